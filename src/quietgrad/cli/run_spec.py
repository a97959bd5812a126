"""A training run as its options describe it, written to ``run.json`` first so that it can be resumed.

A :class:`RunSpec` is plain values; from them come the data (loaded or scanned), the objective, the algorithm and
the budget, the same in ``train``, ``resume`` and ``demo``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import secrets
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.errors import DataError
from quietgrad.files import read_json
from quietgrad.privacy.budget import DEFAULT_RELATION

if TYPE_CHECKING:
    from quietgrad.data import Dataset
    from quietgrad.objectives.privacy_units import UnitGrouping
    from quietgrad.objectives.tables.scanned import ScannedPeople
    from quietgrad.privacy.budget import Budget

RUN_FILE = "run.json"
_HOMES = {
    "reading": (
        "schema", "label", "classes", "task", "n_features", "person", "drop", "keep", "delimiter", "encoding",
    ),
    "scanning": ("cluster", "memory", "threads"),
    "flags": ("steps", "batch_size", "learning_rate", "clip", "gamma", "sampling"),
}  # fmt: skip
"""Options that are kept together: how the file is read, how it is scanned, settings of the algorithm."""
_FULL_BATCH = {"steps": 50, "learning_rate": 1.0, "clip": 1.5, "momentum": 0.5}


@dataclass(frozen=True)
class RunSpec:
    """The options of ``quietgrad train``, as JSON values."""

    data: str | None = None
    test: str | None = None
    reading: dict[str, Any] = field(default_factory=dict)
    scanning: dict[str, Any] = field(default_factory=dict)
    objective: str | None = None
    regularizer: str | None = None
    intercept: bool = True
    row_bound: float | None = None
    rows: str = "clip"
    algorithm: str | None = None
    oracle: str | None = None
    landscape: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    epsilon: float | None = None
    delta: float = 1e-5
    relation: str = DEFAULT_RELATION
    non_private: bool = False
    ledger: str | None = None
    account: str = "default"
    cap_epsilon: float | None = None
    n_public: int | None = None
    combine: str = "mean"
    records_per_person: int | None = None
    records_public: int | None = None
    evaluate_train: bool = False
    checkpoint_seconds: float = 10.0
    features: str | None = None
    model: str | None = None
    inference: bool = False
    class_weight: str | None = None
    holdout: float | None = None
    score_share: float = 0.2
    split_key: str | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> RunSpec:
        """The run that the options of ``quietgrad train`` describe; every one of them must have a place in it."""
        values: dict[str, Any] = {"reading": {}, "scanning": {}, "flags": {}}
        for name, value in options.items():
            value = str(value.resolve()) if isinstance(value, Path) else value
            home = next((home for home, names in _HOMES.items() if name in names), None)
            if home is None:
                values[name] = value
            elif value not in (None, (), []):
                values[home][name] = list(value) if isinstance(value, tuple) else value
        if values.get("holdout") is not None:
            values["split_key"] = secrets.token_hex(16)
        return cls(**values)

    @classmethod
    def read(cls, path: Path) -> RunSpec:
        """The run that a TOML or JSON file describes: fields as in ``run.json``, options as on the command line."""
        values = tomllib.loads(path.read_text("utf-8")) if path.suffix == ".toml" else dict(read_json(path))
        known = {field.name for field in dataclasses.fields(cls)}
        options = {key.replace("-", "_"): value for key, value in _whole(values).items()}
        inside = {home: dict(options.pop(home, {})) for home in _HOMES}
        flat = {**options, **{key: value for part in inside.values() for key, value in part.items()}}
        flat.pop("split_key", None)  # a run of its own splits anew
        if unknown := sorted(flat.keys() - known - {name for names in _HOMES.values() for name in names}):
            raise DataError(f"{path}: {', '.join(unknown)}: no options of a run; see `quietgrad train --help`.")
        if isinstance(flat.get("settings"), list):
            flat["settings"] = tuple(flat["settings"])
        return cls.from_options(flat)

    def to_toml(self) -> str:
        """The run as a file that :meth:`read` takes; what is usual is left out."""
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in self._said().items())

    def command(self) -> str:
        """The ``quietgrad train`` that makes this run again, with files named without their folders."""
        words = ["quietgrad", "train"]
        for name, value in self._said().items():
            flag = {"settings": "--set"}.get(name, f"--{name.replace('_', '-')}")
            if name == "data":
                words.append(Path(value).name if "://" not in value else value)
            elif name in ("settings", "drop"):
                words += [word for one in value for word in (flag, one)]
            elif name == "intercept":
                words.append("--no-intercept")
            elif value is True:
                words.append(flag)
            elif name in ("schema", "test", "ledger"):
                words += [flag, Path(value).name]
            else:
                words += [flag, ",".join(map(str, value)) if isinstance(value, list | tuple) else _text(value)]
        return " ".join(shlex.quote(word) for word in words)

    def _said(self) -> dict[str, Any]:
        """The options that differ from what is usual, by the name of their flag."""
        said: dict[str, Any] = {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            usual = {} if one.name in _HOMES else one.default
            always = one.name in ("delta", "relation") and not self.non_private
            if one.name == "split_key" or (value == usual and not always):
                continue
            if one.name in _HOMES:
                said |= {key: inner for key, inner in value.items() if inner is not None}
            else:
                said[one.name] = list(value) if isinstance(value, tuple) else value
        return said

    def save(self, folder: Path) -> None:
        """Write ``run.json`` into ``folder``."""
        from quietgrad.files import write_atomically

        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(schema := self.reading.get("schema"), str):  # a run keeps what its model's features mean
            path = Path(schema)
            write_atomically(folder / f"schema{path.suffix}", path.read_bytes())
        values = dataclasses.asdict(self)
        model, score = self.budget(), self.score_budget()
        if model is not None and score is not None:  # checks of the run compare its own part with what was asked
            values |= {"epsilon": model.epsilon, "delta": model.delta, "whole": [self.epsilon, self.delta]}
        write_atomically(folder / RUN_FILE, (json.dumps(values, indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> RunSpec:
        """Read the options that a run was started with."""
        try:
            values = _whole(read_json(folder / RUN_FILE))
            return cls(**{**values, "settings": tuple(values["settings"])})
        except FileNotFoundError:
            raise DataError(f"{folder}: no run was started here ({RUN_FILE} is missing).") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DataError(f"{folder / RUN_FILE}: cannot be read as the options of a run.") from None

    @property
    def uses_estimator(self) -> bool:
        """Whether an estimator is fitted, and not a loss minimised by an algorithm."""
        return self.model is not None or self.inference or self.class_weight is not None

    def check(self) -> None:
        """Refuse what cannot be before any data is read."""
        self.budget()
        by_hand = {
            "algorithm": self.algorithm, "objective": self.objective, "regularizer": self.regularizer,
            "oracle": self.oracle, "landscape": self.landscape, "features": self.features, "test": self.test,
            "set": self.settings or None, **self.flags,
        }  # fmt: skip
        if self.uses_estimator and (extra := [name for name, value in by_hand.items() if value is not None]):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in extra)
            raise ValueError(f"a --model chooses its own method; leave {flags} out, or --model.")
        if self.holdout is not None and (self.test is not None or self.landscape is not None):
            raise ValueError("--holdout splits the records of one file; leave --test and --landscape out.")

    def budget(self) -> Budget | None:
        """The guarantee of the training: all of ε and δ but the score's share; ``None`` if it is not private."""
        return self._share(1.0 if self.holdout is None else 1.0 - self.score_share)

    def score_budget(self) -> Budget | None:
        """The guarantee of the private score of held-out records, which the same account pays."""
        return None if self.holdout is None else self._share(self.score_share)

    def _share(self, share: float) -> Budget | None:
        from quietgrad.cli.options import budget

        if not 0.0 < self.score_share < 1.0:
            raise ValueError(f"score_share={self.score_share:g}: must be between 0 and 1.")
        if self.non_private:
            return None
        whole = budget(self.epsilon, self.delta, self.relation)
        return whole if share == 1.0 else budget(whole.epsilon * share, whole.delta * share, self.relation)

    def cap(self) -> Budget | None:
        """The most that the account as a whole may spend."""
        from quietgrad.cli.options import budget

        return None if self.cap_epsilon is None else budget(self.cap_epsilon, self.delta, self.relation)

    def people_in(self, data: Any) -> UnitGrouping | ScannedPeople | None:
        """Whose the records are, if a column says so; ``None`` if every record is a person's only one."""
        from quietgrad.objectives.privacy_units import UnitGrouping, check_combination
        from quietgrad.objectives.tables.scanned import ScannedPeople

        check_combination(self.combine, self.records_per_person)
        if data.person is None and "person" in self.reading:
            raise DataError("--person: names a column of a file; these data have none.")
        if data.person is None:
            if self.combine != "mean" or self.records_per_person is not None:
                raise ValueError("combine, records_per_person: say how a person's records count; give --person.")
            return None
        combine: Any = self.combine
        if getattr(data.person, "is_source", False):
            return ScannedPeople(data.person, combine, self.records_per_person)
        return UnitGrouping.of(
            data.person, combine=combine, records_per_person=self.records_per_person, records=data.n
        )

    def make_algorithm(self, data: Dataset, n: int) -> Any:
        """The method asked for, or the default for linear models, chosen for ``n``, a public number of records."""
        from quietgrad.cli.settings import algorithm_from, key_values

        if self.algorithm is not None:
            return algorithm_from(self.algorithm, self.flags, self.settings, self.oracle)
        given = {key: value for key, value in self.flags.items() if value is not None}
        bound = data.row_bound if self.row_bound is None else self.row_bound
        promise = self.budget()
        if self.features is not None:  # thousands of features are too many to whiten
            said = key_values(self.settings)
            usual = pictures_settings(n, None if promise is None else promise.epsilon)
            flags = {**{key: value for key, value in usual.items() if key not in said}, **given}
            return algorithm_from("dp-sgd", flags, self.settings)
        if promise is None or given or self.settings:  # settings by hand replace the default design
            usual = _FULL_BATCH if promise is None else {"row_bound": bound}
            said = key_values(self.settings)  # what is set by hand comes before what is usual
            flags = {**{key: value for key, value in usual.items() if key not in said}, **given}
            return algorithm_from("dp-gd" if promise is None else "whitened-gd", flags, self.settings)
        from quietgrad.algorithms.whitened_design import for_table

        return for_table(
            n,
            data.d,
            budget=promise,
            outputs=1 if data.classes is None or len(data.classes) == 2 else len(data.classes),
            row_bound=bound,
            feature_bounds=data.feature_bounds if bound is None else None,
            regression=data.task == "regression",
            sparse=hasattr(data.X, "indptr"),
            inference=False,
        )

    def load_data(self) -> Any:
        """Read and check the data, or open what is scanned; nothing is reserved yet."""
        from quietgrad.cli.scanned_data import open_scan, scans
        from quietgrad.data import demo_dataset, load

        if self.data is None:
            data: Any = demo_dataset()
        elif scans(self.data, self.scanning):
            for name in ("features", "model", "holdout"):
                if getattr(self, name) is not None:
                    raise DataError(
                        f"{self.data}: --{name} is not known to scans; give one file, which is read whole."
                    )
            return open_scan(self.data, self.reading, self.scanning, self.test)
        else:
            data = load(self.data, test=self.test, **self.reading)
            data.refuse_uncounted(self.budget())
        if self.holdout is not None:
            from quietgrad.cli.scoring import hold_out_records

            fixed = self.non_private or self.relation == "replace-one"
            data = hold_out_records(data, self.holdout, self.split_key or "", fixed=fixed)
        return data if self.features is None else _featured(data)

    def ledger_in(self, folder: Path) -> Path | None:
        """The ledger file: the one asked for, or one that the folder had of its own; ``None`` for the project's."""
        own = folder / "ledger.jsonl"
        if self.ledger is not None:
            return Path(self.ledger)
        return own if own.is_file() and not own.is_symlink() else None

    def link_ledger(self, folder: Path) -> None:
        """Let ``ledger.jsonl`` in the folder lead to the project's ledger, if that is what pays."""
        from quietgrad.privacy.project import project_path

        own = folder / "ledger.jsonl"
        if self.non_private or self.ledger_in(folder) is not None:
            return
        with contextlib.suppress(OSError):  # on file systems without links the folder just has none
            own.unlink(missing_ok=True)
            own.symlink_to(project_path().resolve())

    def describe_objective(self, data: Dataset) -> dict[str, Any]:
        """What :func:`objective_from` needs, and the class names: public facts that are kept with the model."""
        from quietgrad.objectives.registry import usual_loss

        return {
            "objective": self.objective or usual_loss(data.task),
            "regularizer": self.regularizer,
            "intercept": self.intercept,
            "row_bound": data.row_bound if self.row_bound is None else self.row_bound,
            "rows": self.rows,
            "features": data.d,
            "feature_names": None if data.feature_names is None else list(data.feature_names),
            "task": data.task,
            "classes": None if data.classes is None else len(data.classes),
            "class_names": None if data.class_names is None else list(data.class_names),
            "pictures": data.pictures,
        }


