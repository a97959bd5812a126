"""Events: what was released, read from JSON and taken apart into what has to be proved.

``noise_multiplier`` is σ of the noise on a sum ÷ C, the L2 bound of one record's contribution. Under add-remove one
record moves a sum by C, under replace-one by 2C. The kinds and their fields are in ``docs/certificate-format.md``.

:func:`take_apart` turns an event into *branches*: under ``parallel`` and ``per-party`` a record lies in one part,
so an event costs what its worst choice of parts costs. A branch is a multiset of releases without parallel parts.
What is added up apart (distances, failures, releases that decide about others) is summed beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from typing import Any, Literal, TypeAlias

RELATIONS = ("add-remove", "replace-one")
_MOST_BRANCHES = 256
_MOST_PARTS = 4096
_MOST_LAW = 512


class NoRule(Exception):
    """No rule here proves this event; the words say why."""


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian release on all records; many un-sampled ones are exactly one of Σ 1/z² as its 1/z²."""

    z: float


@dataclass(frozen=True)
class Pure:
    """A release that was proved ε-DP under ``relation``."""

    epsilon: float
    relation: str


@dataclass(frozen=True)
class ZCDP:
    """A release, or a sequence of them under a filter, that was proved ρ-zCDP under ``relation``."""

    rho: float
    relation: str


@dataclass(frozen=True)
class Sampled:
    """``base`` on a secret sample: of Poisson's law at ``rate``, or of a fixed size that is ``rate`` of all."""

    law: Literal["poisson", "fixed-size"]
    rate: float
    base: Gaussian | Pure


@dataclass(frozen=True)
class Allocated:
    """An epoch of ``steps`` Gaussian releases; every record is in one of them, drawn in secret."""

    steps: int
    base: Gaussian


@dataclass(frozen=True)
class RandomRounds:
    """``inner`` made R times, R drawn beforehand; ``law`` holds (R, probability), sorted by R."""

    inner: Branch
    law: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Selected:
    """The best of K runs of ``inner``, K negative binomial of this mean and shape."""

    inner: Branch
    mean: float
    shape: float


Release: TypeAlias = Gaussian | Pure | ZCDP | Sampled | Allocated | RandomRounds | Selected
Branch: TypeAlias = tuple[tuple[Release, int], ...]
"""Releases and how often each is made, on the same records."""


@dataclass(frozen=True)
class Parts:
    """An event taken apart: its branches, and what is added to the worst of them."""

    branches: tuple[Branch, ...]
    slack: float = 0.0  # total variation
    failure: float = 0.0  # probability
    upfront: float = 0.0  # ε


def take_apart(event: object, relation: str) -> Parts:
    """Read an event's JSON; ``ValueError`` if it is none, :class:`NoRule` if it has too many choices of parts.

    >>> take_apart({"event": "repeated", "count": 4, "inner": {"event": "gaussian", "noise_multiplier": 2.0}},
    ...            "add-remove").branches
    (((Gaussian(z=1.0), 1),),)
    """
    _known(relation)
    if _size(event) > _MOST_PARTS:
        raise ValueError(f"event: has more than {_MOST_PARTS} parts.")
    parts = _read(event, relation)
    return replace(parts, branches=_undominated(tuple(dict.fromkeys(map(_merged, parts.branches)))))


def _known(relation: object) -> object:
    if relation not in RELATIONS:
        raise ValueError(f"relation={relation!r}: must be add-remove or replace-one.")
    return relation


def _size(value: object, depth: int = 0) -> int:
    if depth > 60:
        raise ValueError("event: is nested too deeply.")
    if isinstance(value, Mapping):
        if isinstance(value.get("law"), list) and len(value["law"]) > _MOST_LAW:
            raise ValueError(f"law: has more than {_MOST_LAW} rounds.")
        return 1 + sum(_size(item, depth + 1) for item in value.values())
    return sum(_size(item, depth + 1) for item in value) if isinstance(value, list) else 0


def _number(data: Mapping[str, Any], name: str, low: float, high: float, *, whole: bool = False) -> float:
    value = data.get(name)
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: must be a number from {low:g} to {high:g}.")
    return value


def _fields(data: Mapping[str, Any], *names: str) -> None:
    if set(data) != {"event", *names}:
        raise ValueError(f"event {data.get('event')!r}: has the fields {', '.join(names)} and no others.")


def _proved_under(data: Mapping[str, Any], relation: str) -> str:
    if _known(data.get("relation")) != relation:
        raise NoRule(f"a release was proved under {data['relation']}, and {relation} is claimed")
    return relation


