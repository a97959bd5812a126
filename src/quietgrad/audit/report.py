"""What an audit found, for people and programs."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from quietgrad.audit.confidence_bounds import OFTEN
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.budget import Relation

Verdict = Literal["pass", "violation", "vacuous"]


class AuditFinding(NamedTuple):
    """One test: the layer, what was attacked, claim and measured bound in the layer's unit, and the verdict.

    ``refutes`` is the power of the test: the least ε of a Gaussian mechanism that it nearly always accuses
    (:data:`~quietgrad.audit.confidence_bounds.OFTEN`), attacked as strongly as can be.
    """

    layer: str
    what: str
    unit: str
    claimed: float
    measured: float
    verdict: Verdict
    epsilon_lower: float = 0.0
    note: str = ""
    refutes: float = math.inf

    def to_json(self) -> dict[str, Any]:
        """The finding as JSON values; without a power, ``refutes`` is null."""
        return {**self._asdict(), "refutes": self.refutes if math.isfinite(self.refutes) else None}


@dataclass(frozen=True)
class AuditReport:
    """An audit of one configuration.

    ``epsilon_lower`` is proved at ``confidence`` by the attack of ``layer``; ``epsilon_claimed`` is what the
    accountant promises. ``passed`` means that nothing was found with enough runs to see half the noise missing, if
    the attack is as strong as the claim allows; how strong it was is ``tightness``. A ``vacuous`` audit, whose runs
    were too few even then, has not passed.
    """

    algorithm: str
    relation: Relation
    delta: float
    epsilon_claimed: float
    epsilon_lower: float
    confidence: float
    runs: int
    seconds: float
    findings: tuple[AuditFinding, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        plan: Plan,
        findings: Sequence[AuditFinding],
        *,
        runs: int,
        started: float,
        confidence: float = 1.0 - 1e-6,
        notes: Sequence[str] = (),
    ) -> AuditReport:
        """The report of ``findings`` about ``plan``; ``started`` is when ``time.perf_counter()`` began to count."""
        assert plan.budget is not None
        return cls(
            algorithm=name,
            relation=plan.budget.relation,
            delta=plan.budget.delta,
            epsilon_claimed=plan.epsilon(),
            epsilon_lower=max(f.epsilon_lower for f in findings),
            confidence=confidence,
            runs=runs,
            seconds=time.perf_counter() - started,
            findings=tuple(findings),
            notes=tuple(notes),
        )

    @property
    def verdict(self) -> Verdict:
        """``violation`` if any layer found one, ``vacuous`` if no statistical layer could have, else ``pass``."""
        if any(f.verdict == "violation" for f in self.findings):
            return "violation"
        attacks = [f.verdict for f in self.findings if not f.layer.startswith("L0")]
        return "vacuous" if attacks and all(v == "vacuous" for v in attacks) else "pass"

    @property
    def passed(self) -> bool:
        """Whether the claim stood, and the runs sufficed for a strong attack to break it."""
        return self.verdict == "pass"

    @property
    def vacuous(self) -> bool:
        """Whether the runs were too few for the claim to be in any danger."""
        return self.verdict == "vacuous"

    @property
    def layer(self) -> str:
        """The layer that found a violation, else the one with the largest lower bound."""
        wrong = [f for f in self.findings if f.verdict == "violation"]
        return (wrong[0] if wrong else max(self.findings, key=lambda f: f.epsilon_lower)).layer

    @property
    def tightness(self) -> float:
        """ε lower bound ÷ ε claimed: how much of the claim is visible to the attacker."""
        return self.epsilon_lower / self.epsilon_claimed

    @property
    def refutes(self) -> float:
        """The least ε of a Gaussian mechanism that these runs nearly always accuse; infinite if not worked out."""
        return min((f.refutes for f in self.findings), default=math.inf)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        told = {name: getattr(self, name) for name in ("verdict", "passed", "vacuous", "layer")}
        found = {
            "refutes": self.refutes if math.isfinite(self.refutes) else None,
            "findings": [f.to_json() for f in self.findings],
            "notes": list(self.notes),
        }
        return {**vars(self), "relation": str(self.relation), **told, **found}

    def __str__(self) -> str:
        runs = "one run" if self.runs == 1 else f"{self.runs} runs of each world"
        head = (
            f"{self.algorithm}: {self.verdict.upper()}. Claimed ε={self.epsilon_claimed:.4g} at δ={self.delta:g} "
            f"({self.relation}); ε ≥ {self.epsilon_lower:.4g} shown with confidence 1−{1 - self.confidence:.0e} "
            f"({runs}, {self.seconds:.2g} s)."
        )
        lines = [f"  {describe(f)}" for f in self.findings]
        power = [f"  power: {self.power}"] if self.power else []
        return "\n".join([head, *lines, *power, *(f"  note: {note}" for note in self.notes)])

    @property
    def power(self) -> str:
        """In words, what these runs could have shown."""
        if not math.isfinite(self.refutes):
            return ""
        return (
            f"{OFTEN:.0%} of such audits accuse a Gaussian mechanism whose true ε is {self.refutes:.3g} or more, "
            "if the attack is as strong as can be; what leaks less may pass"
        )


def describe(finding: AuditFinding) -> str:
    """One line of a finding."""
    tail = f" ({finding.note})" if finding.note else ""
    return (
        f"{finding.layer:<15}{finding.verdict:<10}{finding.what}: claimed {finding.unit} {finding.claimed:.4g}, "
        f"measured {finding.measured:.4g}{tail}"
    )


def cells(r: AuditReport) -> dict[str, str]:
    """A row of a table of audits, by column."""
    return {
        "audit": r.algorithm, "relation": str(r.relation), "δ": f"{r.delta:g}",
        "claimed ε": f"{r.epsilon_claimed:.3g}", "ε at least": f"{r.epsilon_lower:.3g}",
        "confidence": f"1−{1 - r.confidence:.0e}", "runs": str(r.runs), "seconds": f"{r.seconds:.2f}",
        "verdict": r.verdict.upper(), "layer": r.layer,
    }  # fmt: skip


def to_html(reports: Sequence[AuditReport]) -> str:
    """A section of a page: the table of audits."""
    rows = [cells(report) for report in reports]
    head = "".join(f"<th>{html.escape(column)}</th>" for column in (rows[0] if rows else ()))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    text = (
        "<p>A lower bound above the claim proves a violation. A pass says that these attacks found nothing; "
        "it is no proof of privacy. The nearer the lower bound is to the claim, the stronger the attack was.</p>"
    )
    return f'<section class="audit"><h2>Audit</h2>{text}{table}</section>'
