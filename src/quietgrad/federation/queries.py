"""Queries on the wire: a name from a fixed list, public numbers and vectors; and what a plan lets them be.

A party never runs what a coordinator sends. It reads a query's name and fields, builds the query itself, and
compares it with the *templates* of the plan it approved: which query a slot may ask, with which clips and lengths.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quietgrad.errors import BudgetError
from quietgrad.federation.wire import Array, WireError
from quietgrad.objectives.base import (
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
from quietgrad.objectives.queries.local_fit import LocalFit
from quietgrad.objectives.queries.second_order import PackedHessian
from quietgrad.objectives.tables.features import FeatureMean, FeatureMoments, SecondMoments
from quietgrad.objectives.tables.table import Affine
from quietgrad.objectives.tables.whitening import (
    RowNormHistogram,
    SecondMomentMatrix,
    WhitenedGradient,
    Whitening,
)
from quietgrad.privacy.budget import Relation
from quietgrad.vectors import Vector

FREE = "any"  # a template's word for a finite number ≥ 0 that follows from earlier releases
Template = dict[str, Any]


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
    SecondMoments, FeatureMoments, SecondMomentMatrix, RowNormHistogram, WhitenedGradient, Scores,
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
        if not np.isfinite(array).all():
            raise WireError("query has a vector that is not finite")
        return array if isinstance(like, np.ndarray) or array.ndim != 1 else like.new_tensor(array)
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise WireError(f"query {kind!r} is not known; known are {', '.join(_KINDS)}")
    maker, names = _KINDS[kind], _FIELDS[kind]
    if value.keys() != names | {"kind"}:
        raise WireError(f"query {kind} must have exactly the fields {', '.join(sorted(names))}")
    return maker(**{name: _unpack(value[name], arrays, like) for name in names})


def flat(fields: Any, arrays: Mapping[str, Array], path: str = "query") -> dict[str, Any]:
    """Every number, word and array shape of a packed query by its path: what a template is made of."""
    if isinstance(fields, dict) and "array" in fields:
        array = arrays.get(fields["array"])
        return {path: ["array", *(() if array is None else array.shape)]}
    if isinstance(fields, dict):
        parts = fields.items()
    elif isinstance(fields, (list, tuple)):
        parts = {str(i): item for i, item in enumerate(fields)}.items()
    else:
        return {path: fields}
    found: dict[str, Any] = {}
    for name, item in parts:
        found.update(flat(item, arrays, f"{path}.{name}"))
    return found


def merged(old: Template | None, new: Template) -> Template:
    """The template of all queries seen: equal values stay, numbers that differ become free."""
    if old is None:
        return new
    if set(old) != set(new):
        raise BudgetError("this algorithm asks different queries in one slot; it cannot be pinned.")
    return {path: value if old[path] == value else _freed(path, old[path], value) for path, value in new.items()}


def _freed(path: str, old: Any, new: Any) -> str:
    if old == FREE or (_is_number(old) and _is_number(new)):
        return FREE
    raise BudgetError(f"this algorithm changes {path} from {old!r} to {new!r} between releases; not a number.")


def off_plan(templates: Sequence[Template], given: Mapping[str, Any]) -> str | None:
    """Why a packed query fits none of the templates, or ``None`` if it fits one.

    >>> off_plan([{"query.kind": "Gradient", "query.clip": 1.0}], {"query.kind": "Gradient", "query.clip": 9.0})
    'query.clip is 9.0, the plan has 1.0'
    """
    reason: str | None = "the plan allows no query here"
    for template in templates:
        reason = _difference(template, given)
        if reason is None:
            return None
    return reason


def _difference(template: Template, given: Mapping[str, Any]) -> str | None:
    if set(template) != set(given):
        kinds = template.get("query.kind"), given.get("query.kind")
        return f"query {kinds[1]!r} has other fields than the plan's {kinds[0]!r}"
    for path, value in given.items():
        planned = template[path]
        if planned == FREE:
            if not (_is_number(value) and 0.0 <= value < math.inf):
                return f"{path} is {value!r}, must be a finite number ≥ 0"
        elif planned != value or isinstance(planned, bool) != isinstance(value, bool):
            return f"{path} is {value!r}, the plan has {planned!r}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