def _read(data: object, relation: str) -> Parts:
    if not isinstance(data, Mapping):
        raise ValueError("event: must be an object.")
    match data.get("event"):
        case "gaussian":
            _fields(data, "noise_multiplier")
            return Parts((((Gaussian(float(_number(data, "noise_multiplier", 1e-18, 1e18))), 1),),))
        case "pure":
            _fields(data, "epsilon", "relation")
            epsilon = float(_number(data, "epsilon", 1e-18, 1e18))
            return Parts((((Pure(epsilon, _proved_under(data, relation)), 1),),))
        case "zcdp":
            _fields(data, "rho", "relation")
            return Parts((((ZCDP(float(_number(data, "rho", 1e-37, 1e37)), _proved_under(data, relation)), 1),),))
        case "slack":
            _fields(data, "total_variation")
            return Parts(((),), slack=_number(data, "total_variation", 0.0, 1.0))
        case "failure":
            _fields(data, "probability")
            return Parts(((),), failure=_number(data, "probability", 0.0, math.nextafter(1.0, 0.0)))
        case "upfront":
            _fields(data, "epsilon", "relation")
            _proved_under(data, relation)
            return Parts(((),), upfront=float(_number(data, "epsilon", 1e-18, 1e18)))
        case "composed":
            _fields(data, "parts")
            return _together([_read(part, relation) for part in _several(data, "parts")])
        case "parallel" | "per-party" as kind:
            name = "parts" if kind == "parallel" else "parties"
            _fields(data, name)
            return _apart([_read(part, relation) for part in _several(data, name)])
        case "repeated":
            _fields(data, "inner", "count")
            return _repeated(_read(data["inner"], relation), int(_number(data, "count", 1, 10**15, whole=True)))
        case "poisson" | "fixed-size" | "random-allocation" | "random-round" | "repeat-and-select":
            return _inside(data, relation)
    raise ValueError(f"event {data.get('event')!r}: is of no kind that is known here.")


def _several(data: Mapping[str, Any], name: str) -> list[Any]:
    parts = data[name]
    if not isinstance(parts, list) or not parts:
        raise ValueError(f"{name}: must be a list of events, one at least.")
    return parts


def _together(parts: list[Parts]) -> Parts:
    if math.prod(len(part.branches) for part in parts) > _MOST_BRANCHES:
        raise NoRule(f"its parallel parts combine in more than {_MOST_BRANCHES} ways")
    branches = tuple(_merged(sum(choice, ())) for choice in product(*(part.branches for part in parts)))
    return _added(tuple(dict.fromkeys(branches)), parts, math.fsum)


def _apart(parts: list[Parts]) -> Parts:
    branches = tuple(dict.fromkeys(branch for part in parts for branch in part.branches))
    return _added(_undominated(branches), parts, max)


def _added(branches: tuple[Branch, ...], parts: list[Parts], how: Callable[[list[float]], float]) -> Parts:
    totals = ([part.slack for part in parts], [part.failure for part in parts], [part.upfront for part in parts])
    return Parts(branches, *map(how, totals))


def _repeated(inner: Parts, count: int) -> Parts:
    added = {"slack": count * inner.slack, "failure": count * inner.failure, "upfront": count * inner.upfront}
    if len(inner.branches) == 1:
        return Parts((_times(inner.branches[0], count),), **added)
    if math.comb(count + len(inner.branches) - 1, count) > _MOST_BRANCHES:
        raise NoRule(f"its parallel parts combine in more than {_MOST_BRANCHES} ways")
    picks = combinations_with_replacement(inner.branches, count)
    return Parts(tuple(_merged(sum(pick, ())) for pick in picks), **added)