FEATURES = ("scattering",)


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``run.json`` with all of ε and δ, the score's share included."""
    found = dict(values)
    epsilon, delta = found.pop("whole", (found.get("epsilon"), found.get("delta", 1e-5)))
    return {**found, "epsilon": epsilon, "delta": delta}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _featured(data: Dataset) -> Dataset:
    """Scattering features in place of pixels, and what says how they were made."""
    from quietgrad.features.scattering import Pictures

    pictures = Pictures.of(data.d)
    words = {**pictures.to_json(), "columns": None if data.feature_names is None else list(data.feature_names)}
    return dataclasses.replace(
        data,
        X=pictures.rows(data.X),
        X_test=None if data.X_test is None else pictures.rows(data.X_test),
        row_bound=pictures.row_bound,
        feature_names=None,
        notes=(*data.notes, f"{pictures.width} scattering features of {pictures.pixels} pixels"),
        pictures=words,
    )


def pictures_settings(n: int, epsilon: float | None) -> dict[str, Any]:
    """DP-SGD for a linear model on scattering features, from public numbers: those of ``benchmarks/pictures.py``.

    >>> pictures_settings(60_000, 1.2)["learning_rate"]
    'linear:1'
    """
    weight = math.inf if epsilon is None else n * epsilon  # the more people and the larger ε, the longer the steps
    reach, clip = (0.3, 0.3) if weight < 1e5 else (0.5, 1.0) if weight < 3e5 else (1.0, 2.0)
    rate, batch = f"linear:{reach / clip:g}", max(1, min(4096, n // 2))
    return {"steps": 700, "batch_size": batch, "learning_rate": rate, "clip": clip, "momentum": 0.9}


def objective_from(facts: dict[str, Any]) -> Any:
    """The objective that :meth:`RunSpec.describe_objective` describes.

    >>> facts = {"objective": "huber:0.5", "regularizer": "l2:0.1", "intercept": True, "row_bound": None,
    ...          "rows": "clip", "task": "regression", "classes": None}
    >>> objective_from(facts)
    Huber(regularizer=L2(strength=0.1, unpenalized=1), intercept=True, ..., threshold=0.5)
    """
    from quietgrad.cli.options import usage
    from quietgrad.objectives.registry import make_objective

    given = {key: facts[key] for key in ("intercept", "row_bound", "rows", "regularizer")}
    with usage():
        return make_objective(facts["objective"], given, task=facts["task"], classes=facts["classes"])[0]
