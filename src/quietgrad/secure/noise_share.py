"""The share of the noise that one role draws on its own, from a key that nobody else ever sees."""

from __future__ import annotations

import hashlib

import numpy as np

from quietgrad.privacy.rng import SecureStream, fresh_key, seed_key
from quietgrad.secure.encoding import Words
from quietgrad.secure.sampler import discrete_gaussian
from quietgrad.secure.terms import Terms


class NoiseShare:
    """Discrete Gaussian noise of one role, a fresh block of AES-256-CTR for every round.

    Args:
        terms: the run's terms; they fix the share's σ in grid units.
        role: the role's roster number.
        seed: for tests: the noise is then a function of (seed, role, round) and hides nothing.

    >>> terms = Terms("servers", parties=2, dimension=3, bound=1.0, sigma=1.0)
    >>> bool((NoiseShare(terms, 0, seed=1).draw(5) == NoiseShare(terms, 0, seed=1).draw(5)).all())
    True
    >>> bool((NoiseShare(terms, 0, None).draw(5) == NoiseShare(terms, 0, None).draw(5)).all())
    False
    """

    def __init__(self, terms: Terms, role: int, seed: int | None) -> None:
        key = fresh_key() if seed is None else hashlib.sha256(seed_key(seed) + role.to_bytes(4, "big")).digest()
        self._stream = SecureStream(key, "noise share")
        self._dimension = terms.dimension
        self._sampler = discrete_gaussian(terms.share_sigma) if terms.sigma > 0.0 else None
        self._last = -1

    def draw(self, t: int) -> Words:
        """The share of round t as words mod 2^64; a round draws once and rounds only go up."""
        if t <= self._last:
            raise ValueError(f"round {t}: its noise was already drawn; a retried round needs a new number.")
        self._last = t
        if self._sampler is None:
            return np.zeros(self._dimension, np.uint64)
        return self._sampler.sample(self._stream, t, self._dimension).view(np.uint64)
