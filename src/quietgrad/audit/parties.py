"""Layer L0 over time, in federations: hundreds of rounds of real parties, listened to where they leave somebody's
hands.

What the coordinator publishes is one such place. Where every party adds its own noise there is one at each of
them: the sum of three may look sound while one gives half of its coordinates away. So each party's answers are
heard as the coordinator hears them, and every ledger is compared with what was answered.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.audit.canaries import CanaryObjective, Cast
from quietgrad.audit.distinguish import Finding
from quietgrad.audit.federated import TRUSTS
from quietgrad.audit.mechanisms import spread_choice
from quietgrad.audit.units import judge_units
from quietgrad.privacy.accounting import account
from quietgrad.privacy.budget import Budget

Floats = npt.NDArray[np.float64]
ROUNDS, WIDTH, PARTIES, CHOICES = 200, 64, 3, 600
_BUDGET = Budget(6.0, 1e-5)
_MULTIPLIER = 20.0


class Ears:
    """Handlers of everybody, and the sums that each party answered."""

    def __init__(self, handlers: dict[str, Any], names: tuple[str, ...]) -> None:
        self.said: dict[str, list[Floats]] = {name: [] for name in names}
        self.handlers = {name: self._hear(name, handler) for name, handler in handlers.items()}

    def _hear(self, name: str, handler: Any) -> Any:
        from quietgrad.federation.wire import decode

        def handle(data: Any) -> Any:
            reply = handler(data)
            message = decode(reply)
            if message.kind == "sum" and name in self.said:
                self.said[name].append(np.array(message.arrays["total"], np.float64))
            return reply

        return handle


def probe_federation(
    trust: str, secure: str | None = None, *, rounds: int = ROUNDS, alpha: float = 1e-6
) -> list[Finding]:
    """Noise of ``rounds`` rounds after aggregation, that of every party where it adds its own, and the charges.

    >>> {finding.verdict for finding in probe_federation("local", rounds=64)}
    {'pass'}
    """
    from quietgrad.algorithms.dp_gd import DPGD
    from quietgrad.federation.coordinator import FederatedCurator
    from quietgrad.federation.parties import Party
    from quietgrad.federation.simulation import assemble
    from quietgrad.federation.transport.in_process import InProcess
    from quietgrad.objectives.base import Gradient

    where = trust if secure is None else f"secure sum by {secure}"
    with tempfile.TemporaryDirectory() as folder:
        books = [Path(folder) / f"party-{k}.jsonl" for k in range(PARTIES)]
        own = Path(folder) / "coordinator.jsonl"
        objective: Any = CanaryObjective("constant")
        holders = [Party(Cast(("silent",), 1, WIDTH), n_public=1, ledger=book) for book in books]
        # One round more than is asked: a run that stops early, for no reason of the data's, pays for what it made.
        plan, people = assemble(
            DPGD(steps=rounds + 1), objective, holders, budget=_BUDGET, trust=trust, secure=secure,
            noise_multiplier=_MULTIPLIER,
        )  # fmt: skip
        ears = Ears(people.handlers, plan.names)
        session = FederatedCurator(
            objective, InProcess(ears.handlers), identity=people.identity, roster=people.roster, ledger=own
        ).open(plan)
        heard = [np.asarray(session.release("gradient", Gradient(np.zeros(WIDTH), 1.0))) for _ in range(rounds)]
        session.close("enough")
        factor = PARTIES if trust == "local" else plan.variance_factor
        z = np.stack(heard) / (_MULTIPLIER * math.sqrt(factor))
        voices = [np.stack(said) / _MULTIPLIER for said in ears.said.values()] if trust == "local" else []
        share = alpha / (1 + 2 * len(voices))
        findings = judge_units(z, f"published sums, {where}", share)
        for name, voice in zip(ears.said, voices, strict=bool(voices)):
            findings += judge_units(voice, f"answers of {name}", share)
        if voices:  # noise that parties share cancels for whoever subtracts
            together = np.concatenate(voices)
            found = judge_units(together, "answers of different parties", share)
            findings += [f for f in found if f.layer == "L0 freshness"]
        findings += list(_charges([own, *books], rounds, where))
    return findings


def _charges(books: list[Path], rounds: int, where: str) -> Iterator[Finding]:
    from quietgrad.privacy import events
    from quietgrad.privacy.ledger import Ledger

    owed = account(events.gaussian(_MULTIPLIER, rounds), delta=_BUDGET.delta, relation=_BUDGET.relation)
    spent = [Ledger(b).spent("default", delta=_BUDGET.delta, relation=_BUDGET.relation).epsilon for b in books]
    least = min(spent)
    verdict = "pass" if owed <= least * (1.0 + 1e-9) else "violation"
    yield Finding("L0 charge", f"{rounds} rounds, {where}", "ε", least, owed, verdict)  # type: ignore[arg-type]


def probe_federated_choice(*, releases: int = CHOICES, alpha: float = 1e-6, seed: int = 0) -> list[Finding]:
    """A trusted coordinator's noisy choice among equals, which must be uniform and independent."""
    from quietgrad.algorithms.dp_agd import DPAGD
    from quietgrad.federation.coordinator import FederatedCurator
    from quietgrad.federation.parties import Party
    from quietgrad.federation.simulation import assemble
    from quietgrad.federation.transport.in_process import InProcess
    from quietgrad.objectives.base import Loss

    grid = 5
    objective: Any = CanaryObjective("constant")
    holders = [Party(Cast(("silent",), 1, 2), n_public=1) for _ in range(PARTIES)]
    algorithm = DPAGD(grid=grid, max_steps=releases)
    plan, people = assemble(algorithm, objective, holders, budget=_BUDGET, trust="curator")
    session = FederatedCurator(
        objective, InProcess(people.handlers), identity=people.identity, roster=people.roster
    ).open(plan)
    rng = np.random.default_rng(seed)
    rho = session.rho_left / (2.0 * releases)
    queries = [Loss(np.zeros(2), algorithm.loss_clip)] * grid
    shares = np.full(grid, 1.0 / grid)
    z = [spread_choice(session.choose("length", queries, rho=rho), shares, rng) for _ in range(releases)]
    session.close("enough")
    return judge_units(np.stack(z), "choices of a coordinator", alpha)


def probe_federations() -> Iterator[Finding]:
    """All trusts and secure sums."""
    for trust, secure in TRUSTS:
        yield from probe_federation(trust, secure)
    yield from probe_federated_choice()
