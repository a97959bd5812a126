"""Layer L0: exact probes that take milliseconds and see what statistics would need millions of runs for.

Noise: what leaves the trust boundary when every record is silent, also from an empty sample, must have the claimed
scale and law, be fresh in every release and lie on the public grid. Sensitivity: sums without noise on adversarial
neighbours must not differ by more than Δ. Ledger: the reservation must be in the file before data are touched.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc, gammaincinv, ndtr, ndtri

from quietgrad.audit.canaries import CanaryObjective, Cast
from quietgrad.audit.distinguish import Finding
from quietgrad.audit.listener import as_numbers
from quietgrad.audit.replicas import CuratorFactory, central
from quietgrad.curators.base import Curator
from quietgrad.errors import LedgerError
from quietgrad.objectives.base import Batch, Gradient, Query
from quietgrad.plans.schedule import Plan, Schedule, Slot
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.noise import sigma_for
from quietgrad.privacy.rng import fresh_key, seed_key
from quietgrad.sampling import FullBatch, Poisson
from quietgrad.vectors import Vector, zeros_like

Floats = npt.NDArray[np.float64]
_BINS = 64
_FLOAT_SLACK = 1e-9


@dataclass(frozen=True)
class Silence:
    """A query to which no record contributes anything: its release is the noise itself."""

    size: int
    bound: float

    def dim(self, records: Any) -> int:
        """Length of the vector released."""
        return self.size

    def sum_into(self, objective: Any, batch: Batch, out: Vector) -> None:
        """Add nothing."""


def probe_noise(
    curator: CuratorFactory = central,
    *,
    noise_multiplier: float = 2.0,
    bound: float = 0.75,
    size: int = 20_000,
    alpha: float = 1e-6,
    seed: int | None = None,
) -> list[Finding]:
    """Release silence through a curator, full and Poisson-sampled (half of the samples empty), and test it.

    >>> [finding.verdict for finding in probe_noise(seed=0)]
    ['pass', 'pass', 'pass', 'pass']
    """
    slots = (Slot("full", FullBatch(), 3), Slot("sampled", Poisson(0.5), 6))
    plan = Plan("probe", {}, Schedule(slots), 1, Budget(1.0, 1e-5), noise_multiplier)
    key = fresh_key() if seed is None else seed_key(seed)
    session = curator(CanaryObjective(), Cast(("silent",), 1, size), key).open(plan)
    query = Silence(size, bound)
    heard = [np.array(session.release(slot.name, query), np.float64) for slot in slots for _ in range(slot.count)]
    sigma, step = sigma_for(noise_multiplier, bound, size)
    return [*judge_noise(np.stack(heard), sigma, "curator", alpha), _on_grid(np.stack(heard), step)]


def judge_noise(samples: Floats, sigma: float, what: str, alpha: float = 1e-6) -> list[Finding]:
    """Test noise after aggregation, one row per release: scale (two-sided), law, and freshness across releases.

    >>> rng = np.random.default_rng(0)
    >>> [f.verdict for f in judge_noise(0.9 * rng.standard_normal((2, 10_000)), 1.0, "too little")]
    ['violation', 'violation', 'pass']
    """
    each = alpha / (3 * len(samples))
    size = samples.shape[1]
    widths = np.sqrt((samples**2).sum(axis=1))
    # χ² quantiles through the incomplete gamma function: the true σ is in [low, high] with confidence 1 − each.
    low, high = (widths / math.sqrt(2 * gammaincinv(size / 2, p)) for p in (1 - each / 2, each / 2))
    worst = int(np.argmax(np.maximum(low / sigma, sigma / np.maximum(high, 1e-300))))
    scaled = low[worst] <= sigma <= high[worst]
    measured = float(widths[worst] / math.sqrt(size))
    scale = Finding("L0 noise scale", what, "σ", sigma, measured, "pass" if scaled else "violation")
    chances = [_fits(row / sigma) for row in samples]
    law = Finding("L0 noise law", what, "p", each, min(chances), "pass" if min(chances) >= each else "violation")
    return [scale, law, _fresh(samples, what, alpha / 3)]


def _fits(row: Floats) -> float:
    """p-value of a χ² test with bins of equal probability under N(0, 1)."""
    counts = np.bincount(np.minimum((ndtr(row) * _BINS).astype(int), _BINS - 1), minlength=_BINS)
    expected = row.size / _BINS
    return float(chdtrc(_BINS - 1, float(((counts - expected) ** 2).sum() / expected)))


def _fresh(samples: Floats, what: str, alpha: float) -> Finding:
    """Correlation between every two releases: reused noise or masks show as 1."""
    norms = np.linalg.norm(samples, axis=1)
    products = np.abs(np.triu(samples @ samples.T, 1))
    correlation = products / np.maximum(np.outer(norms, norms), 1e-300)
    pairs = max(1, len(samples) * (len(samples) - 1) // 2)
    limit = -float(ndtri(alpha / (2 * pairs))) / math.sqrt(samples.shape[1])
    worst = float(correlation.max())
    verdict = "pass" if worst <= limit else "violation"
    return Finding("L0 freshness", what, "|correlation|", limit, worst, verdict)  # type: ignore[arg-type]


def _on_grid(samples: Floats, step: float) -> Finding:
    off = float(np.abs(samples / step - np.rint(samples / step)).max())
    verdict = "pass" if off == 0.0 else "violation"
    return Finding("L0 grid", "curator", "units off", 0.0, off, verdict)  # type: ignore[arg-type]


def probe_secure_sum(mode: str, *, parties: int = 5, size: int = 10_000, alpha: float = 1e-6) -> list[Finding]:
    """Test the noise of a secure sum of silent parties, after aggregation, against what its terms state."""
    from quietgrad.federation import secure_sum
    from quietgrad.secure.terms import Terms

    # A clip far above the noise: else the sum's own check of its length would hear the loudest errors before we do.
    clip, sigma = 150.0, 1.5
    terms = Terms(mode, parties=parties, dimension=size, bound=clip, sigma=sigma)  # type: ignore[arg-type]
    silence, times = np.zeros((parties, size)), sigma / clip
    heard = [secure_sum(silence, clip=clip, noise_multiplier=times, mode=mode) for _ in range(3)]  # type: ignore[arg-type]
    return judge_noise(np.stack(heard), sigma * math.sqrt(terms.variance_factor), f"secure sum by {mode}", alpha)


def probe_masks(*, parties: int = 4, size: int = 4096, rounds: int = 3, alpha: float = 1e-6) -> Finding:
    """Whether what the server sees of one party in different rounds is unrelated, though her vector is the same.

    A mask used twice cancels in the difference of two submissions and bares the change of the vector.
    """
    from quietgrad.secure.channel import Kind, View
    from quietgrad.secure.sums import SecureSession
    from quietgrad.secure.terms import Terms

    view = View()
    session = SecureSession(Terms("masks", parties=parties, dimension=size, bound=1.0, sigma=1.0), view=view)
    for _ in range(rounds):
        session.sum(np.zeros((parties, size)))
    seen = [s.payload[-8 * size :] for s in view.of("server", Kind.MASKED) if s.sender == "party-1"]
    words = np.stack([np.frombuffer(payload, "<i8").astype(np.float64) for payload in seen])
    return _fresh(words / 2.0**63, "masked vectors of one party", alpha)


def sums(query: Query, objective: Any, records: Any, indices: Any = None) -> Floats:
    """The query's sum without noise, as float64."""
    like, dim = objective.initial(records), query.dim(records)
    out = zeros_like(like) if len(like) == dim else np.zeros(dim)
    query.sum_into(objective, Batch(records, indices), out)
    return as_numbers(out)


