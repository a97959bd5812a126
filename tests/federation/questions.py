"""Questions of a hostile coordinator to a party, through the real path, and what is checked of every answer.

A party holds one absurd record. Whatever it is asked, its sum is no longer than the query's bound; and what it
refuses, and in which words, is the same for a party that holds another record. Used by
``tests/federation/test_ranges.py`` in passing and by ``benchmarks/federation_questions.py`` for longer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import quietgrad as qg
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan import Shape
from quietgrad.federation.planning import declared, federate
from quietgrad.federation.wire import Message, decode, encode, pack, template, unpack
from quietgrad.tables.losses import Logistic, Multinomial, Squared
from quietgrad.tables.queries.local_fit import LocalFit
from quietgrad.tables.regularizers import L2

N = 40
SLACK = 1e-9
_SPIDER: dict[str, Any] = {"batch_size": N, "difference_batch_size": N, "regime": "reuse", "full_queries": 400}
ALGORITHMS: dict[str, Any] = {
    "dp-srm": qg.DPSRM(steps=10**6, batch_size=N),
    "dp-srm smooth": qg.DPSRM(steps=10**6, batch_size=N, smoothness=0.5, difference_clip=1.0),
    "dp-srm joint": qg.DPSRM(steps=10**6, batch_size=N, joint_clip=True),
    "dp-sgd": qg.DPSGD(steps=10**6, batch_size=N),
    "dp-adam": qg.DPAdam(steps=10**6, batch_size=N),
    "dp-disk": qg.DPDiSK(steps=10**6, batch_size=N, learning_rate=0.1),
    "dp-gd": qg.DPGD(steps=10**6),
    "stagewise": qg.StagewiseDPSGD(stages=2, first_steps=10**6, batch_size=N),
    "rrpsgd": qg.RRPSGD(steps=10**5, batch_size=N),
    "bassily-sgd": qg.BassilySGD(steps=10**6, batch_size=N),
    "whitened-gd": qg.WhitenedGD(steps=10**6),
    "whitened-gd diagonal": qg.WhitenedGD(steps=10**6, moments="diagonal"),
    "perturbed-sgd": qg.PerturbedSGD(
        oracle=qg.AdaptiveSpider(kappa=1.0, clip=1.0, smoothness=1.0, **_SPIDER), steps=10**6, chi=0.1
    ),
    "weighted-average": qg.WeightedAverage(steps=3),
    "weighted-average rounds": qg.WeightedAverage(steps=10**6, method="rounds"),
    "output-perturbation": qg.OutputPerturbation(steps=3),
}
LOSSES: dict[str, Any] = {
    "logistic": Logistic(row_bound=2.0, rows="clip", regularizer=L2(0.1)),
    "logistic, unbounded": Logistic(intercept=True),
    "least squares": Squared(),
    "softmax": Multinomial(3, intercept=True),
}
_NUMBERS = (
    0.0, -0.0, 5e-324, 1e-323, 2.2e-308, 1e-200, 1e-30, 2.0**-60, 2.0**-60 * (1 - 2**-53), 1e-9, 0.1, 1.0, 3.7, 1e9,
    2.0**100, 1e150, 1.79e308, math.inf, -math.inf, math.nan, -1.0,
)  # fmt: skip
_WORDS: tuple[Any, ...] = (
    None,
    True,
    False,
    "1",
    "",
    [],
    {},
    [1.0],
    10**400,
    -(10**30),
    2**63,
    {"array": "q0"},
    {"kind": "Gradient"},
)
_CELLS = (0.0, 1.0, -1.0, 1e-308, 5e-324, 1e-30, 3.0, 1e30, -1e30, 1e75, 1e150, 1e200, 1.7e308, -1.7e308)
Floats = npt.NDArray[np.float64]


def absurd(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """A vector that nobody would send."""
    kind = rng.integers(15)
    if kind == 0:
        return np.zeros(shape)
    if kind == 1:
        return rng.normal(size=shape) * 10.0 ** rng.integers(-320, 308)
    if kind == 2:  # alternating, and as large as it gets: inf − inf
        size = math.prod(shape)
        return np.resize([1.0, -1.0], size).reshape(shape) * float(rng.choice([1.79e308, 1e154, 2.0**100, 1e30]))
    if kind == 3:
        return rng.choice([0.0, 5e-324, 1e-300, 1.0, 2.0**100, -(2.0**100)], size=shape)
    if kind == 4:
        return rng.choice([np.nan, np.inf, -np.inf, 1.0, 0.0], size=shape)
    if len(shape) == 2 and shape[0] == shape[1] and kind < 12:
        return np.eye(shape[0])
    return rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3)


def spoiled(rng: np.random.Generator, fields: Any, allowed: dict[str, Any], path: str = "query") -> Any:
    """Packed fields with some numbers and words changed; a number that may vary mostly stays in its interval."""
    if isinstance(fields, dict) and "array" not in fields:
        return {name: spoiled(rng, item, allowed, f"{path}.{name}") for name, item in fields.items()}
    if isinstance(fields, (list, tuple)):
        return [spoiled(rng, item, allowed, f"{path}.{i}") for i, item in enumerate(fields)]
    range_of = allowed.get(path)
    if isinstance(range_of, dict) and "from" in range_of and rng.random() < 0.9:
        low, high = range_of["from"], range_of["to"]
        tiny = 5e-324 * int(rng.integers(1, 64))  # where rounding is as large as what is rounded
        near = (low, high, tiny, tiny, tiny, *_NUMBERS)
        return near[rng.integers(len(near))] if rng.random() < 0.6 else float(rng.uniform(low, min(high, 10.0)))
    if rng.random() < 0.02:
        return (*_NUMBERS, *_WORDS)[rng.integers(len(_NUMBERS) + len(_WORDS))]
    return fields


class Interrogation:
    """Two parties of one plan with one record each, who are asked the same.

    Args:
        algorithm, loss: by name.
        features: of the records.
        rng: for everything.
    """

    def __init__(self, algorithm: str, loss: str, features: int, rng: np.random.Generator) -> None:
        self._rng, self._objective = rng, LOSSES[loss]
        chosen = ALGORITHMS[algorithm]
        outputs, intercept = self._objective.outputs, self._objective.intercept
        self._shape = Shape((features + intercept) * outputs, features)
        known: dict[str, Any] = {"names": ["a", "b"], "sizes": [N, N], "shape": self._shape}
        self.plan = federate(chosen, self._objective, budget=None, **known)
        initial = self._objective.initial(self._shape)
        setting = _Setting(self._objective, self.plan)
        assert declared(chosen, self._objective, self.plan, initial)[1] == self.plan.dims
        slots = {slot.name for slot in self.plan.schedule.slots}
        self._asks = [(slot, *template(each)) for slot, each in chosen.asks(initial, setting) if slot in slots]
        self._parties = [self._party(self._record(), outputs) for _ in range(2)]
        self._t = 0
        self._draws = dict.fromkeys(slots, 0)
        self._zero = initial

    def _record(self) -> Floats:
        rng, features = self._rng, self._shape.features
        if rng.random() < 0.5:
            return rng.normal(size=(1, features))
        if rng.random() < 0.3:
            return np.clip(absurd(rng, (1, features)), -1.7e308, 1.7e308)
        return rng.choice(_CELLS, size=(1, features))

    def _party(self, X: Floats, outputs: int) -> PartyCurator:
        y = self._rng.integers(0, max(2, outputs), size=1).astype(float)
        party = PartyCurator("a", self._objective, (np.nan_to_num(X), y), self.plan, seed=0)
        assert decode(party.handle(encode(Message("open", {"run": "r", "plan": self.plan.digest})))).kind == "ready"
        return party

    def ask(self) -> str:
        """One question; what became of it: ``sum`` or ``refused``. Raises if anything was wrong with it."""
        rng = self._rng
        slot, query, allowed = self._asks[rng.integers(len(self._asks))]
        fields, arrays = pack(query)
        if rng.random() < 0.9:
            arrays = {name: absurd(rng, array.shape) for name, array in arrays.items()}
        if rng.random() < 0.03:
            arrays[f"q{rng.integers(4)}"] = absurd(rng, (int(rng.integers(1, 9)),))
        fields = spoiled(rng, fields, allowed)
        words = {"run": "r", "round": self._t, "slot": slot, "draw": self._draws[slot], "query": fields}
        question = encode(Message("ask", words, arrays))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replies = [decode(bytes(party.handle(question))) for party in self._parties]
        kinds = {reply.kind for reply in replies}
        if len(kinds) > 1 or (kinds == {"refused"} and replies[0].fields != replies[1].fields):
            raise AssertionError(
                f"{slot}: the answer depends on the record: {[r.fields for r in replies]}; {fields}"
            )
        if any(party.private_notes for party in self._parties):
            raise AssertionError(
                f"{slot}: {self._parties[0].private_notes}{self._parties[1].private_notes}; {fields}"
            )
        if kinds == {"sum"}:
            self._t += 1
            self._draws[slot] += 1
            self._check(slot, unpack(fields, arrays, self._zero), [reply.arrays["total"] for reply in replies])
        return kinds.pop()

    def _check(self, slot: str, query: Any, sums: list[Floats]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(query, LocalFit):  # a fit is bounded for a replaced record, by Δ = 2·bound
                lengths, most = [float(np.linalg.norm(sums[0] - sums[1]))], 2.0 * query.bound
            else:
                lengths, most = [length(each) for each in sums], query.bound
        for each in lengths:
            if not each <= most * (1.0 + SLACK):
                raise AssertionError(f"{slot}: a record contributes {each!r}, its bound is {most!r}: {query}")


class _Setting:
    def __init__(self, objective: Any, plan: Any) -> None:
        self.objective, self.plan, self.regularizer = objective, plan, objective.regularizer

    def expected_batch(self, slot: str) -> float:
        return float(self.plan.schedule[slot].sampling.expected_batch(self.plan.n_public))


def length(vector: Floats) -> float:
    """The norm, without overflow or underflow on the way."""
    peak = float(np.abs(vector).max(initial=0.0))
    return peak * float(np.linalg.norm(vector / peak)) if 0.0 < peak < math.inf else peak


def pairs() -> Iterator[tuple[str, str]]:
    """Algorithms and losses that go together."""
    for algorithm in ALGORITHMS:
        for loss in LOSSES:
            fits = "average" not in algorithm and "perturbation" not in algorithm
            if loss == "logistic" or (fits or ("rounds" in algorithm and loss != "least squares")):
                yield algorithm, loss
