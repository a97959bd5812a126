"""Which labels a table has, found privately: a count per label with noise, and only the frequent ones leave.

For labels that both of two neighbouring tables have, the counts are a Gaussian release. A label that only one of
them has occurs there once, and passes the threshold with probability at most β, independently of the other counts;
otherwise it might as well not be there. The event is therefore a Gaussian release with that probability of failure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from quietgrad.privacy import events
from quietgrad.privacy.budget import Relation
from quietgrad.privacy.noise import release_gaussian, sigma_for
from quietgrad.privacy.rng import SecureStream


@dataclass(frozen=True)
class LabelDiscovery:
    """A plan to find labels: noise on counts of bound C = 1 (add-remove) or 1/√2 (replace-one), and β.

    >>> LabelDiscovery(10.0, Relation.ADD_REMOVE, 1e-9).threshold > 50
    True
    """

    noise_multiplier: float
    relation: Relation
    failure: float

    @property
    def bound(self) -> float:
        """Counts of two neighbours differ by 1 in one place, or by 1 in two places: √2 = 2·(1/√2)."""
        return 1.0 if self.relation is Relation.ADD_REMOVE else 1.0 / math.sqrt(2.0)

    @property
    def event(self) -> events.Event:
        """What looking for labels costs."""
        return events.Composed((events.Gaussian(self.noise_multiplier), events.Failure(self.failure)))

    @property
    def threshold(self) -> float:
        """The noisy count a label must pass: one record does with probability at most ``failure``."""
        from scipy.special import ndtri

        sigma, step = self._noise
        return float(1.0 + 2.0 * step - sigma * ndtri(self.failure))  # count and noise are each rounded to a step

    @property
    def _noise(self) -> tuple[float, float]:
        # Neighbours differ in two counts at most, so no other is rounded apart. The number of labels must not
        # enter: it would make the noise depend on the data.
        return sigma_for(self.noise_multiplier, self.bound, dim=2)

    def run(self, labels: Any, key: bytes) -> Any:
        """The labels that pass, sorted; everything else about ``labels`` stays here."""
        values, counts = np.unique(labels, return_counts=True)
        total = counts.astype(np.float64)
        release_gaussian(total, SecureStream(key, "labels").normal(0, len(total)), *self._noise)
        found = values[total > self.threshold]
        # An array of texts is as wide as its longest: that one may be a label that did not pass.
        return np.array(found.tolist(), dtype=found.dtype.kind) if found.dtype.kind in "US" else found
