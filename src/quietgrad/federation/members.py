"""The two ends of a secure sum that answer messages: a party who gives a vector, and a server who adds them up.

Each keeps one role of the protocol per length of vector, made anew (with new keys) whenever the coordinator starts
an epoch. Terms come from the plan that this side approved, never from the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quietgrad.federation.cohorts import invited_by, roster_of
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.wire import Array, Bytes, Message, WireError, blobs, decode, encode, limit
from quietgrad.secure.channel import Endpoint
from quietgrad.secure.faults import ProtocolError
from quietgrad.secure.graph import GRAPHS_PER_RELEASE
from quietgrad.secure.identity import Identity, Roster
from quietgrad.secure.masking import MaskingParty
from quietgrad.secure.mpc import NoiseServer
from quietgrad.secure.noise_share import NoiseShare
from quietgrad.secure.replicated import Exchange
from quietgrad.secure.servers import SharingParty, SumServer


class Stranger(ProtocolError):
    """This side has no role in the epoch it was asked about: it restarted, or missed its beginning."""


class _Member:
    """Roles by length of vector, and the messages that set them up."""

    def __init__(self, plan: FederatedPlan, identity: Identity, roster: Roster, seed: int | None) -> None:
        if roster.names[: len(plan.names)] != plan.names:
            raise ValueError("roster: must begin with the plan's parties, in their order.")
        self.name, self._plan, self._identity, self._roster, self._seed = (
            identity.name,
            plan,
            identity,
            roster,
            seed,
        )
        self._roles: dict[int, Any] = {}
        self._shares: dict[int, NoiseShare] = {}
        self._key: bytes | None = None
        self._drawn: dict[str, int] = {}
        self._most_drawn = GRAPHS_PER_RELEASE * sum(plan.limit(slot.name) for slot in plan.schedule.slots)

    def _make(self, dim: int, epoch: bytes, roster: Roster) -> Endpoint:
        raise NotImplementedError

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

    def _role(self, message: Message) -> Any:
        dim = message.fields.get("dim")
        if dim not in self._roles:
            raise Stranger(self.name, "has no keys for this epoch")
        return self._roles[dim]

    def set_up(self, message: Message) -> Message:
        """Answer ``hello`` with a signed key for a new epoch, and ``meet`` by verifying everybody's."""
        if message.kind == "meet":
            self._role(message).meet([message.blob(name) for name in sorted(message.arrays)])
            return Message("ok")
        dim = message.fields.get("dim")
        if dim not in set(self._plan.dims.values()):
            raise ProtocolError("coordinator", f"asks for sums of length {dim!r}, which the plan does not have")
        run = str(message.fields.get("run"))
        if run not in self._drawn:
            self._shares = {}
        self._drawn = {run: self._drawn.get(run, 0) + 1}
        if self._drawn[run] > self._most_drawn:
            # Each set-up draws neighbours anew; whoever could ask for ever would find some that do not protect us.
            raise ProtocolError("coordinator", f"asks for new keys more than {self._most_drawn} times in one run")
        roster = roster_of(self._plan, self._roster, invited_by(self._plan, message.fields))
        if self.name not in roster.names:
            raise ProtocolError("coordinator", "asks for keys for a round of others")
        role = self._make(int(dim), bytes.fromhex(str(message.fields.get("epoch"))), roster)
        self._roles[int(dim)] = role
        return Message("hello", {}, blobs({"frame": role.hello}))


