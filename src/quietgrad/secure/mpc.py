"""Secure sums on three servers that sample one discrete Gaussian together, so that nobody knows the noise.

The parties share their vectors as in ``servers.py``. The noise is c·X₂ + Y₀ + Y₁ + Y₂ with c = 2^23:

* X₂ ~ N_Z(24²) is sampled inside replicated secret sharing by the alias method (``sampler.py``): 8 shared random
  bits choose one of 256 columns, one-hot vectors of their halves select the column's 56-bit threshold and its
  alias from the public table, a shared comparison with 56 random bits decides between column and alias, one more
  bit is the sign. About 260 shared ANDs and 13 messages per round, whatever the dimension.
* Y_i ~ N_Z((1.75c)²/2) is drawn by server i alone. The two that a curious server does not know add up to
  σ₁ = 1.75c, so c·X₂ + Y + Y′ is N_Z(c²(24² + 1.75²)) within 2⁻⁸⁰ (``sampler.smoothing_error``); the third is the
  only excess: 0.27 % of the variance.

Adversary: one **semi-honest** server of the three (it follows the protocol and keeps notes) with any number of
parties. A server that deviates can spoil the noise without being noticed, and two servers together know
everything; where that is not acceptable use ``servers`` (any K − 1 servers may cheat) or ``masks``.

    generator = server.prepare(t): yields frames for the previous server, takes frames of the next; needs no data,
    so it may run while the parties compute; then as in ``servers.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from quietgrad.privacy.rng import SecureStream, seed_key
from quietgrad.secure.channel import Kind, View, derive
from quietgrad.secure.encoding import Words
from quietgrad.secure.faults import ProtocolError
from quietgrad.secure.identity import Hello, Identity, Roster
from quietgrad.secure.replicated import Exchange, Replicated, Shared
from quietgrad.secure.sampler import alias_table, gaussian_masses
from quietgrad.secure.servers import SumServer
from quietgrad.secure.terms import COARSE_SIGMA, COARSE_STEP, COARSE_TOP, COARSE_WORD_BITS, Terms

_HALF = 4  # column bits per half: 16 × 16 columns
_BITS = 2 * _HALF
_OUTPUTS = COARSE_WORD_BITS + _BITS
_CHUNK = 256  # words per look-up: the selected rows then stay in the second-level cache


class NoiseServer(SumServer):
    """One of the three servers of a secure sum whose noise is sampled inside the computation."""

    def __init__(
        self,
        identity: Identity,
        roster: Roster,
        terms: Terms,
        run: bytes,
        *,
        view: View | None = None,
        seed: int | None = None,
    ) -> None:
        self._streams: dict[int, SecureStream] = {}
        self._seed = seed
        self._coarse: dict[int, Words] = {}
        self._prepared = -1
        super().__init__(identity, roster, terms, run, view=view, seed=seed)

    @property
    def position(self) -> int:
        """0, 1 or 2."""
        return self.me - self.servers[0]

    @property
    def previous(self) -> int:
        """Roster number of the server that this one sends to."""
        return self.servers[(self.position - 1) % 3]

    @property
    def next(self) -> int:
        """Roster number of the server that this one hears from."""
        return self.servers[(self.position + 1) % 3]

    def prepare(self, t: int) -> Exchange[None]:
        """Sample this round's coarse noise with the other two servers."""
        if t <= self._prepared or not 0 <= t < 1 << 48:
            raise ProtocolError(self.name, f"round {t} was already prepared; a retried round needs a new number")
        self._prepared = t
        self._coarse = dict(list(self._coarse.items())[-1:])  # older ones were aborted
        if self.terms.sigma == 0.0:
            return
        sharing = Replicated(
            self.position, self._streams[self.previous], self._streams[self.next], t, self.roster.names[self.next]
        )
        computation = sample(sharing, self.terms.dimension)
        try:
            payload = next(computation)
            while True:
                received = yield self._seal(self.previous, Kind.NOISE, t, payload)
                payload = computation.send(bytes(self._open(self.next, Kind.NOISE, t, received)))
        except StopIteration as done:
            self._coarse[t] = done.value * np.uint64(COARSE_STEP)

    def _met(self, known: Hello, secret: bytes, hello: bytes) -> None:
        peer = known.sender
        if peer in self.servers:
            # The stream of two neighbours is component i of everything random, i the later of the two.
            key = derive(secret, salt=self.context, info=b"replicated")
            if self._seed is not None:
                pair = min(self.me, peer).to_bytes(4, "big") + max(self.me, peer).to_bytes(4, "big")
                key = hashlib.sha256(seed_key(self._seed) + pair).digest()
            self._streams[peer] = SecureStream(key, "replicated")

    def _noise_limit(self) -> int:
        words = (self.terms.dimension + 63) // 64
        return 8 * max(2 * COARSE_WORD_BITS * words, (_BITS + 1) * self.terms.dimension) + 1024

    def _noise(self, t: int) -> Words:
        fine = super()._noise(t)
        if self.terms.sigma == 0.0:
            return fine
        if t not in self._coarse:
            raise ProtocolError(self.name, f"round {t}: the noise was not prepared")
        return fine + self._coarse.pop(t)


