"""Members who answer messages, and the parties' and servers' roles in secure sums.

A role is made anew, with new keys, for every length of vector and every epoch that the coordinator begins. Its
configuration comes from the plan that this side approved, never from the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from quietgrad.errors import BudgetError, DataError, QuietgradError
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.wire import Array, Bytes, Message, WireError, blobs, decode, encode, limit, refusal
from quietgrad.files import os_error_text as error_words
from quietgrad.secure.channel import Endpoint, NoiseShare
from quietgrad.secure.graph import GRAPHS_PER_RELEASE
from quietgrad.secure.identity import Identity, ProtocolError, Roster
from quietgrad.secure.masking import MaskingParty
from quietgrad.secure.servers import Computation, NoiseServer, SharingParty, SumServer


class UnknownRunError(ProtocolError):
    """This side does not know the run: it restarted, and is told of the run again."""


Answer = Callable[[Message], Message]


class Member:
    """A member that answers messages: a table of the kinds that it understands, and one way to refuse.

    A message may be anything. Kinds that the plan's mode does not have are not in the table.
    """

    name: str
    _most: int
    _kinds: Mapping[str, Answer]

    def handle(self, data: Bytes) -> bytearray:
        """Answer one message; never raises, and what it says of a failure depends on no record."""
        try:
            message = decode(data, most=self._most)
            answer = self._kinds.get(message.kind)
            if answer is None:
                raise ProtocolError("coordinator", f"says {message.kind[:40]!r}; {self.name} does not know it")
            return encode(answer(message))
        except ProtocolError as error:
            return refusal("stranger" if isinstance(error, UnknownRunError) else "protocol", str(error))
        except (BudgetError, DataError) as error:
            return refusal("plan", f"{self.name}: {error}")
        except (QuietgradError, WireError) as error:
            return refusal("protocol", f"{self.name}: {error}")
        except OSError as error:  # a full disk has a name, and that carries no record
            return refusal("failed", f"{self.name}: could not keep its journal ({error_words(error)})")
        except Exception:  # its text, or even its type, could carry a record's value
            return refusal("failed", f"{self.name}: could not answer")

    def close(self) -> None:
        """Let go of what is open."""


Role = TypeVar("Role", bound=Endpoint)


class _Roles(Generic[Role]):
    """Roles by length of vector, and the messages that set them up."""

    def __init__(self, plan: FederatedPlan, identity: Identity, roster: Roster, seed: int | None = None) -> None:
        if roster.names[: len(plan.names)] != plan.names:
            raise ValueError("roster: must begin with the plan's parties, in their order.")
        self.name, self._plan, self._identity = identity.name, plan, identity
        self._roster, self._seed = roster, seed
        self._roles: dict[int, Role] = {}
        self._shares: dict[int, NoiseShare] = {}
        self._key: bytes | None = None
        self._drawn: dict[str, int] = {}
        self._most_drawn = GRAPHS_PER_RELEASE * sum(plan.limit(slot.name) for slot in plan.schedule.slots)

    def _make(self, dim: int, epoch: bytes) -> Role:
        raise NotImplementedError

    @property
    def kinds(self) -> dict[str, Answer]:
        """What is understood of secure sums, beside the question itself."""
        return {"hello": self.set_up, "meet": self.meet}

    def begin(self, key: bytes) -> None:
        """A run begins or continues, with this secret for noise that outlives a set-up."""
        self._key, self._shares = key, {}

    def _share(self, dim: int) -> NoiseShare | None:
        """Noise that is correlated over rounds goes on whatever keys the rounds have; other noise does not."""
        terms = self._plan.terms(dim)
        if terms.correlated is None:
            return None
        if dim not in self._shares:
            self._shares[dim] = NoiseShare(terms, self._roster.index(self.name), self._seed, self._key)
        return self._shares[dim]

    def _role(self, message: Message) -> Role:
        dim = message.fields.get("dim")
        if type(dim) is not int or dim not in self._roles:
            raise ProtocolError(self.name, "has no keys for this epoch: it restarted, or missed the beginning")
        return self._roles[dim]

    def _step(self, reply: str, step: Callable[[Role, int, Message], Mapping[str, Array]]) -> Answer:

        def answer(message: Message) -> Message:
            role, t = self._role(message), round_of(message)
            return Message(reply, {"round": t}, step(role, t, message))

        return answer

    def meet(self, message: Message) -> Message:
        self._role(message).meet([message.blob(name) for name in sorted(message.arrays)])
        return Message("ok")

    def set_up(self, message: Message) -> Message:
        """Answer ``hello`` with a signed key for a new epoch."""
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
        self._roles[dim] = role = self._make(dim, bytes.fromhex(epoch))
        return Message("hello", {}, blobs({"frame": role.hello}))


class SharingMember(_Roles[SharingParty]):
    """A party that gives shares of its sums to servers."""

    def _make(self, dim: int, epoch: bytes) -> SharingParty:
        return SharingParty(self._identity, self._roster, self._plan.terms(dim), epoch)

    def ready(self, message: Message) -> None:
        """Refuse before any record is touched if this side cannot take part in the round."""
        self._role(message)

    def submit(self, message: Message, vector: Array) -> Message:
        return self._step("shares", lambda role, t, _: blobs(role.share(t, vector)))(message)


class MaskingMember(_Roles[MaskingParty]):
    """A party that masks its sums."""

    def _make(self, dim: int, epoch: bytes) -> MaskingParty:
        seen = [role.witness for role in self._roles.values() if role.witness is not None]
        role = MaskingParty(
            self._identity, self._roster, self._plan.terms(dim), epoch, seed=self._seed, noise=self._share(dim)
        )
        role.witness = max(seen, key=lambda witness: witness.round, default=None)
        return role

    @property
    def kinds(self) -> dict[str, Answer]:
        return super().kinds | {
            "prepare": self._step("frame", lambda role, t, _: blobs({"frame": role.prepare(t)})),
            "reveal": self._step("frame", lambda role, t, m: blobs({"frame": role.reveal(t, m.blob("frame"))})),
        }

    def ready(self, message: Message) -> None:
        """Refuse before any record is touched if this side cannot take part in the round."""
        self._role(message).deliver(round_of(message), message.blob("deliver"))

    def submit(self, message: Message, vector: Array) -> Message:
        return self._step("masked", lambda role, t, _: blobs({"frame": role.submit(t, vector)}))(message)


SecureMember = SharingMember | MaskingMember
"""A party's side of secure sums."""


