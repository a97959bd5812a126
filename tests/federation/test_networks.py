"""Networks in plan files: what is pinned, what is shown, what is run and when, and what comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.cli import main
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.noise.rng import SecureStream
from quietgrad.core.sampling import Poisson
from quietgrad.core.sampling.samplers import RowScan
from quietgrad.federation import Party, simulate
from quietgrad.federation.approved import Approved
from quietgrad.federation.network import NetworkSource, numbers_in
from quietgrad.federation.plan_file import parse_plan, read_plan
from tests.federation.deployment import MODULE, PARAMETERS, RAISES, SIZES, pictures, plan_text, write

TWO = {"a": 60, "b": 50}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    write(tmp_path, TWO, plan_text(TWO))
    return tmp_path


def module() -> nn.Module:
    space: dict[str, Any] = {}
    exec(MODULE, space)
    torch.manual_seed(3)
    made: nn.Module = space["make"]()
    return made


def start() -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(module().parameters()).detach()


def test_no_command_before_an_approval_runs_the_code_of_a_plan(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "network.py").write_text(RAISES)
    assert main(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
    assert main(["federate", "show", "plan.toml", "--keys", "keys/a"]) == 0
    shown = capfd.readouterr().out
    assert RAISES.strip() in shown
    assert read_plan("plan.toml").network.digests["network.py"] in shown  # type: ignore[union-attr]
    assert main(["federate", "show", "plan.toml", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["module_text"] == RAISES
    assert main(["federate", "job", "plan.toml", "--engine", "flare", "--out", "job"]) == 0
    words = ["federate", "approve", "plan.toml", "--keys", "keys/a", "--data", "a.npz", "--pin"]
    assert main([*words, "0" * 64]) == 1  # another plan's pin: refused before any code is run
    with pytest.raises(SystemExit, match="was run"):
        main([*words, read_plan("plan.toml").digest])


def test_digest_of_a_plan_pins_code_and_weights(folder: Path) -> None:
    first = read_plan("plan.toml").digest
    (folder / "network.py").write_text(MODULE + "\n# another\n")
    assert read_plan("plan.toml").digest != first
    (folder / "network.py").write_text(MODULE)
    assert read_plan("plan.toml").digest == first
    (folder / "start.safetensors").write_bytes(save(module().state_dict()))
    (folder / "plan.toml").write_text(plan_text(TWO, objective='start = "start.safetensors"'))
    with_weights = read_plan("plan.toml")
    assert with_weights.plan.shape.dim == PARAMETERS  # by the header of the weights
    other = module()
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    (folder / "start.safetensors").write_bytes(save(other.state_dict()))
    assert read_plan("plan.toml").digest not in (first, with_weights.digest)


def test_approval_keeps_the_code_that_was_read_and_refuses_other_weights(folder: Path) -> None:
    weights = save(module().state_dict())
    (folder / "start.safetensors").write_bytes(weights)
    (folder / "plan.toml").write_text(plan_text(TWO, objective='start = "start.safetensors"'))
    assert main(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
    words = ["federate", "approve", "plan.toml", "--pin", read_plan("plan.toml").digest, "--keys", "keys/a"]
    assert main([*words, "--data", "a.npz", "--file", "approval.json"]) == 0
    (folder / "network.py").write_text(RAISES)
    built = Approved.read("approval.json").objective
    assert torch.equal(built.initial(None), start())
    (folder / "start.safetensors").write_bytes(weights[:-4] + b"\0\0\0\1")
    with pytest.raises(BudgetError, match="approve again"):
        _ = Approved.read("approval.json").objective
    content = json.loads(Path("approval.json").read_text())
    (folder / "start.safetensors").write_bytes(weights)
    Path("approval.json").write_text(json.dumps({**content, "module_text": RAISES}))
    with pytest.raises(BudgetError, match="approve again"):
        _ = Approved.read("approval.json").objective


@pytest.mark.parametrize(
    ("text", "objective", "words"),
    [
        (MODULE, "parameters = 150", "trains 151 parameters, the plan states 150"),
        (MODULE, f"parameters = {PARAMETERS}\narguments = {{ shape = 2 }}", "make raises TypeError"),
        ("make = 3\n", "parameters = 1", "no function 'make'"),
        ("def make():\n    return 3\n", "parameters = 1", "not a torch module"),
        (MODULE.replace("nn.Tanh()", "nn.BatchNorm2d(4)"), "parameters = 159", "name it in .objective. start"),
        (MODULE, f'parameters = {PARAMETERS}\nloss = "own"', "no loss 'own'"),
        ("x = (\n", "parameters = 1", "cannot be run: SyntaxError"),
    ],
)
def test_a_network_that_is_not_the_plans_is_refused_when_it_is_built(
    folder: Path, text: str, objective: str, words: str
) -> None:
    (folder / "network.py").write_text(text)
    (folder / "plan.toml").write_text(plan_text(TWO, objective=objective))
    network = read_plan("plan.toml").network
    assert network is not None
    with pytest.raises(DataError, match=words):
        network.build()


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("", "parameters"),
        ('start = "../start.safetensors"', "name of a file in the plan's folder"),
        ('start = "network.py"', "not a safetensors file"),
        ('start = "absent.safetensors"', "the plan names this file"),
        (f"parameters = {PARAMETERS}\nregularizer = 3", "no setting 'regularizer'"),
        (f"parameters = {PARAMETERS}\npad = 0", "length ≥ 1"),
        ("parameters = 0", "between 1 and"),
    ],
)
def test_settings_of_a_network_are_checked_without_running_it(folder: Path, objective: str, words: str) -> None:
    (folder / "plan.toml").write_text(plan_text(TWO, objective=objective))
    with pytest.raises(DataError, match=words):
        _ = read_plan("plan.toml").plan


def test_a_line_that_no_screen_shows_is_refused(folder: Path) -> None:
    (folder / "network.py").write_text(MODULE + "#" + " " * 2000 + "hidden()\n")
    with pytest.raises(DataError, match="break them"):
        read_plan("plan.toml")


def test_a_plan_without_its_folder_and_a_bare_module_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="read from its file"):
        parse_plan(plan_text(TWO))
    with pytest.raises(TypeError, match=r"quietgrad\.torch\.objective"):
        simulate(qg.DPGD(steps=1), module(), [Party(np.eye(2), [0, 1])], budget=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"quietgrad\.torch\.objective"):
        qg.minimize(module(), None, qg.DPGD(steps=1), budget=None)


def test_numbers_in_refuses_what_is_no_header() -> None:
    for weights in (b"", b"\xff" * 16, (2).to_bytes(8, "little") + b"[]", (4).to_bytes(8, "little") + b"null"):
        with pytest.raises(ValueError, match="not a safetensors file"):
            numbers_in(weights, "w")
    for shape in ([2**70], [2**20] * 10**4, [-3, -4], [1.5], ["a"], [[2]], [True], 7, None):
        with pytest.raises(ValueError, match="not a safetensors file"):
            numbers_in(weights_of(shape), "w")


def weights_of(shape: object) -> bytes:
    """A safetensors file of one tensor that claims this shape."""
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 9]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


def test_weights_that_contradict_their_header_are_refused(folder: Path) -> None:
    (folder / "start.safetensors").write_bytes(weights_of([PARAMETERS]))
    (folder / "plan.toml").write_text(plan_text(TWO, objective='start = "start.safetensors"'))
    network = read_plan("plan.toml").network
    assert network is not None
    with pytest.raises(DataError, match="not the weights of this module"):
        network.build()


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the central curator sample by record id, as parties with a shared key do."""

    def poisson(self: Poisson, n_records: int, stream: SecureStream) -> RowScan:
        return self.by_id(np.arange(n_records), stream)

    monkeypatch.setattr(Poisson, "sampler", poisson)


