"""Clipping rules: how the vector of one record, or of one person, is brought to a length of at most C.

A rule is a frozen, public object. It maps the norm of a vector to the vector's scale factor, and it may split the
parameters into groups that are scaled separately. It sees norms only.

The bound does not depend on the rule. :func:`scale_factors` limits every factor to C_k/‖v_k‖. The bounds C_k of
groups are normalised weights times C, so that ΣC_k² = C² for any weights. A rule that is not one of those here is
asked about one vector at a time, by a new copy each time, so that no record's factor follows from another's norm.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np

from quietgrad.core.settings import Within, check_fields, field_values

Norms: TypeAlias = Any
"""Numbers ≥ 0, ``np.ndarray`` or ``torch.Tensor``, in float64."""
ClippingName = Literal["flat", "automatic", "per-layer"]

_KINDS: dict[str, type[Clipping]] = {}
_TINY = 2.0**-1000  # a factor below it has lost digits, and could be too large


class Clipping(ABC):
    """A clipping rule. A subclass is a frozen dataclass whose fields are public settings."""

    kind: ClassVar[str]
    grouped: ClassVar[bool] = False
    """Whether parameters are scaled in groups, by their names; tables of linear models have no such names."""

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        _KINDS[kind] = cls

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def factors(self, norms: Norms, clip: Any) -> Norms:
        """The factor of each vector by its norm; ``clip`` is C, or the bounds C_k of groups along the last axis."""

    def groups(self, names: Sequence[str]) -> tuple[list[int], list[float]]:
        """The group of each parameter, and the weight of each group: its bound is C·weight/√Σweight²."""
        return [0] * len(names), [1.0]

    def config(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {"kind": self.kind, **field_values(self)}


@dataclass(frozen=True)
class Flat(Clipping, kind="flat"):
    """v·min(1, C/‖v‖) over all parameters (Abadi et al. 2016): what is short enough stays as it is."""

    def factors(self, norms: Norms, clip: Any) -> Norms:
        return (clip / norms).clip(max=1.0)


@dataclass(frozen=True)
class Automatic(Clipping, kind="automatic"):
    """v·C/(‖v‖ + γ): automatic clipping (Bu et al. 2023), which needs no search for C.

    Every vector is brought to about the length C, and C is a factor of the learning rate. The length is
    C‖v‖/(‖v‖ + γ) < C, so the sensitivity is C.

    Args:
        stability: γ > 0. Vectors that are much shorter than γ stay short.

    >>> scale_factors(Automatic(0.5), np.array([0.0, 1.5]), 2.0)
    array([4., 1.])
    """

    stability: Annotated[float, Within(2.0**-60, 2.0**60)] = 0.01

    def factors(self, norms: Norms, clip: Any) -> Norms:
        return clip / (norms + self.stability)


@dataclass(frozen=True)
class PerLayer(Clipping, kind="per-layer"):
    """Each group of parameters clipped to its own bound C_k, with ΣC_k² = C².

    Args:
        weights: the relative bound of each group, by the prefix of its parameters' names, in the order of a model's
            modules: ``(("features", 1.0), ("head", 2.0))``, or a mapping. The longest prefix of a name decides.
            Without weights every module that holds parameters is a group, and all bounds are equal.
        within: the rule of each group.

    >>> PerLayer().groups(["conv.weight", "conv.bias", "head.weight"])
    ([0, 0, 1], [1.0, 1.0])
    >>> rule = PerLayer({"conv": 3.0, "head": 4.0})
    >>> group_bounds(rule.groups(["conv.weight", "head.weight"])[1], 10.0)
    [6.0, 8.0]
    """

    weights: tuple[tuple[str, float], ...] | Mapping[str, float] | None = None
    within: Clipping = Flat()

    grouped: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within = read_clipping(self.within)
        if within.grouped:
            raise ValueError("PerLayer(within=...): groups are not cut again; use 'flat' or 'automatic'.")
        object.__setattr__(self, "within", within)
        if self.weights is None:
            return
        pairs: Any = self.weights.items() if isinstance(self.weights, Mapping) else self.weights
        weights = tuple((str(name), float(weight)) for name, weight in pairs)
        # Of any finite weights > 0 the bounds have the right length; the range keeps them from underflow.
        if not weights or not all(2.0**-30 <= weight <= 2.0**30 for _, weight in weights):
            raise ValueError(
                f"PerLayer(weights={weights}): must be numbers between 1e-9 and 1e9, one for each group."
            )
        if len({name for name, _ in weights}) < len(weights):
            raise ValueError("PerLayer(weights=...): a group is given twice.")
        object.__setattr__(self, "weights", weights)

    @property
    def _pairs(self) -> tuple[tuple[str, float], ...] | None:
        assert not isinstance(self.weights, Mapping)  # since it was made
        return self.weights

    def factors(self, norms: Norms, clip: Any) -> Norms:
        return _factors(self.within, norms, clip)

    def groups(self, names: Sequence[str]) -> tuple[list[int], list[float]]:
        pairs = self._pairs
        if pairs is None:
            modules = [name.rpartition(".")[0] for name in names]
            module_names = list(dict.fromkeys(modules))
            return [module_names.index(module) for module in modules], [1.0] * len(module_names)
        prefixes = [prefix for prefix, _ in pairs]
        numbers = []
        for name in names:
            fitting = [p for p in prefixes if p == "" or name == p or name.startswith(f"{p}.")]
            if not fitting:
                raise ValueError(
                    f"per-layer clipping: parameter {name!r} is in none of the groups {', '.join(prefixes)}. "
                    "Give a group for it; '' is the group of all others."
                )
            numbers.append(prefixes.index(max(fitting, key=len)))
        # A group without parameters would take a part of C that no other gets.
        used = sorted(set(numbers))
        return [used.index(group) for group in numbers], [pairs[group][1] for group in used]

    def config(self) -> dict[str, Any]:
        weights = None if self._pairs is None else [list(pair) for pair in self._pairs]
        return {"kind": self.kind, "weights": weights, "within": self.within.config()}


FLAT = Flat()
_OWN = (Flat, Automatic, PerLayer)


def read_clipping(given: object) -> Clipping:
    """A clipping rule from its name, from the JSON of one, or as it is.

    >>> read_clipping("automatic")
    Automatic(stability=0.01)
    >>> read_clipping(PerLayer({"": 1.0}, "automatic").config()) == PerLayer({"": 1.0}, "automatic")
    True
    """
    if isinstance(given, str) and given == FLAT.kind:  # asked for in every step
        return FLAT
    if isinstance(given, Clipping):
        return given
    fields = dict(given) if isinstance(given, Mapping) else {"kind": given}
    kind = fields.pop("kind", None)
    kind = kind.replace("_", "-") if isinstance(kind, str) else kind
    if kind == "adaptive":
        raise ValueError(
            "clipping='adaptive': a bound that follows the data is paid for by a second release in each step, "
            "which is not planned here. Use 'automatic', which needs no bound to be found."
        )
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"clipping={given!r}: must be one of {', '.join(map(repr, _KINDS))}, or a clipping rule.")
    try:
        return _KINDS[kind](**fields)
    except TypeError as error:
        raise ValueError(f"clipping={given!r}: {error}.") from None


def known_rules() -> dict[str, type[Clipping]]:
    """All clipping rules by their kinds."""
    return dict(_KINDS)


def group_bounds(weights: Sequence[float], clip: float) -> list[float]:
    """C_k = C·w_k/√Σw²: bounds of groups whose squares add up to C²."""
    length = math.sqrt(math.fsum(weight * weight for weight in weights))
    return [clip * (weight / length) for weight in weights]


def _factors(rule: Clipping, norms: Norms, clip: Any) -> Norms:
    """The rule's factors, each by a norm alone.

    Of all norms a foreign rule could take the largest, or the mean, and if it kept them, it could do so later. So
    the rule itself is never asked: a copy of it is, and is gone afterwards.
    """
    if type(rule) in _OWN:
        return rule.factors(norms, clip)
    lengths, bounds = (np.asarray(x.cpu() if hasattr(x, "cpu") else x, dtype=np.float64) for x in (norms, clip))
    pairs = zip(lengths.ravel(), np.broadcast_to(bounds, lengths.shape).ravel(), strict=True)
    answers = [
        np.ravel(copy.deepcopy(rule).factors(np.array([length]), np.array([bound]))) for length, bound in pairs
    ]
    given = np.array([float(answer[0]) for answer in answers]).reshape(lengths.shape)
    return given if isinstance(norms, np.ndarray) else norms.new_tensor(given)


def _factor(rule: Clipping, norm: float, clip: float) -> float:
    answer = copy.deepcopy(rule).factors(np.array([norm]), np.array([clip]))
    return float(np.ravel(answer)[0])


def scale_factors(clipping: Clipping, norms: Norms, clip: Any) -> Norms:
    """Return the rule's factors, limited to C/‖v‖ in absolute value, so that no scaled vector is longer than C.

    A factor that is not finite becomes 0.

    >>> scale_factors(FLAT, np.array([0.5, 4.0]), 1.0)
    array([1.  , 0.25])
    """
    if isinstance(norms, np.ndarray):
        with np.errstate(all="ignore"):
            limit = np.nan_to_num(clip / norms, nan=0.0, posinf=np.inf)
            given = np.nan_to_num(_factors(clipping, norms, clip), nan=0.0, posinf=0.0, neginf=0.0)
        return np.clip(given, -limit, limit) * (limit >= _TINY)
    limit = (clip / norms).nan_to_num(0.0, math.inf)
    given = _factors(clipping, norms, clip).nan_to_num(0.0, 0.0, 0.0)
    return given.clamp(-limit, limit) * (limit >= _TINY)
