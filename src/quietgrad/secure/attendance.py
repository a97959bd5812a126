"""Who is in a round: a bitmap that the server signs, so that two lists for one round convict it."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from quietgrad.secure.identity import Identity, is_signed

_DOMAIN = b"quietgrad survivors 1\0"
_EMPTY = bytes(8 + 32 + 32 + 64)
WITNESS_BYTES = len(_EMPTY)


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


class Witness(NamedTuple):
    """The digest of the survivors that the server told someone, and its signature: what neighbours compare.

    It outlives the keys of the run (``context``) in which it was told, so that beginning anew hides nothing.
    """

    round: int
    context: bytes
    digest: bytes
    signature: bytes

    @classmethod
    def of(cls, context: bytes, t: int, bitmap: bytes, signature: bytes) -> Witness:
        """What was told of round t, as its signature claims."""
        return cls(t, context, hashlib.sha256(bitmap).digest(), signature)

    @classmethod
    def signed(cls, identity: Identity, context: bytes, t: int, bitmap: bytes) -> Witness:
        """Sign the survivors of round t."""
        digest = hashlib.sha256(bitmap).digest()
        return cls(t, context, digest, identity.sign(_bound(context, t, digest)))

    def is_from(self, key: bytes) -> bool:
        """Whether the owner of ``key`` signed it."""
        return is_signed(key, self.signature, _bound(self.context, self.round, self.digest))

    def contradicts(self, other: Witness | None) -> bool:
        """Whether the two are about the same round and say different things."""
        if other is None or (self.round, self.context) != (other.round, other.context):
            return False
        return self.digest != other.digest

    def pack(self) -> bytes:
        """As bytes."""
        return (self.round + 1).to_bytes(8, "big") + self.context + self.digest + self.signature

    @staticmethod
    def unpack(data: bytes) -> Witness | None:
        """From :meth:`pack`; None for nobody's (all zeros: there was no earlier round)."""
        t = int.from_bytes(data[:8], "big")
        return Witness(t - 1, data[8:40], data[40:72], data[72:]) if t else None


def pack_witness(witness: Witness | None) -> bytes:
    """As bytes of a fixed length.

    >>> Witness.unpack(pack_witness(None)) is None
    True
    """
    return _EMPTY if witness is None else witness.pack()


def _bound(context: bytes, t: int, digest: bytes) -> bytes:
    return _DOMAIN + context + t.to_bytes(8, "big") + digest
