"""Federations over hundreds of rounds: noise of each party, charges of every ledger, masks, secure sums."""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from quietgrad.assurance.audit.canaries import CanaryObjective, CanaryRecords
from quietgrad.assurance.audit.federated import TRUSTS
from quietgrad.assurance.audit.noise_checks import check_noise, check_normals
from quietgrad.assurance.audit.report import AuditFinding
from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.noise.correlated import BufferedToeplitzNoise
from quietgrad.core.noise.mechanisms import GaussianNoise, L2LaplaceNoise, Mechanism
from quietgrad.core.plans.schedule import Schedule
from quietgrad.core.sampling import CyclicCohorts, FullBatch
from quietgrad.core.session.queries import GradientQuery
from quietgrad.federation import secure_sum
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.planning import Party
from quietgrad.federation.secure.channel import FrameType, TranscriptRecorder
from quietgrad.federation.secure.local_session import SecureSession
from quietgrad.federation.secure.terms import SecureSumConfig
from quietgrad.federation.simulation import InProcess, assemble
from quietgrad.federation.wire import Message, decode, encode
from quietgrad.methods.dp_sgd import DPGD
from tests.probes import found
from tests.probes.sessions import Register, probe_charge

Floats = npt.NDArray[np.float64]
ROUNDS, WIDTH, PARTIES = 200, 64, 3
_BUDGET = Budget(6.0, 1e-5)
_MULTIPLIER = 20.0


def probe_secure_sum(mode: str, *, parties: int = 5, size: int = 10_000) -> list[AuditFinding]:
    """The noise of a secure sum of silent parties, after aggregation, against what its terms state."""
    # A clip far above the noise: else the sum's own check of its length would hear the loudest errors before we do.
    clip, sigma = 150.0, 1.5
    terms = SecureSumConfig(mode, parties=parties, dimension=size, bound=clip, sigma=sigma)  # type: ignore[arg-type]
    silence, times = np.zeros((parties, size)), sigma / clip
    heard = [secure_sum(silence, clip=clip, noise_multiplier=times, mode=mode) for _ in range(3)]  # type: ignore[arg-type]
    return check_noise(np.stack(heard), sigma * math.sqrt(terms.variance_factor), f"secure sum by {mode}")


def probe_masks(*, parties: int = 4, size: int = 4096, rounds: int = 3) -> AuditFinding:
    """Whether what the server sees of one party in different rounds is unrelated, though her vector is the same."""
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
    return next(f for f in check_noise(z, 1.0, "masked vectors of one party") if f.layer == "L0 freshness")


class RecordingHandlers:
    """Handlers of everybody, and the sums that each party answered."""

    def __init__(self, handlers: dict[str, Any], names: Sequence[str]) -> None:
        self.said: dict[str, list[Floats]] = {name: [] for name in names}
        self.handlers = {name: self._hear(name, handler) for name, handler in handlers.items()}

    def _hear(self, name: str, handler: Any) -> Any:
        def handle(data: Any) -> Any:
            reply = handler(data)
            message = decode(reply)
            if message.kind == "sum" and name in self.said:
                self.said[name].append(np.array(message.arrays["total"], np.float64))
            return reply

        return handle


