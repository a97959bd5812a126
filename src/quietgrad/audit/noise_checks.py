"""Layer L0: hundreds of consecutive releases of every slot, through the real session and across a resume.

A program that forgets its noise at every seventh release looks sound to an auditor who listens six times. Every
mechanism's noise is mapped to standard normals under its own law (:mod:`~quietgrad.audit.mechanisms`), so one set
of tests serves all. Rows are releases, columns coordinates. All p-values are exact, and shared out by Bonferroni: a
correct program is accused with probability at most ``alpha``, 10⁻⁶ unless told otherwise.

=============== ==========================================================================================
L0 noise scale  Σz² of every release, every coordinate, every k-th release and coordinate, and of halves,
                quarters, … of both: noise that is missing, or too small, anywhere
L0 noise law    the pooled law, by 64 bins of equal probability, and the means of the same parts
L0 freshness    every two releases, and all pairs at every distance: noise used again
L0 coordinates  the same between coordinates
=============== ==========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import betainc, chdtrc, gammainc, gammaincc, ndtr

from quietgrad.audit.mechanisms import (
    BOUND,
    AnonymousRecords,
    ConstantQuery,
    EmptyObjective,
    labels_of,
    listener,
    probe_of,
)
from quietgrad.audit.replicas import CuratorFactory, as_numbers, central
from quietgrad.audit.report import AuditFinding
from quietgrad.objectives.queries.counts import LabelSet
from quietgrad.plans.schedule import Plan, Schedule, Slot
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.mechanisms import GaussianNoise, Mechanism, kinds
from quietgrad.privacy.noise import sigma_for
from quietgrad.privacy.rng import fresh_key, seed_key
from quietgrad.sampling import CyclicCohorts, FullBatch, Poisson, Sampling

Floats = npt.NDArray[np.float64]
_BINS = 64
_LONGEST_PERIOD = 64
_CUT = 64
_FEWEST_EXPECTED = 50.0
_FEWEST_PAIRED = 16  # numbers of two releases below which only all pairs of a distance are compared


def check_noise(samples: Floats, sigma: float, what: str, alpha: float = 1e-6) -> list[AuditFinding]:
    """Test noise of a claimed σ, one row per release; long rows are cut into shorter ones."""
    z = np.atleast_2d(samples) / sigma
    if z.shape[1] > 8 * _CUT:
        z = z[:, : z.shape[1] // _CUT * _CUT].reshape(-1, _CUT)
    return check_normals(z, what, alpha)


def check_normals(z: Floats, what: str, alpha: float = 1e-6) -> list[AuditFinding]:
    """Test rows of releases that are claimed to be independent standard normals."""
    z = np.atleast_2d(np.asarray(z, np.float64))
    if not np.isfinite(z).all():
        return [AuditFinding("L0 noise scale", what, "numbers", 0.0, math.nan, "violation")]
    found = [_scale(z, what, alpha / 4), _law(z, what, alpha / 4)]
    found.append(_independent(z, f"releases of {what}", "L0 freshness", alpha / 4))
    if z.shape[1] > 1:
        found.append(_independent(z.T, f"coordinates of {what}", "L0 coordinates", alpha / 4))
    return found


def categories(seen: Floats, expected: Floats) -> float:
    """p-value of counts with known expectations, rare categories put together until 50 are expected of each.

    χ² is an approximation here: at 10⁻⁶ the true chance may be some times larger, so ask for less.
    """
    pairs, rest = [], np.zeros(2)
    # In the order of what is expected alone: counts that chose their neighbours would accuse a sound program.
    for pair in sorted(zip(expected.tolist(), seen.tolist(), strict=True), key=lambda pair: pair[0]):
        rest = rest + pair
        if rest[0] >= _FEWEST_EXPECTED:
            pairs.append(rest)
            rest = np.zeros(2)
    if not pairs:
        return 1.0
    pairs[-1] = pairs[-1] + rest
    wanted, got = np.array(pairs).T
    if len(pairs) == 1:
        return 1.0 if got[0] == round(wanted[0]) else 0.0
    return float(chdtrc(len(pairs) - 1, float(((got - wanted) ** 2 / wanted).sum())))


def _scale(z: Floats, what: str, alpha: float) -> AuditFinding:
    blocks = list(_blocks(z * z))
    total, count = (np.concatenate([block[k] for block in blocks]) for k in (0, 1))
    # χ² both ways, by the incomplete gamma function.
    chance = 2.0 * np.minimum(gammainc(count / 2, total / 2), gammaincc(count / 2, total / 2))
    worst = int(np.argmin(chance))
    ratio = math.sqrt(total[worst] / count[worst])
    if float(chance[worst]) >= alpha / len(chance):
        return AuditFinding("L0 noise scale", what, "σ/claim", 1.0, ratio, "pass")
    return AuditFinding("L0 noise scale", what, "σ/claim", 1.0, ratio, "violation", note=_where(blocks, worst))


def _where(blocks: list[tuple[Floats, Floats, str]], place: int) -> str:
    for sums, _, words in blocks:
        if place < len(sums):
            return words.format(place)
        place -= len(sums)
    raise IndexError(place)


def _blocks(values: Floats) -> Iterator[tuple[Floats, Floats, str]]:
    """Sums over parts of the releases and coordinates, how many numbers each has, and where it is."""
    for axis, name in ((1, "release"), (0, "coordinate")):
        sums, width = values.sum(axis=axis), values.shape[axis]
        yield sums, np.full(len(sums), float(width)), f"{name} {{}}"
        at = np.arange(len(sums))
        for period in range(2, min(_LONGEST_PERIOD, len(sums) // 4) + 1):
            part = np.bincount(at % period, weights=sums).astype(np.float64)
            count = (width * np.bincount(at % period)).astype(np.float64)
            yield part, count, f"every {period}th {name}, from {{}}"
    rows, columns = (_halves(size) for size in values.shape)
    for r in rows:
        parts = [values[r, c] for c in columns]
        sums, counts = np.array([p.sum() for p in parts]), np.array([float(p.size) for p in parts])
        yield sums, counts, f"releases {r.start} to {r.stop}, part {{}} of the coordinates"


def _halves(size: int) -> list[slice]:
    found, parts = [], 1
    while size // parts >= 4 and parts <= 16:
        edges = np.linspace(0, size, parts + 1).astype(int).tolist()
        found += [slice(a, b) for a, b in pairwise(edges)]
        parts *= 2
    return found or [slice(0, size)]


def _law(z: Floats, what: str, alpha: float) -> AuditFinding:
    bins = min(_BINS, max(2, z.size // 20))
    counts = np.bincount(np.minimum((ndtr(z.ravel()) * bins).astype(int), bins - 1), minlength=bins)
    expected = z.size / bins
    whole = float(chdtrc(bins - 1, float(((counts - expected) ** 2).sum() / expected)))
    blocks = list(_blocks(z))
    sums, sizes = (np.concatenate([block[k] for block in blocks]) for k in (0, 1))
    means = 2.0 * ndtr(-np.abs(sums) / np.sqrt(sizes))
    worst = int(np.argmin(means))
    shifted = float(means[worst]) * len(means)
    chance = 2.0 * min(whole, shifted)
    if chance >= alpha:
        return AuditFinding("L0 noise law", what, "p", alpha, min(1.0, chance), "pass")
    note = f"the mean at {_where(blocks, worst)}" if shifted < whole else ""
    return AuditFinding("L0 noise law", what, "p", alpha, chance, "violation", note=note)


def _independent(z: Floats, what: str, layer: str, alpha: float) -> AuditFinding:
    """Rows that are related: any two of them, or all that lie a certain distance apart."""
    size, width = z.shape
    products = z @ z.T
    squares = products.diagonal()
    scores, tests = [0.0], 0
    for lag in range(1, size):
        for offset in (0, lag):
            first = np.arange(offset, size - lag)
            first = first[((first - offset) // lag) % 2 == 0]  # each row in one pair at most
            if len(first) * width >= _FEWEST_PAIRED:
                # Given the first rows, the sum of the pairs' products is exactly normal.
                spread = math.sqrt(max(float(squares[first].sum()), 1e-300))
                scores.append(abs(float(products[first, first + lag].sum())) / spread)
    chances = [2.0 * float(ndtr(-max(scores)))]
    tests += len(scores) - 1
    if width >= _FEWEST_PAIRED:
        lengths = np.sqrt(np.maximum(squares, 1e-300))
        cosine = np.abs(np.triu(products / np.outer(lengths, lengths), 1)).max()
        # The squared cosine of two independent directions is Beta(1/2, (d − 1)/2), whatever their lengths.
        chances.append(1.0 - float(betainc(0.5, (width - 1) / 2, min(1.0, cosine**2))))
        tests += size * (size - 1) // 2
    worst = min(chances) * max(1, tests)
    return AuditFinding(layer, what, "p", alpha, min(1.0, worst), "violation" if worst < alpha else "pass")


RELEASES, WIDTH, WIDE = 256, 64, 512  # of vectors
CHOICES = 2048  # of mechanisms that only choose

MECHANISMS: tuple[Mechanism, ...] = tuple(kind.example(RELEASES) for kind in kinds().values())
"""One of every kind."""


def probe_mechanism(
    mechanism: Mechanism, curator: CuratorFactory = central, *, alpha: float = 1e-6, seed: int | None = None
) -> list[AuditFinding]:
    """Listen to hundreds of releases of one mechanism, half of them after the session was opened again."""
    # Normals are made in blocks of 2¹⁶: wide releases go beyond the first.
    width = WIDE if mechanism.amplified else WIDTH
    plan = plan_of(mechanism)
    return probe_slots(plan, curator, f"{mechanism.kind} noise", alpha=alpha, seed=seed, width=width)


def probe_grid(curator: CuratorFactory = central) -> AuditFinding:
    """Whether noise and sum lie on the public grid: a float's last bits would betray the sum."""
    plan = plan_of(GaussianNoise())
    session = curator(EmptyObjective(), AnonymousRecords(1, WIDTH), fresh_key()).open(plan)
    heard = np.stack([as_numbers(session.release("probe", ConstantQuery(WIDTH, BOUND, 0.1))) for _ in range(8)])
    _, step = sigma_for(plan.noise_multiplier, BOUND, WIDTH)
    off = float(np.abs(heard / step - np.rint(heard / step)).max())
    verdict = "pass" if off == 0.0 else "violation"
    return AuditFinding("L0 grid", "curator", "units off", 0.0, off, verdict)  # type: ignore[arg-type]