def dealt() -> tuple[Any, list[Party]]:
    """Pictures as one table, and the same dealt to three parties."""
    X, labels = pictures(120, 5)
    codes = np.array([["circle", "square", "line"].index(label) for label in labels])
    pair = torch.tensor(X / 255.0, dtype=torch.float32), torch.tensor(codes)
    parts = [np.arange(120)[k::3] for k in range(3)]
    return pair, [Party((pair[0][part], pair[1][part]), ids=part) for part in parts]


METHODS = {
    "ddp-srm": qg.DPSRM(steps=5, batch_size=40),
    "dp-sgd": qg.DPSGD(steps=5, batch_size=40),
    "dp-adam": qg.DPAdam(steps=4, batch_size=40),
    "disk": qg.DPDiSK(steps=4, batch_size=40),
}


@pytest.mark.usefixtures("keyed")
@pytest.mark.parametrize("name", METHODS)
def test_parties_of_a_curator_walk_the_path_of_one_table(name: str) -> None:
    """With the same samples and the same noise, the model is that of one table to 1e-6."""

    def network() -> Any:
        return qt.objective(module(), nn.CrossEntropyLoss())

    pair, parties = dealt()
    budget = qg.Budget(4.0, 1e-4)
    one = qg.minimize(network(), pair, METHODS[name], budget=budget, seed=7, n_public=120).params
    many = simulate(METHODS[name], network(), parties, budget=budget, seed=7).params
    assert float((one - start()).norm()) > 1e-2
    assert float((one - many).abs().max()) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"trust": "curator"}, {"trust": "local"}, {"trust": "secure", "secure": "masks"},
        {"trust": "secure", "secure": "servers"}, {"trust": "secure", "secure": "mpc"},
    ],
    ids=str,
)  # fmt: skip
def test_every_trust_mode_trains_a_network_and_charges_every_party(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    _, parties = dealt()
    kept = [
        Party(party.X, n_public=40, ledger=tmp_path / f"{k}.jsonl", account="people")
        for k, party in enumerate(parties)
    ]
    result = simulate(
        METHODS["ddp-srm"], qt.objective(module(), nn.CrossEntropyLoss()), kept, budget=qg.Budget(4.0, 1e-4),
        ledger=tmp_path / "all.jsonl", **settings,
    )  # fmt: skip
    assert result.privacy.is_private
    for k in range(3):
        spent = qg.Ledger(tmp_path / f"{k}.jsonl").spent("people", delta=1e-4, relation=qg.Relation.ADD_REMOVE)
        assert spent.epsilon == pytest.approx(result.privacy.epsilon, rel=1e-6)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (
            qg.DPSGD(steps=6, sampling="turns", cohorts=3, noise="correlated"),
            {"trust": "secure", "secure": "masks"},
        ),
        (qg.DPSGD(steps=6, batch_size=20, sampling="fixed-size"), {"trust": "curator"}),
    ],
    ids=["correlated noise by turns", "fixed batches"],
)
def test_other_samples_and_noise_serve_networks_as_they_serve_tables(method: Any, settings: Any) -> None:
    _, parties = dealt()
    exact = method.sampling == "fixed-size"
    budget = qg.Budget(4.0, 1e-4, qg.Relation.REPLACE_ONE if exact else qg.Relation.ADD_REMOVE)
    result = simulate(method, qt.objective(module(), nn.CrossEntropyLoss()), parties, budget=budget, **settings)
    assert result.privacy.epsilon is not None
    assert result.privacy.epsilon <= 4.0
    assert float(result.params.norm()) > 0.0


def test_people_are_the_unit_of_a_network_too() -> None:
    _, parties = dealt()
    known = [Party(party.X, person=np.arange(40) // 2 + 100 * k) for k, party in enumerate(parties)]
    result = simulate(
        qg.DPSRM(steps=3, batch_size=20), qt.objective(module(), nn.CrossEntropyLoss()), known,
        budget=qg.Budget(4.0, 1e-4), trust="secure", secure="masks", parties_per_person=1,
    )  # fmt: skip
    assert (str(result.privacy.unit), result.n_public) == ("person", 60)


def test_the_five_sizes_of_the_example_are_planned_for_their_own_numbers(folder: Path) -> None:
    write(folder, SIZES, plan_text(SIZES, "trust = 'secure'\nsecure = 'masks'\nquorum = 4"))
    plan = read_plan("plan.toml").plan
    assert (plan.n_public, plan.dims, plan.quorum) == (200, {"first": PARAMETERS, "next": PARAMETERS}, 4)
    assert isinstance(read_plan("plan.toml").objective, NetworkSource)
    assert not hasattr(read_plan("plan.toml").objective, "add")