def _inside(data: Mapping[str, Any], relation: str) -> Parts:
    """A sample, an epoch, random rounds or a search: what happens in each, and how often."""
    kind = data["event"]
    extra = {
        "poisson": ("rate",), "fixed-size": ("n", "batch_size"), "random-allocation": ("steps_per_epoch",),
        "random-round": ("law",), "repeat-and-select": ("mean", "shape"),
    }[kind]  # fmt: skip
    _fields(data, "inner", *extra)
    inner = _read(data["inner"], relation)
    if inner.upfront:
        raise NoRule("a release that decides about others stands before them, never inside a sample")
    releases: list[Branch]
    if kind == "random-round":
        law = _law(data["law"])
        often = math.fsum(rounds * chance for rounds, chance in law)
        releases = [((RandomRounds(branch, law), 1),) if law[-1][0] else () for branch in inner.branches]
    elif kind == "repeat-and-select":
        often = _number(data, "mean", 1.0, 1e18)
        shape = math.inf if data["shape"] == math.inf else float(_number(data, "shape", 0.0, 1e300))
        releases = [((Selected(branch, float(often), shape), 1),) for branch in inner.branches]
    elif kind == "random-allocation":
        often = _number(data, "steps_per_epoch", 1, 10**9, whole=True)
        releases = [_allocated(branch, int(often)) for branch in inner.branches]
    else:
        often = 1.0
        if kind == "poisson":
            rate = float(_number(data, "rate", 1e-15, 1.0))
        else:
            n = _number(data, "n", 1, 10**15, whole=True)
            rate = _number(data, "batch_size", 1, n, whole=True) / n
        releases = [_sampled(branch, kind, rate) for branch in inner.branches]
    if len(releases) > 1 and kind in ("random-round", "random-allocation"):
        raise NoRule("epochs and random rounds of parallel parts have too many choices of parts")
    return Parts(tuple(dict.fromkeys(releases)), often * inner.slack, often * inner.failure)


def _law(value: object) -> tuple[tuple[int, float], ...]:
    pairs = value if isinstance(value, list) else []
    good = bool(pairs) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    good = good and all(
        type(r) is int and 0 <= r <= 10**15 and type(p) in (int, float) and p >= 0 for r, p in pairs
    )
    if not good or abs(math.fsum(p for _, p in pairs) - 1.0) > 1e-9:
        raise ValueError("law: must be pairs [rounds ≥ 0, probability ≥ 0] whose probabilities sum to 1.")
    return tuple(sorted((int(rounds), float(chance)) for rounds, chance in pairs))


def _one_release(branch: Branch, where: str) -> Gaussian | Pure:
    merged = _merged(branch)
    if len(merged) != 1 or merged[0][1] != 1 or not isinstance(merged[0][0], Gaussian | Pure):
        raise NoRule(f"{where} of anything but Gaussian releases, or one pure one, is not understood")
    return merged[0][0]


def _sampled(branch: Branch, law: Literal["poisson", "fixed-size"], rate: float) -> Branch:
    if rate == 1.0:
        return branch
    return ((Sampled(law, rate, _one_release(branch, "a sample")), 1),)


def _allocated(branch: Branch, steps: int) -> Branch:
    if steps == 1:
        return branch
    base = _one_release(branch, "random allocation")
    if not isinstance(base, Gaussian):
        raise NoRule("random allocation is understood for Gaussian releases")
    return ((Allocated(steps, base), 1),)


def _times(branch: Branch, count: int) -> Branch:
    return _merged(tuple((release, number * count) for release, number in branch))


def _merged(branch: Branch) -> Branch:
    """Equal releases counted together, un-sampled Gaussians as one."""
    counts: dict[Release, int] = {}
    precision = []
    for release, number in branch:
        if isinstance(release, Gaussian):
            precision.append(number / release.z**2)
        else:
            counts[release] = counts.get(release, 0) + number
    if precision:
        counts[Gaussian(1.0 / math.sqrt(math.fsum(precision)))] = 1
    return tuple(counts.items())


def _undominated(branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
    """Drop a branch whose one kind of release another makes as often, at no lower rate and with no more noise."""

    def strength(branch: Branch) -> tuple[str, tuple[float, ...]] | None:
        if len(branch) != 1:
            return None
        (release, count), rate, kind = branch[0], 1.0, "all"
        if isinstance(release, Sampled):
            rate, kind, release = release.rate, release.law, release.base
        elif isinstance(release, Allocated):
            rate, kind, release = 1.0 / release.steps, "allocated", release.base
        return (kind, (count, rate, 1.0 / release.z)) if isinstance(release, Gaussian) else None

    # Of equal branches the first stays, or each would drop the other and the maximum would be lost.
    strengths = [strength(branch) for branch in branches]
    undominated = []
    for place, branch_strength in enumerate(strengths):
        covered = branch_strength is not None and any(
            other is not None
            and other[0] == branch_strength[0]
            and all(a >= b for a, b in zip(other[1], branch_strength[1], strict=True))
            and (other[1] != branch_strength[1] or before < place)
            for before, other in enumerate(strengths)
            if before != place
        )
        if not covered:
            undominated.append(branches[place])
    return tuple(undominated)
