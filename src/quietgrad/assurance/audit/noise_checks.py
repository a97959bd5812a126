"""Layer L0: hundreds of consecutive releases of every slot, through the real session and across a resume.

A program that forgets its noise at every seventh release seems sound to an auditor who listens six times. Every
mechanism is asked for releases whose exact answer is known: zeros, constants, labels that occur a chosen number of
times. What comes back is the noise, or a choice that the noise made, and the mechanism's
:class:`~quietgrad.core.noise.mechanisms.Probe` maps it to standard normals under the claimed law, so one set of
tests serves all. Rows are releases, columns coordinates. All p-values are exact, and shared out by Bonferroni: a
correct program is accused with probability at most ``alpha``, 10⁻⁶ by default.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from scipy.special import betainc, chdtrc, gammainc, gammaincc, ndtr

from quietgrad.assurance.audit.replicas import CuratorFactory, as_numbers, central
from quietgrad.assurance.audit.report import AuditFinding, judged
from quietgrad.core.accounting.accounting import noise_multiplier_for_rho
from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.noise.grid import sigma_for
from quietgrad.core.noise.mechanisms import GaussianNoise, Mechanism, Probe, kinds
from quietgrad.core.noise.rng import fresh_key, seed_key
from quietgrad.core.plans.schedule import Plan, Schedule, Slot
from quietgrad.core.sampling import CyclicCohorts, CyclicPoisson, FullBatch, Poisson, Sampling
from quietgrad.core.session.objectives import Batch, NoRegularizer
from quietgrad.core.vectors import Vector
from quietgrad.tables.queries.counts import LabelCounts

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
    findings = [_scale(z, what, alpha / 4), _law(z, what, alpha / 4)]
    findings.append(_independent(z, f"releases of {what}", "L0 freshness", alpha / 4))
    if z.shape[1] > 1:
        findings.append(_independent(z.T, f"coordinates of {what}", "L0 coordinates", alpha / 4))
    return findings


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
    total, count, where = _parts(z * z)
    # χ² both ways, by the incomplete gamma function.
    chance = 2.0 * np.minimum(gammainc(count / 2, total / 2), gammaincc(count / 2, total / 2))
    worst = int(np.argmin(chance))
    ok, ratio = float(chance[worst]) >= alpha / len(chance), math.sqrt(total[worst] / count[worst])
    return judged("L0 noise scale", what, "σ/claim", 1.0, ratio, ok=ok, note="" if ok else where[worst])


def _parts(values: Floats) -> tuple[Floats, Floats, list[str]]:
    """Sums over parts of the releases and coordinates, how many numbers each has, and where it is."""
    sums: list[Floats] = []
    counts: list[Floats] = []
    where: list[str] = []
    for axis, name in ((1, "release"), (0, "coordinate")):
        lines, width = values.sum(axis=axis), values.shape[axis]
        at = np.arange(len(lines))
        for period in (0, *range(2, min(_LONGEST_PERIOD, len(lines) // 4) + 1)):
            group = at % period if period else at
            sums.append(np.bincount(group, weights=lines).astype(np.float64))
            counts.append((width * np.bincount(group)).astype(np.float64))
            words = f"every {period}th {name}, from" if period else name
            where += [f"{words} {k}" for k in range(len(sums[-1]))]
    for r, c in product(*map(_halves, values.shape)):
        sums.append(np.array([values[r, c].sum()]))
        counts.append(np.array([float(values[r, c].size)]))
        where.append(f"releases {r.start} to {r.stop}, coordinates {c.start} to {c.stop}")
    return np.concatenate(sums), np.concatenate(counts), where


def _halves(size: int) -> list[slice]:
    """Return all of a range, its halves, quarters, eighths and sixteenths."""
    cuts = [
        np.linspace(0, size, parts + 1).astype(int).tolist() for parts in (1, 2, 4, 8, 16) if size // parts >= 4
    ]
    return [slice(a, b) for edges in cuts for a, b in pairwise(edges)] or [slice(0, size)]


def _law(z: Floats, what: str, alpha: float) -> AuditFinding:
    bins = min(_BINS, max(2, z.size // 20))
    counts = np.bincount(np.minimum((ndtr(z.ravel()) * bins).astype(int), bins - 1), minlength=bins)
    expected = z.size / bins
    whole = float(chdtrc(bins - 1, float(((counts - expected) ** 2).sum() / expected)))
    sums, sizes, where = _parts(z)
    means = 2.0 * ndtr(-np.abs(sums) / np.sqrt(sizes))
    worst = int(np.argmin(means))
    shifted = float(means[worst]) * len(means)
    chance = min(1.0, 2.0 * min(whole, shifted))
    note = f"the mean at {where[worst]}" if shifted < min(whole, alpha) else ""
    return judged("L0 noise law", what, "p", alpha, chance, ok=chance >= alpha, note=note)


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
    return judged(layer, what, "p", alpha, min(1.0, worst), ok=worst >= alpha)


# --- how a session is asked for its noise -------------------------------------------------------------------------

RELEASES, WIDTH, WIDE = 256, 64, 512  # of vectors
CHOICES = 2048  # of mechanisms that only choose
BOUND = 0.75

MECHANISMS: tuple[Mechanism, ...] = tuple(kind.example(RELEASES) for kind in kinds().values())
"""One of every kind."""

Listen = Callable[[Any, np.random.Generator], Floats]
"""(session, the auditor's own randomness) ↦ standard normals of one release."""


@dataclass(frozen=True)
class AnonymousRecords:
    """Records of which only the number is known, and their labels where those are asked for."""

    n: int
    dim: int
    labels: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return self.n

    def contents(self) -> Iterator[bytes]:
        """Yield empty content: every answer is the same whatever the records are."""
        yield b""

    fingerprint_parts = contents


class EmptyObjective:
    """An objective for queries that ask nothing of it."""

    regularizer = NoRegularizer()
    unit: ClassVar[PrivacyUnit] = PrivacyUnit.RECORD
    silent_batches: ClassVar[bool] = False

    def prepare(self, data: AnonymousRecords) -> AnonymousRecords:
        return data

    def initial(self, records: AnonymousRecords) -> Floats:
        return np.zeros(records.dim)


@dataclass(frozen=True)
class ConstantQuery:
    """A query whose sum is known: ``value`` in every coordinate, whatever the records are."""

    size: int
    bound: float
    value: float = 0.0

    def k_norm_bound(self, width: int) -> float:
        """Return the same bound: no record moves a constant, in any norm."""
        return self.bound

    def dim(self, records: object) -> int:
        """Length of the vector released."""
        return self.size

    def sum_into(self, objective: object, batch: Batch, out: Vector) -> None:
        """Add the constant."""
        out += self.value


def _probe(slot: Slot, plan: Plan, rho: float | None = None) -> Probe:
    """Return the probe of a slot, at the noise of the plan or at noise that spends ρ of a filter."""
    assert plan.budget is not None
    relation = plan.budget.relation
    multiplier = slot.multiplier(plan.noise_multiplier) if rho is None else noise_multiplier_for_rho(rho, relation)
    bound = slot.mechanism.bound_of(LabelCounts(relation)) if slot.mechanism.verb == "discover" else BOUND
    return slot.mechanism.probe(multiplier, bound, relation)


def listener(slot: Slot, plan: Plan, width: int) -> Listen:
    """Return a function that asks one release of ``slot`` and returns standard normals, if its claim holds."""
    assert plan.budget is not None
    rho, name, relation = rho_of(plan), slot.name, plan.budget.relation
    probe = _probe(slot, plan, rho)
    queries = [ConstantQuery(1, BOUND, value) for value in probe.values]
    spend = {} if rho is None else {"rho": rho}

    def listen(session: Any, rng: np.random.Generator) -> Floats:
        number = session.used[name]
        answer: Any = None
        match slot.mechanism.verb:
            case "release":
                answer = as_numbers(session.release(name, ConstantQuery(width, BOUND), **spend))
            case "choose":
                answer = session.choose(name, queries, **spend)
            case "first_below":
                first = session.first_below(name, queries, 0.0)
                answer = len(queries) if first is None else first
            case "discover":
                answer = np.isin(np.arange(width), session.discover(name, LabelCounts(relation))).astype(int)
        return probe.normals(answer, number, rng)

    return listen


def records_for(slot: Slot, plan: Plan, width: int) -> AnonymousRecords:
    """Records to ask ``slot`` about; where labels are asked for, ``width`` occur as often as the probe wants."""
    if slot.mechanism.verb != "discover":
        return AnonymousRecords(plan.n_public, width)
    labels = np.repeat(np.arange(width), _probe(slot, plan).count)
    n = max(plan.n_public, len(labels))  # the other records share one more label
    return AnonymousRecords(n, 1, np.append(labels, np.full(n - len(labels), width)))


def rho_of(plan: Plan) -> float | None:
    """Each release's part of a filter: all releases of all slots together spend it."""
    if plan.schedule.composition != "filter":
        return None
    return plan.event_rho / (plan.schedule.releases + 1)


def _count(mechanism: Mechanism) -> int:
    return CHOICES if mechanism.verb in ("choose", "first_below") else RELEASES


# --- hundreds of releases -----------------------------------------------------------------------------------------


def probe_mechanism(
    mechanism: Mechanism, curator: CuratorFactory = central, *, alpha: float = 1e-6, seed: int | None = None
) -> list[AuditFinding]:
    """Listen to hundreds of releases of one mechanism, half of them after the session was opened again."""
    # Normals are made in blocks of 2¹⁶: wide releases go beyond the first.
    width = WIDE if mechanism.amplified and mechanism.cohorts == 1 else WIDTH
    plan = plan_of(mechanism)
    return probe_slots(plan, curator, f"{mechanism.kind} noise", alpha=alpha, seed=seed, width=width)


def probe_grid(curator: CuratorFactory = central) -> AuditFinding:
    """Whether noise and sum lie on the public grid: a float's last bits would betray the sum."""
    plan = plan_of(GaussianNoise())
    session = curator(EmptyObjective(), AnonymousRecords(1, WIDTH), fresh_key()).open(plan)
    heard = np.stack([as_numbers(session.release("probe", ConstantQuery(WIDTH, BOUND, 0.1))) for _ in range(8)])
    _, step = sigma_for(plan.noise_multiplier, BOUND, WIDTH)
    off = float(np.abs(heard / step - np.rint(heard / step)).max())
    return judged("L0 grid", "curator", "units off", 0.0, off, ok=off == 0.0)


def plan_of(mechanism: Mechanism, relation: Relation = Relation.ADD_REMOVE) -> Plan:
    """A plan of one slot with ``mechanism``; a choice stands in a filter, where alone it may."""
    # Half of the samples of a vector are empty: noise must be there all the same.
    sampling: Sampling = Poisson(0.5) if mechanism.amplified else FullBatch()
    if (cohorts := mechanism.cohorts) > 1:
        sampling = CyclicPoisson(cohorts, 0.5) if mechanism.amplified else CyclicCohorts(cohorts)
    slot = Slot("probe", sampling, _count(mechanism), mechanism=mechanism)
    schedule = Schedule((slot,), "filter" if mechanism.verb == "choose" else "sequential")
    return Plan("probe", {}, schedule.under(relation), 1, Budget(1.0, 1e-5, relation), 2.0)


def lengthened(plan: Plan) -> Plan:
    """The plan with hundreds of releases in every slot and records enough for them; noise and law stay."""
    counted = [(slot, _count(slot.mechanism)) for slot in plan.schedule.slots]
    passes = sum(slot.sampling.fresh * count for slot, count in counted)
    n = max(plan.n_public, passes, *(len(records_for(slot, plan, WIDTH)) for slot, _ in counted), 1)
    slots = []
    for slot, count in counted:
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
    share = alpha / (len(plan.schedule.slots) + 1)
    findings: list[AuditFinding] = []
    vectors = []
    for slot in plan.schedule.slots:
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
    listen, records, rng = listener(slot, plan, width), records_for(slot, plan, width), np.random.default_rng(seed)
    half = slot.count // 2
    holder: Any = curator(EmptyObjective(), records, key)
    session = holder.open(plan)
    for _ in range(half):
        yield listen(session, rng)
    used, left = session.used, session.rho_left if rho_of(plan) else None
    later: Any = curator(EmptyObjective(), records, key)
    session = later.open(plan, used=used, rho_left=left)
    for _ in range(slot.count - half):
        yield listen(session, rng)
    # A probe of correlated noise remembers the releases before: the other session has its own.
    session, listen = holder.open(plan), listener(slot, plan, width)
    for _ in range(slot.count // 4):
        yield listen(session, rng)
