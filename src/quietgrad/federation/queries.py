"""Queries on the wire: a name from a fixed list, public numbers and vectors; and what a plan lets them be.

A party never runs what a coordinator sends. It compares a query's name and fields with the *templates* of the plan
it approved (which query a slot may ask, which numbers are fixed, in which interval the others are, which vectors
are pinned) and builds the query itself, whose constructor refuses numbers that arithmetic cannot keep.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quietgrad.federation.wire import Array, WireError
from quietgrad.objectives.base import (
    LARGEST_CLIP,
    Batch,
    Gradient,
    GradientDifference,
    JointMomentum,
    Loss,
    Objective,
    Query,
    Records,
    RecursiveMomentum,
)
from quietgrad.objectives.queries.asked import Asked
from quietgrad.objectives.queries.local_fit import LocalFit
from quietgrad.objectives.queries.second_order import PackedHessian
from quietgrad.objectives.tables.features import FeatureMean, FeatureMoments, SecondMoments
from quietgrad.objectives.tables.table import Affine
from quietgrad.objectives.tables.whitening import (
    MeanSquares,
    RowNormHistogram,
    SecondMomentMatrix,
    WhitenedGradient,
    Whitening,
)
from quietgrad.privacy.budget import Relation
from quietgrad.vectors import Vector

Template = dict[str, Any]
"""By path, what a query may have there: a word or number; ``{"from": a, "to": b}``; ``["array", *shape]``, followed
by ``{"sha256": …}`` if the array is pinned."""
_LARGEST_ENTRY = LARGEST_CLIP  # of a vector: beyond, scores of ordinary records could overflow


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The scalar answers of several candidates as one vector, for a noisy choice between them.

    A candidate's answer is a sum of numbers in [0, B], so one record moves each of the k by at most B under either
    relation and the vector by √k·B; ``bound`` is C with Δ = √k·B.
    """

    candidates: Sequence[Query]
    relation: Relation

    @property
    def bound(self) -> float:
        """√k·B ÷ (Δ/C)."""
        from quietgrad.privacy.accounting import sensitivity_factor

        largest = max(query.bound for query in self.candidates)
        return float(math.sqrt(len(self.candidates)) * largest / sensitivity_factor(self.relation))

    def dim(self, records: Records) -> int:
        """k."""
        return len(self.candidates)

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        """out[i] += the sum of candidate i."""
        for i, query in enumerate(self.candidates):
            query.sum_into(objective, batch, out[i : i + 1])


_ASKED = (
    Gradient, GradientDifference, RecursiveMomentum, JointMomentum, Loss, LocalFit, PackedHessian, FeatureMean,
    SecondMoments, FeatureMoments, SecondMomentMatrix, MeanSquares, RowNormHistogram, WhitenedGradient, Scores,
)  # fmt: skip
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (*_ASKED, Whitening, Affine)}
"""What may be on the wire: queries, and what they are made of."""
_FIELDS = {name: frozenset(f.name for f in dataclasses.fields(kind) if f.init) for name, kind in _KINDS.items()}


def pack(query: Query) -> tuple[dict[str, Any], dict[str, Array]]:
    """A query as JSON values and arrays.

    >>> from quietgrad.objectives.base import Gradient
    >>> fields, arrays = pack(Gradient(np.zeros(2), 1.5))
    >>> fields
    {'kind': 'Gradient', 'params': {'array': 'q0'}, 'clip': 1.5}
    """
    arrays: dict[str, Array] = {}
    return _pack(query, arrays), arrays


def unpack(fields: Any, arrays: Mapping[str, Array], like: Vector) -> Query:
    """The query of :func:`pack`; vectors become what ``like`` is, numpy or torch.

    >>> from quietgrad.objectives.base import Gradient
    >>> unpack(*pack(Gradient(np.zeros(2), 1.5)), np.zeros(2)).clip
    1.5
    """
    query = _unpack(fields, arrays, like)
    if not isinstance(query, _ASKED):
        raise WireError("that is not a query")
    return query


def _pack(value: Any, arrays: dict[str, Array]) -> Any:
    if isinstance(value, Relation):
        return {"relation": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_pack(item, arrays) for item in value]
    kind = type(value).__name__
    if _KINDS.get(kind) is type(value):
        fields = (f.name for f in dataclasses.fields(value) if f.init)
        return {"kind": kind, **{name: _pack(getattr(value, name), arrays) for name in fields}}
    array = value if isinstance(value, np.ndarray) else _from_torch(value)
    name = f"q{len(arrays)}"
    arrays[name] = array
    return {"array": name}


def _from_torch(value: Any) -> Array:
    if type(value).__module__.partition(".")[0] != "torch":
        raise WireError(f"{type(value).__name__} cannot be part of a query that is sent")
    array: Array = value.detach().cpu().numpy()
    return array


