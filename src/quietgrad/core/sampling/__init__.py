"""Sampling schemes: public values that say which records take part in a release, and what their secrecy is worth.

``FullBatch`` · ``Poisson`` · ``RandomAllocation`` (every record in one secret step of each epoch) · ``FixedSize``
(without replacement) · ``SinglePass`` (disjoint, every record once) · ``CyclicCohorts`` (cohorts, one after the
other) · ``CyclicPoisson`` (secret samples of them) · ``SelfSampled`` and ``CoordinatorSampled`` (parties as units).
Each turns the event of one release into the event of a sampled run (:meth:`Sampling.event`) and, given the
number of records and a secret stream, makes the sampler that draws the batches. An average must divide by
:meth:`Sampling.expected_batch`, a public constant, never by the number of records actually drawn; an empty
Poisson batch is released like any other, as pure noise.
"""

from __future__ import annotations

from typing import Literal, get_args

from quietgrad.core.errors import SettingError
from quietgrad.core.sampling.participation import CyclicCohorts, CyclicPoisson, SinglePass
from quietgrad.core.sampling.parties import CoordinatorSampled, SelfSampled
from quietgrad.core.sampling.samplers import Sampler
from quietgrad.core.sampling.schemes import (
    KINDS,
    FixedSize,
    FullBatch,
    Poisson,
    RandomAllocation,
    Sampling,
    from_json,
)

__all__ = [
    "CoordinatorSampled",
    "CyclicCohorts",
    "CyclicPoisson",
    "FixedSize",
    "FullBatch",
    "Poisson",
    "RandomAllocation",
    "Sampler",
    "Sampling",
    "SamplingName",
    "SelfSampled",
    "SinglePass",
    "from_json",
    "sampling_of",
]

SamplingName = Literal[
    "poisson", "random-allocation", "fixed-size", "full", "single-pass", "turns", "poisson-turns"
]
"""The kinds of schemes that settings may name."""


def sampling_of(name: SamplingName, n_public: int, batch_size: int | None, cohorts: int | None = None) -> Sampling:
    """The scheme that ``name`` stands for at a public n; without a batch size every record is in every batch.

    >>> sampling_of("poisson", n_public=1000, batch_size=10)
    Poisson(rate=0.01)
    """
    if name not in get_args(SamplingName):
        raise SettingError(
            f"{{sampling}}: must be one of {', '.join(map(repr, get_args(SamplingName)))}.", sampling=name
        )
    kind = KINDS[name]
    if kind.in_turns != (cohorts is not None):
        raise SettingError(
            "{sampling}, {cohorts}: name the cohorts exactly when they take turns.", sampling=name, cohorts=cohorts
        )
    return FullBatch() if batch_size is None and cohorts is None else kind.of(n_public, batch_size, cohorts)
