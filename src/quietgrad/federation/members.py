"""Members who answer messages, and the roles that they have in secure sums.

Everything that a coordinator says arrives at :meth:`Member.handle` as bytes. A role in secure sums is made anew,
with new keys, for every length of vector and every epoch that the coordinator begins. Its configuration comes from
the plan that this side approved, never from the message. How a role answers stands in
:mod:`quietgrad.federation.secure.choreography`; here its frames are put into messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, TypeVar

from quietgrad.core.errors import BudgetError, DataError, QuietgradError
from quietgrad.core.files import os_error_text
from quietgrad.federation import wire
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.revocation import Revocations
from quietgrad.federation.secure.channel import Endpoint, NoiseShare
from quietgrad.federation.secure.choreography import ANSWERS, Answer, Reply, submission
from quietgrad.federation.secure.graph import GRAPHS_PER_RELEASE
from quietgrad.federation.secure.identity import Identity, ProtocolError, Roster
from quietgrad.federation.secure.masking import MaskingParty
from quietgrad.federation.secure.servers import NoiseServer, SharingParty, SumServer
from quietgrad.federation.wire import Array, Bytes, Message, WireError, refusal


class UnknownRunError(ProtocolError):
    """This side does not know the run: it restarted, and gets the run again."""


Handling = Callable[[Message], Message]


class Member:
    """A member that answers messages: a table of the kinds that it understands, and one way to refuse.

    A message may be anything. Kinds that the plan's mode does not have are not in the table.
    """

    name: str
    _most: int
    _kinds: Mapping[str, Handling]

    def handle(self, data: Bytes) -> bytearray:
        """Answer one message; never raises, and what it says of a failure depends on no record."""
        try:
            message = wire.decode(data, most=self._most)
            answer = self._kinds.get(message.kind)
            if answer is None:
                raise ProtocolError("coordinator", f"says {message.kind[:40]!r}; {self.name} does not know it")
            return wire.encode(answer(message))
        except ProtocolError as error:
            return refusal("stranger" if isinstance(error, UnknownRunError) else "protocol", str(error))
        except (BudgetError, DataError) as error:
            return refusal("plan", f"{self.name}: {error}")
        except (QuietgradError, WireError) as error:
            return refusal("protocol", f"{self.name}: {error}")
        except OSError as error:  # a full disk has a name, and that carries no record
            return refusal("failed", f"{self.name}: could not keep its journal ({os_error_text(error)})")
        except Exception:  # its text, or even its type, could carry a record's value
            return refusal("failed", f"{self.name}: could not answer")

    def close(self) -> None:
        """Let go of what is open."""


Role = TypeVar("Role", bound=Endpoint)


class _Roles(Generic[Role]):
    """A member's roles of one kind in secure sums, by length of vector, and the messages that set them up."""

    _kind: type[Role]

    def __init__(
        self,
        plan: FederatedPlan,
        identity: Identity,
        roster: Roster,
        *,
        seed: int | None = None,
        revocations: Revocations | None = None,
    ) -> None:
        if roster.names[: len(plan.names)] != plan.names:
            raise ValueError("roster: must begin with the plan's parties, in their order.")
        self.name, self._plan, self._seed = identity.name, plan, seed
        self._identity, self._roster = identity, roster
        self._revocations = Revocations() if revocations is None else revocations
        self._roles: dict[int, Role] = {}
        self._shares: dict[int, NoiseShare] = {}
        self._key: bytes | None = None
        self._drawn: dict[str, int] = {}
        self._most_drawn = GRAPHS_PER_RELEASE * sum(plan.limit(slot.name) for slot in plan.schedule.slots)
        self.kinds: dict[str, Handling] = {"hello": self._set_up}
        """What is understood of secure sums, beside the question itself."""
        self.kinds |= {kind: partial(self._answer, answer) for kind, answer in ANSWERS[self._kind].items()}

    def begin(self, key: bytes) -> None:
        """A run begins or continues, with this secret for noise that outlives a set-up."""
        self._key, self._shares = key, {}

    def _share(self, dim: int) -> NoiseShare | None:
        """Noise that is correlated over rounds goes on whatever keys the rounds have; other noise does not."""
        terms = self._plan.terms(dim)
        if terms.correlated is None or self._kind is SharingParty:
            return None
        if dim not in self._shares:
            self._shares[dim] = NoiseShare(terms, self._roster.index(self.name), self._seed, self._key)
        return self._shares[dim]

    def _role(self, message: Message) -> Role:
        dim = message.fields.get("dim")
        if type(dim) is not int or dim not in self._roles:
            raise ProtocolError(self.name, "has no keys for this epoch: it restarted, or missed the beginning")
        return self._roles[dim]

    def _answer(self, answer: Answer, message: Message) -> Message:
        role, t = self._role(message), round_of(message)
        return _message(answer.kind, t, answer.of(role, t, message.arrays))

    def _set_up(self, message: Message) -> Message:
        """Answer ``hello`` with a signed key for a new epoch."""
        self._revocations.take(message.fields)
        dim = message.fields.get("dim")
        if type(dim) is not int or dim not in self._plan.dims.values():
            raise ProtocolError("coordinator", f"asks for sums of length {dim!r}, which the plan does not have")
        run = str(message.fields.get("run"))
        if run not in self._drawn:
            self._shares = {}
        self._drawn = {run: self._drawn.get(run, 0) + 1}
        if self._drawn[run] > self._most_drawn:
            # Each set-up draws neighbours anew; unbounded set-ups would find some that do not protect us.
            raise ProtocolError("coordinator", f"asks for new keys more than {self._most_drawn} times in one run")
        epoch = message.fields.get("epoch")
        if not isinstance(epoch, str) or not re.fullmatch("[0-9a-f]{32}", epoch):
            raise ProtocolError("coordinator", "names no epoch")
        role = self._kind(
            self._identity, self._roster, self._plan.terms(dim), bytes.fromhex(epoch), seed=self._seed,
            noise=self._share(dim), revoked=self._revocations,
        )  # fmt: skip
        if isinstance(role, MaskingParty):  # new keys must not hide that two lists of survivors were signed
            seen = [old.witness for old in self._roles.values() if isinstance(old, MaskingParty) and old.witness]
            role.witness = max(seen, key=lambda witness: witness.round, default=None)
        self._roles[dim] = role
        return Message("hello", {}, wire.blobs({"frame": role.hello}))


