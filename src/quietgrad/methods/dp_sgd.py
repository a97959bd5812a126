"""DP-SGD, DP-GD and DP-Adam, with their non-private twins SGD and GD.

DP-SGD (Abadi et al. 2016) steps along noisy means of clipped gradients. DP-GD (Wang et al. 2017) uses all records
in each step, so its releases compose exactly as Gaussians. DP-Adam applies Adam's step to the same means; its
moments are post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from quietgrad.core.errors import SettingError
from quietgrad.core.sampling import SamplingName
from quietgrad.core.session.base import Session
from quietgrad.core.session.clipping import Clipping, ClippingName
from quietgrad.core.settings import Count, Fraction, Positive
from quietgrad.core.vectors import Vector, sqrt
from quietgrad.methods.base import FirstOrder, Output, State
from quietgrad.methods.epoch_schedules import ClipSchedule, NoiseSchedule
from quietgrad.methods.learning_rates import LearningRate
from quietgrad.methods.oracles.base import Noise, Oracle, noise_multiplier
from quietgrad.methods.oracles.gradient_estimators import MiniBatch


@dataclass(frozen=True)
class DPSGD(FirstOrder):
    """Differentially private stochastic gradient descent (DP-SGD).

    θ ← θ − η_t·m_t with m_t the noisy mean of clipped gradients, or its momentum.

    Args:
        steps: T, the number of updates (and releases).
        batch_size: expected records per step.
        learning_rate: a number or a schedule of :mod:`quietgrad.methods.learning_rates`.
        clip: C, the L2 bound on one record's gradient.
        clipping: ``"flat"`` (shorten what is longer than C), ``"automatic"`` (bring every gradient to about C),
            ``"per-layer"`` (for networks), or a rule of :mod:`quietgrad.core.session.clipping` with its settings.
        sampling: ``"poisson"`` (default), ``"random-allocation"`` (every record in one secret step of each epoch of
            ⌈n ÷ batch_size⌉ steps), ``"fixed-size"``, ``"full"``, ``"single-pass"`` (every record once),
            ``"turns"`` (``cohorts`` of records, one after the other; the batch is then n ÷ cohorts), or
            ``"poisson-turns"`` (a Poisson sample of ``batch_size`` of the cohort whose turn it is).
        noise: ``"independent"``; ``"correlated"``, for a single pass or turns of either kind; or a mechanism that
            releases sums. Later releases cancel a part of correlated noise, so that sums of releases carry much
            less of it (:mod:`quietgrad.core.noise.correlated`).
        momentum: β, the weight of the past; 0 for none.
        momentum_kind: ``"heavy-ball"`` (m = βm + g) or ``"ema"`` (m = βm + (1−β)g).
        momentum_steps: the number of steps with momentum; later steps have none (early momentum, paper 001).
        returns: ``"last"``, ``"average"`` of the second half, ``"ema"``, or ``"random"`` round.
        noise_schedule: what the noise multiplier is multiplied by in each epoch of ⌈n ÷ batch_size⌉ steps, such as
            ``StepNoise(step_size=5, gamma=0.8)`` of :mod:`quietgrad.methods.epoch_schedules`.
        clip_schedule: likewise of C, such as ``ExponentialGradClip(gamma=0.9)``. It changes no ε.

    >>> DPSGD(steps=100, batch_size=50, learning_rate=0.5).schedule(1000).releases
    100
    """

    steps: Count = 1000
    batch_size: Count = 256
    learning_rate: float | str | LearningRate = 0.5
    clip: Positive = 1.0
    sampling: SamplingName = "poisson"
    momentum: Fraction = 0.0
    momentum_kind: Literal["heavy-ball", "ema"] = "heavy-ball"
    momentum_steps: int | None = None
    returns: Output = "last"
    cohorts: int | None = None
    noise: Noise = "independent"
    clipping: ClippingName | Clipping = "flat"
    noise_schedule: NoiseSchedule | None = None
    clip_schedule: ClipSchedule | None = None

    name: ClassVar[str] = "dp-sgd"

    def oracle(self) -> Oracle:
        return MiniBatch(
            self.batch_size, self.clip, self.sampling, self.law(), self.cohorts, self.noise, self.clipping,
            self.noise_schedule, self.clip_schedule,
        )  # fmt: skip

    def direction(self, state: State, gradient: Vector) -> tuple[float, Vector]:
        rate = self._rate(state.step, self.steps)
        has_momentum = self.momentum_steps is None or state.step < self.momentum_steps
        if not self.momentum or not has_momentum:
            return rate, gradient
        update = gradient if self.momentum_kind == "heavy-ball" else (1.0 - self.momentum) * gradient
        state.velocity = update if state.velocity is None else self.momentum * state.velocity + update
        return rate, state.velocity


@dataclass(frozen=True)
class SGD(DPSGD):
    """Stochastic gradient descent without noise, a baseline that is **not private**.

    Nothing is clipped.
    """

    clip: Positive = math.inf

    name: ClassVar[str] = "sgd"
    private: ClassVar[bool] = False


@dataclass(frozen=True)
class DPGD(FirstOrder):
    """Full-batch gradient descent with clipped gradients and noise (DP-GD).

    θ ← θ − η_t·(1/n)[Σ clip_C(∇fᵢ(θ)) + N(0, (zC)² I)], with optional heavy-ball momentum.

    T releases of all n records are μ-GDP with μ = √T·Δ/σ exactly: no amplification, no slack.

    >>> DPGD(steps=20).schedule(1000).releases
    20
    """

    steps: Count = 30
    learning_rate: float | str | LearningRate = 2.0
    clip: Positive = 1.0
    momentum: Fraction = 0.0
    returns: Output = "last"
    clipping: ClippingName | Clipping = "flat"

    name: ClassVar[str] = "dp-gd"

    def oracle(self) -> Oracle:
        return MiniBatch(None, self.clip, "full", self.law(), clipping=self.clipping)

    def direction(self, state: State, gradient: Vector) -> tuple[float, Vector]:
        if self.momentum:
            gradient = gradient if state.velocity is None else self.momentum * state.velocity + gradient
            state.velocity = gradient
        return self._rate(state.step, self.steps), gradient


@dataclass(frozen=True)
class GD(DPGD):
    """Gradient descent without clipping or noise: a baseline, **not private**."""

    clip: Positive = math.inf

    name: ClassVar[str] = "gd"
    private: ClassVar[bool] = False


@dataclass(frozen=True)
class DPAdam(FirstOrder):
    """Adam on noisy mean gradients (DP-Adam).

    θ ← θ − η_t·m̂/(√v̂ + stabiliser), m and v running moments of the noisy mean gradient.

    The noise adds its variance Φ = (zC/b)², a public number, to every coordinate of v̂; where Φ outweighs the
    squared gradients all coordinates are divided by about the same √Φ, and Adam is SGD with momentum.
    ``subtract_noise`` divides by √max(v̂ − Φ, floor·Φ) instead (DP-AdamBC, Tang et al. 2023): post-processing, at
    the same ε. The divisor is smaller, so the same learning rate makes longer steps.

    Args:
        subtract_noise: take Φ out of the second moment.
        floor: the least that is left of it, in units of Φ.
        clipping, sampling, cohorts, noise, noise_schedule, clip_schedule: as in
            :class:`~quietgrad.methods.dp_sgd.DPSGD`. Correlated noise is louder in each single release, which is
            what the second moment sees; larger learning rates suit it.

    >>> DPAdam(steps=10, batch_size=20).schedule(100).releases
    10
    """

    steps: Count = 1000
    batch_size: Count = 256
    learning_rate: float | str | LearningRate = 0.01
    clip: Positive = 1.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    stabiliser: float = 1e-8
    subtract_noise: bool = False
    floor: Positive = 0.1
    sampling: SamplingName = "poisson"
    returns: Output = "last"
    cohorts: int | None = None
    noise: Noise = "independent"
    clipping: ClippingName | Clipping = "flat"
    noise_schedule: NoiseSchedule | None = None
    clip_schedule: ClipSchedule | None = None

    name: ClassVar[str] = "dp-adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subtract_noise and (self.noise_schedule is not None or self.clip_schedule is not None):
            raise SettingError(
                "{subtract_noise}: a schedule changes the noise that it takes out.", subtract_noise=True
            )

    def step(self, state: State, session: Session) -> State:
        if self.subtract_noise and "noise" not in state.memo:
            mean = self.clip / session.expected_batch("gradient")
            state.memo["noise"] = (
                (noise_multiplier(session, "gradient") * mean) ** 2 if session.plan.is_private else 0.0
            )
        return super().step(state, session)

    def oracle(self) -> Oracle:
        return MiniBatch(
            self.batch_size, self.clip, self.sampling, self.law(), self.cohorts, self.noise, self.clipping,
            self.noise_schedule, self.clip_schedule,
        )  # fmt: skip

    def direction(self, state: State, gradient: Vector) -> tuple[float, Vector]:
        first = (1.0 - self.beta1) * gradient
        second = (1.0 - self.beta2) * (gradient * gradient)
        state.velocity = first if state.velocity is None else self.beta1 * state.velocity + first
        state.second = second if state.second is None else self.beta2 * state.second + second
        t = state.step + 1
        mean = state.velocity * (1.0 / (1.0 - self.beta1**t))
        square = state.second * (1.0 / (1.0 - self.beta2**t))
        if self.subtract_noise:
            noise = state.memo["noise"]
            square = (square - noise).clip(min=self.floor * noise)
        return self._rate(state.step, self.steps), mean / (sqrt(square) + self.stabiliser)
