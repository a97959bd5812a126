"""What a run leaves: the model, public history, and a privacy statement that says what it does not cover."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quietgrad.errors import DataError, boundary
from quietgrad.files import check_regular, read_bytes, read_json, write_atomically
from quietgrad.privacy.budget import Relation, Unit, check_condition
from quietgrad.privacy.events import Event
from quietgrad.vectors import Vector

SCHEMA_VERSION = 1
SEEDED = "seeded randomness: not private"
REFUTED = "refuted"


_STATEMENT: dict[str, tuple[type, ...]] = {
    "epsilon": (float, int, type(None)), "delta": (float, int, type(None)), "noise_multiplier": (float, int),
    "accountant": (str, type(None)), "sampling": (str,), "adversary": (str,), "account": (str, type(None)),
    "is_private": (bool,), "releases": (dict,), "notes": (list,),
}  # fmt: skip


@dataclass(frozen=True)
class Privacy:
    """What is proved about a run.

    ``epsilon`` is ``None`` when the run added no noise; ``is_private`` is also false when its randomness was
    seeded, whatever ε the noise would have given, and when a paper's noise was used only to reproduce it. The first
    of the ``notes`` then says so. ``unit`` is whom it is about: one record, or a person with all of theirs.
    ``condition`` is the clause under which ε holds, where part of it rests on code that is not checked; ``None``:
    ε holds without one.
    """

    epsilon: float | None
    delta: float | None
    relation: Relation | None
    accountant: str | None
    noise_multiplier: float
    events: Event | None
    releases: Mapping[str, int]
    sampling: str
    adversary: str
    account: str | None
    is_private: bool
    notes: tuple[str, ...] = ()
    unit: Unit = Unit.RECORD
    condition: str | None = None

    def __post_init__(self) -> None:
        check_condition(self.condition)

    def to_json(self) -> dict[str, Any]:
        """The statement as JSON values."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "relation": None if self.relation is None else str(self.relation),
            "unit": str(self.unit),
            "accountant": self.accountant,
            "sampling": self.sampling,
            "noise_multiplier": self.noise_multiplier,
            "releases": dict(self.releases),
            "adversary": self.adversary,
            "account": self.account,
            "is_private": self.is_private,
            "condition": self.condition,
            "notes": list(self.notes),
            "event": None if self.events is None else self.events.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Privacy:
        """Rebuild a statement from :meth:`to_json`; ``ValueError`` if its parts are not of their kind."""
        from quietgrad.privacy.events import from_json

        for key, kinds in _STATEMENT.items():
            value = data[key]
            if not isinstance(value, kinds) or (isinstance(value, float) and not value >= 0.0):
                raise ValueError(f"{key}={value!r}: is not what a privacy statement has there.")
        return cls(
            epsilon=data["epsilon"],
            delta=data["delta"],
            relation=None if data["relation"] is None else Relation.parse(data["relation"]),
            accountant=data["accountant"],
            noise_multiplier=data["noise_multiplier"],
            events=None if data["event"] is None else from_json(data["event"]),
            releases=data["releases"],
            sampling=data["sampling"],
            adversary=data["adversary"],
            account=data["account"],
            is_private=data["is_private"],
            notes=tuple(data["notes"]),
            unit=Unit.parse(data.get("unit", "record")),
            condition=data.get("condition"),
        )

    @property
    def refuted(self) -> tuple[str, ...]:
        """What contradicts the statement, if it was read from a file that does not prove it."""
        return tuple(note for note in self.notes if note.startswith(f"{REFUTED}: "))

    def facts(self) -> list[tuple[str, object]]:
        """What is proved, to whom and by whom, as rows of a table."""
        rows: list[tuple[str, object]] = [("privacy", str(self))]
        if self.epsilon is not None:
            rows += [("ε", f"{self.epsilon:.4g}"), ("δ", f"{self.delta:g}"), ("neighbours", self.relation)]
            rows += [] if self.condition is None else [("condition", self.condition)]
            rows += [
                ("proved by", self.accountant),
                ("adversary", self.adversary),
                ("account", self.account or "–"),
            ]
        releases = ", ".join(f"{made} × {name}" for name, made in self.releases.items() if made)
        return [*rows, ("released", releases), *(("note", note) for note in self.notes)]

    def _repr_html_(self) -> str:
        """The statement in a notebook."""
        from quietgrad.charts import in_a_notebook

        return in_a_notebook("Privacy", self.facts())

    def __str__(self) -> str:
        if self.refuted:
            return f"REFUTED: {'; '.join(note.removeprefix(f'{REFUTED}: ') for note in self.refuted)}"
        if self.epsilon is None:
            return "NOT PRIVATE"
        whom = " per person" if self.unit is Unit.PERSON else ""
        text = f"({self.epsilon:.4g}, {self.delta:g})-DP{whom}, {self.relation}, proved by {self.accountant}"
        text = text if self.condition is None else f"{text}, {self.condition}"
        if self.is_private:
            return text
        if SEEDED in self.notes:
            return f"NOT PRIVATE (seeded; with secret randomness: {text})"
        return f"NOT PRIVATE ({self.notes[0] if self.notes else 'no reason was kept'}; proved: {text})"


