"""Layer L0 over time, in federations: hundreds of rounds of real parties, listened to where they leave somebody's
hands.

What the coordinator publishes is one such place. Where every party adds its own noise there is one at each of
them: the sum of three may look sound while one gives half of its coordinates away. So each party's answers are
heard as the coordinator hears them, and every ledger is compared with what was answered.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.audit.canaries import CanaryObjective, CanaryRecords
from quietgrad.audit.federated import TRUSTS
from quietgrad.audit.mechanisms import laplace_units, spread_choice, strategy
from quietgrad.audit.noise_checks import check_normals
from quietgrad.audit.report import AuditFinding
from quietgrad.plans.schedule import Plan, Schedule
from quietgrad.privacy.accounting import account
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.correlated import BufferedToeplitzNoise
from quietgrad.privacy.mechanisms import GaussianNoise, L2LaplaceNoise, Mechanism
from quietgrad.sampling import CyclicCohorts, FullBatch

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
    trust: str,
    secure: str | None = None,
    *,
    mechanism: Mechanism | None = None,
    rounds: int = ROUNDS,
    alpha: float = 1e-6,
) -> list[AuditFinding]:
    """Noise of ``rounds`` rounds after aggregation, that of every party where it adds its own, and the charges.

    Halfway everybody is restarted and goes on from what the folder holds: completed rounds are answered as they
    were, and the noise of the others is new.

    >>> {finding.verdict for finding in probe_federation("local", rounds=64)}
    {'pass'}
    """
    from quietgrad.federation.coordinator import FederatedCurator
    from quietgrad.federation.parties import Party
    from quietgrad.federation.simulation import assemble
    from quietgrad.federation.transport.in_process import InProcess
    from quietgrad.objectives.base import Gradient

    law = GaussianNoise() if mechanism is None else mechanism
    where = f"{trust if secure is None else f'secure sum by {secure}'}, {law.kind} noise"
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        books = [folder / f"party-{k}.jsonl" for k in range(PARTIES)]
        own = folder / "coordinator.jsonl"
        objective: Any = CanaryObjective("constant")
        holders = [Party(CanaryRecords(("silent",), 1, WIDTH), n_public=1, ledger=book) for book in books]
        # One round more than is asked: a run that stops early, for no reason of the data's, pays for what it made.
        plan, people = assemble(
            _descent(rounds + 1, law), objective, holders, budget=_BUDGET, trust=trust, secure=secure,
            noise_multiplier=_MULTIPLIER, folder=folder,
        )  # fmt: skip
        query = Gradient(np.zeros(WIDTH), 1.0)

        def open_door() -> tuple[Any, Ears]:
            ears = Ears({name: people.again(name) for name in people.makers}, plan.names)
            curator = FederatedCurator(
                objective, InProcess(ears.handlers), identity=people.identity, roster=people.roster, ledger=own,
                folder=folder,
            )  # fmt: skip
            return curator.open(plan), ears

        def ask(count: int, *, end: bool) -> tuple[list[Floats], dict[str, list[Floats]]]:
            session, ears = open_door()
            heard = [np.array(session.release("gradient", query), np.float64) for _ in range(count)]
            if end:
                session.close("enough")
            return heard, ears.said

        before, first = ask(rounds // 2, end=False)
        gc.collect()  # everybody who was there is gone, and lets go of the folder
        again, second = ask(rounds, end=True)
        changed = float(np.abs(np.stack(again[: rounds // 2]) - np.stack(before)).max())
        said = {name: first[name] + second[name] for name in plan.names}
        findings = list(_charges([own, *books], plan, rounds, where))
    same: Any = "pass" if changed == 0.0 else "violation"
    findings.append(AuditFinding("L0 replay", f"completed rounds, {where}", "change", 0.0, changed, same))
    voices = {name: _units(np.stack(sums), law, 1.0) for name, sums in said.items()} if trust == "local" else {}
    share = alpha / (2 + 2 * len(voices))
    if law.kind != "pure" or not voices:  # L2-Laplace noise adds up to another law
        factor = PARTIES if voices else plan.variance_factor
        findings += check_normals(_units(np.stack(again), law, factor), f"published sums, {where}", share)
    for name, voice in voices.items():
        findings += check_normals(voice, f"answers of {name}, {where}", share)
    if voices:  # noise that parties share cancels for whoever subtracts
        found = check_normals(
            np.concatenate(list(voices.values())), f"answers of different parties, {where}", share
        )
        findings += [f for f in found if f.layer == "L0 freshness"]
    return findings


def _descent(steps: int, mechanism: Mechanism) -> Any:
    """Gradient descent whose releases have the noise of ``mechanism``."""
    from quietgrad.algorithms.dp_sgd import DPGD

    class Descent(DPGD):
        def schedule(self, n_public: int) -> Schedule:
            planned = super().schedule(n_public)
            sampling = (
                CyclicCohorts(mechanism.separation) if isinstance(mechanism, BufferedToeplitzNoise) else FullBatch()
            )
            slots = (replace(slot, mechanism=mechanism, sampling=sampling) for slot in planned.slots)
            return replace(planned, slots=tuple(slots))

    return Descent(steps=steps)


def _units(sums: Floats, mechanism: Mechanism, factor: float) -> Floats:
    """Noise of the claimed scale as standard normals."""
    scale = _MULTIPLIER * math.sqrt(factor)
    if isinstance(mechanism, L2LaplaceNoise):
        return np.stack([laplace_units(row, scale) for row in sums])
    if isinstance(mechanism, BufferedToeplitzNoise):  # S times S⁻¹u
        column, louder = strategy(mechanism)
        numbers = range(len(sums))
        return np.stack([column[: t + 1][::-1] @ sums[: t + 1] for t in numbers]) / (scale * louder)
    return sums / scale


def _charges(books: list[Path], plan: Plan, rounds: int, where: str) -> Iterator[AuditFinding]:
    from quietgrad.privacy.ledger import Ledger

    event = plan.schedule.slots[0].event(_MULTIPLIER, _BUDGET.relation, rounds)
    owed = account(event, delta=_BUDGET.delta, relation=_BUDGET.relation)
    spent = [Ledger(b).spent("default", delta=_BUDGET.delta, relation=_BUDGET.relation).epsilon for b in books]
    least = min(spent)
    verdict = "pass" if owed <= least * (1.0 + 1e-9) else "violation"
    yield AuditFinding("L0 charge", f"{rounds} rounds, {where}", "ε", least, owed, verdict)  # type: ignore[arg-type]


def probe_federated_choice(*, releases: int = CHOICES, alpha: float = 1e-6, seed: int = 0) -> list[AuditFinding]:
    """A trusted coordinator's noisy choice among equals, which must be uniform and independent."""
    from quietgrad.algorithms.dp_agd import DPAGD
    from quietgrad.federation.coordinator import FederatedCurator
    from quietgrad.federation.parties import Party
    from quietgrad.federation.simulation import assemble
    from quietgrad.federation.transport.in_process import InProcess
    from quietgrad.objectives.base import Loss

    grid = 5
    objective: Any = CanaryObjective("constant")
    holders = [Party(CanaryRecords(("silent",), 1, 2), n_public=1) for _ in range(PARTIES)]
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
    return check_normals(np.stack(z), "choices of a coordinator", alpha)


def probe_federations() -> Iterator[AuditFinding]:
    """All trusts and secure sums."""
    for trust, secure in TRUSTS:
        yield from probe_federation(trust, secure)
        if secure is None:
            yield from probe_federation(trust, mechanism=L2LaplaceNoise())
        if secure != "mpc":
            yield from probe_federation(trust, secure, mechanism=BufferedToeplitzNoise.made(ROUNDS + 1, 4, 51))
    yield from probe_federated_choice()