class SumMember(_Roles[SumServer], Member):
    """A server of ``"servers"`` or ``"mpc"``: adds shares and noise, and never sees a vector.

    It keeps nothing of a run: it is there, and gets keys when it is needed.
    """

    def __init__(self, plan: FederatedPlan, identity: Identity, roster: Roster, *, seed: int | None = None) -> None:
        super().__init__(plan, identity, roster, seed)
        self._noise: dict[int, Computation[None]] = {}
        self._most = limit(max([1, *plan.dims.values()]), 2 * len(plan.names) + 64)
        mpc = {"noise": self._step("noise", self._sample)} if plan.secure == "mpc" else {}
        self._kinds = {**self.kinds, **mpc,
            "open": lambda message: Message("ready", {"round": -1}),
            "receive": self._step("present", lambda role, t, m: blobs(role.receive(t, _frames(m)))),
            "partial": self._step("partial", lambda role, t, m: _optional(role.partial(t, _frames(m)))),
            "finish": self._step("total", lambda role, t, m: {"total": role.finish(t, _frames(m))}),
        }  # fmt: skip

    def _make(self, dim: int, epoch: bytes) -> SumServer:
        terms = self._plan.terms(dim)
        if self._plan.secure == "mpc":
            return NoiseServer(self._identity, self._roster, terms, epoch, seed=self._seed)
        return SumServer(self._identity, self._roster, terms, epoch, seed=self._seed, noise=self._share(dim))

    def _sample(self, role: SumServer, t: int, message: Message) -> dict[str, Array]:
        """One step of sampling the noise together: a frame of the next server in, a frame for the previous out."""
        dim = role.terms.dimension
        try:
            if "frame" in message.arrays:
                if dim not in self._noise:
                    raise ProtocolError("coordinator", "sends a frame for noise that was not begun")
                return _optional(self._noise[dim].send(message.blob("frame")))
            assert isinstance(role, NoiseServer)
            self._noise[dim] = role.prepare(t)
            return _optional(next(self._noise[dim]))
        except StopIteration:
            return {}


def _optional(frame: bytes | None) -> dict[str, Array]:
    return {} if frame is None else blobs({"frame": frame})


def round_of(message: Message) -> int:
    t = message.fields.get("round")
    if type(t) is not int or not 0 <= t < 1 << 62:
        raise ProtocolError("coordinator", "names no round")
    return t


def _frames(message: Message) -> dict[int, bytes]:
    if not all(name.isascii() and name.isdigit() and len(name) < 6 for name in message.arrays):
        raise WireError("frames have roster numbers for names")
    return {int(name): message.blob(name) for name in message.arrays}