@dataclass(frozen=True)
class Result:
    """The outcome of :func:`quietgrad.minimize`.

    ``history`` holds public numbers only: norms of released estimates and the ε spent, never raw losses.
    ``seconds`` is for whoever ran it: how long a batch took depends on its size, which is secret under Poisson
    sampling, so only whole seconds are saved.
    """

    params: Vector
    privacy: Privacy
    algorithm: str
    config: Mapping[str, Any]
    n_public: int
    history: list[dict[str, float]] = field(default_factory=list)
    stopped_by: str = "steps"
    seconds: float = 0.0
    versions: Mapping[str, str | None] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def escapes(self) -> int:
        """Saddle escapes made (perturbed SGD)."""
        return int(self.details.get("escapes", 0))

    @property
    def samples_used(self) -> int:
        """Fresh records consumed (single-pass oracles)."""
        return int(self.details.get("samples_used", 0))

    def _repr_html_(self) -> str:
        """The result in a notebook: what is promised, and the public curves of the run."""
        from quietgrad.charts import Lines, Series, in_a_notebook

        curve = [(0.0, 0.0), *((float(p[0]), float(p[1])) for p in self.details.get("epsilon_curve", ()))]
        norms = [(r["step"], r["estimate_norm"]) for r in self.history if "estimate_norm" in r]
        charts = (
            Lines("Privacy spent", (Series("ε", curve if len(curve) > 2 else ()),), "releases", "ε", zero=True),
            Lines("Gradient estimate", (Series("norm", norms),), "steps", "norm of the estimate", log_y=True),
        )
        rows: list[tuple[str, object]] = [
            ("parameters", len(self.params)),
            (self.privacy.unit.in_words("records (public number)"), self.n_public),
            ("stopped by", self.stopped_by),
            *self.privacy.facts(),
        ]
        return in_a_notebook(self.algorithm, rows, charts)

    def to_json(self) -> dict[str, Any]:
        """Everything but the parameters, as JSON values (schema version 1)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "algorithm": self.algorithm,
            "config": dict(self.config),
            "data": {"d": len(self.params), "n_public": self.n_public, **self.data},
            "privacy": self.privacy.to_json(),
            "metrics": dict(self.metrics),
            "stopped_by": self.stopped_by,
            "details": dict(self.details),
            "history": self.history,
            "seconds": math.ceil(self.seconds),
            "versions": dict(self.versions),
        }

    def save(self, folder: str | Path) -> Path:
        """Write ``model.safetensors`` and ``result.json`` into ``folder``; :func:`quietgrad.load` reads them."""
        from safetensors.numpy import save as to_bytes

        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        params = self.params if hasattr(self.params, "tobytes") else self.params.detach().cpu().numpy()
        write_atomically(path / "model.safetensors", to_bytes({"params": params}))
        write_atomically(path / "result.json", (json.dumps(self.to_json(), indent=2) + "\n").encode())
        return path


def digest_of(folder: Path) -> str:
    """What tells the result in ``folder`` from any other that may take its place."""
    return hashlib.sha256(read_bytes(folder / "result.json")).hexdigest()


def load(folder: str | Path) -> Result:
    """Read a result that :meth:`Result.save` wrote, and prove its ε again from the releases it lists.

    A statement that its own events do not prove comes back as not private, with ``privacy.refuted`` saying why;
    ``quietgrad report`` also holds it against the options of the run and its ledger.
    """
    from safetensors.numpy import load_file

    from quietgrad.training.verification import checked

    path = Path(folder)
    try:
        with boundary(f"{path}: the result cannot be read: it may be cut short."):
            data = read_json(path / "result.json")
            check_regular(path / "model.safetensors")
            params = load_file(path / "model.safetensors")["params"]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no result here ({Path(error.filename or '').name} is missing).") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise DataError(f"{path}: schema_version {version!r}; this version reads {SCHEMA_VERSION}.")
    with boundary(f"{path / 'result.json'}: not a result of this version."):
        return Result(
            params=params,
            privacy=checked(Privacy.from_json(data["privacy"])),
            algorithm=str(data["algorithm"]),
            config=dict(data["config"]),
            n_public=int(data["data"]["n_public"]),
            history=[dict(record) for record in data["history"]],
            stopped_by=str(data["stopped_by"]),
            seconds=float(data["seconds"]),
            versions=dict(data["versions"]),
            details=dict(data["details"]),
            data={k: v for k, v in data["data"].items() if k not in ("d", "n_public")},
            metrics=dict(data["metrics"]),
        )