def plan_of(mechanism: Mechanism, relation: Relation = Relation.ADD_REMOVE) -> Plan:
    """A plan of one slot with ``mechanism``; a choice stands in a filter, where alone it may."""
    # Half of the samples of a vector are empty: noise must be there all the same.
    sampling: Sampling = Poisson(0.5) if mechanism.amplified else FullBatch()
    if (cohorts := mechanism.cohorts) > 1:
        sampling = CyclicCohorts(cohorts)
    slot = Slot("probe", sampling, _count(mechanism), mechanism=mechanism)
    schedule = Schedule((slot,), "filter" if mechanism.verb == "choose" else "sequential")
    return Plan("probe", {}, schedule.under(relation), 1, Budget(1.0, 1e-5, relation), 2.0)


def lengthened(plan: Plan) -> Plan:
    """The plan with hundreds of releases in every slot and records enough for them; noise and law stay."""
    counts = [_count(slot.mechanism) for slot in plan.schedule.slots]
    passes = [slot.sampling.fresh * count for slot, count in zip(plan.schedule.slots, counts, strict=True)]
    looks = [WIDTH * probe_of(s, plan).count for s in plan.schedule.slots if s.mechanism.verb == "discover"]
    n = max(plan.n_public, sum(passes), *looks, 1)
    slots = []
    for slot, count in zip(plan.schedule.slots, counts, strict=True):
        sampling = slot.sampling.sized(n)
        held = sampling.participation(count)
        mechanism = slot.mechanism if held is None else slot.mechanism.over(count, *held)
        slots.append(replace(slot, count=count, sampling=sampling, law=None, mechanism=mechanism))
    return replace(plan, schedule=replace(plan.schedule, slots=tuple(slots)), n_public=n)


