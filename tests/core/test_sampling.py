"""Sampling: who takes part, how often, independently of what, and what it is worth."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from quietgrad.core.accounting import events
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.compiled import draw_subsets
from quietgrad.core.errors import BudgetError
from quietgrad.core.noise.rng import SecureStream, seed_key
from quietgrad.core.sampling import FixedSize, FullBatch, Poisson, Sampling, SinglePass, from_json
from quietgrad.core.sampling.samplers import binomial_table, hashed_slots, permuted_slots

FALSE_ALARM = 1e-6
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def stream(seed: int = 0) -> SecureStream:
    return SecureStream(seed_key(seed), "batches")


def chi2_rejects(counts: npt.ArrayLike, expected: npt.ArrayLike) -> bool:
    seen, wanted = np.asarray(counts, float), np.asarray(expected, float)
    statistic = float(np.sum((seen - wanted) ** 2 / wanted))
    return bool(special.gammaincc((seen.size - 1) / 2, statistic / 2) < FALSE_ALARM)


def shuffled(words: list[int], n: int) -> list[int]:
    """The textbook: one step of Fisher–Yates per word, in exact integers; untouched positions are implied."""
    order: dict[int, int] = {}
    for i, word in enumerate(words):
        r = i + word * (n - i) // 2**64
        order[i], order[r] = order.get(r, r), order.get(i, i)
    return [order[i] for i in range(len(words))]


@settings(deadline=None)
@given(
    st.integers(0, 60).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n), max_size=12))), st.data()
)
def test_kernel_is_fisher_yates_and_remembers_nothing(case: tuple[int, list[int]], data: st.DataObject) -> None:
    """Every batch equals a fresh textbook shuffle with its own words, whatever was drawn before it."""
    n, sizes = case
    starts = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))]).astype(np.int64)
    words = stream(data.draw(st.integers(0, 10**6))).uint64(0, int(starts[-1]))
    out = np.empty(words.size, np.int64)
    draw_subsets(words, starts, n, out)
    for first, last in pairwise(starts.tolist()):
        assert out[first:last].tolist() == shuffled(words[first:last].tolist(), n)


def test_kernel_at_the_ends_of_the_words() -> None:
    n = 2**31 - 1
    words = np.array([0, 2**64 - 1, 2**63, 2**64 - 2**33, 1], np.uint64)
    out = np.empty(5, np.int64)
    draw_subsets(words, np.array([0, 5]), n, out)
    assert out.tolist() == shuffled(words.tolist(), n)
    assert out.tolist()[:2] == [0, n - 1]
    assert out[3] == 1  # step 3 hits position n − 1 again, where step 1 had put record 1


def inclusions(sampling: Sampling, n: int, draws: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    sampler = sampling.sampler(n, stream(1))
    member = np.zeros((draws, n), bool)
    for i in range(draws):
        member[i, sampler.batch(i)] = True
    return member.sum(axis=0), member


@pytest.mark.parametrize("sampling", [FixedSize(50, 5), Poisson(0.1)], ids=["fixed", "poisson"])
def test_inclusion_is_uniform_and_batches_are_independent(sampling: Sampling) -> None:
    n, draws, rate = 50, 60_000, 0.1
    counts, member = inclusions(sampling, n, draws)

    def rejects(expected: npt.ArrayLike) -> bool:
        # For fixed sizes the counts are slightly negatively correlated, which only lowers the statistic.
        statistic = float(np.sum((counts - np.asarray(expected)) ** 2)) / (draws * rate * (1 - rate))
        return bool(special.gammaincc(n / 2, statistic / 2) < FALSE_ALARM)

    assert not rejects(draws * rate)
    assert rejects(draws * rate * 0.95)
    assert rejects(draws * rate * 1.05)
    assert rejects(draws * rate * np.repeat([0.95, 1.05], n // 2))
    # Batches one apart and 256 apart (the same row of the next block): overlap as of independent ones. The
    # products are one-dependent: their variance is (1 − q² + 2q(1 − q)) q² < 1.2² q² each.
    for lag in (1, 256):
        overlap = (member[lag:] & member[:-lag]).sum()
        mean = (draws - lag) * n * rate**2
        assert abs(overlap - mean) < special.ndtri(1 - FALSE_ALARM / 4) * 1.2 * math.sqrt(mean)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 400), st.floats(1e-4, 0.9999))
def test_binomial_table_is_exact(n: int, rate: float) -> None:
    """Against exact fractions: every probability right to 2⁻⁶⁴, plus what the cut tails may hold."""
    lowest, thresholds = binomial_table(n, rate)
    mass = np.diff([0, *thresholds.tolist(), 2**64])
    hit, out_of = rate.as_integer_ratio()
    for k in range(n + 1):
        exact = math.comb(n, k) * hit**k * (out_of - hit) ** (n - k) * 2**64 // out_of**n
        stated = int(mass[k - lowest]) if 0 <= k - lowest < len(mass) else 0
        assert abs(stated - exact) <= 2


@pytest.mark.parametrize("sampling", [FixedSize(1000, 300), FixedSize(10**6, 100), Poisson(0.3), Poisson(0.001)])
def test_batches_can_be_asked_for_in_any_order(sampling: Sampling) -> None:
    """A run resumed at any release, with a sampler made anew, draws what the first run drew."""
    n = sampling.n if isinstance(sampling, FixedSize) else 1000
    sampler = sampling.sampler(n, stream(3))
    first = [np.array(sampler.batch(i)) for i in range(600)]
    for i in (599, 0, 255, 256, 300, 17):
        again = sampling.sampler(n, stream(3)).batch(i)
        np.testing.assert_array_equal(first[i], again)
        np.testing.assert_array_equal(first[i], sampler.batch(i))
    other = sampling.sampler(n, stream(4))
    assert any(first[i].tolist() != np.array(other.batch(i)).tolist() for i in range(20))
    with pytest.raises(ValueError, match="block="):
        sampler.batch(-1)


def test_batches_handed_out_are_kept_and_cannot_be_changed() -> None:
    sampler = FixedSize(1000, 10).sampler(1000, stream())
    early = sampler.batch(0)
    assert early is not None
    kept = early.copy()
    for i in range(0, 2000, 100):
        sampler.batch(i)
    np.testing.assert_array_equal(early, kept)
    with pytest.raises(ValueError, match="read-only"):
        early[0] = 1


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 2**62), unique=True, max_size=60),
    st.integers(1, 5),
    st.floats(0.01, 1.0),
    st.integers(0, 2**40),
)
def test_keyed_sampling_does_not_see_the_split(ids: list[int], parties: int, rate: float, i: int) -> None:
    sampling = Poisson(rate)
    whole = {ids[k] for k in sampling.by_id(ids, stream()).batch(i)}
    parts = [ids[p::parties] for p in range(parties)]
    union = {part[k] for part in parts for k in sampling.by_id(part, stream()).batch(i)}
    assert union == whole


def test_keyed_sampling_has_the_rate_and_is_independent() -> None:
    n, draws = 1000, 300
    sampler = Poisson(0.2).by_id(np.arange(5, 5 + n), stream(5))
    member = np.zeros((draws, n), bool)
    for i in range(draws):
        member[i, sampler.batch(i)] = True
    limit = special.ndtri(1 - FALSE_ALARM / 2)
    for counted, trials, chance, wrong in (
        (member.sum(), draws * n, 0.2, 1.05),
        ((member[1:] & member[:-1]).sum(), (draws - 1) * n, 0.04, 1.2),
        ((member[:, 1:] & member[:, :-1]).sum(), draws * (n - 1), 0.04, 1.2),
    ):
        # Neighbouring products are one-dependent: their variance is below three times the binomial one.
        spread = math.sqrt(3 * trials * chance * (1 - chance))
        assert abs(counted - trials * chance) < limit * spread
        assert abs(counted - trials * chance * wrong) > limit * spread


def test_keyed_sampling_refuses_bad_ids() -> None:
    with pytest.raises(ValueError, match="same id"):
        Poisson(0.5).by_id([1, 2, 1], stream())
    with pytest.raises(ValueError, match="list of integers"):
        Poisson(0.5).by_id([0.5], stream())
    with pytest.raises(ValueError, match="≥ 0"):
        Poisson(0.5).by_id([-1], stream())


@pytest.mark.parametrize("relation", list(Relation))
def test_single_pass_uses_every_record_at_most_once(relation: Relation) -> None:
    sampler = SinglePass(1000, batch_size=10, relation=relation).sampler(1000, stream())
    taken = [sampler.take(k) for k in (1, 400, 7, 92)]
    taken.append(sampler.batch(60))  # slots 500 … 599 are given up
    assert sampler.left == 390
    with pytest.raises(BudgetError, match="391 fresh records asked for, 390 of 1000 left"):
        sampler.take(391)
    assert sampler.left == 390  # the refusal took nothing
    taken.append(sampler.take(390))
    used = np.concatenate(taken)
    assert np.unique(used).size == used.size
    if relation is Relation.REPLACE_ONE:
        assert [t.size for t in taken] == [1, 400, 7, 92, 10, 390]
    for call in (lambda: sampler.take(1), lambda: sampler.batch(5), lambda: sampler.skip_to(999)):
        with pytest.raises(BudgetError):
            call()
    with pytest.raises(ValueError, match="count=0"):
        sampler.take(0)


def test_single_pass_resumes_where_it_was() -> None:
    plan = SinglePass(100, batch_size=5)
    whole, resumed = plan.sampler(100, stream()), plan.sampler(100, stream())
    first = [whole.take(3), whole.take(30)]
    resumed.skip_to(3)
    np.testing.assert_array_equal(resumed.take(30), first[1])
    np.testing.assert_array_equal(plan.sampler(100, stream()).batch(7), plan.sampler(100, stream()).batch(7))


def test_slots_by_permutation_and_by_hash() -> None:
    n, keys = 8, 20_000
    permuted = np.array([permuted_slots(n, stream(k)) for k in range(keys)])
    hashed = np.array([hashed_slots(np.arange(n), n, stream(k)) for k in range(keys)])
    assert (np.sort(permuted, axis=1) == np.arange(n)).all()
    for slots in (permuted, hashed):
        for record in range(n):
            assert not chi2_rejects(np.bincount(slots[:, record], minlength=n), np.full(n, keys / n))
    both = np.bincount(hashed[:, 0] * n + hashed[:, 1], minlength=n * n)
    assert not chi2_rejects(both, np.full(n * n, keys / n**2))  # two records' slots are independent


def test_removing_a_record_moves_no_other_hashed_slot() -> None:
    ids = np.array([3, 99, 10**15, 7])
    everyone = hashed_slots(ids, 1000, stream())
    np.testing.assert_array_equal(hashed_slots(np.delete(ids, 1), 1000, stream()), np.delete(everyone, 1))


GAUSSIAN = events.Gaussian(2.0)


@pytest.mark.parametrize(
    ("sampling", "event", "divisor"),
    [
        (FullBatch(), events.Repeated(GAUSSIAN, 9), 1000.0),
        (Poisson(0.25), events.Repeated(events.PoissonSampled(0.25, GAUSSIAN), 9), 250.0),
        (Poisson(1.0), events.Repeated(GAUSSIAN, 9), 1000.0),
        (FixedSize(1000, 20), events.Repeated(events.FixedSizeSampled(1000, 20, GAUSSIAN), 9), 20.0),
        (FixedSize(1000, 1000), events.Repeated(GAUSSIAN, 9), 1000.0),
        (SinglePass(1000, 50), events.Parallel((GAUSSIAN,)), 50.0),
        (SinglePass(1000, 50, Relation.ADD_REMOVE), events.Parallel((GAUSSIAN,)), 50.0),
    ],
)
def test_each_scheme_knows_its_event_its_divisor_and_its_json(
    sampling: Sampling, event: events.Event, divisor: float
) -> None:
    assert sampling.event(GAUSSIAN, steps=9) == event
    assert sampling.expected_batch(1000) == divisor
    assert from_json(json.loads(json.dumps(sampling.to_json()))) == sampling
    assert sampling.kind.split("-")[0] in sampling.describe().lower().replace(" ", "-")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Poisson(0.0), r"rate=0\.0: must be in \(0, 1\]"),
        (lambda: Poisson(1.01), r"rate=1\.01"),
        (lambda: Poisson(math.nan), "rate=nan"),
        (lambda: FixedSize(10, 11), "batch_size=11: must be ≤ n=10"),
        (lambda: FixedSize(0, 1), "n=0"),
        (lambda: FixedSize(10, 2.5), "batch_size=2.5"),  # type: ignore[arg-type]
        (lambda: FixedSize(10, 2).sampler(11, stream()), "FixedSize was declared for n=10"),
        (lambda: SinglePass(10, 11), "batch_size=11"),
        (lambda: SinglePass(10, 1, "both"), "relation='both'"),  # type: ignore[arg-type]
        (lambda: SinglePass(10).sampler(9, stream()), "SinglePass was declared for n=10"),
        (lambda: Poisson(0.5).sampler(2**31, stream()), "records: must be between"),
        (lambda: from_json({"sampling": "shuffle"}), "must be one of"),
        (lambda: from_json({"sampling": "poisson"}), "must be one of"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
