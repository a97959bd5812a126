"""The mutation suite: every known way to break a private optimiser, and the layer that notices.

``TABLE`` says which layer must catch which bug. Every row is run broken (the named layer must report a violation)
and sound (it must not). Seeds are fixed; the stated false-alarm rate of each test is 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.assurance.audit.canaries import CanaryGame, CanaryObjective
from quietgrad.assurance.audit.noise_checks import (
    MECHANISMS,
    RELEASES,
    check_noise,
    lengthened,
    probe_grid,
    probe_mechanism,
    probe_slots,
)
from quietgrad.assurance.audit.replicas import CuratorFactory, central
from quietgrad.assurance.audit.report import AuditFinding
from quietgrad.assurance.audit.running import run
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import BudgetError
from quietgrad.core.noise.correlated import BufferedToeplitzNoise
from quietgrad.core.noise.grid import NoiseStream
from quietgrad.core.noise.mechanisms import GaussianNoise, Mechanism
from quietgrad.core.plans.schedule import Schedule
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.queries import RecursiveMomentumQuery
from quietgrad.federation.secure.identity import SumOutOfBoundsError
from quietgrad.objectives import Logistic
from tests.mutations import broken
from tests.probes.parties import (
    probe_federation,
    probe_lost_rounds,
    probe_masks,
    probe_secure_sum,
)
from tests.probes.records import (
    adversarial_table,
    neighbouring_tables,
    probe_clip,
    probe_second_order,
    probe_sensitivity,
)
from tests.probes.sessions import probe_charges, probe_fresh_records, probe_ledger, probe_replay, probe_samples

Findings = Iterable[AuditFinding]
GAUSSIAN = GaussianNoise()
REPLACE = qg.Budget(6.0, 1e-5, Relation.REPLACE_ONE)
ADD = qg.Budget(6.0, 1e-5)
DPSRM = qg.DPSRM(steps=6, batch_size=4, difference_clip=0.2)


def audited(
    curator: CuratorFactory = central, *, runs: int = 2000, budget: qg.Budget = REPLACE, **more: Any
) -> Findings:
    return run(
        more.pop("algorithm", DPSRM), budget=budget, n=4, runs=runs, curator=curator, seed=1, **more
    ).findings


def noise(curator: CuratorFactory = central, mechanism: Mechanism = GAUSSIAN) -> Findings:
    return probe_mechanism(mechanism, curator, seed=1)


def source(how: Any, mechanism: Mechanism = GAUSSIAN) -> Findings:
    """What is heard if every source of noise is broken in one way."""
    return noise(broken.Broken(source=how), mechanism)


def alternating(objective: Any) -> Findings:
    game = CanaryGame(4, Relation.REPLACE_ONE, "alternating", objective=objective)
    return audited(game=game)


def momentum_kernel(objective: Any) -> Findings:
    def queries(records: Any) -> Any:
        rng = np.random.default_rng(2)
        for scale in (0.3, 5.0, 100.0):
            theta = scale * rng.standard_normal(records.dim)
            yield RecursiveMomentumQuery(theta, -theta, 0.1, 1.0, 0.2)

    relation = Relation.ADD_REMOVE
    return [probe_sensitivity(objective, neighbouring_tables(objective, relation), queries, relation)]


def tight_bound(query: type[RecursiveMomentumQuery]) -> Findings:
    """A bound that is never reached is no leak but wasted noise; the probe says so and we read it as a finding."""

    def queries(records: Any) -> Any:
        theta = np.random.default_rng(3).standard_normal(records.dim) * 5.0
        for previous in (-theta, theta, 0.5 * theta):
            yield query(theta, previous, 0.01, 1.0, 0.01)

    relation = Relation.ADD_REMOVE
    found = probe_sensitivity(Logistic(), neighbouring_tables(Logistic(), relation), queries, relation)
    return [found._replace(verdict="violation" if found.note else found.verdict)]


def clipped(objective: Any) -> Findings:
    return [probe_clip(objective, adversarial_table(objective))]


def rounds(curator: CuratorFactory) -> Findings:
    return audited(curator, algorithm=qg.RRPSGD(steps=4, batch_size=4), runs=400)


def whitened(curator: CuratorFactory) -> Findings:
    return audited(curator, algorithm=qg.WhitenedGD(steps=2, row_bound=1.0), runs=400)


def moments(patched: bool) -> Findings:
    from quietgrad.tables import whitening

    with pytest.MonkeyPatch.context() as patch:
        if patched:
            patch.setattr(whitening, "_shortened", lambda block, clip, weights: block)
        return [finding for finding in probe_second_order() if finding.what.startswith("second moments")]


def blocks(patched: bool) -> Findings:
    """Normals are made in blocks; the bug makes the first block again."""
    made = NoiseStream.normal

    def again(self: NoiseStream, block: int, shape: Any) -> Any:
        return made(self, 0, shape)

    with pytest.MonkeyPatch.context() as patch:
        if patched:
            patch.setattr(NoiseStream, "normal", again)
        return noise()


def streams(patched: bool) -> Findings:
    """The bug: a slot's name is not part of its stream's label."""
    made = GaussianNoise.source

    def unlabelled(self: GaussianNoise, key: bytes, label: str, count: int) -> Any:
        return made(self, key, "noise", count)

    with pytest.MonkeyPatch.context() as patch:
        if patched:
            patch.setattr(GaussianNoise, "source", unlabelled)
        return probe_slots(lengthened(qg.plan(DPSRM, n=4, budget=REPLACE)), seed=1)


def sessions(patched: bool) -> Findings:
    """The bug: a curator's second session draws what its first drew."""
    with pytest.MonkeyPatch.context() as patch:
        if patched:
            patch.setattr(CentralCurator, "_session_key", lambda self: self._key)
        return noise()


