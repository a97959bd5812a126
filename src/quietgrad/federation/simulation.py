"""A whole federation in one process: the real plan, the real messages, the real secure sums, no network."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.core.accounting.budget import Budget, PrivacyUnit
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.noise.rng import fresh_key
from quietgrad.core.session.objectives import Objective
from quietgrad.core.session.opening import Terms
from quietgrad.core.vectors import Vector
from quietgrad.federation.clients import fits_one_curator, simulate_together
from quietgrad.federation.coordinator import AGGREGATES, FederatedCurator, FederatedSession
from quietgrad.federation.exchange import PATIENCE, Exchange, Responder
from quietgrad.federation.journal import forget
from quietgrad.federation.members import Member, SumMember
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan import FederatedPlan, Shape, Trust
from quietgrad.federation.planning import (
    Party,
    Weights,
    adversary,
    federate,
    local_batches,
    multiplicity,
    party_statements,
)
from quietgrad.federation.public_time import AtOnce
from quietgrad.federation.secure.identity import Identity, Roster
from quietgrad.federation.secure.terms import Mode
from quietgrad.federation.transport import Away, Bytes, Clock, Handler, Transport
from quietgrad.methods import Callback, run
from quietgrad.methods.base import Algorithm
from quietgrad.methods.callbacks import begin
from quietgrad.methods.minimizing import check_objective, how_people_count
from quietgrad.methods.result import Result
from quietgrad.tables.person_ids import hashed_ids, kind_of
from quietgrad.tables.privacy_units import Combine

_SIZES = (
    "the numbers of records were taken from the parties' data and are published: ε holds for neighbours with the "
    "same numbers; Party(n_public=...) declares others"
)


def simulate(
    algorithm: Algorithm,
    objective: Objective,
    parties: Sequence[Party],
    *,
    budget: Budget | None,
    trust: Trust = "curator",
    secure: Mode | None = None,
    weights: Weights = "size",
    quorum: int | None = None,
    colluders: int = 1,
    servers: int | None = None,
    spare: int = 0,
    ledger: Ledger | str | Path | None = None,
    account: str = "default",
    cap: Budget | None = None,
    start: Vector | None = None,
    seed: int | None = None,
    folder: str | Path | None = None,
    timeout: float = 60.0,
    transport: Callable[[Federation], Transport] | None = None,
    callback: Callback | None = None,
    noise_multiplier: float | None = None,
    keep: Callable[[Result], object] = lambda result: None,
    parties_per_person: int | None = None,
    combine: Combine = "mean",
    records_per_person: int | None = None,
    parties_per_round: int | None = None,
) -> Result:
    """Train one model on the records of several parties, all in this process.

    Args:
        algorithm: any method that releases sums; on many parties ``DPSRM`` is DDP-SRM (paper 000, Algorithm 2).
            With ``FedAvg`` the privacy unit is a party.
        parties: :class:`Party`, or :class:`~quietgrad.federation.clients.Clients` of one table, of which 10⁵ are
            simulated at once with a trusted curator.
        budget: (ε, δ) for every record of every party, or for every party; ``None`` adds no noise.
        trust: ``"curator"``: the coordinator sees exact sums; the noise of one table. ``"secure"``: no role sees a
            sum without noise; 1.003 (``mpc``), m/(m−1) (``masks``) or 2 (``servers``) times the variance.
            ``"local"``: every party adds its own noise; m times the variance.
        secure: ``"masks"``, ``"servers"`` or ``"mpc"``, with ``trust="secure"``.
        weights: ``"size"``, ``"equal"`` or one number per party.
        quorum: complete a round with this many parties at least; all of them unless given.
        colluders: masks: how many parties may work with the coordinator.
        servers: how many servers ``secure="servers"`` uses.
        spare: rounds of each kind reserved to pay for lost ones.
        ledger, account, cap: the coordinator's record; each :class:`Party` can have its own.
        seed: fixed randomness for tests; the result is then not private.
        folder: keep aggregates and the parties' journals here; calling again after an interruption resumes. A
            call that finds no interrupted run there approves a new one for all parties.
        transport: make another transport to the members, to rehearse what can go wrong.
        keep: called with the result before what could resume the run is removed: save it there.
        parties_per_person: if the parties' records are people's (``Party(..., person=ids)``), how many parties one
            of them may be known to; 1 if no person is known to two. The privacy unit is then a person.
        combine, records_per_person: how a person's records count, as in :func:`quietgrad.minimize`.
        parties_per_round: ask so many parties in each round, drawn in public, and multiply their sum by m/k. It
            saves work and buys no privacy: every party is charged for every round.

    >>> import numpy as np, quietgrad as qg
    >>> from quietgrad.federation import Party, simulate
    >>> X = np.linspace(-1, 1, 400)[:, None]
    >>> parties = [Party(X[::2], X[::2, 0] > 0), Party(X[1::2], X[1::2, 0] > 0)]
    >>> result = simulate(qg.DPGD(steps=5), qg.objectives.Logistic(), parties, budget=qg.Budget(1.0, 1e-5),
    ...                   trust="secure", secure="masks")
    >>> result.params.shape, result.privacy.is_private, result.details["trust"]
    ((1,), True, 'secure')
    """
    check_objective(objective)
    if fits_one_curator(
        algorithm, parties, trust=trust, folder=folder, transport=transport, spare=spare, quorum=quorum
    ):
        result = simulate_together(
            algorithm, objective, parties, budget=budget, ledger=ledger, account=account, cap=cap, start=start,
            seed=seed, callback=callback, noise_multiplier=noise_multiplier,
        )  # fmt: skip
        keep(result)
        return result
    by_person = check_known_people(parties, parties_per_person)
    home = None if folder is None else Path(folder)
    if home is not None and not (home / AGGREGATES).exists():
        for name in names_of(parties):
            forget(home, name)
    plan, federation = assemble(
        algorithm, objective, parties, budget=budget, trust=trust, secure=secure, weights=weights, quorum=quorum,
        colluders=colluders, servers=servers, spare=spare, seed=seed, folder=folder,
        noise_multiplier=noise_multiplier, parties_per_person=parties_per_person, combine=combine,
        records_per_person=records_per_person, unit="person" if by_person else "record",
        start=start, parties_per_round=parties_per_round,
    )  # fmt: skip
    payer = Terms.of(budget, account=account, ledger=ledger, cap=cap, seed=seed).account
    if budget is not None:
        loss = plan.asks(objective)

        def contents() -> Iterator[bytes | memoryview]:  # by which a project's ledger knows these people again
            for party in parties:
                yield from loss.prepare(party.held).fingerprint_parts()

        payer = payer.settled(contents)
    notes = () if algorithm.by_party or all(party.n_public is not None for party in parties) else (_SIZES,)
    x0 = objective.initial(plan.shape) if start is None else start
    with contextlib.ExitStack() as until_the_end:
        until_the_end.callback(federation.close)  # also of those who were made before another could not be
        carrier = InProcess(federation.handlers) if transport is None else transport(federation)
        until_the_end.callback(carrier.close)
        exchange = Exchange(carrier, timeout=timeout, patience=max(timeout, PATIENCE))
        curator = FederatedCurator(
            objective, exchange, account=payer,
            identity=federation.identity, roster=federation.roster, folder=folder, seed=seed,
        )  # fmt: skip
        result = train(algorithm, curator, plan, x0, account=account, callback=callback, notes=notes, keep=keep)
    if home is not None:
        for name in plan.names:
            forget(home, name)
    return result


def check_known_people(parties: Sequence[Party], most: int | None) -> bool:
    """Whether the privacy unit is a person; raises if only some parties say so, or one is in too many.

    Who is in several is found by hashes under a key that lives as long as this call. Parties that do not share a
    machine cannot look: there the number is their word.
    """
    whose = [party.person is not None for party in parties]
    if any(whose) and not all(whose):
        raise ValueError("parties: give all of them person=, or none.")
    if any(whose) and most is not None:
        if any(party.ids is not None for party in parties):
            raise ValueError("ids: name records across parties, for tests; leave them out where people are named.")
        if len({kind_of(party.person) for party in parties}) > 1:
            raise DataError("parties: ids of people are of different kinds, so no person would be found twice.")
        key = fresh_key()
        met = Counter(each for party in parties for each in hashed_ids(party.person, key))
        if max(met.values()) > most:
            raise DataError(f"parties: a person is known to more than parties_per_person={most}; declare as many.")
    return any(whose)


def names_of(parties: Sequence[Party]) -> tuple[str, ...]:
    """The parties' names, made up where they have none."""
    if not parties:
        raise ValueError("parties: must be at least one Party(X, y).")
    names = tuple(party.name or f"party-{i + 1}" for i, party in enumerate(parties))
    if len(set(names)) < len(names):
        raise ValueError(f"parties {names}: must have different names.")
    return names


