"""Algorithm 2 is Algorithm 1 with another curator: without noise all trust settings walk one path."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.core.noise.rng import SecureStream
from quietgrad.core.sampling import CyclicCohorts, Poisson, Sampler, SinglePass
from quietgrad.core.sampling.samplers import RowScan, SlotSampler, hashed_slots
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.queries import GradientQuery
from quietgrad.federation import Party, deal
from quietgrad.federation.simulation import assemble, simulate
from quietgrad.methods import plan, run
from quietgrad.tables.losses import Logistic
from quietgrad.tables.regularizers import Nonconvex
from tests.federation.talk import ask, say

Floats = npt.NDArray[np.float64]
N, D, SEED = 400, 6, 5
OBJECTIVE = Logistic(regularizer=Nonconvex(1e-2), intercept=True, row_bound=3.0, rows="clip")

ALGORITHMS: dict[str, Any] = {
    "dp-srm": qg.DPSRM(steps=15, batch_size=40, first_batch_size=80),
    "dp-srm joint": qg.DPSRM(steps=15, batch_size=40, joint_clip=True, returns="average"),
    "dp-srm smooth": qg.DPSRM(steps=15, batch_size=40, smoothness=0.5),
    "dp-srm random": qg.DPSRM(steps=15, batch_size=40, returns="random"),
    "dp-sgd": qg.DPSGD(steps=15, batch_size=40, momentum=0.5),
    "dp-adam": qg.DPAdam(steps=15, batch_size=40),
    "dp-gd": qg.DPGD(steps=10),
    "stagewise": qg.StagewiseDPSGD(stages=2, first_steps=3, batch_size=40),
    "rrpsgd": qg.RRPSGD(steps=20, batch_size=40),
    "bassily-sgd": qg.BassilySGD(steps=10, batch_size=40),
    "whitened-gd": qg.WhitenedGD(steps=6),
    "perturbed-sgd": qg.PerturbedSGD(
        oracle=qg.AdaptiveSpider(batch_size=40, difference_batch_size=8, kappa=0.3),
        chi=0.05,
        learning_rate=0.2,
        mode="practical",
        radius=1.0,
        escape_steps=5,
        steps=12,
    ),
    "weighted-average": qg.WeightedAverage(steps=8, method="rounds"),
    "dp-spider": qg.DPSpider(steps=12, period=5, warm_steps=2, smoothness=0.5),
    "dp-spider Poisson": qg.DPSpider(steps=12, period=5, sampling="poisson", batch_size=80, smoothness=0.5),
    "dp-spider drift": qg.DPSpider(steps=12, kappa=0.3, smoothness=0.5),
    "dp-spider random": qg.DPSpider(steps=12, period=5, returns="random", smoothness=0.5),
    "dp-spider correlated": qg.DPSpider(
        steps=12, period=6, noise="correlated", sampling="turns", cohorts=3, difference_clip=0.05, smoothness=0.5
    ),
}
OPEN = {
    "storm": qg.STORM(steps=12, batch_size=40),
    "sgd": qg.SGD(steps=12, batch_size=40),
    "gd": qg.GD(steps=8),
}
TRUSTS: list[dict[str, Any]] = [
    {"trust": "curator"},
    {"trust": "local"},
    {"trust": "secure", "secure": "masks"},
    {"trust": "secure", "secure": "servers"},
    {"trust": "secure", "secure": "mpc"},
]


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the central curator sample by record id, as parties with a shared key do."""

    def poisson(self: Poisson, n_records: int, stream: SecureStream) -> RowScan:
        return self.by_id(np.arange(n_records), stream)

    def single(self: SinglePass, n_records: int, stream: SecureStream) -> SlotSampler:
        return SlotSampler(hashed_slots(np.arange(n_records), self.n, stream), self.n, self.batch_size)

    def turns(self: CyclicCohorts, n_records: int, stream: SecureStream) -> Sampler:
        return self.by_id(np.arange(n_records), stream)

    monkeypatch.setattr(CyclicCohorts, "sampler", turns)
    monkeypatch.setattr(Poisson, "sampler", poisson)
    monkeypatch.setattr(SinglePass, "sampler", single)


def table() -> tuple[Floats, Floats]:
    rng = np.random.default_rng(1)
    X = rng.normal(size=(N, D)) * np.linspace(0.3, 2.0, D)
    y = (X @ rng.normal(size=D) + 0.3 * rng.normal(size=N) > 0.0).astype(np.float64)
    return X, y


