"""Long-term Ed25519 identities, the roster of a run, signed hellos and survivor lists, and the protocol's errors.

A hello carries a fresh X25519 key, signed with the digest of the run, its configuration and its roster, so a relay
cannot put itself in the middle and a restarted role never repeats a stream. The server signs the bitmap of a
round's survivors, so two lists for one round convict it.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from quietgrad.core.errors import QuietgradError


class ProtocolError(QuietgradError, RuntimeError):
    """A message or a request of ``party`` that the protocol does not allow.

    Nothing of the round is released.
    """

    code = "QG-PROTOCOL"

    def __init__(self, party: str, reason: str) -> None:
        super().__init__(f"{party}: {reason}")
        self.party, self.reason = party, reason


class DropoutError(ProtocolError):
    """Too few parties are left for the required noise or for recovery.

    The message names the missing ones.
    """

    code = "QG-DROPOUT"

    def __init__(self, missing: list[str], reason: str) -> None:
        super().__init__(", ".join(missing) or "no party", reason)
        self.missing = missing


class SumOutOfBoundsError(ProtocolError):
    """A sum that no data within the bounds can have; nothing proves which role made it so."""

    code = "QG-SUM"
    CHECK = "headroom check"

    def __init__(self, length: float, most: float) -> None:
        super().__init__(
            self.CHECK,
            f"the sum has length {length:.3g}, the most that clipped data and noise can have is {most:.3g}; a mask "
            "or share was falsified, or a party ignored the clip",
        )


_HELLO = struct.Struct("<4sH32s32sH")
_MAGIC = b"QGH2"
_SIGNATURE = 64
_HELLO_DOMAIN = b"quietgrad hello 2\0"
HELLO_BYTES = _HELLO.size + _SIGNATURE
"""The length of a hello that names no neighbours."""


class Identity:
    """A name and its long-term Ed25519 signing key.

    The key is new unless ``secret`` comes from :meth:`secret_bytes`.
    """

    def __init__(self, name: str, secret: bytes | None = None) -> None:
        self.name = name
        self._key = Ed25519PrivateKey.from_private_bytes(secret) if secret else Ed25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"Identity({self.name!r})"  # never the key

    def __reduce__(self) -> tuple[type[Identity], tuple[str, bytes]]:
        return Identity, (self.name, self.secret_bytes())  # to a child process of its owner

    def secret_bytes(self) -> bytes:
        return self._key.private_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


@dataclass(frozen=True)
class Roster:
    """Names and Ed25519 public keys of all roles in a run.

    The parties come first, then the servers.
    """

    names: tuple[str, ...]
    keys: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names) or len(set(self.keys)) != len(self.keys):
            raise ValueError("roster: names and keys must be unique. One institution, one name, one key.")
        if len(self.names) != len(self.keys) or len(self.names) > 65_535:
            raise ValueError(f"roster of {len(self.names)} names and {len(self.keys)} keys: must match.")

    @classmethod
    def of(cls, identities: list[Identity]) -> Roster:
        return cls(tuple(i.name for i in identities), tuple(i.public for i in identities))

    def index(self, name: str) -> int:
        if name not in self._numbers:
            raise ValueError(f"{name!r} is not on the roster: {', '.join(self.names)}.")
        return self._numbers[name]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def digest(self) -> bytes:
        rows = [(name.encode(), key) for name, key in zip(self.names, self.keys, strict=True)]
        body = b"".join(len(name).to_bytes(4, "big") + name + key for name, key in rows)
        return hashlib.sha256(b"quietgrad roster 1\0" + body).digest()


class Hello(NamedTuple):
    """A verified hello."""

    sender: int
    exchange_key: bytes
    picks: tuple[int, ...]


def write_hello(
    identity: Identity, roster: Roster, context: bytes, exchange_key: bytes, picks: tuple[int, ...] = ()
) -> bytes:
    """A signed hello: (roster number, context, X25519 public key, the neighbours that its sender drew)."""
    body = _HELLO.pack(_MAGIC, roster.index(identity.name), context, exchange_key, len(picks))
    body += struct.pack(f"<{len(picks)}H", *picks)
    return body + identity.sign(_HELLO_DOMAIN + body)


def read_hello(hello: bytes, roster: Roster, context: bytes) -> Hello:
    if len(hello) < _HELLO.size + _SIGNATURE:
        raise ProtocolError("hello", f"has {len(hello)} bytes, too few")
    magic, sender, theirs, exchange_key, count = _HELLO.unpack_from(hello)
    if magic != _MAGIC or sender >= len(roster.names):
        raise ProtocolError("hello", "is not a hello of anyone on the roster")
    name = roster.names[sender]
    if len(hello) != _HELLO.size + 2 * count + _SIGNATURE:
        raise ProtocolError(name, f"hello has {len(hello)} bytes, a wrong number")
    body, signature = hello[:-_SIGNATURE], hello[-_SIGNATURE:]
    if not is_signed(roster.keys[sender], signature, _HELLO_DOMAIN + body):
        raise ProtocolError(name, "hello is not signed with the key on the roster")
    if theirs != context:
        raise ProtocolError(name, "hello is for another run, other terms or another roster")
    return Hello(sender, exchange_key, struct.unpack(f"<{count}H", body[_HELLO.size :]))


def is_signed(key: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def in_round(domain: bytes, context: bytes, t: int, body: bytes) -> bytes:
    """Return the bytes to sign for a statement in round t. They count in no other run, round or place."""
    return domain + context + t.to_bytes(8, "big") + body


_DOMAIN = b"quietgrad survivors 1\0"
WITNESS_BYTES = 8 + 32 + 32 + 64


def pack_members(members: tuple[int, ...], parties: int) -> bytes:
    """One bit for each party of the roster.

    >>> pack_members((0, 2), 10).hex()
    '0500'
    """
    bits = np.zeros(parties, np.uint8)
    bits[list(members)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_members(payload: bytes, parties: int) -> tuple[tuple[int, ...], bytes]:
    """The members, and what follows the bitmap; empty when malformed.

    >>> unpack_members(bytes.fromhex("0500") + b"rest", 10)
    ((0, 2), b'rest')
    """
    size = (parties + 7) // 8
    if len(payload) < size:
        return (), b""
    bits = np.unpackbits(np.frombuffer(payload[:size], np.uint8), bitorder="little")
    if bits[parties:].any():
        return (), b""
    return tuple(np.flatnonzero(bits).tolist()), payload[size:]


class SurvivorAttestation(NamedTuple):
    """The digest of the survivors that the server named to a party, signed: what neighbours compare.

    It outlives the keys of the run (``context``) in which it was made, so that beginning anew hides nothing.
    """

    round: int
    context: bytes
    digest: bytes
    signature: bytes

    @classmethod
    def of(cls, context: bytes, t: int, bitmap: bytes, signature: bytes) -> SurvivorAttestation:
        return cls(t, context, hashlib.sha256(bitmap).digest(), signature)

    @staticmethod
    def sign(identity: Identity, context: bytes, t: int, bitmap: bytes) -> bytes:
        return identity.sign(in_round(_DOMAIN, context, t, hashlib.sha256(bitmap).digest()))

    def is_from(self, key: bytes) -> bool:
        return is_signed(key, self.signature, in_round(_DOMAIN, self.context, self.round, self.digest))

    def contradicts(self, other: SurvivorAttestation | None) -> bool:
        """Whether the two are about the same round and say different things."""
        return other is not None and self[:2] == other[:2] and self.digest != other.digest

    @staticmethod
    def pack(witness: SurvivorAttestation | None) -> bytes:
        """Pack an attestation into bytes of a fixed length, all zeros if there was no earlier round."""
        if witness is None:
            return bytes(WITNESS_BYTES)
        return (witness.round + 1).to_bytes(8, "big") + witness.context + witness.digest + witness.signature

    @staticmethod
    def unpack(data: bytes) -> SurvivorAttestation | None:
        t = int.from_bytes(data[:8], "big")
        return SurvivorAttestation(t - 1, data[8:40], data[40:72], data[72:]) if t else None