class SimulatedClock(Clock):
    """Time that passes only while the caller waits."""

    _now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)


class InProcess:
    """A transport of calls in this thread, one member after another; ``handlers`` are, by name, what answers."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.clock = SimulatedClock()
        self._sites = {name: Responder(handler) for name, handler in handlers.items()}
        self._renewed: set[str] = set()

    def parties(self) -> tuple[str, ...]:
        return tuple(self._sites)

    def renewed(self) -> set[str]:
        names, self._renewed = self._renewed, set()
        return names

    def replace(self, name: str, handler: Handler) -> None:
        """Put a new process in the place of a member."""
        self._sites[name] = Responder(handler)
        self._renewed.add(name)

    def send(self, frames: Mapping[str, Bytes], seconds: float) -> dict[str, Bytes | Away]:
        return {name: self._sites[name].answer(frame) for name, frame in frames.items()}

    def close(self) -> None:
        """Do nothing: no connection is open."""


class Federation:
    """All members of a simulated federation, ready to be put behind a transport."""

    def __init__(self, identity: Identity, roster: Roster, members: dict[str, Callable[[], Member]]) -> None:
        self.identity, self.roster, self._members = identity, roster, members
        self._here: dict[str, Member] = {}

    @cached_property
    def handlers(self) -> dict[str, Handler]:
        return {name: self.again(name) for name in self._members}

    def again(self, name: str) -> Handler:
        """A party that restarts: it knows its data, its plan and its folder, and nothing else."""
        if name in self._here:
            self._here[name].close()
        self._here[name] = self._members[name]()
        return self._here[name].handle

    def close(self) -> None:
        for member in self._here.values():
            member.close()


def assemble(
    algorithm: Algorithm,
    objective: Objective,
    parties: Sequence[Party],
    *,
    seed: int | None = None,
    folder: str | Path | None = None,
    **settings: Any,
) -> tuple[FederatedPlan, Federation]:
    """The plan for ``parties`` and a handler for each of them; ``settings`` are those of :func:`federate`."""
    names = names_of(parties)
    shape = Shape.of(objective.prepare(parties[0].data))
    plan = federate(
        algorithm, objective, names=names, sizes=[party.size for party in parties], shape=shape, **settings
    )
    coordinator = Identity("coordinator")
    people = {name: Identity(name) for name in (*names, *plan.servers)}
    last = [people[name] for name in plan.servers] or [coordinator]
    roster = Roster.of([*(people[name] for name in names), *last])
    makers: dict[str, Callable[[], Member]] = {}
    for name, party in zip(names, parties, strict=True):
        makers[name] = partial(
            PartyCurator, name, objective, party.held, plan, ledger=party.ledger, account=party.account,
            cap=party.cap, identity=people[name], roster=roster, folder=folder,
            ids=party.ids if seed is not None and not algorithm.by_party else None, seed=seed, pace=AtOnce(),
        )  # fmt: skip
    makers |= {name: partial(SumMember, plan, people[name], roster, seed=seed) for name in plan.servers}
    return plan, Federation(coordinator, roster, makers)


def train(
    algorithm: Algorithm,
    curator: FederatedCurator,
    plan: FederatedPlan,
    x0: Vector,
    *,
    account: str | None = None,
    callback: Callback | None = None,
    notes: tuple[str, ...] = (),
    keep: Callable[[Result], object] = lambda result: None,
    wait: float | None = None,
) -> Result:
    """Run ``algorithm`` through a federation that is up; the coordinator's whole job, on any transport.

    ``keep`` is called with the result while the run could still be continued: a kill before it has returned costs
    nothing, since calling again with the same folder asks no party and comes to the same result.
    """
    begin(callback, plan.schedule.releases, x0, private=plan.is_private)
    session = curator.open(plan, wait)
    try:
        result = run(
            algorithm, session, np.array(x0) if isinstance(x0, np.ndarray) else x0, callback=callback,
            account=account, notes=notes,
        )  # fmt: skip
        result = _described(result, session, plan)
        keep(result)
        session.store.remove()  # the result is safe
    except Exception as error:
        if curator.folder is None and not session.closed:
            session.close(f"aborted: {error}"[:200], data_dependent=True)
        raise
    finally:
        session.store.close()
    return result


def _described(result: Result, session: FederatedSession, plan: FederatedPlan) -> Result:
    """The result with what is true of a federation: who was trusted, what the noise cost, who was missing."""
    notes = (*result.privacy.notes, *session.notes)
    if plan.is_private and plan.secure is not None:
        variance = f"{plan.variance_factor:.4g} times a trusted curator's"
        notes = (f"secure sums by {plan.secure}: noise variance {variance}", *notes)
    if plan.unit is PrivacyUnit.PERSON:
        notes = (f"people: {multiplicity(plan)}", *notes, *how_people_count(plan.asks(session.objective)))
    notes = (*party_statements(plan), *notes)
    if local_batches(plan):
        notes = (local_batches(plan), *notes)
    if plan.parties_per_round is not None:
        asked = f"each round asked {plan.parties_per_round} of {len(plan.names)} parties, drawn in public"
        notes = (f"{asked}: it buys no privacy", *notes)
    if plan.trust == "curator":
        notes = ("the coordinator is a trusted curator: it sees each party's exact sums", *notes)
    details = {
        **result.details,
        "slots": [{**slot, "count": plan.limit(slot["name"])} for slot in result.details["slots"]],
        "trust": plan.trust,
        "secure": plan.secure,
        "parties": list(plan.names),
        "sizes": list(plan.sizes),
        "parties_per_person": plan.parties_per_person if plan.unit is PrivacyUnit.PERSON else None,
        "variance_factor": plan.variance_factor,
        "lost_rounds": session.lost,
    }
    return replace(result, privacy=replace(result.privacy, adversary=adversary(plan), notes=notes), details=details)