def probe_federation(
    trust: str, secure: str | None = None, *, mechanism: Mechanism | None = None, rounds: int = ROUNDS
) -> list[AuditFinding]:
    """Noise after aggregation, that of every party where it adds its own, and the charges.

    Halfway everybody is restarted from what the folder holds: completed rounds are answered as they were, and the
    noise of the others is new.
    """
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

        def ask(count: int, *, end: bool) -> tuple[Floats, dict[str, list[Floats]]]:
            ears = RecordingHandlers(
                {name: people.again(name) for name in (*plan.names, *plan.servers)}, plan.names
            )
            session = FederatedCurator(
                objective, InProcess(ears.handlers), identity=people.identity, roster=people.roster, ledger=own,
                folder=folder,
            ).open(plan)  # fmt: skip
            query = GradientQuery(np.zeros(WIDTH), 1.0)
            heard = [np.array(session.release("gradient", query), np.float64) for _ in range(count)]
            if end:
                session.close("enough")
            return np.stack(heard), ears.said

        before, first = ask(rounds // 2, end=False)
        gc.collect()  # everybody who was there is gone, and lets go of the folder
        again, second = ask(rounds, end=True)
        event = plan.schedule.slots[0].event(_MULTIPLIER, _BUDGET.relation, rounds)
        findings = [probe_charge(f"{book.stem}, {where}", book, event, _BUDGET) for book in (own, *books)]
    changed = float(np.abs(again[: rounds // 2] - before).max())
    findings.append(found("L0 replay", f"completed rounds, {where}", "change", 0.0, changed, ok=changed == 0.0))
    said = {name: np.stack(first[name] + second[name]) for name in plan.names} if trust == "local" else {}
    voices = {name: _units(sums, law, 1.0) for name, sums in said.items()}
    share = 1e-6 / (2 + 2 * len(voices))
    if law.kind != "pure" or not voices:  # L2-Laplace noise adds up to another law
        factor = PARTIES if voices else plan.variance_factor
        findings += check_normals(_units(again, law, factor), f"published sums, {where}", share)
    for name, voice in voices.items():
        findings += check_normals(voice, f"answers of {name}, {where}", share)
    if voices:  # noise that parties share cancels for an attacker who subtracts
        both = check_normals(np.concatenate(list(voices.values())), f"answers of parties, {where}", share)
        findings += [f for f in both if f.layer == "L0 freshness"]
    return findings


def _descent(steps: int, mechanism: Mechanism) -> Any:
    """Gradient descent whose releases have the noise of ``mechanism``."""

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
    probe = mechanism.probe(_MULTIPLIER * math.sqrt(factor), 1.0, _BUDGET.relation)
    return np.stack([probe.normals(row, t, np.random.default_rng()) for t, row in enumerate(sums)])


def probe_lost_rounds(*, spare: int = 2) -> AuditFinding:
    """What a federation that lost ``spare`` rounds is charged, against the cost of all sums that were made."""
    steps, register = 3, Register(1)
    holders = [Party(CanaryRecords(("silent",), 1, 2), n_public=1) for _ in range(2)]
    plan, people = assemble(
        DPGD(steps=steps), register, holders, budget=_BUDGET, trust="curator", spare=spare, noise_multiplier=5.0
    )
    honest, lies = people.handlers["party-2"], iter(range(spare))

    def lying(message: Any) -> Any:
        """The first answers of the second party are no numbers, so that their rounds are lost."""
        reply = decode(bytes(honest(message)))
        if reply.kind == "sum" and next(lies, None) is not None:
            reply = Message(reply.kind, reply.fields, {"total": np.full_like(reply.arrays["total"], np.nan)})
        return encode(reply)

    handlers = {**people.handlers, "party-2": lying}
    curator = FederatedCurator(register, InProcess(handlers), identity=people.identity, roster=people.roster)
    session = curator.open(plan)
    for _ in range(steps):
        session.release("gradient", GradientQuery(np.zeros(2), 1.0))
    charged = session.close("steps").event
    assert charged is not None
    answered = int(register.uses[0]) // len(holders)  # each party sums in every round
    paid = account(charged, delta=_BUDGET.delta, relation=_BUDGET.relation)
    made = events.gaussian(plan.noise_multiplier, answered)
    return probe_charge(f"{answered} sums, {spare} of them lost", paid, made, _BUDGET)


def probe_federations() -> Iterator[AuditFinding]:
    """All trusts and secure sums, with every law of noise that each can carry."""
    for trust, secure in TRUSTS:
        yield from probe_federation(trust, secure)
        if secure is None:
            yield from probe_federation(trust, mechanism=L2LaplaceNoise())
        if secure != "mpc":
            yield from probe_federation(trust, secure, mechanism=BufferedToeplitzNoise.made(ROUNDS + 1, 4, 51))
    yield probe_masks()
    yield probe_lost_rounds()
    for mode in ("masks", "servers", "mpc"):
        yield from probe_secure_sum(mode)
