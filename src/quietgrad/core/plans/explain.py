"""A plan in words: each release, its sensitivity, its amplification, the accountant, and what a scan would take.

A release of a table that is not in memory is a pass over it. A pass costs so much per row and per value: more if it
reads files, less if it sums rows that an earlier pass kept. A matrix of second moments costs so much per value
squared. The seven numbers are fitted to measured runs by ``benchmarks/scan.py cost`` and kept in ``pass_cost.json``
with their error on runs that the fit has not seen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from quietgrad.core.accounting.budget import PrivacyUnit, Relation

if TYPE_CHECKING:
    from quietgrad.core.plans.schedule import Plan, Slot

_NEIGHBOURS = {
    Relation.ADD_REMOVE: "adding or removing one record",
    Relation.REPLACE_ONE: "replacing one record by any other",
}
# Not "a record contributes at most C": counts and moments of fixed length have a C of their own under replace-one.
_MOVES = {
    Relation.ADD_REMOVE: "a record more or less moves it by at most C (L2)",
    Relation.REPLACE_ONE: "a record replaced moves it by at most 2C (L2)",
}


def explain(plan: Plan) -> str:
    """Return the text that :meth:`quietgrad.core.plans.schedule.Plan.explain` prints."""
    text = plan.unit.in_words(_records(plan))
    if plan.records_public is None:
        return text
    head, _, rest = text.partition("\n")
    return f"{head}\nin all: {plan.declared}\n{rest}"


_UNITS = {
    PrivacyUnit.RECORD: "",
    PrivacyUnit.PERSON: "; one is a person with everything that is recorded of them",
    PrivacyUnit.PARTY: "; one is a party with all that it holds, and who they are is public",
}


def _records(plan: Plan) -> str:
    unit = _UNITS[plan.unit]
    origin = "a public number" if plan.counted is None else "counted privately"
    head = f"{plan.algorithm} on n = {plan.n_public} records ({origin}{unit})"
    if plan.budget is None:
        return f"{head}\nNOT PRIVATE: no noise is added, and no ε can be stated."
    relation = plan.budget.relation
    lines = [
        head,
        f"guarantee: {_NEIGHBOURS[relation]} ({relation}) changes an output's odds by at most e^ε, but for δ",
        *([] if plan.delta_caution is None else [f"caution: {plan.delta_caution}"]),
        *("  " + _slot(plan, slot, relation) for slot in plan.schedule.slots),
    ]
    composition = {
        "sequential": "adaptive, all releases on the same people",
        "parallel": "each record is used in one release only, so the worst release counts",
        "filter": "adaptive noise levels under a hard zCDP filter",
        "select": "a secret random number of rounds, of which only the best leaves",
    }[plan.schedule.composition]
    together = [slot.mechanism.together for slot in plan.schedule.slots if slot.mechanism.together]
    lines.append(f"composition: {[*together, composition][0]}")
    proof = plan.proof
    lines.append(
        f"cost: ε = {proof.epsilon:.4g} at δ = {proof.delta:g} ({relation}), "
        f"proved by the {proof.accountant} accountant" + ("" if plan.condition is None else f", {plan.condition}")
    )
    return "\n".join(lines)


def _slot(plan: Plan, slot: Slot, relation: Relation) -> str:
    times = f"up to {slot.count}×" if slot.law else f"{slot.count}×"
    text = f"{times} {slot.name!r}: {slot.mechanism.what} over {slot.sampling.describe()}; {_MOVES[relation]}; "
    if plan.schedule.composition == "filter":
        return text + "noise chosen per release within one zCDP filter"
    text += slot.mechanism.describe(slot.multiplier(plan.noise_multiplier))
    return text + ("; the number of releases is drawn before the run" if slot.law else "")


BYTES_PER_VALUE = 4  # float32, as tables this large are written
_RELEASE_SECONDS = 0.06  # to tell a cluster what to sum and to hear of it
_MATRIX = frozenset({"second-moments", "information"})
_RANGES = ("ranges", "offsets")  # how the slots begin that look for ranges that were not declared


@dataclass(frozen=True)
class ScanCostModel:
    """Processor seconds of the machine the model was fitted on; errors are relative, of unseen runs.

    A pass reads the rows from their files (``per_row``, ``per_value``), or sums rows that an earlier one kept
    (``kept_row``, ``kept_value``). A matrix of second moments costs ``per_square`` more.
    """

    fixed: float
    per_pass: float
    per_row: float
    per_value: float
    kept_row: float
    kept_value: float
    per_square: float
    typical_error: float
    worst_error: float

    @classmethod
    def measured(cls) -> ScanCostModel:
        """The fitted model."""
        return cls(**json.loads((files("quietgrad.core.plans") / "pass_cost.json").read_text()))

    def seconds(self, rows: int, columns: int, reads: int, kept_passes: int, matrix_passes: int) -> float:
        """Processor seconds of a run.

        >>> ScanCostModel(1.0, 0.0, 0.0, 1e-9, 0.0, 1e-10, 0.0, 0.1, 0.2).seconds(10**6, 100, 10, 0, 0)
        2.0
        """
        reading = reads * (self.per_pass + rows * (self.per_row + self.per_value * columns))
        summing = kept_passes * (self.per_pass + rows * (self.kept_row + self.kept_value * columns))
        return self.fixed + reading + summing + matrix_passes * rows * self.per_square * columns**2


@dataclass(frozen=True)
class ScanCostEstimate:
    """The expected time and memory of a run on a scan."""

    passes: int
    reads: int
    bytes_read: int
    processor_hours: float
    hours: float
    typical_error: float
    worst_error: float

    def to_json(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        return dict(self.__dict__)

    def lines(self) -> list[tuple[str, str]]:
        """The numbers for people."""
        return [
            ("passes", f"{self.passes}, the first to check the table"),
            ("read", f"{_sized(self.bytes_read)} of float32 from the files, {self.reads} times the table"),
            ("kept", f"{self.passes - self.reads} passes sum rows in memory or in scratch files"),
            ("processor", f"{self.processor_hours:.3g} hours"),
            ("time", f"{_spoken(self.hours)} if the storage keeps up"),
            (
                "error",
                f"typically {self.typical_error:.0%}, at most {self.worst_error:.0%} on measured runs that the "
                "model had not seen; other processors scale it",
            ),
        ]


def expected_cost(plan: Plan, columns: int, machines: int, cores: int) -> ScanCostEstimate:
    """Estimate the cost of ``plan`` on ``machines`` of ``cores`` each, for ``n_public`` rows of ``columns``."""
    cost, rows = ScanCostModel.measured(), plan.n_public
    slots = plan.schedule.slots
    passes = 1 + sum(slot.count for slot in slots)
    matrix = 0
    reads = passes
    if "moments" in plan.config:  # a method that boxes rows, which a scan keeps from its second reading on
        features = (plan.config.get("look") or {}).get("features")
        undeclared = features is None or any(bounds is None for bounds in features)
        looks = sum(slot.count for slot in slots if slot.name.startswith(_RANGES))
        reads = 2 + (looks if undeclared else 0)
        passes -= 0 if undeclared else looks  # without a feature to look at, no table is read
        if plan.config["moments"] == "full":
            matrix = sum(slot.count for slot in slots if slot.name in _MATRIX)
    processor = cost.seconds(rows, columns, reads, passes - reads, matrix)
    waiting = passes * _RELEASE_SECONDS if machines > 1 else 0.0
    hours = (processor / (machines * cores) + waiting) / 3600.0
    bytes_read = reads * rows * (columns + 1) * BYTES_PER_VALUE
    return ScanCostEstimate(
        passes, reads, bytes_read, processor / 3600.0, hours, cost.typical_error, cost.worst_error
    )


def _sized(count: int) -> str:
    """A number of bytes for people.

    >>> _sized(3_200_000_000_000), _sized(12)
    ('3.2 TB', '12 B')
    """
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 1000.0:
            break
        size, unit = size / 1000.0, larger
    return f"{size:.3g} {unit}"


def _spoken(hours: float) -> str:
    """A time for people.

    >>> _spoken(2.5), _spoken(0.25), _spoken(0.001)
    ('2.5 hours', '15 minutes', '3.6 seconds')
    """
    if hours >= 1.0:
        return f"{hours:.3g} hours"
    return f"{60 * hours:.3g} minutes" if hours >= 1 / 60 else f"{3600 * hours:.3g} seconds"