def one_turn(patched: bool) -> Findings:
    """The bug: a record that takes part again and again counts as if it did once."""
    with pytest.MonkeyPatch.context() as patch:
        if patched:
            once = BufferedToeplitzNoise.made(RELEASES).sensitivity()
            patch.setattr(BufferedToeplitzNoise, "sensitivity", lambda self, releases=None: once)
        return noise(mechanism=BufferedToeplitzNoise.made(RELEASES, 4, RELEASES // 4))


def realised(curator: CuratorFactory) -> Findings:
    return audited(curator, budget=ADD, algorithm=qg.DPSGD(steps=6, batch_size=4))


def shuffled(curator: CuratorFactory) -> Findings:
    game = broken.ZeroOutGame(8, Relation.ADD_REMOVE, all_records=True, background=False)
    algorithm = qg.DPSGD(steps=8, batch_size=1)
    return run(
        algorithm, budget=ADD, n=8, runs=2000, curator=curator, game=game, noise_multiplier=0.35, seed=1
    ).findings


def forgotten(forget: bool) -> Findings:
    algorithm = qg.DPSRM(steps=2, batch_size=4)
    plan = qg.plan(algorithm, n=4, budget=REPLACE)
    claimed = replace(plan, schedule=Schedule(plan.schedule.slots[1:])) if forget else plan
    return audited(algorithm=algorithm, claimed=claimed)


# Differences with the smaller multiplier: full gradients have 6.3 ÷ 2.1 times theirs.
SPIDER = qg.DPSpider(steps=6, period=3, split=0.05, learning_rate=0.1)


def two_noises(curator: CuratorFactory = central) -> Findings:
    return audited(curator, algorithm=SPIDER, runs=200)


CORRELATED_SPIDER = replace(
    SPIDER, steps=12, period=6, noise="correlated", sampling="turns", cohorts=2, difference_clip=0.1
)


def correlated_two_noises(curator: CuratorFactory = central) -> Findings:
    return audited(curator, algorithm=CORRELATED_SPIDER, runs=200)


def correlated_differences(patched: bool) -> Findings:
    """The bug: differences of DP-SPIDER cancel noise over five turns of a record and pay for one."""
    with pytest.MonkeyPatch.context() as patch:
        if patched:
            once = BufferedToeplitzNoise.made(CORRELATED_SPIDER.steps).sensitivity()
            patch.setattr(BufferedToeplitzNoise, "sensitivity", lambda self, releases=None: once)
        return correlated_two_noises()


def free_restart(forget: bool) -> Findings:
    """The bug: a chain that begins again is not charged, so the plan claims one full gradient of three."""
    algorithm = replace(SPIDER, period=2, split=0.9)
    plan = qg.plan(algorithm, n=4, budget=REPLACE)
    full, differences = plan.schedule.slots
    claimed = replace(plan, schedule=Schedule((replace(full, count=1), differences))) if forget else plan
    return audited(algorithm=algorithm, claimed=claimed, runs=400)


def averaged_noise(parties: int) -> Findings:
    """WD-DP as printed: every party adds N(0, σ²) to its model and the models are averaged."""
    rng = np.random.default_rng(4)
    return check_noise(rng.standard_normal((parties, 3, 20_000)).mean(axis=0), 1.0, "weighted average")


def same_seed(patched: bool) -> Findings:
    from quietgrad.federation.secure import channel

    class Shared(channel.NoiseShare):
        def __init__(self, terms: Any, role: int, seed: int | None) -> None:
            super().__init__(terms, 0, 7)

    with pytest.MonkeyPatch.context() as patch:
        if patched:
            patch.setattr(channel, "NoiseShare", Shared)
        try:
            return probe_secure_sum("masks")
        except SumOutOfBoundsError:  # the sum was so long that nobody would take it: also seen
            return [AuditFinding("L0 noise scale", "secure sum", "refused", 0.0, 1.0, "violation")]


def reused_masks(patched: bool) -> Findings:
    from quietgrad.federation.secure import masking

    class Constant:
        """A stream whose blocks are all the same."""

        def words(self, block: int, size: int, kind: Any, first: int = 0) -> Any:
            words = np.random.default_rng(5).integers(0, 2**63, first + size, dtype=np.uint64)
            return words[first:].astype(kind)

    with pytest.MonkeyPatch.context() as patch:
        if patched:
            for name in ("self_mask", "pair_mask"):
                patch.setattr(masking, name, lambda *arguments: Constant())
        return [probe_masks()]


def charged(late: bool) -> Findings:
    def in_time(objective: Any, data: Any, path: Path) -> CentralCurator:
        return CentralCurator(objective, data, ledger=path)

    return [probe_ledger(broken.ChargesAfterwards if late else in_time)]


def lost_rounds(patched: bool) -> Findings:
    """The bug: only rounds that were completed are charged."""
    from quietgrad.federation.coordinator import FederatedSession

    def completed(self: Any, *_: Any) -> Any:
        return self._plan.event_of(self._made)

    with pytest.MonkeyPatch.context() as patch:
        if patched:
            patch.setattr(FederatedSession, "_spent_event", completed)
        return [probe_lost_rounds()]


def party(source: Any, *, rounds: int = 64) -> Findings:
    """Parties who add their own noise; the second one's source is broken."""
    from quietgrad.federation.party import PartyCurator

    opened = PartyCurator._open

    def broken_open(self: PartyCurator, message: Any) -> Any:
        answer = opened(self, message)
        if source is not None and self.name == "party-2":
            self._sources = {name: source(inner) for name, inner in self._sources.items()}
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartyCurator, "_open", broken_open)
        return probe_federation("local", rounds=rounds)


def shares(patched: bool) -> Findings:
    """Secure sums by masks; one party's share of the noise covers half of the coordinates."""
    from quietgrad.federation.secure import channel

    class Half(channel.NoiseShare):
        def __init__(self, terms: Any, role: int, seed: int | None) -> None:
            super().__init__(terms, role, seed)
            self.role = role

        def draw(self, t: int) -> Any:
            words = super().draw(t).copy()
            if self.role == 1:
                words[len(words) // 2 :] = 0
            return words

    with pytest.MonkeyPatch.context() as patch:
        if patched:
            patch.setattr(channel, "NoiseShare", Half)
        return probe_federation("secure", "masks", rounds=128)


def coordinator(source: Any) -> Findings:
    """A trusted coordinator whose source of noise is broken."""
    from quietgrad.federation.coordinator import FederatedSession

    built = FederatedSession.__init__

    def broken_init(self: FederatedSession, *args: Any) -> None:
        built(self, *args)
        if source is not None:
            self._sources = {name: source(inner) for name, inner in self._sources.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedSession, "__init__", broken_init)
        return probe_federation("curator", rounds=64)


def party_charge(patched: bool) -> Findings:
    """Parties who charge less than they answer."""
    from quietgrad.federation.plan import FederatedPlan

    def less(self: FederatedPlan, place: int, counts: Any) -> Any:
        return self.schedule.slots[0].event(self.noise_multiplier, Relation.ADD_REMOVE, 31)

    with pytest.MonkeyPatch.context() as patch:
        if patched:
            patch.setattr(FederatedPlan, "party_event", less)
        return probe_federation("curator", rounds=32)


@dataclass(frozen=True)
class Mutation:
    """A bug, the layer that must notice it, the broken variant and its sound twin."""

    bug: str
    layer: str
    broken: Callable[[], Findings]
    sound: Callable[[], Findings]


def switched(bug: str, layer: str, probe: Callable[[bool], Findings]) -> Mutation:
    """A probe that takes whether it is broken."""
    return Mutation(bug, layer, partial(probe, True), partial(probe, False))


def replaced(bug: str, layer: str, probe: Callable[..., Findings], mutant: Any, sound: Any = None) -> Mutation:
    """A probe of a curator or an objective, with a broken one in its place; ``sound`` if it has no default."""
    return Mutation(bug, layer, partial(probe, mutant), probe if sound is None else partial(probe, sound))


def session(bug: str, layer: str, probe: Callable[..., Findings], mutant: Any, sound: Any = None) -> Mutation:
    """The same with a broken class of sessions."""
    return replaced(bug, layer, probe, broken.Broken(mutant), sound)


def each_mechanism(bug: str, layer: str, how: Any, scale: str = "") -> list[Mutation]:
    """A broken source under every mechanism; where noise is added to sums, its scale may tell first."""
    return [
        Mutation(
            f"{bug} ({m.kind})", scale if scale and m.kind in ("gaussian", "pure") else layer,
            partial(source, how, m), partial(noise, mechanism=m),
        )
        for m in MECHANISMS
    ]  # fmt: skip


def intact(inner: Any) -> Any:
    """A source of noise as it is."""
    return inner


def long_run(curator: CuratorFactory = central) -> Findings:
    return audited(curator, runs=20_000)


def fresh_records(*curator: Any) -> Findings:
    return [probe_fresh_records(*curator)]


def grid(*curator: Any) -> Findings:
    return [probe_grid(*curator)]


def one_slot(patched: bool) -> Findings:
    return whitened(broken.Broken(source=broken.Quieter, only="second-moments") if patched else central)


SCALE, LAW, FRESH, CHARGE, SAMPLING = (
    "L0 noise scale", "L0 noise law", "L0 freshness", "L0 charge", "L0 sampling"
)  # fmt: skip
TABLE = [
    replaced("sensitivity off by 2", "L1", audited, broken.Broken(noise=0.5)),
    replaced("noise × 0.5", SCALE, noise, broken.Broken(noise=0.5)),
    replaced("noise × 0.9", SCALE, noise, broken.Broken(noise=0.9)),
    replaced("noise × 0.9 in a run", "L1", long_run, broken.Broken(noise=0.9)),
    session("noise before clipping", SCALE, noise, broken.NoiseThenClip),
    replaced("clips apart", "L1", alternating, broken.SeparateClips, CanaryObjective),
    replaced(
        "clips apart in a kernel", "L0 sensitivity", momentum_kernel, broken.SeparatelyClippedLogistic(), Logistic()
    ),
    session("mean over the realised batch", "L1", realised, broken.MeanOfRealisedBatch, central),
    session("skipped empty batch", SCALE, noise, broken.SkipsEmptyBatch),
    switched("same seed in all parties", SCALE, same_seed),
    switched("reused mask stream", FRESH, reused_masks),
    Mutation("reused noise", FRESH, lambda: source(broken.SameNoise), noise),
    replaced("Poisson accounting of shuffled batches", "L2", shuffled, broken.ShufflingCurator, central),
    replaced("WD-DP as printed", SCALE, averaged_noise, 8, 1),
    replaced("swapped C1 and C2", "L0 sensitivity", tight_bound, broken.SwappedClips, RecursiveMomentumQuery),
    switched("forgotten step 0", "L1", forgotten),
    session("a difference's multiplier on full gradients", SCALE, two_noises, broken.OneMultiplier),
    session("the same beside correlated differences", SCALE, correlated_two_noises, broken.OneMultiplier),
    switched("correlated differences that pay for one turn", SCALE, correlated_differences),
    switched("a restart without a charge", "L1", free_restart),
    switched("ledger charged after release", "L0 ledger", charged),
    session("fresh record used twice", "L0 reuse", fresh_records, broken.TakesRecordsAgain),
    switched("spare round not charged", CHARGE, lost_rounds),
    session("float noise off the grid", "L0 grid", grid, broken.FloatNoise),
    *each_mechanism("no noise at every 7th release", LAW, broken.SilentEverySeventh, SCALE),
    *each_mechanism("noise used twice from release 32", FRESH, broken.TwiceFromThirtyTwo),
    *each_mechanism("a tenth of the noise", LAW, broken.Quieter),
    switched("correlated noise for one turn", SCALE, one_turn),
    Mutation("noise of another law", LAW, lambda: source(broken.UniformNoise), noise),
    Mutation("one number for all coordinates", "L0 coordinates", lambda: source(broken.OneNumberForAll), noise),
    Mutation("noise on half the coordinates", SCALE, lambda: source(broken.HalfTheCoordinates), noise),
    session("noise begun anew after a resume", FRESH, noise, broken.BeginsNoiseAnew),
    *(
        Mutation(
            f"k − 1 of k releases charged ({m.kind})", CHARGE,
            partial(probe_charges, broken.Broken(broken.ChargesOneLess).charging, [m]),
            partial(probe_charges, broken.Broken().charging, [m]),
        )
        for m in MECHANISMS
    ),
    replaced("a party's noise on half the coordinates", SCALE, party, broken.HalfTheCoordinates, intact),
    switched("a party's share on half the coordinates", SCALE, shares),
    replaced("a party's noise used twice", FRESH, party, broken.TwiceFromThirtyTwo, intact),
    replaced("a coordinator's noise dropped in every 7th", SCALE, coordinator, broken.SilentEverySeventh, intact),
    switched("a party charges less than it answers", CHARGE, party_charge),
    session("a random round that is always the last", "L0 rounds", rounds, broken.AlwaysTheLastRound, central),
    switched("a tenth of the noise in one slot", SCALE, one_slot),
    switched("the same, from transcripts alone", "L1", one_slot),
    switched("moments of rows that were not shortened", "L0 sensitivity", moments),
    session("one sample for all releases", SAMPLING, probe_samples, broken.SamplesOnce),
    session("samples larger than planned", SAMPLING, probe_samples, broken.SamplesMore),
    session("the same steps in every epoch", SAMPLING, probe_samples, broken.AllocatesOnce),
    session("steps by place", SAMPLING, probe_samples, broken.AllocatesByPlace),
    session("a record in two steps of an epoch", SAMPLING, probe_samples, broken.AllocatesTwice),
    switched("blocks of noise that begin again", FRESH, blocks),
    switched("one stream for all slots", FRESH, streams),
    switched("one key for all sessions", FRESH, sessions),
    replaced("clipped in the maximum norm", "L0 clip", clipped, broken.InfinityClipped(), Logistic()),
    session("replay with another query", FRESH, probe_replay, broken.ReplaysByName, broken.Broken()),
    session("replay with another query, not charged", CHARGE, probe_replay, broken.ReplaysByName, broken.Broken()),
]  # fmt: skip


@pytest.mark.parametrize("mutation", TABLE, ids=lambda m: m.bug)
def test_named_layer_catches_the_bug_and_spares_the_sound_twin(mutation: Mutation) -> None:
    caught = {f.layer for f in mutation.broken() if f.verdict == "violation"}
    assert mutation.layer in caught, f"{mutation.bug}: caught by {caught or 'nothing'}"
    spared = [f for f in mutation.sound() if f.verdict == "violation"]
    assert not spared, f"{mutation.bug}: the sound twin was accused by {spared}"


def test_door_refuses_a_release_that_was_not_planned() -> None:
    """The forgotten step 0 cannot even be run: the door counts."""
    algorithm = qg.DPSRM(steps=2, batch_size=4)
    plan = qg.plan(algorithm, n=4, budget=REPLACE)
    short = replace(plan, schedule=Schedule(plan.schedule.slots[1:]))
    objective, data = CanaryGame(4, Relation.REPLACE_ONE, all_records=True, background=False).world(0, 1)
    session = CentralCurator(objective, data, seed=0).open(short)
    with pytest.raises(BudgetError, match="'first' is not in the plan"):
        algorithm.step(algorithm.init(np.zeros(2)), session)


def test_every_bug_of_the_issue_is_in_the_table() -> None:
    layers = {m.layer.split()[0] for m in TABLE}
    assert layers == {"L0", "L1", "L2"}
    assert len({m.bug for m in TABLE}) == len(TABLE) >= 50
