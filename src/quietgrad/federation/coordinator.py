"""The federated curator: a release is a round of messages, so every algorithm runs on many parties.

DP-SRM on it is DDP-SRM (paper 000, Algorithm 2); SPIDER with local trust is paper 003, Algorithm 3; a local fit is
one-shot weighted averaging (paper 002, repaired). A round that lost a party is used if a quorum is left. Otherwise
it is asked again as a new release, which one of the plan's spare rounds pays for.

Every aggregate is on the disk before it is used, so a killed run resumes. The file has a header line, then records
of a JSON line and raw numbers. *asked* is written when a question leaves, *done* before its aggregate is used,
*ended* before a member hears of the end. A round that was asked and not finished is a release that a spare round
pays for. A record torn by a crash is cut off.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting import events
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.errors import BudgetError, DataError, ExhaustedError
from quietgrad.core.ledger.account import Account, Charge
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.ledger.log import LockedAppendFile
from quietgrad.core.noise.rng import SecureStream, fresh_key, run_key, seed_key
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.sampling.samplers import drawn as drawn_by
from quietgrad.core.session.base import SessionCost
from quietgrad.core.session.objectives import Objective, Regularizer
from quietgrad.core.session.queries import Query
from quietgrad.core.vectors import OwnVector, zeros_like
from quietgrad.federation.exchange import Exchange, Tell
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.revocation import Revocations
from quietgrad.federation.rounds import (
    FailedRoundError,
    PlainRounds,
    RoundRequest,
    SecureRounds,
    largest_reply,
    named,
    quorate,
)
from quietgrad.federation.secure.identity import DropoutError, Identity, ProtocolError, Roster
from quietgrad.federation.transport import Transport
from quietgrad.federation.wire import Message, encode, pack, template_mismatch

Floats = npt.NDArray[np.float64]
_VAIN = 8  # times that a round may fail before its question has left
AGGREGATES = "aggregates.bin"
"""What a coordinator keeps of a run that is not over, in its folder."""


class AggregateStore:
    """The rounds of one run of the plan with this digest; in memory only if ``path`` is ``None``.

    ``run`` and ``public_key`` are those of a new run; a resumed one keeps its own.
    """

    def __init__(self, path: Path | None, *, digest: str, run: str, public_key: bytes) -> None:
        self.run, self.public_key = run, public_key
        self.asked: dict[str, int] = {}
        self.last_round = -1
        self.unfinished: str | None = None
        """The slot of the last round, if it was asked and its aggregate is not here."""
        self.done: list[tuple[str, Floats]] = []
        """Completed rounds: the slot and its aggregate."""
        self.resumed = False
        self.ended = False
        """Whether the run has ended: no member is asked any more."""
        self._file = None if path is None else LockedAppendFile(path, "coordinates this run")
        try:
            self.resumed = self._file is not None and self._read(self._file, digest)
            if not self.resumed:
                self._write({"format": 1, "plan": digest, "run": run, "public_key": public_key.hex()})
        except BaseException:
            self.close()
            raise

    def ask(self, t: int, slot: str) -> None:
        self._write({"asked": t, "slot": slot})
        self._count(t, slot)

    def finish(self, t: int, slot: str, value: Floats) -> None:
        """Round ``t`` gave ``value``, which may be used once this returns."""
        body = np.ascontiguousarray(value, "<f8").tobytes()
        self._write({"done": t, "slot": slot, "numbers": len(value), "crc": zlib.crc32(body)}, body)
        self.unfinished = None

    def end(self) -> None:
        """Record the end; members may hear of it once this returns."""
        if not self.ended:
            self._write({"ended": True})
            self.ended = True

    def remove(self) -> None:
        """Remove the file: the result is safe."""
        if self._file is not None:
            self._file.remove()

    def close(self) -> None:
        """Close the file and leave it for a later process."""
        if self._file is not None:
            self._file.close()

    def _count(self, t: int, slot: str) -> None:
        self.last_round, self.unfinished = t, slot
        self.asked[slot] = self.asked.get(slot, 0) + 1

    def _write(self, line: dict[str, object], body: bytes = b"") -> None:
        if self._file is not None:
            self._file.append(json.dumps(line).encode() + b"\n" + body)

    def _read(self, log: LockedAppendFile, digest: str) -> bool:
        with log.path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):  # killed while the file was made: nothing was asked yet
                log.cut(0)
                return False
            head = _line(first)
            if head is None or head.get("format") != 1 or head["plan"] != digest:
                raise DataError(f"{log.path}: has a run of another plan or version; continue it, or move it away.")
            self.run, self.public_key = head["run"], bytes.fromhex(head["public_key"])
            good = file.tell()
            while (entry := _line(file.readline())) is not None:
                if "ended" in entry:
                    self.ended = True
                elif "asked" in entry:
                    self._count(entry["asked"], entry["slot"])
                else:
                    body = file.read(8 * entry["numbers"])
                    if len(body) < 8 * entry["numbers"] or zlib.crc32(body) != entry["crc"]:
                        break
                    self.done.append((entry["slot"], np.frombuffer(body, "<f8").astype(np.float64)))
                    self.unfinished = None
                good = file.tell()
            # What a crash cut short is removed, or the next entry would be appended to half a line.
            if file.seek(0, 2) > good:
                log.cut(good)
        return True


def _line(line: bytes) -> dict[str, Any] | None:
    """A whole line of JSON, or ``None`` where the file ends or was torn."""
    with contextlib.suppress(ValueError):
        entry = json.loads(line)
        if line.endswith(b"\n") and isinstance(entry, dict):
            return entry
    return None


class FederatedSession:
    """A session with many parties; see :class:`quietgrad.core.session.base.Session`."""

    def __init__(
        self, plan: FederatedPlan, curator: FederatedCurator, store: AggregateStore, charge: Charge
    ) -> None:
        self.plan: Plan = plan
        self._plan = plan
        self.objective = curator.objective
        self.regularizer: Regularizer = curator.objective.regularizer
        self.faults: list[tuple[int, dict[str, str]]] = []
        """Rounds that failed or lack a party: number, and by name what happened."""
        self.store, self._exchange, self._charge = store, curator.exchange, charge
        self.epochs, self.run, self.charged = 1, store.run, (charge.note,) if charge.note else ()
        self._answered: set[str] = set()
        self._tell = curator.tell
        curator.admitted = self._admitted
        self.seeded = curator.seeded
        self._key = curator._key if self.seeded else run_key(curator._key, store.run)
        self._rounds: PlainRounds | SecureRounds = PlainRounds(plan, curator.exchange)
        if plan.secure is not None:
            self._rounds = SecureRounds(
                plan, curator.exchange, curator._identity, curator._roster, curator.revocations
            )
        self._zero = zeros_like(curator.objective.initial(plan.shape))
        self._sources = {
            slot.name: slot.mechanism.source(self._key, slot.name, plan.limit(slot.name))
            for slot in plan.schedule.slots
        }
        self._made = {slot.name: 0 for slot in plan.schedule.slots}
        self._draws = dict(self._made)
        self._replay = list(reversed(store.done))
        self._round = store.last_round
        self.rho_left = math.inf
        self.closed = False
        if store.resumed and not store.done:
            self._catch_up()

    @property
    def used(self) -> dict[str, int]:
        """Releases charged so far by slot, lost rounds among them."""
        return dict(self._draws)

    @property
    def lost(self) -> int:
        """Rounds that were charged and never completed."""
        return sum(self._draws.values()) - self.made

    @property
    def made(self) -> int:
        """Rounds completed so far, of all slots."""
        return sum(self._made.values())

    def expected_batch(self, slot: str) -> float:
        return self._plan.schedule[slot].sampling.expected_batch(self._plan.n_public)

    def uniform(self, label: str) -> float:
        word = SecureStream(self.store.public_key, f"public/{label}").uint64(0, 1)[0]
        return float(word >> np.uint64(11)) * 2.0**-53

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> OwnVector:
        if self.closed:
            raise BudgetError("this session is closed; open a new one for a new plan.")
        total = self._replayed(slot) if self._replay else self._ask(slot, query)
        if isinstance(self._zero, np.ndarray) or len(total) != len(self._zero):
            return total
        return self._zero.new_tensor(total)

    def choose(
        self, slot: str, queries: Sequence[Query], *, rho: float, offsets: Sequence[float] | None = None
    ) -> int:
        raise BudgetError("a noisy choice needs one curator of all records.")

    def first_below(self, slot: str, queries: Sequence[Query], threshold: float) -> int | None:
        raise BudgetError("a noisy search needs one curator of all held-out records; parties use Algorithm 4.")

    def close(self, reason: str, *, data_dependent: bool = False) -> SessionCost:
        """Book the run here and at every party; a run that was interrupted meanwhile may simply close again."""
        if self.closed:
            raise BudgetError("this session is closed already; open a new one for a new plan.")
        self.closed = True
        self.store.end()
        # A party who does not hear of the end keeps the whole plan charged, which is what it books anyway.
        message = encode(Message("close", {"run": self.store.run, "reason": reason}))
        self._exchange.call(dict.fromkeys(self._plan.names, message), {})
        event = self._charge.close(self._spent_event(), reason=reason, data_dependent=data_dependent)
        return SessionCost(event, self.used, reason, data_dependent)

    def _ask(self, slot: str, query: Query) -> Floats:
        """Ask until a round is complete, each time as a new release, and keep the aggregate before it is used."""
        if self.store.ended:
            raise BudgetError("the kept run had ended and this one asks for more; not the same run.")
        if self._made[slot] >= (planned := self._plan.schedule[slot].count):
            raise ExhaustedError(f"the plan allows {planned} releases of {slot!r} and all were made.")
        dim = query.dim(self._plan.shape)
        if query.bound == 0.0:  # exactly zero whatever the data: no party is asked
            self._begin(slot, self._round + 1)
            return self._keep(slot, np.zeros(dim), self._round)
        fields, arrays = pack(query)
        if (reason := template_mismatch(self._plan.templates[slot], fields, arrays)) is not None:
            raise BudgetError(f"slot {slot!r}: {reason}; no party was asked.")  # as every party would say
        multiplier = self._plan.multiplier(slot)
        self._check_fresh(slot)
        vain = 0
        blamed: dict[str, str] = {}  # without whom the round is asked again
        while True:
            # The question that an interrupted run left open is asked again as it was: the answers are the same.
            # Where the coordinator draws, it would draw others.
            draws = self._plan.schedule[slot].sampling.coordinator_draws is not None
            again = self.store.unfinished == slot and self._plan.secure is None and not draws
            t, draw = self._round + 1 - again, self._draws[slot] - again
            if not again and self._draws[slot] - self._made[slot] > self._plan.spare:
                last = self.faults[-1] if self.faults else (self.store.last_round, {"coordinator": "interrupted"})
                why = f"round {last[0]} was lost ({named(last[1])}) and the plan's {self._plan.spare} spare rounds"
                raise DropoutError(list(last[1]), f"{why} are used up")
            faults = dict(blamed)
            words = {"run": self.store.run, "round": t, "slot": slot, "draw": draw, "dim": dim, "query": fields}
            ask = RoundRequest(
                self._drawn(t, self._present(faults)), slot, words, arrays, float(query.bound), multiplier, faults,
                partial(self._begin, slot, t), drawn=self._units_drawn(slot, t),
            )  # fmt: skip
            try:
                total = self._rounds.collect(ask)
            except FailedRoundError as lost:
                self.store.unfinished = None
                vain = 0 if self._round >= t else vain + 1
                self._lost(t, slot, lost.faults, vain)
                blamed |= {name: lost.faults.get(name, "was accused by others") for name in lost.blamed}
                if len(self._plan.names) - len(blamed) < self._plan.quorum:  # no round could do without them all
                    blamed = {}
                continue
            if faults:
                self.faults.append((t, faults))
                self._tell(f"round {t} is complete without some ({named(faults)})")
            self._answered.update(name for name in ask.invited if name not in faults)
            if self._plan.trust == "curator" and multiplier > 0.0:
                self._sources[slot].add(total, draw, multiplier, ask.bound * self._plan.reach)
            if self._plan.parties_per_round is not None:
                total *= self._plan.upscaling
            return self._keep(slot, total, t)

    def _drawn(self, t: int, here: tuple[str, ...]) -> tuple[str, ...]:
        """The parties that round t asks: all who are here, or as many as the plan says, by public randomness."""
        most = self._plan.parties_per_round
        if most is None:
            return here
        self._rounds.reset()  # those of this round introduce themselves to each other
        order = np.argsort(SecureStream(self.store.public_key, "public/parties").uint64(t, len(here)))
        return tuple(here[k] for k in sorted(order[:most]))

    def _units_drawn(self, slot: str, t: int) -> frozenset[str] | None:
        """The parties drawn for round ``t``, each by a secret coin of its own; ``None`` if they are not drawn here.

        A party that was drawn as often as it takes part is drawn in vain: it hands in zeros.
        """
        sampling = self._plan.schedule[slot].sampling
        if sampling.coordinator_draws is None:
            return None
        stream = SecureStream(self._key, f"draw/{slot}")
        coins = stream.at(t, np.arange(len(self._plan.names)))
        return frozenset(np.array(self._plan.names)[drawn_by(coins, sampling.probability)].tolist())

    def _present(self, faults: dict[str, str]) -> tuple[str, ...]:
        """Those who are there and not in ``faults``, once they are a quorum and the servers are there too."""
        servers = self._plan.servers
        enough = quorate(self._plan, *servers)
        wanted = [name for name in self._plan.names if name not in faults]
        here = self._exchange.here((*wanted, *servers), enough, faults)
        if not enough(here):
            raise DropoutError(
                list(faults),
                f"missing for {self._exchange.patience:g} s ({named(faults)}); {len(here) - len(servers)} are here "
                f"and {self._plan.quorum} are needed. When they are back, the same commands continue the run",
            )
        return tuple(name for name in here if name not in servers)

    def _lost(self, t: int, slot: str, faults: dict[str, str], vain: int) -> None:
        """Report a failed round, and give up if it fails again and again before a question leaves."""
        if not vain:
            self.faults.append((t, faults))
            left = max(0, self._plan.spare - (self._draws[slot] - self._made[slot]) + 1)
            self._tell(f"round {t} is lost ({named(faults)}); {left} spare rounds are left")
            return
        self._tell(f"round {t} is begun anew ({named(faults)}); it has cost nothing")
        if vain > _VAIN:
            raise DropoutError(list(faults), f"round {t} cannot begin: {named(faults)}")
        self._exchange.transport.clock.sleep(0.1 * 2.0 ** min(vain, 8))

    def _admitted(self, name: str, reply: Message) -> str | None:
        """A member is back: it needs keys, and its journal if records are used once."""
        if self._plan.uses_records_in_turn and name in self._answered and reply.fields["round"] < 0:
            return "restarted without its journal and cannot tell used records from fresh"
        self._rounds.reset()
        return None

    def _check_fresh(self, slot: str) -> None:
        sampling = self._plan.schedule[slot].sampling
        taken = sum(each.sampling.fresh * self._draws[each.name] for each in self._plan.schedule.slots)
        if sampling.fresh and taken + sampling.fresh > sampling.pass_size:
            raise ExhaustedError(f"fresh records are used up: {taken} of {sampling.pass_size} were taken.")

    def _begin(self, slot: str, t: int) -> None:
        """Charge a release of ``slot``, durably: its question leaves now."""
        if t <= self._round:  # it was charged when it was asked the first time
            return
        self._check_fresh(slot)
        self._round = t
        self._draws[slot] += 1
        self.store.ask(t, slot)

    def _keep(self, slot: str, total: Floats, t: int) -> Floats:
        self.store.finish(t, slot, total)
        self._made[slot] += 1
        return total

    def _replayed(self, slot: str) -> Floats:
        name, value = self._replay.pop()
        if name != slot:
            raise BudgetError(f"the kept run released {name!r} here, and {slot!r} is asked: not the same run.")
        self._made[slot] += 1
        self._draws[slot] += 1
        if not self._replay:
            self._catch_up()
        return value

    def _catch_up(self) -> None:
        """Count the rounds that were asked and never finished: they are spent."""
        self._draws = {name: self.store.asked.get(name, 0) for name in self._made}

    def _spent_event(self) -> events.Event | None:
        """The whole plan.

        Spare rounds that were not needed are not given back: whether a round is lost is up to any member, who has
        seen earlier releases by then.
        """
        return None if self._plan.budget is None else self._plan.event

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"round {t}: {named(faults)}" for t, faults in self.faults)


class FederatedCurator:
    """Coordinates parties that each hold their own records.

    Args:
        ledger, account, cap: the coordinator's own record of what the run releases; each party keeps its own too.
        identity: the coordinator's own keys, for ``secure="masks"``.
        roster: the public keys of all members, for ``secure="masks"``.
        folder: keep every aggregate here before it is used, so that a killed run can be resumed.
        seed: fixed randomness, for tests: the run is then **not private**.
        revocations: the members that are no longer trusted, whose list is handed out to all.
        tell: is called at once, with a sentence, for every round that fails.
    """

    def __init__(
        self,
        objective: Objective,
        over: Transport | Exchange,
        *,
        ledger: Ledger | str | Path | None = None,
        account: Account | str = "default",
        cap: Budget | None = None,
        identity: Identity | None = None,
        roster: Roster | None = None,
        folder: str | Path | None = None,
        seed: int | None = None,
        revocations: Revocations | None = None,
        tell: Tell = lambda words: None,
    ) -> None:
        self.objective = objective
        self.revocations = Revocations() if revocations is None else revocations
        self.exchange = over if isinstance(over, Exchange) else Exchange(over, tell=tell)
        self._account = account if isinstance(account, Account) else Account(account, ledger, cap)
        self.tell = tell
        self.admitted: Callable[[str, Message], str | None] = lambda name, reply: None
        """Is called for every party that comes back in mid-run; says why it is not taken back."""
        self.seeded = seed is not None
        self._key = fresh_key() if seed is None else seed_key(seed)
        self._identity, self._roster = identity, roster
        self.folder = None if folder is None else Path(folder)

    def open(self, plan: FederatedPlan, wait: float | None = None) -> FederatedSession:
        """Reserve the plan's whole cost here and at every party, or continue the run kept in the folder.

        Waits for a quorum, and then ``wait`` seconds for the others.
        """
        absent = {*plan.names, *plan.servers} - set(self.exchange.transport.parties())
        if absent:
            raise ProtocolError(", ".join(sorted(absent)), "cannot be reached by this transport")
        late = plan.answer_after
        if late is not None and plan.trust != "curator" and self.exchange.timeout <= late:
            raise ValueError(
                f"timeout={self.exchange.timeout:g}: parties answer {late:g} s after they are asked; use a "
                "longer timeout, or a smaller answer_seconds of the method. Nothing was asked."
            )
        path = None if self.folder is None else self.folder / AGGREGATES
        public = self._key if self.seeded else os.urandom(32)
        store = AggregateStore(path, digest=plan.digest, run=os.urandom(16).hex(), public_key=public)
        self.exchange.most = largest_reply(plan)
        charge = None
        try:
            if store.resumed:
                charge = self._account.reopen(plan.cost, run=store.run)
            if charge is not None:
                self._account.resume(store.run)
            elif plan.cost is not None:
                self._account.check(plan.cost)  # before a party has paid
            if not store.ended:
                self._gather(plan, store, wait)
            if charge is None:
                note = f"{plan.algorithm}, {len(plan.names)} parties, trust {plan.trust}"
                note += "" if plan.records_public is None else f"; {plan.counts}"
                charge = self._account.reserve(plan.cost, run=store.run, note=note)
        except BaseException as error:
            if isinstance(error, Exception) and not store.resumed:
                # The run could not be opened: those who paid get it back, for they were asked nothing.
                over = encode(Message("close", {"run": store.run, "reason": f"not opened: {error}"[:200]}))
                with contextlib.suppress(ProtocolError):
                    self.exchange.call(dict.fromkeys(plan.names, over), {}, grace=1.0)
                store.remove()
            store.close()
            raise
        return FederatedSession(plan, self, store, charge)

    def _gather(self, plan: FederatedPlan, store: AggregateStore, wait: float | None) -> None:
        """Open the run at the parties; a member that restarts later gets the same message."""
        faults: dict[str, str] = {}
        handed_out = self.revocations.handed_out()
        message = encode(Message("open", {"run": store.run, "plan": plan.digest, **handed_out}))

        def admit(name: str, reply: Message) -> str | None:
            return _not_ready(plan, reply) or self.admitted(name, reply)

        self.exchange.opening, self.exchange.admit = message, admit
        replies = self.exchange.call(dict.fromkeys(plan.names, message), faults, quorate(plan), grace=wait)
        # Before anything is asked, a member that approved another plan ends the run. Later it is absent.
        for name, reason in () if store.resumed else self.exchange.refused.items():
            raise ProtocolError(name, f"refuses: {reason}")
        faults |= {name: why for name, reply in replies.items() if (why := _not_ready(plan, reply)) is not None}
        if len(plan.names) - len(faults) < plan.quorum:
            raise FailedRoundError(faults)


def _not_ready(plan: FederatedPlan, reply: Message) -> str | None:
    if reply.kind != "ready":
        return "says that this run is over"
    last, limits = reply.fields.get("round"), [plan.limit(slot.name) for slot in plan.schedule.slots]
    return None if type(last) is int and -1 <= last < sum(limits) else "says that it is ready, and not where it was"