def sample(sharing: Replicated, size: int) -> Exchange[Words]:
    """Additive shares mod 2^64 of ``size`` draws of N_Z(24²), of which no server learns anything.

    |X| = column or alias(column), both below 256; X = Σ 2^j (|X|_j ⊕ s) − 255·s for the sign s, because the one's
    complement of |X| is 255 − |X|.
    """
    width = (size + 63) // 64
    columns = sharing.random(2, _HALF, width)
    uniform = sharing.random(COARSE_WORD_BITS, width)
    sign = sharing.random(1, width)
    hot = yield from sharing.one_hot(columns)
    chosen = yield from sharing.reshare(_look_up(sharing, hot, width))
    threshold = (chosen[0][:COARSE_WORD_BITS], chosen[1][:COARSE_WORD_BITS])
    change = (chosen[0][COARSE_WORD_BITS:], chosen[1][COARSE_WORD_BITS:])
    keep = yield from sharing.less(uniform, threshold)
    changed = yield from sharing.conjunction(sharing.invert(keep), change)
    bits = []
    for k in (0, 1):
        magnitude = columns[k].reshape(_BITS, width) ^ changed[k]
        bits.append(np.concatenate([magnitude ^ sign[k], sign[k]]))
    weights = [1 << (_BITS - 1 - j) for j in range(_BITS)] + [(1 << 64) - COARSE_TOP]
    return (yield from sharing.weighted_sum((bits[0], bits[1]), np.array(weights, np.uint64), size))


def _look_up(sharing: Replicated, hot: Shared, width: int) -> Words:
    """This server's terms of Σ_{v,w} table[v, w]·[high = v]·[low = w] for every output bit of the table."""
    halves = 1 << _HALF
    out = np.empty((_OUTPUTS, width), np.uint64)
    for start in range(0, width, _CHUNK):
        piece = slice(start, min(start + _CHUNK, width))
        rows: list[Words] = []
        for k in (0, 1):
            selected = np.zeros((halves * _OUTPUTS, piece.stop - start), np.uint64)
            for w, ones in enumerate(_table_ones()):
                selected[ones] ^= hot[k][1, w, piece]
            rows.append(selected.reshape(halves, _OUTPUTS, -1))
        high = (hot[0][0, :, None, piece], hot[1][0, :, None, piece])
        terms = sharing.products(high, (rows[0], rows[1]))
        np.bitwise_xor.reduce(terms, axis=0, out=out[:, piece])
    return out


@lru_cache(maxsize=1)
def _table_ones() -> list[npt.NDArray[np.intp]]:
    """For every low half w: where the table has a 1, as v·64 + output bit.

    Column 16v + w holds 56 bits of the threshold, then 8 of column ⊕ alias.
    """
    masses = gaussian_masses(COARSE_SIGMA, COARSE_TOP, 1 << (_BITS + COARSE_WORD_BITS), magnitudes=True)
    table = alias_table(masses, COARSE_WORD_BITS)
    ones: list[list[int]] = [[] for _ in range(1 << _HALF)]
    for column, (threshold, alias) in enumerate(zip(table.thresholds.tolist(), table.alias.tolist(), strict=True)):
        v, w = divmod(column, 1 << _HALF)
        text = f"{threshold << _BITS | (column ^ alias):0{_OUTPUTS}b}"
        ones[w] += [v * _OUTPUTS + i for i, bit in enumerate(text) if bit == "1"]
    return [np.array(where, np.intp) for where in ones]


def run_together(computations: Sequence[Exchange[None]]) -> None:
    """Run the three servers' generators in step in one process: i's frame goes to i − 1."""
    frames = [next(c, None) for c in computations]
    while all(frame is not None for frame in frames):
        inbound = [frames[(i + 1) % 3] for i in range(3)]
        frames = [_resume(c, frame) for c, frame in zip(computations, inbound, strict=True)]


def _resume(computation: Exchange[None], frame: bytes | None) -> bytes | None:
    try:
        return computation.send(frame or b"")
    except StopIteration:
        return None
