"""A party: the end of a federation that holds records.

A party pins the plan it approved and answers nothing else: it draws its own secret sample at the plan's public
rate, clips and sums, by the same function as one curator (:func:`quietgrad.core.session.summing.batch_sum`). The
sum leaves as the plan's trust says: to a trusted curator, with the party's own noise, or inside a secure sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.files import is_path_name
from quietgrad.core.ledger.account import Account
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.noise.mechanisms import NoiseSource
from quietgrad.core.noise.rng import SecureStream, fresh_key, seed_key
from quietgrad.core.sampling.samplers import SlotSampler, hashed_slots
from quietgrad.core.session.objectives import Batch, Objective, public_loss
from quietgrad.core.session.opening import Terms
from quietgrad.core.session.queries import Query
from quietgrad.core.session.summing import batch_sum
from quietgrad.core.vectors import OwnVector, zeros_like
from quietgrad.federation import wire
from quietgrad.federation.freed_memory import give_back
from quietgrad.federation.journal import Approval, Journal, LastReply
from quietgrad.federation.members import Handling, MaskingMember, Member, SharingMember, UnknownRunError, round_of
from quietgrad.federation.plan import FederatedPlan, Shape
from quietgrad.federation.public_time import Pace, PublicTime
from quietgrad.federation.revocation import Revocations
from quietgrad.federation.secure.identity import Identity, ProtocolError, Roster
from quietgrad.federation.wire import Message
from quietgrad.tables.privacy_units import RecordsWithIds, UserLevelObjective
from quietgrad.tables.queries.local_fit import LocalFit, local_fit

Draw = Callable[[int], npt.NDArray[np.int64] | None]
"""Record positions of draw i of a slot; ``None`` means all records."""


def samplers(
    plan: FederatedPlan,
    party: int,
    key: bytes,
    n_records: int,
    ids: npt.NDArray[np.int64] | None,
    drawn: Callable[[str], int],
) -> dict[str, Draw]:
    """The sampler of every slot for one party, after ``drawn`` draws of each.

    With ``ids`` all parties share the secret key and sample by record, as one curator of all records would.
    """
    owner = f"/{plan.names[party]}" if ids is None else ""
    draws: dict[str, Draw] = {}
    fresh: SlotSampler | None = None
    for slot in plan.schedule.slots:
        stream, local = SecureStream(key, f"sample/{slot.name}{owner}"), slot.sampling.at_party(plan.sizes, party)
        if local is None:
            draws[slot.name] = lambda draw: np.empty(0, np.int64)
        elif local.fresh:
            if fresh is None:
                # Each record has a secret slot of n, by a keyed hash of its id: a replaced record keeps its slot.
                names = np.arange(n_records) if ids is None else ids
                slots = hashed_slots(names, local.pass_size, SecureStream(key, f"sample/fresh{owner}"))
                fresh = SlotSampler(slots, local.pass_size)
            fresh.skip_to(fresh.position + local.fresh * drawn(slot.name))
            draws[slot.name] = partial(_take, fresh, local.fresh)
        else:
            draws[slot.name] = (local.sampler(n_records, stream) if ids is None else local.by_id(ids, stream)).batch
    return draws


def _take(fresh: SlotSampler, count: int, draw: int) -> npt.NDArray[np.int64]:
    return fresh.take(count)


Floats = npt.NDArray[np.float64]

_ROUNDS_AT_ONCE = 2**10  # rounds of noise made together for short vectors


class PartyCurator(Member):
    """A data holder's end of a federation.

    Args:
        data: what ``objective.prepare`` takes.
        plan: the plan this party approved; a coordinator with another one is refused.
        ledger, account, cap: as in :class:`~quietgrad.core.session.curator.CentralCurator`; this party's own.
        identity: this party's own keys, for secure sums.
        roster: the public keys of all members, for secure sums.
        folder: keep a journal here, so that this party can restart within the run; without it a restarted party
            has approved another run and is charged for the whole plan again. One process at a time.
        seed: fixed randomness, for tests: the run is then **not private**.
        ids: whole numbers that name the records, by which parties of one seed sample.
        revocations: the members that this party does not trust; the coordinator's list is added to them.
        pace: when answers leave, where this party draws in secret.
    """

    def __init__(
        self,
        name: str,
        objective: Objective,
        data: object,
        plan: FederatedPlan,
        *,
        ledger: Ledger | str | Path | None = None,
        account: str = "default",
        cap: Budget | None = None,
        identity: Identity | None = None,
        roster: Roster | None = None,
        folder: str | Path | None = None,
        ids: npt.ArrayLike | None = None,
        seed: int | None = None,
        revocations: Revocations | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.name, self.objective, self.plan = name, plan.asks(objective), plan
        self._pace: Pace = PublicTime() if pace is None else pace
        if isinstance(data, RecordsWithIds) != (plan.unit is PrivacyUnit.PERSON):
            what = "leave out" if isinstance(data, RecordsWithIds) else "say"
            raise DataError(f"{name}: the plan counts a {plan.unit} as one; {what} whose each record is.")
        self.records = self.objective.prepare(data)
        if name not in plan.numbers:
            raise ValueError(f"{name!r} is not a party of this plan: {', '.join(plan.names)}.")
        self._place = plan.numbers[name]
        self._check_records()
        # What is kept goes on after a restart, and without a ledger nothing does.
        people = Account(account, ledger, cap)
        if folder is not None:
            people = Terms.of(plan.budget, account=account, ledger=ledger, cap=cap, seed=seed).account
        self.private_notes: list[str] = []
        """Sums that could not be made, with the reason, which may hold a record's value: for this party alone."""
        self._seed, self._revocations = seed, Revocations() if revocations is None else revocations
        self._ids = None if ids is None else np.asarray(ids)
        self._member: MaskingMember | SharingMember | None = None
        if plan.secure is not None:
            if identity is None or roster is None:
                raise ValueError(f"{name}: secure sums need this party's identity and the roster.")
            kind = MaskingMember if plan.secure == "masks" else SharingMember
            self._member = kind(plan, identity, roster, seed=seed, revocations=revocations)
        self._zero = zeros_like(self.objective.initial(self.records))
        self._inner: dict[str, SecureStream] = {}
        templates = [each for some in plan.templates.values() for each in some]
        vectors = max([1, *(sum(isinstance(value, list) for value in each.values()) for each in templates)])
        self._most = wire.limit(max([1, *plan.dims.values()]), 4 * (2 + vectors))
        self._samplers: dict[str, Draw] = {}
        in_run = {"ask": self._ask} | ({} if self._member is None else self._member.kinds)
        self._kinds = {kind: partial(self._in_run, answer) for kind, answer in in_run.items()}
        self._kinds |= {"open": self._open, "close": self._close}
        self._sources: dict[str, NoiseSource] = {}
        self._journal = Journal(None if folder is None else Path(folder), name, plan.digest)
        self._last = LastReply(None if folder is None else Path(folder) / f"{name}.reply", name)
        self.approval = Approval(plan, self._place, people, self._journal, self.records.fingerprint_parts)
        try:
            self._keep_places()
        except BaseException:
            self.close()
            raise

    def _keep_places(self) -> None:
        if self.plan.uses_records_in_turn and self._seed is None:
            self._journal.keep_places(self.records.contents)

    def _check_records(self) -> None:
        shape = Shape.of(self.records)
        if shape != self.plan.shape:
            raise DataError(f"{self.name}: records have shape {tuple(shape)}, the plan {tuple(self.plan.shape)}.")
        size, budget = self.plan.sizes[self._place], self.plan.budget
        if len(self.records) > 2 * size + 64:
            raise DataError(
                f"{self.name}: the plan declares {size} records; declare a number closer to that of the data."
            )
        exact = budget is not None and budget.relation is Relation.REPLACE_ONE
        fixed = any(slot.sampling.counts_exactly for slot in self.plan.schedule.slots)
        if (exact or fixed) and len(self.records) != size:
            raise DataError(
                f"{self.name}: the data do not have the {size} records of the plan: under replace-one, or with "
                "fixed "
                "batches, it must be exact."
            )

    @property
    def run(self) -> str | None:
        return self._journal.run

    def answered(self) -> dict[str, int]:
        """How many draws of each slot this party answered in the run it knows."""
        return {slot.name: self._journal.draws(slot.name) for slot in self.plan.schedule.slots}

    def _known_run(self, message: Message) -> str:
        run = self._journal.run
        if run is None or run != message.fields.get("run"):
            raise UnknownRunError(self.name, "does not know this run")
        return run

    def _in_run(self, answer: Handling, message: Message) -> Message:
        """Answer a message of the run that is open here, and of no other."""
        self._known_run(message)
        if self._journal.ended:
            raise BudgetError("this run is over; nothing was given.")
        if not self.approval.in_use:
            raise UnknownRunError(self.name, "does not know this run")
        return answer(message)

    def _close(self, message: Message) -> Message:
        run = self._known_run(message)
        self.approval.close(run, str(message.fields.get("reason", ""))[:200])
        self._last.forget()
        return Message("closed", {"run": run})

    def _open(self, message: Message) -> Message:
        """Compare plans, pay, and be ready; opening the same run again continues it, and there is no other."""
        run = message.fields.get("run")
        if not isinstance(run, str) or not run.isalnum() or not is_path_name(run) or len(run) > 64:
            raise ProtocolError("coordinator", "gives no name to the run")
        if message.fields.get("plan") != self.plan.digest:
            raise BudgetError("the coordinator's plan is not the one that was approved here; nothing was given.")
        self._revocations.take(message.fields)
        if not self.approval.use(run):
            return Message("closed", {"run": run})
        if not self._samplers:
            self._keep_places()
            self._draw_keys()
        return Message("ready", {"run": run, "round": self._journal.last_round})

    def _draw_keys(self) -> None:
        """Samples go on where an earlier process of this run was; noise is of this process alone."""
        # A round is answered once, so the same noise never has to be drawn again: then it cannot be, either.
        samples, noise = (self._journal.key, fresh_key()) if self._seed is None else (seed_key(self._seed),) * 2
        self._sources = {
            slot.name: slot.mechanism.source(noise, f"local/{self.name}/{slot.name}", _ROUNDS_AT_ONCE)
            for slot in self.plan.schedule.slots
        }
        if self._member is not None:
            self._member.begin(noise)
        if isinstance(self.objective, UserLevelObjective):  # which of a person's records are looked at
            self._inner = {
                slot.name: SecureStream(samples, f"inner/{self.name}/{slot.name}")
                for slot in self.plan.schedule.slots
            }
        self._samplers = samplers(
            self.plan, self._place, samples, len(self.records), self._ids, self._journal.draws
        )

    def _ask(self, message: Message) -> Message:
        question = b"" if self._member else hashlib.blake2b(wire.encode(message), digest_size=32).digest()
        if self._member is None and (again := self._last.to(question, self._journal.last_round)) is not None:
            return again  # lost on its way, or this party, or the coordinator, restarted: not a new release
        slot, draw, t = self._check_turn(message)
        packed = message.fields.get("query")
        reason = wire.template_mismatch(self.plan.templates.get(slot, ()), packed, message.arrays)
        if reason is not None:
            raise BudgetError(f"slot {slot!r}: {reason}; nothing was given.")
        try:
            query = wire.unpack(packed, message.arrays, self._zero)
        except ValueError as error:  # a number outside of what such a query may have
            raise BudgetError(f"slot {slot!r}: {error} Nothing was given.") from None
        if isinstance(query, LocalFit):  # its noise follows from its claimed sensitivity: prove that here
            n, loss = self.plan.n_public, public_loss(self.objective)
            proved = local_fit(loss, n, query.steps, query.step_size, query.row_bound).sensitivity
            if query.n != n or query.sensitivity < proved * (1.0 - 1e-12):
                raise BudgetError(f"a fit of sensitivity {query.sensitivity:g} is asked; it is {proved:g}.")
        multiplier = self.plan.multiplier(slot)
        drawn = self._is_drawn(message, slot)
        if self._member is not None:
            self._member.ready(message)
        give_back(query.dim(self.records))
        try:
            takes_part = drawn is None or drawn
            total = partial(self._answer_sum, slot, draw, query) if takes_part else partial(self._zeros, query)
            reply = self._answer(message, slot, total, query, multiplier)
            if self._member is None:
                self._last.keep(question, t, reply)
        finally:
            self._journal.record(t, slot, draw, drawn=bool(drawn))  # before anything leaves, and whatever happened
            if self._draws_in_secret(slot):
                self._pace.hold()
        return reply

    def _is_drawn(self, message: Message, slot: str) -> bool | None:
        """Whether the coordinator drew this party; ``None`` where it draws none.

        It lets that happen so many times only. Beyond these it hands in zeros, not a refusal: a refusal would show
        in released sums that it was drawn.
        """
        most, drawn = self.plan.schedule[slot].sampling.coordinator_draws, message.fields.get("drawn")
        if (most is None) != (drawn is None) or not isinstance(drawn, bool | None):
            raise ProtocolError(
                "coordinator", "says whether a party is drawn where the plan does not, or does not say"
            )
        return None if most is None else bool(drawn) and self._journal.times_drawn(slot) < most

    def _answer_sum(self, slot: str, draw: int, query: Query) -> Floats:
        """This party's sum; if it draws in secret, by a coin that is drawn last, handed over at a public time."""
        if not self._draws_in_secret(slot):
            return self._sum(slot, draw, query, self._samplers[slot](draw) if self._samples(slot) else None)
        seconds = self.plan.schedule[slot].sampling.answer_after
        assert seconds is not None

        def coin() -> bool:
            # Presence is settled by now: the others of the round are known, and this party answers in any case.
            indices = self._samplers[slot](draw)
            return indices is None or len(indices) > 0

        return self._pace.answer(lambda: self._sum(slot, draw, query, None), coin, self._zeros(query), seconds)

    def _draws_in_secret(self, slot: str) -> bool:
        """Whether its coin must not show in when this party answers; a trusted curator may know it."""
        return self.plan.schedule[slot].sampling.answer_after is not None and self.plan.trust != "curator"

    def _samples(self, slot: str) -> bool:
        """Whether this side's sampler says which records take part; not where the coordinator drew the party."""
        return self.plan.schedule[slot].sampling.coordinator_draws is None

    def _zeros(self, query: Query) -> Floats:
        return np.zeros(query.dim(self.records))

    def _answer(
        self, message: Message, slot: str, sum_of: Callable[[], Floats], query: Query, multiplier: float
    ) -> Message:
        """The reply with what ``sum_of`` returns; a long vector is held by no more places than needed."""
        if self._member is not None:
            bound = query.bound * self.plan.reach

            def in_units() -> Floats:
                total = sum_of()
                total /= self.plan.scale(multiplier, bound, len(total))  # in place: there may be no room for two
                return total

            return self._member.submit(message, in_units)
        total, bound = sum_of(), query.bound * self.plan.factors[self._place]
        if self.plan.own_noise and multiplier > 0.0 and bound > 0.0:
            self._sources[slot].add(total, message.fields["draw"], multiplier, bound)
        return Message("sum", {"run": self._journal.run, "round": message.fields["round"]}, {"total": total})

    def _check_turn(self, message: Message) -> tuple[str, int, int]:
        slot, draw = message.fields.get("slot"), message.fields.get("draw")
        t = round_of(message)
        if not isinstance(slot, str) or type(draw) is not int:
            raise ProtocolError("coordinator", "asks without slot and draw")
        limit = self.plan.limit(slot)
        if t <= self._journal.last_round:
            raise ProtocolError("coordinator", f"round {t} is stale: {self._journal.last_round} was answered")
        slots = self.plan.schedule.slots
        if draw != t and len(slots) == 1 and slots[0].mechanism.together:
            # One slot: its draws are the rounds, by which a secure sum's noise goes. Otherwise one cohort could be
            # asked in every round. Beside other slots noise and cohorts both go by draws, and no sum is secure.
            raise ProtocolError("coordinator", f"asks for draw {draw} in round {t}; they are the same here")
        if not self._journal.draws(slot) <= draw < limit:
            raise BudgetError(f"slot {slot!r}: draw {draw} is a repetition or beyond the planned {limit}.")
        return slot, draw, t

    def _sum(self, slot: str, draw: int, query: Query, indices: npt.NDArray[np.int64] | None) -> Floats:
        out: OwnVector = np.zeros(query.dim(self.records))
        if indices is None or len(indices):
            inner = self._inner.get(slot)
            batch = Batch(self.records, indices, None if inner is None else inner.bytes(draw, 32))
            try:
                out = batch_sum(query, self.objective, batch, self._zero, private=self.plan.is_private)
            except (MemoryError, OSError):
                raise
            except Exception as error:  # a refusal could depend on a record: the answer is noise alone
                self.private_notes.append(f"slot {slot}, draw {draw}: {type(error).__name__}: {error}")
        total: Floats = out if isinstance(out, np.ndarray) else out.detach().cpu().numpy()
        factor = self.plan.factors[self._place]
        if factor != 1.0:
            total *= factor
        return np.asarray(total, np.float64)

    def withdraw(self) -> bool:
        """Withdraw after the coordinator gave up. Return whether all is given back, since it asked nothing."""
        self._samplers = {}
        return self.approval.withdraw()

    def discard(self) -> None:
        """Book a run whose results are safe, if the coordinator's close did not arrive, and remove its journal."""
        if self.approval.in_use and self._journal.run is not None:
            self.approval.close(self._journal.run, "the model came")
        self._last.forget()
        self._journal.discard()

    def close(self) -> None:
        self._last.close()
        self._journal.close()