class SecureMember(_Member):
    """A party's side."""

    def _make(self, dim: int, epoch: bytes, roster: Roster) -> Endpoint:
        terms = self._plan.terms(dim)
        if terms.mode == "masks":
            seen = [role.witness for role in self._roles.values() if role.witness is not None]
            last = max(seen, key=lambda witness: witness.round, default=None)
            return MaskingParty(
                self._identity, roster, terms, epoch, seed=self._seed, witness=last, noise=self._share(dim)
            )
        return SharingParty(self._identity, roster, terms, epoch)

    def answer(self, message: Message) -> Message:
        """Everything but the vector itself."""
        if message.kind in ("hello", "meet"):
            return self.set_up(message)
        role, t = self._role(message), int(message.fields["round"])
        if message.kind == "prepare":
            return Message("frame", {"round": t}, blobs({"frame": role.prepare(t)}))
        return Message("frame", {"round": t}, blobs({"frame": role.reveal(t, message.blob("frame"))}))

    def ready(self, message: Message) -> None:
        """Refuse before any record is touched if this side cannot take part in the round."""
        role = self._role(message)
        if isinstance(role, MaskingParty):
            role.deliver(int(message.fields["round"]), message.blob("deliver"))

    def submit(self, message: Message, vector: Array) -> Message:
        """The vector, masked or in shares."""
        role, t = self._role(message), int(message.fields["round"])
        if isinstance(role, MaskingParty):
            return Message("masked", {"round": t}, blobs({"frame": role.submit(t, vector)}))
        return Message("shares", {"round": t}, blobs(role.share(t, vector)))


class SumMember(_Member):
    """A server of ``"servers"`` or ``"mpc"``: adds shares and noise, and never sees a vector.

    Args:
        plan: the plan this server approved.
        identity: its long-term identity, on the roster.
        roster: the parties in the plan's order, then the servers.
        seed: fixes the noise, for tests only.
    """

    def __init__(self, plan: FederatedPlan, identity: Identity, roster: Roster, *, seed: int | None = None) -> None:
        super().__init__(plan, identity, roster, seed)
        self._noise: dict[int, Exchange[None]] = {}
        self._most = limit(max([1, *plan.dims.values()]), 2 * len(plan.names) + 64)

    def _make(self, dim: int, epoch: bytes, roster: Roster) -> Endpoint:
        terms = self._plan.terms(dim)
        if self._plan.secure == "mpc":
            return NoiseServer(self._identity, roster, terms, epoch, seed=self._seed)
        return SumServer(self._identity, roster, terms, epoch, seed=self._seed, noise=self._share(dim))

    def handle(self, data: Bytes) -> bytearray:
        """Answer one message; never raises."""
        try:
            return encode(self._answer(decode(data, most=self._most)))
        except Stranger as refusal:
            return encode(Message("refused", {"code": "stranger", "reason": str(refusal)}))
        except (ProtocolError, WireError, ValueError, KeyError, TypeError) as refusal:
            return encode(Message("refused", {"code": "protocol", "reason": f"{refusal}"}))

    def close(self) -> None:
        """Nothing is kept."""

    def _answer(self, message: Message) -> Message:
        if message.kind in ("hello", "meet"):
            return self.set_up(message)
        role, t = self._role(message), int(message.fields["round"])
        if message.kind == "noise":
            return self._sample(role, t, message)
        frames = {int(name): message.blob(name) for name in message.arrays}
        if message.kind == "receive":
            return Message("present", {"round": t}, blobs(role.receive(t, frames)))
        if message.kind == "partial":
            partial = role.partial(t, frames)
            return Message("partial", {"round": t}, {} if partial is None else blobs({"frame": partial}))
        if message.kind == "finish":
            return Message("total", {"round": t}, {"total": role.finish(t, frames)})
        raise WireError(f"message {message.kind!r} is not for a server")

    def _sample(self, role: NoiseServer, t: int, message: Message) -> Message:
        """One step of sampling the noise together: a frame of the next server in, a frame for the previous out."""
        dim = int(message.fields["dim"])
        try:
            if "frame" in message.arrays:
                frame = self._noise[dim].send(message.blob("frame"))
            else:
                self._noise[dim] = role.prepare(t)
                frame = next(self._noise[dim])
        except StopIteration:
            return Message("noise", {"round": t})
        return Message("noise", {"round": t}, blobs({"frame": frame}))


def total_of(message: Message, dimension: int) -> Array:
    """The released sum in a server's ``total``, checked."""
    total = message.arrays.get("total")
    if total is None or total.dtype != np.float64 or total.shape != (dimension,) or not np.isfinite(total).all():
        raise WireError("total is not a finite vector of the agreed length")
    return total


def frame_of(message: Message) -> bytes:
    """The one frame of a reply."""
    return message.blob("frame")


def frames_of(replies: Mapping[int, Message]) -> dict[int, bytes]:
    """The frames of replies, by roster number."""
    return {i: frame_of(reply) for i, reply in replies.items()}
