"""Dealing a round's two secrets so that whoever lies about a share is found out.

A dealer splits her round key and her self-mask among k + 1 holders (herself first) and signs, for the server, a
hash of every share beside her public round key and a hash of the self-mask. A holder compares what she was
dealt with these
hashes before there are data, and complains or is bound by them: from then on

* a share that does not have its hash was falsified by the **holder** who returned it; it is left out;
* T shares that all have their hashes and do not open the secret were dealt false by the **dealer**.

Shares are uniform numbers of 257 bits (a single holder's is the secret itself, 256 random bits): their plain hashes
tell nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from quietgrad.secure import shamir
from quietgrad.secure.identity import Identity, is_signed

KEY_BYTES = 32
HASH_BYTES = 32
SIGNATURE_BYTES = 64
PAIR_BYTES = 2 * HASH_BYTES
_DOMAIN = b"quietgrad deal 1\0"


def share_hash(kind: bytes, share: bytes) -> bytes:
    """The commitment to one share; ``kind`` is b"key" or b"self".

    >>> share_hash(b"key", bytes(33)) == share_hash(b"self", bytes(33))
    False
    """
    return hashlib.sha256(b"quietgrad share 1\0" + kind + b"\0" + share).digest()


def pair_hash(key_share: bytes, self_share: bytes) -> bytes:
    """The commitments to a holder's two shares, one after the other."""
    return share_hash(b"key", key_share) + share_hash(b"self", self_share)


@dataclass(frozen=True)
class Statement:
    """What a dealer signs: her round key, the hash of her self-mask, and the hashes of all shares by rank."""

    public: bytes
    self_hash: bytes
    pairs: tuple[bytes, ...]

    @staticmethod
    def size(holders: int) -> int:
        """How many bytes a signed statement has."""
        return KEY_BYTES + HASH_BYTES + holders * PAIR_BYTES + SIGNATURE_BYTES

    def signed(self, identity: Identity, context: bytes, t: int) -> bytes:
        """The statement and its signature, bound to the run and the round."""
        body = self.public + self.self_hash + b"".join(self.pairs)
        return body + identity.sign(_bound(context, t, body))

    @classmethod
    def read(cls, data: bytes, key: bytes, context: bytes, t: int) -> Statement | None:
        """A statement signed with ``key`` for this run and round, or None."""
        body, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
        if not is_signed(key, signature, _bound(context, t, body)):
            return None
        rest = body[KEY_BYTES + HASH_BYTES :]
        pairs = tuple(rest[i : i + PAIR_BYTES] for i in range(0, len(rest), PAIR_BYTES))
        return cls(body[:KEY_BYTES], body[KEY_BYTES : KEY_BYTES + HASH_BYTES], pairs)

    def has(self, rank: int, *, kind: bytes, share: bytes) -> bool:
        """Whether ``share`` is the one of this rank and kind that was committed to."""
        pair = self.pairs[rank]
        return share_hash(kind, share) == (pair[:HASH_BYTES] if kind == b"key" else pair[HASH_BYTES:])


@dataclass(frozen=True)
class Deal:
    """Both secrets of a round, split among k + 1 holders.

    >>> deal = Deal.of(b"k" * 32, b"p" * 32, b"b" * 32, threshold=2, holders=3)
    >>> deal.statement.has(1, kind=b"self", share=deal.self_shares[1])
    True
    """

    key_shares: tuple[bytes, ...]
    self_shares: tuple[bytes, ...]
    statement: Statement

    @classmethod
    def of(cls, key: bytes, public: bytes, self_mask: bytes, *, threshold: int, holders: int) -> Deal:
        """Split ``key`` and ``self_mask``."""
        key_shares = tuple(shamir.split(key, threshold, holders))
        self_shares = tuple(shamir.split(self_mask, threshold, holders))
        pairs = tuple(pair_hash(a, b) for a, b in zip(key_shares, self_shares, strict=True))
        return cls(key_shares, self_shares, Statement(public, share_hash(b"mask", self_mask), pairs))


def _bound(context: bytes, t: int, body: bytes) -> bytes:
    return _DOMAIN + context + t.to_bytes(8, "big") + body