def central(algorithm: Any) -> Floats:
    curator = CentralCurator(OBJECTIVE, table(), seed=SEED)
    session = curator.open(plan(algorithm, n=N, budget=None))
    params: Floats = run(algorithm, session, curator.initial()).params
    return params


def federated(algorithm: Any, parties: list[Party], **settings: Any) -> Floats:
    params: Floats = simulate(algorithm, OBJECTIVE, parties, budget=None, seed=SEED, **settings).params
    return params


@pytest.mark.usefixtures("keyed")
@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, TRUSTS[k % 5]) for k, name in enumerate(ALGORITHMS)), *(("dp-srm", trust) for trust in TRUSTS[1:])],
    ids=str,
)
def test_every_algorithm_walks_the_central_path(name: str, settings: dict[str, Any]) -> None:
    algorithm = ALGORITHMS[name]
    expected = central(algorithm)
    got = federated(algorithm, deal(*table(), 4, unevenness=5.0), **settings)
    assert np.linalg.norm(expected) > 1e-3
    np.testing.assert_allclose(got, expected, rtol=0.0, atol=1e-9)


@pytest.mark.usefixtures("keyed")
@pytest.mark.parametrize("trust", ["curator", "local"])
@pytest.mark.parametrize("name", OPEN)
def test_unclipped_baselines_walk_the_central_path(name: str, trust: str) -> None:
    expected = central(OPEN[name])
    got = federated(OPEN[name], deal(*table(), 3, dirichlet=0.3), trust=trust)
    np.testing.assert_allclose(got, expected, rtol=0.0, atol=1e-9)


def test_unclipped_sums_cannot_be_secure() -> None:
    with pytest.raises(ValueError, match="finite bound"):
        federated(OPEN["gd"], deal(*table(), 3), trust="secure", secure="masks")


def test_networks_federate_too() -> None:
    torch = pytest.importorskip("torch")
    from quietgrad.torch.networks.module import ModuleObjective

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(D, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    cross_entropy = torch.nn.functional.cross_entropy
    objective = ModuleObjective(network, lambda out, y: cross_entropy(out, y, reduction="none"))
    X, y = (torch.from_numpy(part) for part in table())
    rows, labels = X.float(), y.long()
    whole = torch.utils.data.TensorDataset(rows, labels)
    parties = [Party(torch.utils.data.TensorDataset(rows[k::3], labels[k::3])) for k in range(3)]
    algorithm = qg.DPGD(steps=4, learning_rate=0.5)
    expected = qg.minimize(objective, whole, algorithm, budget=None).params
    for settings in TRUSTS[:3]:
        got = simulate(algorithm, objective, parties, budget=None, **settings).params
        assert got.dtype == expected.dtype
        assert float((got - expected).norm()) < 1e-5 * float(expected.norm())


def test_a_party_sums_networks_as_widely_as_one_curator() -> None:
    """One record more moves the sum of 131 073 aligned records of a float32 network by what it contributes.

    A sum in float32 moves by multiples of 1/64 there; of 300 002 records one moved it by 1.0156 C.
    """
    torch = pytest.importorskip("torch")
    from quietgrad.torch.networks.module import ModuleObjective

    n, clip = 131_073, 1.0
    network = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(network.weight)
    objective = ModuleObjective(network, lambda out, y: out[:, 0] * y)  # the gradient of each record is x·y
    algorithm = qg.DPGD(steps=1, learning_rate=1.0, clip=clip)

    def total(records: int) -> float:
        data = torch.utils.data.TensorDataset(torch.full((records, 1), 3.0), torch.ones(records))
        parties = [Party(data, name="a", n_public=n), Party(data, name="b", n_public=n)]
        plan, federation = assemble(algorithm, objective, parties, budget=None, trust="curator")
        say(federation.handlers["a"], "open", run="r", plan=plan.digest)
        start = objective.initial(objective.prepare(data))
        reply = ask(federation.handlers["a"], GradientQuery(start, clip))
        assert reply.kind == "sum", reply.fields
        return float(reply.arrays["total"][0])

    one = total(1)
    assert 0.999 < one <= clip
    assert total(n + 1) - total(n) == pytest.approx(one, rel=1e-9)
