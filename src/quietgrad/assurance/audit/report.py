"""Findings and reports of audits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.plans.schedule import Plan

Verdict = Literal["pass", "violation", "vacuous"]


class AuditFinding(NamedTuple):
    """One test: the layer, what was attacked, claim and measured bound in the layer's unit, and the verdict."""

    layer: str
    what: str
    unit: str
    claimed: float
    measured: float
    verdict: Verdict
    epsilon_lower: float = 0.0
    note: str = ""


def judged(
    layer: str,
    what: str,
    unit: str,
    claimed: float,
    measured: float,
    *,
    ok: bool,
    seen: bool = True,
    epsilon_lower: float = 0.0,
    note: str = "",
) -> AuditFinding:
    """Return a finding: a violation unless ``ok``, vacuous unless half the noise would have been ``seen``."""
    verdict: Verdict = "violation" if not ok else "pass" if seen else "vacuous"
    return AuditFinding(layer, what, unit, claimed, measured, verdict, epsilon_lower, note)


@dataclass(frozen=True)
class AuditReport:
    """The outcome of an audit of one configuration.

    ``epsilon_lower`` is proved at ``confidence`` by the attack of ``layer``; ``epsilon_claimed`` is what the
    accountant guarantees. ``passed`` means that the attacks found no violation, with enough runs to see half the
    noise missing if the attack is as strong as the claim allows. ``tightness`` says how strong it was. A
    ``vacuous`` audit has too few runs even then, and has not passed.
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
        """Return the report of ``findings`` about ``plan``; ``started`` is a value of ``time.perf_counter()``."""
        assert plan.budget is not None
        relation, delta, lower = plan.budget.relation, plan.budget.delta, max(f.epsilon_lower for f in findings)
        seconds = time.perf_counter() - started
        return cls(
            name, relation, delta, plan.epsilon(), lower, confidence, runs, seconds, tuple(findings), tuple(notes)
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
        """Whether the runs were too few to break the claim."""
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

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            **vars(self),
            "relation": str(self.relation),
            "verdict": self.verdict,
            "passed": self.passed,
            "vacuous": self.vacuous,
            "layer": self.layer,
            "findings": [f._asdict() for f in self.findings],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        runs = "one run" if self.runs == 1 else f"{self.runs} runs of each world"
        head = (
            f"{self.algorithm}: {self.verdict.upper()}. Claimed ε={self.epsilon_claimed:.4g} at δ={self.delta:g} "
            f"({self.relation}); ε ≥ {self.epsilon_lower:.4g} shown with confidence 1−{1 - self.confidence:.0e} "
            f"({runs}, {self.seconds:.2g} s)."
        )
        lines = [
            f"  {f.layer:<15}{f.verdict:<10}{f.what}: claimed {f.unit} {f.claimed:.4g}, measured {f.measured:.4g}"
            + (f" ({f.note})" if f.note else "")
            for f in self.findings
        ]
        return "\n".join([head, *lines, *(f"  note: {note}" for note in self.notes)])