class SharingMember(_Roles[SharingParty]):
    """A party that gives shares of its sums to servers."""

    _kind = SharingParty

    def ready(self, message: Message) -> None:
        """Refuse before any record is touched if this side cannot take part in the round."""
        self._role(message)

    def submit(self, message: Message, vector: Callable[[], Array]) -> Message:
        t = round_of(message)
        return _message("shares", t, submission(self._role(message), t, vector()))


class MaskingMember(_Roles[MaskingParty]):
    """A party that masks its sums."""

    _kind = MaskingParty

    def ready(self, message: Message) -> None:
        """Refuse before any record is touched if this side cannot take part in the round."""
        self._role(message).check_delivered(round_of(message))

    def submit(self, message: Message, vector: Callable[[], Array]) -> Message:
        role, t = self._role(message), round_of(message)
        role.add(t, vector())  # it has no name here, so it is gone when its masked form is sealed
        return _message("masked", t, Reply({"frame": role.sealed(t)}))


class SumMember(_Roles[SumServer], Member):
    """A server of ``"servers"`` or ``"mpc"``: adds shares and noise, and never sees a vector.

    It keeps nothing of a run: it is there, and gets keys when it is needed.
    """

    def __init__(
        self,
        plan: FederatedPlan,
        identity: Identity,
        roster: Roster,
        *,
        seed: int | None = None,
        revocations: Revocations | None = None,
    ) -> None:
        self._kind = NoiseServer if plan.secure == "mpc" else SumServer
        super().__init__(plan, identity, roster, seed=seed, revocations=revocations)
        self._most = wire.limit(max([1, *plan.dims.values()]), 2 * len(plan.names) + 64)
        self._kinds = self.kinds | {"open": self._open, "partial": partial(self._counted, self.kinds["partial"])}
        self.rounds = 0
        """How many sums this server has added its part to."""

    def _open(self, message: Message) -> Message:
        self._revocations.take(message.fields)
        return Message("ready", {"round": -1})

    def _counted(self, answer: Handling, message: Message) -> Message:
        reply = answer(message)
        self.rounds += 1
        return reply


def _message(kind: str, t: int, reply: Reply) -> Message:
    left_out = {"left_out": dict(reply.left_out)} if reply.left_out else {}
    return Message(kind, {"round": t, **left_out}, wire.blobs(reply.frames))


def round_of(message: Message) -> int:
    t = message.fields.get("round")
    if type(t) is not int or not 0 <= t < 1 << 62:
        raise ProtocolError("coordinator", "names no round")
    return t