def probe_sensitivity(
    objective: Any,
    neighbours: Iterable[tuple[Any, Any]],
    queries: Callable[[Any], Iterable[Query]],
    relation: Relation,
    what: str = "objective",
) -> Finding:
    """The largest ‖q(D) − q(D′)‖/Δ over neighbours and queries; above 1 the claimed bound is false.

    Args:
        neighbours: pairs of data sets, as ``objective.prepare`` takes them, that are neighbours under ``relation``.
        queries: makes the queries to ask of a pair, given the first one's prepared records.

    Both ways of summing are asked: all records at once, and by index.
    """
    from quietgrad.privacy.accounting import sensitivity_factor

    factor = sensitivity_factor(relation)
    worst = 0.0
    for pair in neighbours:
        a, b = (objective.prepare(data) for data in pair)
        for query in queries(a):
            reach = factor * query.bound
            for by_index in (False, True):
                left, right = (
                    sums(query, objective, r, np.arange(len(r), dtype=np.int64) if by_index else None)
                    for r in (a, b)
                )
                gap = float(np.linalg.norm(left - right))
                # A sum that is not a number would be published as such: the worst of all leaks.
                worst = max(worst, gap / reach if math.isfinite(gap) else math.inf)
    verdict = "violation" if worst > 1.0 + _FLOAT_SLACK else "pass"
    note = "the claimed bound is never nearly reached: noise is wasted" if worst < 0.5 else ""
    return Finding("L0 sensitivity", what, "Δ", 1.0, worst, verdict, note=note)  # type: ignore[arg-type]


class _Witness(CanaryObjective):
    """Looks into the ledger at the moment the data are first touched."""

    def __init__(self, ledger: Path) -> None:
        super().__init__("constant")
        self.ledger = ledger
        self.reserved = False

    def add_gradients(self, records: Cast, indices: Any, params: Floats, clip: float, out: Floats) -> None:
        from quietgrad.privacy.ledger import Ledger

        try:
            self.reserved = bool(Ledger(self.ledger).entries())
        except (LedgerError, FileNotFoundError):
            self.reserved = False


def probe_ledger(curator: Callable[[Any, Any, Path], Curator]) -> Finding:
    """Whether a curator made with (objective, data, ledger) writes its reservation before it sums anything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        witness = _Witness(path)
        session = curator(witness, Cast(("silent",), 1, 2), path).open(
            Plan("probe", {}, Schedule((Slot("gradient", FullBatch(), 1),)), 1, Budget(1.0, 1e-5), 5.0)
        )
        session.release("gradient", Gradient(np.zeros(2), 1.0))
    kept = 1.0 if witness.reserved else 0.0
    verdict = "pass" if witness.reserved else "violation"
    return Finding("L0 ledger", "reservation before release", "kept", 1.0, kept, verdict)  # type: ignore[arg-type]