def _unpack(value: Any, arrays: Mapping[str, Array], like: Vector) -> Any:
    if isinstance(value, list):
        return tuple(_unpack(item, arrays, like) for item in value)
    if not isinstance(value, dict):
        return value
    if "relation" in value and len(value) == 1:
        return Relation.parse(value["relation"])
    if "array" in value:
        if value["array"] not in arrays:
            raise WireError("query refers to an array that was not sent")
        array = arrays[value["array"]]
        return array if isinstance(like, np.ndarray) or array.ndim != 1 else like.new_tensor(array)
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise WireError(f"query {kind!r} is not known; known are {', '.join(_KINDS)}")
    maker, names = _KINDS[kind], _FIELDS[kind]
    if value.keys() != names | {"kind"}:
        raise WireError(f"query {kind} must have exactly the fields {', '.join(sorted(names))}")
    return maker(**{name: _unpack(value[name], arrays, like) for name in names})


def template(asked: Asked, relation: Relation) -> tuple[Query, Template]:
    """The query that an algorithm declares, and what a party lets it be.

    >>> from quietgrad.objectives.base import RecursiveMomentum
    >>> query = RecursiveMomentum(np.zeros(2), np.zeros(2), 0.1, 1.0, 0.5)
    >>> template(Asked(query, {"difference_clip": (0.0, 0.5)}), Relation.ADD_REMOVE)[1]["query.difference_clip"]
    {'from': 0.0, 'to': 0.5}
    """
    query = Scores(asked.query, relation) if isinstance(asked.query, tuple) else asked.query
    fields, arrays = pack(query)
    found: Template = {}
    for path, value in _leaves(fields, arrays):
        name = path.removeprefix("query.")
        if name in asked.between:
            low, high = (float(end) for end in asked.between[name])
            found[path] = {"from": low, "to": high}
        elif isinstance(value, np.ndarray):
            found[path] = ["array", *value.shape, *([{"sha256": _digest(value)}] if name in asked.pinned else [])]
        else:
            found[path] = value
    if missing := {*asked.between, *asked.pinned} - {path.removeprefix("query.") for path in found}:
        raise ValueError(f"{type(query).__name__} has no field {sorted(missing)[0]!r} that could vary.")
    return query, json.loads(json.dumps(found))


def _leaves(fields: Any, arrays: Mapping[str, Array], path: str = "query") -> Iterator[tuple[str, Any]]:
    """Every number, word and array of a packed query, by its path."""
    if isinstance(fields, dict) and "array" in fields:
        name = fields["array"]
        yield path, arrays.get(name) if isinstance(name, str) else None
    elif isinstance(fields, dict):
        for name, item in fields.items():
            yield from _leaves(item, arrays, f"{path}.{name}")
    elif isinstance(fields, (list, tuple)):
        for i, item in enumerate(fields):
            yield from _leaves(item, arrays, f"{path}.{i}")
    else:
        yield path, fields


def off_plan(templates: Sequence[Template], fields: Any, arrays: Mapping[str, Array]) -> str | None:
    """Why a packed query fits none of the templates, or ``None`` if it fits one.

    >>> off_plan([{"query.kind": "Gradient", "query.clip": 1.0}], {"kind": "Gradient", "clip": 9.0}, {})
    'query.clip is 9.0, the plan has 1.0'
    """
    given = dict(_leaves(fields, arrays))
    if sum(isinstance(value, np.ndarray) for value in given.values()) != len(arrays):
        return "it brings vectors that the query does not name"
    reason: str | None = "the plan allows no query here"
    for each in templates:
        reason = _difference(each, given)
        if reason is None:
            return None
    return reason


def _difference(allowed: Template, given: Mapping[str, Any]) -> str | None:
    if set(allowed) != set(given):
        kinds = allowed.get("query.kind"), given.get("query.kind")
        return f"query {kinds[1]!r} has other fields than the plan's {kinds[0]!r}"
    for path, value in given.items():
        planned = allowed[path]
        if isinstance(planned, list):
            why = _other_array(planned, value)
        elif isinstance(planned, dict):
            inside = _is_number(value) and planned["from"] <= value <= planned["to"]
            why = None if inside else f"is {value!r}, must be from {planned['from']:g} to {planned['to']:g}"
        else:
            same = planned == value and isinstance(planned, bool) == isinstance(value, bool)
            why = None if same else f"is {value!r}, the plan has {planned!r}"
        if why is not None:
            return f"{path} {why}"
    return None


def _other_array(planned: list[Any], value: Any) -> str | None:
    pinned = planned[-1]["sha256"] if isinstance(planned[-1], dict) else None
    shape = tuple(planned[1:] if pinned is None else planned[1:-1])
    if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype.kind != "f":
        return f"is not a vector of shape {shape}"
    if value.size and not float(np.abs(value).max()) <= _LARGEST_ENTRY:  # refuses NaN too
        return f"has entries that are not numbers, or larger than {_LARGEST_ENTRY:.3g}"
    if pinned is not None and _digest(value) != pinned:
        return "is not the vector that the plan pins"
    return None


def _digest(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, "<f8").tobytes()).hexdigest()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
