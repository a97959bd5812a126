"""The share of the noise that one role draws on its own, from a key that nobody else ever sees."""

from __future__ import annotations

import hashlib

import numpy as np

from quietgrad.privacy.rng import SecureStream, fresh_key, seed_key
from quietgrad.secure.encoding import Words
from quietgrad.secure.sampler import discrete_gaussian
from quietgrad.secure.terms import Terms


class NoiseShare:
    """Noise of one role: discrete Gaussian, a fresh block of AES-256-CTR every round, or correlated over rounds.

    A correlated share is a real Gaussian one, made by the recursion of
    :class:`~quietgrad.privacy.correlated.NoiseRecurrence` and rounded to the grid. It belongs to the run and not
    to the keys of one set-up: round t is row t, also if rounds in between were missed or lost. A role that
    restarts with a new key begins an independent share, which protects as well (``docs/correlated.md``, absences)
    and cancels nothing of the old one; what must never happen is that one round is answered under two keys.

    Args:
        terms: the run's terms; they fix the share's σ in grid units.
        role: the role's roster number.
        seed: for tests: the noise is then a function of (seed, role, round) and hides nothing.
        key: 32 secret bytes that survive a restart; fresh ones unless given.

    >>> terms = Terms("servers", parties=2, dimension=3, bound=1.0, sigma=1.0)
    >>> bool((NoiseShare(terms, 0, seed=1).draw(5) == NoiseShare(terms, 0, seed=1).draw(5)).all())
    True
    >>> bool((NoiseShare(terms, 0, None).draw(5) == NoiseShare(terms, 0, None).draw(5)).all())
    False
    """

    def __init__(self, terms: Terms, role: int, seed: int | None, key: bytes | None = None) -> None:
        if seed is not None:
            key = hashlib.sha256(seed_key(seed) + role.to_bytes(4, "big")).digest()
        key = fresh_key() if key is None else key
        self._stream = SecureStream(key, "noise share")
        self._dimension = terms.dimension
        self._sigma = terms.share_sigma if terms.sigma > 0.0 else 0.0
        self._rows = None if terms.correlated is None else terms.correlated.rows(key, "noise share")
        self._releases = None if terms.correlated is None else terms.correlated.releases
        self._sampler = discrete_gaussian(self._sigma) if self._sigma and self._rows is None else None
        self._last = -1

    def draw(self, t: int) -> Words:
        """The share of round t as words mod 2^64; a round draws once and rounds only go up."""
        if t <= self._last:
            raise ValueError(f"round {t}: its noise was already drawn; a retried round needs a new number.")
        if self._releases is not None and t >= self._releases:
            raise ValueError(f"round {t}: the correlated noise was made for {self._releases} rounds.")
        self._last = t
        if not self._sigma:
            return np.zeros(self._dimension, np.uint64)
        if self._rows is not None:
            # Reals are combined first and rounded once: integers combined with fractions would bare residues.
            return np.rint(self._sigma * self._rows.row(t, self._dimension)).astype(np.int64).view(np.uint64)
        assert self._sampler is not None
        return self._sampler.sample(self._stream, t, self._dimension).view(np.uint64)