def probe_slots(
    plan: Plan,
    curator: CuratorFactory = central,
    what: str = "",
    *,
    alpha: float = 1e-6,
    seed: int | None = None,
    width: int = WIDTH,
) -> list[AuditFinding]:
    """Listen to all releases of every slot of ``plan``, and for noise that slots share."""
    key = fresh_key() if seed is None else seed_key(seed)
    slots = plan.schedule.slots
    share = alpha / (len(slots) + 1)
    findings: list[AuditFinding] = []
    vectors = []
    for slot in slots:
        z = np.stack(list(_hear(plan, slot, curator, key, seed, width)))
        findings += check_normals(z, f"{what}, {slot.name!r}" if what else slot.name, share)
        if z.shape[1] == width:
            vectors.append(z)
    if len(vectors) > 1:
        together = check_normals(np.concatenate(vectors), f"{what}, all slots" if what else "all slots", share)
        findings += [f for f in together if f.layer == "L0 freshness"]
    return findings


def _hear(
    plan: Plan, slot: Slot, curator: CuratorFactory, key: bytes, seed: int | None, width: int
) -> Iterator[Floats]:
    """The slot's releases as normals: half through one session, the rest through one that continues it, and some
    through another session of the same curator, which must not begin its noise again."""
    rho = rho_of(plan)
    listen = listener(slot, plan, width, rho)
    rng = np.random.default_rng(seed)
    half = slot.count // 2
    holder = _holder(plan, slot, curator, key, width)
    session = holder.open(plan)
    for _ in range(half):
        yield listen(session, rng)
    used, left = session.used, session.rho_left
    session = _holder(plan, slot, curator, key, width).open(plan, used=used, rho_left=left if rho else None)
    for _ in range(slot.count - half):
        yield listen(session, rng)
    session, listen = holder.open(plan), listener(slot, plan, width, rho)
    for _ in range(slot.count // 4):
        yield listen(session, rng)


def _holder(plan: Plan, slot: Slot, curator: CuratorFactory, key: bytes, width: int) -> Any:
    if slot.mechanism.verb == "discover":
        return curator(Labelled(), labels_of(slot, plan, width), key)
    return curator(EmptyObjective(), AnonymousRecords(plan.n_public, width), key)


class Labelled(LabelSet):
    """Labels that are ready as records."""

    def prepare(self, data: Any) -> Any:
        return data


def rho_of(plan: Plan) -> float | None:
    """Each release's part of a filter: all releases of all slots together spend it."""
    if plan.schedule.composition != "filter":
        return None
    return plan.event_rho / (plan.schedule.releases + 1)


def _count(mechanism: Mechanism) -> int:
    return CHOICES if mechanism.verb in ("choose", "first_below") else RELEASES
