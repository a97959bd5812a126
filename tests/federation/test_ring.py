"""32-bit rings: the law's divergence, dithered rounding, chunks, and sums of long vectors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import DataError
from quietgrad.core.noise.rng import SecureStream, seed_key
from quietgrad.federation import Identity, MaskingParty, MaskingServer, Party, Roster, SecureSumConfig, simulate
from quietgrad.federation import planning as plans
from quietgrad.federation.network import NetworkSource
from quietgrad.federation.plan import FederatedPlan, Shape
from quietgrad.federation.secure import ring
from quietgrad.federation.secure.channel import NoiseShare
from quietgrad.federation.secure.discrete_gaussian import discrete_gaussian
from quietgrad.federation.secure.terms import coarse_reach

LONG = ring.CHUNK + 4000  # more than one chunk


@pytest.mark.parametrize("sigma", [0.3, 0.5, 0.8, 1.0, 2.0, 4.0, 16.0])
def test_divergence_of_the_discrete_from_the_rounded_gaussian_is_bounded(sigma: float) -> None:
    """By exact sums; from σ = 1 on the bound is within twice the truth, 1/576σ⁴."""
    from mpmath import erfc, exp, log, mp, mpf, sqrt

    with mp.workdps(60):
        top = math.ceil(18 * sigma) + 2
        masses = {k: exp(-(mpf(k) ** 2) / (2 * mpf(sigma) ** 2)) for k in range(-top, top + 1)}
        total = sum(masses.values())
        root = mpf(sigma) * sqrt(2)

        def cell(k: int) -> Any:  # of one tail, so that nothing cancels
            k = abs(k)
            return (erfc((k - mpf("0.5")) / root) - erfc((k + mpf("0.5")) / root)) / 2

        truth = float(sum(m / total * log(m / total / cell(k)) for k, m in masses.items()))
    assert truth <= ring.divergence(sigma)
    if sigma >= 1.0:
        assert ring.divergence(sigma) < 2.0 * truth


@pytest.mark.parametrize("dimension", [1, 50, 2000])
@pytest.mark.parametrize("length", [0.01, 3.0, 400.0])
def test_dithered_shift_is_no_longer_than_counted_and_right_on_average(dimension: int, length: float) -> None:
    """Whatever the sum of the others is; plain rounding moves the sum by up to √d more."""
    rng = np.random.default_rng(dimension)
    g = rng.normal(size=dimension)
    g *= length / np.linalg.norm(g)
    moved = []
    for t in range(60):
        s = rng.uniform(-50, 50, dimension)
        dither = SecureStream(seed_key(t), "dither")
        words = np.zeros((2, dimension), np.uint32)
        for out, x in zip(words, (s, s + g), strict=True):
            ring.add_rounded(out, x, bound=1e9, step=1.0, dither=dither, t=0)
        moved.append((words[1] - words[0]).view(np.int32))
    lengths = np.linalg.norm(np.array(moved, float), axis=1)
    assert lengths.max() <= ring.dithered_sensitivity(length, dimension)
    # 60 means of variance at most ¼ each: all of up to 2000 within 6.5 standard deviations but for 2e-7.
    assert np.abs(np.mean(moved, axis=0) - g).max() < 6.5 * 0.5 / math.sqrt(60)


def test_clip_and_sensitivity_are_inverse_and_far_below_plain_rounding() -> None:
    for multiplier in (0.5, 1.0, 7.0):
        clip = ring.dithered_clip(multiplier, 7_000_000)
        counted = multiplier * ring.dithered_sensitivity(clip, 7_000_000)
        assert counted == pytest.approx(ring.COARSE_UNITS, rel=1e-9)
        louder = ring.COARSE_UNITS / multiplier / clip
        plain = 1.0 / (1.0 - multiplier * math.sqrt(7e6) / ring.COARSE_UNITS)
        assert louder - 1.0 < 0.05 * (plain - 1.0)
    with pytest.raises(ValueError, match="too coarse"):
        ring.dithered_clip(1e4, 7_000_000)


def terms(**settings: Any) -> SecureSumConfig:
    given = {"parties": 5, "dimension": LONG, "bound": coarse_reach(5, 3), "sigma": 1.0, "honest": 3, "ring": 32}
    return SecureSumConfig("masks", **{**given, **settings})


def summed(config: SecureSumConfig, vectors: list[Any], dropped: int | None = None) -> tuple[Any, list[int]]:
    """One round; the sum, and the lengths of the masked frames. Party ``dropped`` never submits."""
    people = [Identity(name) for name in ("a", "b", "c", "d", "e", "server")]
    roster, run = Roster.of(people), b"a run of this test"
    parties = [MaskingParty(person, roster, config, run) for person in people[:5]]
    server = MaskingServer(people[5], roster, config, run)
    server.meet([party.hello for party in parties])
    for party in parties:
        party.meet(server.introductions()[party.me])
    delivery = server.relay(0, {p.me: p.prepare(0) for p in parties})
    for p in parties:
        p.deliver(0, delivery[p.me])
    frames = {p.me: p.submit(0, vectors[p.me]) for p in parties if p.me != dropped}
    questions = server.survivors(0, frames)
    total = server.finish(0, {p.me: p.reveal(0, questions[p.me]) for p in parties if p.me in questions})
    return total, [len(frame) for frame in frames.values()]


@pytest.mark.parametrize("dropped", [None, 1])
def test_long_vectors_are_summed_mod_2_32_with_the_planned_noise(dropped: int | None) -> None:
    rng = np.random.default_rng(4)
    vectors = [rng.normal(size=LONG) * 0.1 for _ in range(5)]
    total, lengths = summed(terms(), vectors, dropped)
    assert {length // LONG for length in lengths} == {4}
    error = total - np.sum([v for k, v in enumerate(vectors) if k != dropped], axis=0)
    here = (5 if dropped is None else 4) / 3
    # Each of the parties has variance 1/3: the mean square of LONG errors is within 6 of its standard deviations.
    assert abs(np.mean(error**2) / here - 1.0) < 6.0 * math.sqrt(2.0 / LONG)
    assert abs(error.mean()) < 6.0 * math.sqrt(here / LONG)
    for first in range(0, LONG, ring.CHUNK):  # no chunk has the noise of another
        part = error[first : first + 4000]
        assert abs(np.corrcoef(part, error[:4000])[0, 1] - (first == 0)) < 6.0 / math.sqrt(4000)


def test_a_sum_that_is_too_long_is_shortened_and_what_is_no_number_refused() -> None:
    config = terms(sigma=1.0, bound=5.0)
    long = np.full(LONG, 1.0)
    total, _ = summed(config, [long, *[np.zeros(LONG)] * 4])
    assert float(total.sum() / math.sqrt(LONG)) == pytest.approx(5.0, abs=6.0 * math.sqrt(5 / 3))
    out = np.zeros(2, np.uint32)
    for vector in ([np.nan, 0.0], [np.inf, 0.0], [1.0]):
        with pytest.raises(DataError):
            ring.add_rounded(out, vector, bound=1.0, step=1.0, dither=SecureStream(seed_key(0), "d"), t=0)


def test_noise_of_a_chunk_is_the_samplers_and_no_block_serves_twice() -> None:
    config = terms(dimension=ring.CHUNK + 8)
    share, out = NoiseShare(config, 0, 1), np.zeros(ring.CHUNK + 8, np.uint32)
    share.add_to(out, 3)
    noise, stream = discrete_gaussian(config.share_sigma), NoiseShare(config, 0, 1)._stream
    first = noise.sample(stream, 3, ring.CHUNK)
    np.testing.assert_array_equal(out[: ring.CHUNK].view(np.int32), first)
    np.testing.assert_array_equal(out[ring.CHUNK :].view(np.int32), noise.sample(stream, 3 + ring.CHUNK_BLOCKS, 8))
    for t in (3, 2, ring.CHUNK_BLOCKS + 4):
        with pytest.raises(ValueError, match="round"):
            share.add_to(out, t)


def test_streams_are_read_anywhere_at_whole_blocks() -> None:
    stream = SecureStream(seed_key(2), "x")
    whole = stream.words(5, 40, np.dtype("<u4"))
    np.testing.assert_array_equal(stream.words(5, 20, np.dtype("<u4"), 20), whole[20:])
    np.testing.assert_array_equal(stream.uint64(5, 20).view(np.uint32), whole)
    with pytest.raises(ValueError, match="must be a multiple of 16 bytes"):
        stream.words(5, 4, np.dtype("<u4"), 2)


@pytest.mark.parametrize(
    "settings", [{"ring": 16}, {"sigma": 0.0}, {"bound": 1000.0}], ids=["16 bits", "no noise", "no room"]
)
def test_terms_that_a_32_bit_ring_cannot_keep_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        terms(**settings)


def planned(dimension: int, batch: int, **settings: Any) -> FederatedPlan:
    network: Any = NetworkSource("network.py", "make", "", dimension)
    return plans.federate(
        qg.DPSRM(steps=100, batch_size=batch), network, names=[f"p{k}" for k in range(10)], sizes=[1000] * 10,
        shape=Shape(dimension), budget=qg.Budget(2.0, 1e-5), trust="secure", secure="masks", **settings,
    )  # fmt: skip


def test_plans_choose_32_bits_where_vectors_are_long_and_sums_have_room() -> None:
    long = planned(7_000_000, 500)
    assert (long.ring, planned(1000, 500).ring) == (32, 64)
    assert planned(7_000_000, 5000, noise_multiplier=1.0).ring == 64  # 500 records a party, reach 201σ
    wide = planned(7_000_000, 500, ring=64)
    assert long.slack < 1e-8
    assert long.slack < 0.021 * 7e6 * 100 / 2.0**40 / 1000
    assert long.noise_multiplier == pytest.approx(wide.noise_multiplier, rel=1e-4)
    assert long.scale(1.0, 1.0, 7_000_000) == pytest.approx(1.0, abs=2e-5)
    assert "32 bits" in long.explain()
    assert FederatedPlan.from_json(long.to_json()).digest == long.digest
    assert replace(long, ring=64).digest != long.digest


def test_every_party_that_knows_a_person_rounds_and_is_counted() -> None:
    people = {"unit": "person", "parties_per_person": 4}
    for bits in (32, 64):
        plan = planned(7_000_000, 500, noise_multiplier=2.0, ring=bits, **people)
        units = plan.terms(7_000_000).noise_units
        step = plan.scale(2.0, 4.0, 7_000_000) / units  # of a clip of 1 at each of four parties
        rounded = ring.dithered_sensitivity(1.0 / step, 7_000_000) if bits == 32 else 1.0 / step + math.sqrt(7e6)
        assert units >= 2.0 * 4 * rounded * (1.0 - 1e-9)


def test_a_network_trains_on_a_32_bit_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run as by masks of 64 bits, but for noise and rounding."""
    X, y = torch.randn(60, 3, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 2
    parties = [Party((X[k::3], y[k::3])) for k in range(3)]
    monkeypatch.setattr(plans, "LONG", 1)
    torch.manual_seed(0)
    result = simulate(
        qg.DPSRM(steps=4, batch_size=20), qt.objective(nn.Linear(3, 2), nn.CrossEntropyLoss()), parties,
        budget=qg.Budget(4.0, 1e-4), trust="secure", secure="masks",
    )  # fmt: skip
    assert result.privacy.is_private
    assert bool(result.params.isfinite().all())
