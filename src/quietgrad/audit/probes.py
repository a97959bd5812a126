"""Layer L0: exact probes that take milliseconds and see what statistics would need millions of runs for.

Sensitivity: sums without noise on adversarial neighbours must not differ by more than Δ. Secure sums: their noise
after aggregation, and masks that are never used twice. Ledger: the reservation must be in the file before data
are touched. Noise over time is in :mod:`~quietgrad.audit.noise_checks`, clipping in
:mod:`~quietgrad.audit.clipping`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from quietgrad.audit.canaries import CanaryObjective, CanaryRecords
from quietgrad.audit.noise_checks import check_noise
from quietgrad.audit.replicas import as_numbers
from quietgrad.audit.report import AuditFinding
from quietgrad.curators.base import Curator
from quietgrad.errors import LedgerError
from quietgrad.objectives.base import Batch, ClippingRule, Gradient, Query
from quietgrad.plans.schedule import Plan, Schedule, Slot
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.sampling import FullBatch
from quietgrad.vectors import zeros_like

Floats = npt.NDArray[np.float64]
_FLOAT_SLACK = 1e-9


def probe_secure_sum(mode: str, *, parties: int = 5, size: int = 10_000, alpha: float = 1e-6) -> list[AuditFinding]:
    """Test the noise of a secure sum of silent parties, after aggregation, against what its terms state."""
    from quietgrad.federation import secure_sum
    from quietgrad.secure.terms import SecureSumConfig

    # A clip far above the noise: else the sum's own check of its length would hear the loudest errors before we do.
    clip, sigma = 150.0, 1.5
    terms = SecureSumConfig(mode, parties=parties, dimension=size, bound=clip, sigma=sigma)  # type: ignore[arg-type]
    silence, times = np.zeros((parties, size)), sigma / clip
    heard = [secure_sum(silence, clip=clip, noise_multiplier=times, mode=mode) for _ in range(3)]  # type: ignore[arg-type]
    return check_noise(np.stack(heard), sigma * math.sqrt(terms.variance_factor), f"secure sum by {mode}", alpha)


def probe_masks(*, parties: int = 4, size: int = 4096, rounds: int = 3, alpha: float = 1e-6) -> AuditFinding:
    """Whether what the server sees of one party in different rounds is unrelated, though her vector is the same.

    A mask used twice cancels in the difference of two submissions and bares the change of the vector.
    """
    from quietgrad.secure.channel import FrameType, TranscriptRecorder
    from quietgrad.secure.local_session import SecureSession
    from quietgrad.secure.terms import SecureSumConfig

    view = TranscriptRecorder()
    session = SecureSession(
        SecureSumConfig("masks", parties=parties, dimension=size, bound=1.0, sigma=1.0), view=view
    )
    for _ in range(rounds):
        session.sum(np.zeros((parties, size)))
    seen = [s.payload[-8 * size :] for s in view.of("server", FrameType.MASKED) if s.sender == "party-1"]
    words = np.stack([np.frombuffer(payload, "<i8").astype(np.float64) for payload in seen])
    # Uniform words, each as good as a normal number.
    z = ndtri((words / 2.0**64 + 0.5) * (1.0 - 2.0**-52) + 2.0**-53)
    return next(f for f in check_noise(z, 1.0, "masked vectors of one party", alpha) if f.layer == "L0 freshness")


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
    *,
    whole: bool = False,
) -> AuditFinding:
    """The largest ‖q(D) − q(D′)‖/Δ over neighbours and queries; above 1 the claimed bound is false.

    Args:
        neighbours: pairs of data sets, as ``objective.prepare`` takes them, that are neighbours under ``relation``.
        queries: makes the queries to ask of a pair, given the first one's prepared records.

    Both ways of summing are asked: all records at once, and by index unless ``whole`` says that there is no such.
    """
    from quietgrad.privacy.accounting import sensitivity_factor

    factor = sensitivity_factor(relation)
    worst = 0.0
    for pair in neighbours:
        a, b = (objective.prepare(data) for data in pair)
        for query in queries(a):
            reach = factor * query.bound
            for by_index in (False,) if whole else (False, True):
                left, right = (
                    sums(query, objective, r, np.arange(len(r), dtype=np.int64) if by_index else None)
                    for r in (a, b)
                )
                gap = float(np.linalg.norm(left - right))
                # A sum that is not a number would be published as such: the worst of all leaks.
                worst = max(worst, gap / reach if math.isfinite(gap) else math.inf)
    verdict = "violation" if worst > 1.0 + _FLOAT_SLACK else "pass"
    note = "the claimed bound is never nearly reached: noise is wasted" if worst < 0.5 else ""
    return AuditFinding("L0 sensitivity", what, "Δ", 1.0, worst, verdict, note=note)  # type: ignore[arg-type]


class _Witness(CanaryObjective):
    """Looks into the ledger at the moment the data are first touched."""

    def __init__(self, ledger: Path) -> None:
        super().__init__("constant")
        self.ledger = ledger
        self.reserved = False

    def add(self, batch: Batch, points: Sequence[Floats], rule: ClippingRule, out: Floats) -> None:
        from quietgrad.privacy.ledger import Ledger

        try:
            self.reserved = bool(Ledger(self.ledger).entries())
        except (LedgerError, FileNotFoundError):
            self.reserved = False


def probe_ledger(curator: Callable[[Any, Any, Path], Curator]) -> AuditFinding:
    """Whether a curator made with (objective, data, ledger) writes its reservation before it sums anything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        witness = _Witness(path)
        session = curator(witness, CanaryRecords(("silent",), 1, 2), path).open(
            Plan("probe", {}, Schedule((Slot("gradient", FullBatch(), 1),)), 1, Budget(1.0, 1e-5), 5.0)
        )
        session.release("gradient", Gradient(np.zeros(2), 1.0))
    kept = 1.0 if witness.reserved else 0.0
    verdict = "pass" if witness.reserved else "violation"
    return AuditFinding("L0 ledger", "reservation before release", "kept", 1.0, kept, verdict)  # type: ignore[arg-type]
