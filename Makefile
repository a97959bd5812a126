# quietgrad: `make demo` trains a private model and leaves a report; `make test` checks everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ATTACKED := private-certificate evaluation labels groups estimators private-search clients people own-loop networks federations
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_NUM_THREADS ?= 1

.PHONY: demo test setup lint types unit long attack docs supply release clean

demo: $(VENV)/.plain
	$(BIN)/quietgrad demo --out runs/demo

test: $(VENV)/.ready lint types unit attack

setup: $(VENV)/.ready

# What the demo needs: a plain install.
$(VENV)/.plain: pyproject.toml verifier/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e verifier -e .
	touch $@

# torch first and exactly: what follows then finds it installed and keeps the CPU build. The tests run with the
# set of constraints.txt, so that a release of somebody else's package cannot fail them overnight.
$(VENV)/.ready: pyproject.toml verifier/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e verifier
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[torch,federated,report,data,logs,onnx,docs,dev,zoo]'
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/zoo torchvision==0.28.0 timm==1.0.30
	touch $(VENV)/.plain $@

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.ready
	$(BIN)/mypy

# Three workers for two cores: many tests wait for other processes.
unit: $(VENV)/.ready
	$(BIN)/python -m pytest -n 3 --dist worksteal

# All tests, with those that take minutes and with all settings of the verifier's proofs.
long: $(VENV)/.ready
	QUIETGRAD_LONG=1 $(BIN)/python -m pytest -n 3 --dist worksteal
	$(BIN)/quietgrad audit --all --quick

# What is no algorithm is attacked here; algorithms are in tests/assurance/test_audit.py. A violated claim fails.
attack: $(VENV)/.ready
	$(BIN)/quietgrad audit --quick $(ATTACKED)

docs: $(VENV)/.ready
	$(BIN)/sphinx-build -W -q docs docs/_build

# sdist and wheel, tried in empty environments of every Python here; nothing is uploaded.
release: $(VENV)/.ready
	$(BIN)/python tools/release.py

# The tested set and the licences from what is installed; then what the package index says of direct dependencies.
supply: $(VENV)/.ready
	$(BIN)/python tools/supply.py lock
	$(BIN)/python tools/supply.py licences
	$(BIN)/python tools/supply.py check

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
