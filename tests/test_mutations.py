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
from quietgrad.audit.canaries import CanaryGame, CanaryObjective
from quietgrad.audit.noise_checks import (
    MECHANISMS,
    RELEASES,
    check_noise,
    lengthened,
    probe_grid,
    probe_mechanism,
    probe_slots,
)
from quietgrad.audit.replicas import CuratorFactory, central
from quietgrad.audit.report import AuditFinding
from quietgrad.audit.running import run
from quietgrad.curators.central import CentralCurator
from quietgrad.errors import BudgetError
from quietgrad.objectives import Logistic
from quietgrad.objectives.base import RecursiveMomentumQuery
from quietgrad.plans.schedule import Schedule
from quietgrad.privacy.budget import Relation
from quietgrad.privacy.correlated import BufferedToeplitzNoise
from quietgrad.privacy.mechanisms import GaussianNoise, Mechanism
from quietgrad.privacy.noise import NoiseStream
from quietgrad.secure.identity import SumOutOfBoundsError
from tests import broken
from tests.probes.parties import (
    probe_federated_choice,
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
    from quietgrad.objectives.tables import whitening

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


def averaged_noise(parties: int) -> Findings:
    """WD-DP as printed: every party adds N(0, σ²) to its model and the models are averaged."""
    rng = np.random.default_rng(4)
    return check_noise(rng.standard_normal((parties, 3, 20_000)).mean(axis=0), 1.0, "weighted average")


def same_seed(patched: bool) -> Findings:
    from quietgrad.secure import channel

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
    from quietgrad.secure import masking

    def constant(*arguments: Any) -> Any:
        size = arguments[2] if len(arguments) == 3 else arguments[0].terms.dimension
        return np.random.default_rng(5).integers(0, 2**63, size, dtype=np.uint64)

    with pytest.MonkeyPatch.context() as patch:
        if patched:
            for room in (masking, masking):
                for name in ("self_mask_words", "pair_mask_words"):
                    if hasattr(room, name):
                        patch.setattr(room, name, constant)
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
    from quietgrad.secure import channel

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
        return [*probe_federation("curator", rounds=64), *probe_federated_choice()]


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


TABLE = [
    Mutation("sensitivity off by 2", "L1", lambda: audited(broken.Broken(noise=0.5)), audited),
    Mutation("noise × 0.5", "L0 noise scale", lambda: noise(broken.Broken(noise=0.5)), noise),
    Mutation("noise × 0.9", "L0 noise scale", lambda: noise(broken.Broken(noise=0.9)), noise),
    Mutation(
        "noise × 0.9 in a run",
        "L1",
        lambda: audited(broken.Broken(noise=0.9), runs=20_000),
        lambda: audited(runs=20_000),
    ),
    Mutation("noise before clipping", "L0 noise scale", lambda: noise(broken.Broken(broken.NoiseThenClip)), noise),
    Mutation(
        "clips apart",
        "L1",
        lambda: alternating(broken.SeparateClips),
        lambda: alternating(CanaryObjective),
    ),
    Mutation(
        "clips apart in a kernel",
        "L0 sensitivity",
        lambda: momentum_kernel(broken.SeparatelyClippedLogistic()),
        lambda: momentum_kernel(Logistic()),
    ),
    Mutation(
        "mean over the realised batch",
        "L1",
        lambda: realised(broken.Broken(broken.MeanOfRealisedBatch)),
        lambda: realised(central),
    ),
    Mutation("skipped empty batch", "L0 noise scale", lambda: noise(broken.Broken(broken.SkipsEmptyBatch)), noise),
    Mutation("same seed in all parties", "L0 noise scale", lambda: same_seed(True), lambda: same_seed(False)),
    Mutation("reused mask stream", "L0 freshness", lambda: reused_masks(True), lambda: reused_masks(False)),
    Mutation("reused noise", "L0 freshness", lambda: source(broken.SameNoise), noise),
    Mutation(
        "Poisson accounting of shuffled batches",
        "L2",
        lambda: shuffled(broken.ShufflingCurator),
        lambda: shuffled(central),
    ),
    Mutation("WD-DP as printed", "L0 noise scale", lambda: averaged_noise(8), lambda: averaged_noise(1)),
    Mutation(
        "swapped C1 and C2",
        "L0 sensitivity",
        lambda: tight_bound(broken.SwappedClips),
        lambda: tight_bound(RecursiveMomentumQuery),
    ),
    Mutation("forgotten step 0", "L1", lambda: forgotten(True), lambda: forgotten(False)),
    Mutation("ledger charged after release", "L0 ledger", lambda: charged(True), lambda: charged(False)),
    Mutation(
        "fresh record used twice",
        "L0 reuse",
        lambda: [probe_fresh_records(broken.Broken(broken.TakesRecordsAgain))],
        lambda: [probe_fresh_records()],
    ),
    Mutation("spare round not charged", "L0 charge", lambda: lost_rounds(True), lambda: lost_rounds(False)),
    Mutation(
        "float noise off the grid",
        "L0 grid",
        lambda: [probe_grid(broken.Broken(broken.FloatNoise))],
        lambda: [probe_grid()],
    ),
    *(
        Mutation(
            f"no noise at every 7th release ({m.kind})",
            "L0 noise scale" if m.kind in ("gaussian", "pure") else "L0 noise law",
            lambda m=m: source(broken.SilentEverySeventh, m),  # type: ignore[misc]
            lambda m=m: noise(mechanism=m),  # type: ignore[misc]
        )
        for m in MECHANISMS
    ),
    *(
        Mutation(
            f"noise used twice from release 32 ({m.kind})",
            "L0 freshness",
            lambda m=m: source(broken.TwiceFromThirtyTwo, m),  # type: ignore[misc]
            lambda m=m: noise(mechanism=m),  # type: ignore[misc]
        )
        for m in MECHANISMS
    ),
    *(
        Mutation(
            f"a tenth of the noise ({m.kind})",
            "L0 noise law",
            lambda m=m: source(broken.Quieter, m),  # type: ignore[misc]
            lambda m=m: noise(mechanism=m),  # type: ignore[misc]
        )
        for m in MECHANISMS
    ),
    Mutation("correlated noise for one turn", "L0 noise scale", lambda: one_turn(True), lambda: one_turn(False)),
    Mutation("noise of another law", "L0 noise law", lambda: source(broken.UniformNoise), noise),
    Mutation("one number for all coordinates", "L0 coordinates", lambda: source(broken.OneNumberForAll), noise),
    Mutation("noise on half the coordinates", "L0 noise scale", lambda: source(broken.HalfTheCoordinates), noise),
    Mutation(
        "noise begun anew after a resume",
        "L0 freshness",
        lambda: noise(broken.Broken(broken.BeginsNoiseAnew)),
        noise,
    ),
    *(
        Mutation(
            f"k − 1 of k releases charged ({m.kind})",
            "L0 charge",
            lambda m=m: probe_charges(broken.Broken(broken.ChargesOneLess).charging, [m]),  # type: ignore[misc]
            lambda m=m: probe_charges(broken.Broken().charging, [m]),  # type: ignore[misc]
        )
        for m in MECHANISMS
    ),
    Mutation(
        "a party's noise on half the coordinates",
        "L0 noise scale",
        lambda: party(broken.HalfTheCoordinates),
        lambda: party(None),
    ),
    Mutation(
        "a party's share on half the coordinates", "L0 noise scale", lambda: shares(True), lambda: shares(False)
    ),
    Mutation(
        "a party's noise used twice", "L0 freshness", lambda: party(broken.TwiceFromThirtyTwo), lambda: party(None)
    ),
    Mutation(
        "a coordinator's noise dropped at every 7th round",
        "L0 noise scale",
        lambda: coordinator(broken.SilentEverySeventh),
        lambda: coordinator(None),
    ),
    Mutation(
        "a coordinator's choice without noise at every 7th round",
        "L0 noise law",
        lambda: coordinator(broken.SilentEverySeventh),
        lambda: coordinator(None),
    ),
    Mutation(
        "a party charges less than it answers",
        "L0 charge",
        lambda: party_charge(True),
        lambda: party_charge(False),
    ),
    Mutation(
        "a random round that is always the last",
        "L0 rounds",
        lambda: rounds(broken.Broken(broken.AlwaysTheLastRound)),
        lambda: rounds(central),
    ),
    Mutation(
        "a tenth of the noise in one slot",
        "L0 noise scale",
        lambda: whitened(broken.Broken(source=broken.Quieter, only="second-moments")),
        lambda: whitened(central),
    ),
    Mutation(
        "the same, from transcripts alone",
        "L1",
        lambda: whitened(broken.Broken(source=broken.Quieter, only="second-moments")),
        lambda: whitened(central),
    ),
    Mutation(
        "moments of rows that were not shortened", "L0 sensitivity", lambda: moments(True), lambda: moments(False)
    ),
    Mutation(
        "one sample for all releases",
        "L0 sampling",
        lambda: probe_samples(broken.Broken(broken.SamplesOnce)),
        probe_samples,
    ),
    Mutation(
        "samples larger than planned",
        "L0 sampling",
        lambda: probe_samples(broken.Broken(broken.SamplesMore)),
        probe_samples,
    ),
    *(
        Mutation(name, "L0 sampling", partial(probe_samples, broken.Broken(mutant)), probe_samples)
        for name, mutant in (
            ("the same steps in every epoch", broken.AllocatesOnce),
            ("steps by place", broken.AllocatesByPlace),
            ("a record in two steps of an epoch", broken.AllocatesTwice),
        )
    ),
    Mutation("blocks of noise that begin again", "L0 freshness", lambda: blocks(True), lambda: blocks(False)),
    Mutation("one stream for all slots", "L0 freshness", lambda: streams(True), lambda: streams(False)),
    Mutation("one key for all sessions", "L0 freshness", lambda: sessions(True), lambda: sessions(False)),
    Mutation(
        "clipped in the maximum norm",
        "L0 clip",
        lambda: clipped(broken.InfinityClipped()),
        lambda: clipped(Logistic()),
    ),
    Mutation(
        "replay with another query",
        "L0 freshness",
        lambda: probe_replay(broken.Broken(broken.ReplaysByName)),
        lambda: probe_replay(broken.Broken()),
    ),
    Mutation(
        "replay with another query, not charged",
        "L0 charge",
        lambda: probe_replay(broken.Broken(broken.ReplaysByName)),
        lambda: probe_replay(broken.Broken()),
    ),
]


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
