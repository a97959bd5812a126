"""Two gloo processes: fits, kept loops of which one rank is killed, samplers by rank, a Trainer, shards."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import BudgetError, QuietgradError
from tests.torch import in_shards

X = torch.randn(61, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
BUDGET = qg.Budget(4.0, 1e-5)
METHODS = {"dp-sgd": qg.DPSGD(steps=4, batch_size=20), "dp-srm": qg.DPSRM(steps=4, batch_size=20)}
STEPS = 6


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def fitted(algorithm: Any, **settings: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = qt.fit(
            network(),
            nn.CrossEntropyLoss(),
            (X, Y),
            algorithm,
            budget=BUDGET,
            n_public=61,
            progress=False,
            **settings,
        )
    return {"params": made.params, "epsilon": made.privacy.epsilon, "stopped_by": made.stopped_by}


def by_rank() -> Any:
    """The loader of a DDP script."""
    data: Any = TensorDataset(X, Y)
    if not dist.is_initialized():
        return DataLoader(data, batch_size=20)
    sampler: Any = DistributedSampler(data)
    return DataLoader(data, batch_size=10, sampler=sampler)


def verbs() -> dict[str, Any]:
    model: Any = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader, criterion = qt.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=by_rank(), epochs=1,
            target_epsilon=4.0, target_delta=1e-5, max_grad_norm=1.0, criterion=nn.CrossEntropyLoss(), n_public=61,
            seed=7,
        )  # fmt: skip
    read = ""
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        if dist.is_initialized():
            try:
                next(model.parameters()).grad.norm()  # a log, which one process alone may write
            except BudgetError as error:
                read = str(error)
        optimizer.step()
    return {"params": flat(model), "epsilon": loader.privacy.epsilon, "size": loader.batch_size, "read": read}


def loop(folder: Path, killed_at: int | None = None) -> dict[str, Any]:
    model = network()
    made = qt.PrivateLoop(
        model, nn.CrossEntropyLoss(), (X, Y), optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        budget=BUDGET, steps=STEPS, batch_size=20, max_grad_norm=1.0, n_public=61, folder=folder / "run",
        checkpoint_seconds=0.0, ledger=folder / "ledger.jsonl",
    )  # fmt: skip
    begun = made.handed_out
    for batch in made:
        made.step(batch)
        if made.handed_out == killed_at and dist.get_rank() == 1:
            os._exit(9)
    return {"begun": begun, "params": flat(model), "epsilon": made.privacy.epsilon}


def kept_fit(folder: Path, method: str = "dp-sgd", killed_at: int | None = None) -> dict[str, Any]:
    steps: list[int] = []

    def watch(progress: Any) -> None:
        steps.append(progress.step)
        if progress.step == killed_at and dist.get_rank() == 1:
            os._exit(9)

    made = fitted(
        METHODS[method], folder=folder / method, ledger=folder / f"{method}.jsonl", checkpoint_seconds=0.0,
        callbacks=[watch], every=1,
    )  # fmt: skip
    return {**made, "first": steps[0]}


def other_sums(folder: Path) -> dict[str, Any]:
    """A loop that goes on with other labels from its start: who was in each sample, and what it costs."""
    samples: list[list[tuple[int, tuple[int, ...]]]] = []

    def part(labels: Tensor, end: int | None) -> qt.PrivateLoop:
        model = network()
        made = qt.PrivateLoop(
            model, nn.CrossEntropyLoss(), (X, labels), optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            budget=BUDGET, steps=3, batch_size=20, max_grad_norm=1.0, n_public=61, folder=folder / "others",
            checkpoint_seconds=1e9, ledger=folder / "others.jsonl",
        )  # fmt: skip
        samples.append([])
        session: Any = made._session
        summed = session._sum_of_shares

        def watched(drawn: Any, query: Any) -> Tensor:
            out: Tensor = summed(drawn, query)
            samples[-1].append((drawn.number, tuple(session.batch(drawn).indices.tolist())))
            return out

        session._sum_of_shares = watched
        for batch in made:
            made.step(batch)
            if made.handed_out == end:
                made.let_go()
                break
        return made

    part(Y, 1)
    loop = part(1 - Y, None)
    return {"before": dict(samples[0]), "after": dict(samples[1]), "epsilon": loop.privacy.epsilon}


def sharded(folder: Path | None = None) -> dict[str, Any]:
    """Rank 0 holds the first 25 records, rank 1 the others; alone, all of them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    mine = slice(None)
    if dist.is_initialized():
        mine = slice(0, 25) if dist.get_rank() == 0 else slice(25, 61)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = qt.PrivateLoop(
            model, nn.CrossEntropyLoss(), (X[mine], Y[mine]), optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            noise_multiplier=1.0, steps=4, batch_size=20, max_grad_norm=1.0, sharded=True,
            ledger=None if folder is None else folder / "shards.jsonl", seed=5 if folder is None else None,
        )  # fmt: skip
    for batch in made:
        made.step(batch)
    return {"params": flat(model), "epsilon": made.privacy.epsilon, "n": made.plan.n_public}


def trainer(folder: Path) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    from quietgrad.torch.hugging_face import DPTrainer

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.net(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    rows = [{"x": x, "labels": int(y)} for x, y in zip(X, Y, strict=True)]
    args = transformers.TrainingArguments(
        str(folder / "out"), per_device_train_batch_size=10, max_steps=2, save_strategy="no", disable_tqdm=True,
        report_to=[], use_cpu=True,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = DPTrainer(
            model=Net(), args=args, train_dataset=rows,
            privacy={"target_epsilon": 4.0, "target_delta": 1e-5, "max_grad_norm": 1.0, "n_public": 61,
                     "ledger": folder / "trainer.jsonl"},
        )  # fmt: skip
        made.train()
    return {"params": flat(made.model), "epsilon": made.privacy.epsilon, "size": made._loop.expected_batch}


def refusals() -> dict[str, str]:
    said = {}
    try:
        fitted(qg.DPAGD())
    except (ValueError, QuietgradError) as error:
        said["choose"] = str(error)
    here = {} if dist.get_rank() else {"folder": "nowhere"}
    try:
        fitted(METHODS["dp-sgd"], **here)
    except QuietgradError as error:
        said["one folder"] = str(error)
    return said


def refused_folder(folder: Path) -> str:
    """A kept fit that is called again with another method."""
    try:
        fitted(qg.DPSGD(steps=5, batch_size=20), folder=folder / "dp-sgd", ledger=folder / "dp-sgd.jsonl")
    except QuietgradError as error:
        return str(error)
    return ""


def process(rank: int, home: str, what: str) -> None:
    torch.set_num_threads(1)
    folder = Path(home)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{what}", rank=rank, world_size=2)
    out: dict[str, Any] = {}
    if what == "killed":
        try:
            loop(folder, killed_at=3)
        except QuietgradError as error:
            out["said"] = str(error)
        torch.save(out, folder / f"{what}-{rank}.pt")
        os._exit(0)  # its peer is gone
    if what == "killed fit":
        try:
            kept_fit(folder, killed_at=2)
        except QuietgradError as error:
            out["said"] = str(error)
        torch.save(out, folder / f"{what}-{rank}.pt")
        os._exit(0)
    out = {name: fitted(method, seed=7) for name, method in METHODS.items()}
    # One process alone wants to stop: both do.
    out["stopped"] = fitted(
        METHODS["dp-sgd"], seed=7, every=1, stop=lambda progress: rank == 1 and progress.step == 2
    )
    out |= {"verbs": verbs(), "loop": loop(folder), "refusals": refusals()}
    out |= {"refused folder": refused_folder(folder), "kept fit": kept_fit(folder)}
    out |= {"kept srm": kept_fit(folder, "dp-srm"), "other sums": other_sums(folder)}
    out |= {"shards": sharded(), "paid shards": sharded(folder), "trainer": trainer(folder)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("left", "trained", "trained on"):
            (folder / "fsdp" / name).mkdir(parents=True, exist_ok=True)
        out["fsdp"] = in_shards.all_cases(folder / "fsdp")
    torch.save(out, folder / f"{what}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[dict[str, Any]]]:
    """A loop of which rank 1 is killed, and then everything else on two new processes."""
    pytest.importorskip("transformers", reason="needs quietgrad[hf]")
    start: Any = torch.multiprocessing
    folder = tmp_path_factory.mktemp("ranks")
    killed = start.spawn(process, (str(folder), "killed"), nprocs=2, join=False)
    for one in killed.processes:
        one.join(120)
    assert killed.processes[1].exitcode == 9
    said = torch.load(folder / "killed-0.pt")["said"]
    killed = start.spawn(process, (str(folder), "killed fit"), nprocs=2, join=False)
    for one in killed.processes:
        one.join(120)
    assert killed.processes[1].exitcode == 9
    start.spawn(process, (str(folder), "whole"), nprocs=2)
    return folder, said, [torch.load(folder / f"whole-{rank}.pt") for rank in range(2)]


Ranks = tuple[Path, str, list[dict[str, Any]]]


@pytest.mark.parametrize("name", METHODS)
def test_a_fit_on_two_processes_is_that_of_one(name: str, ranks: Ranks) -> None:
    first, second = (answer[name] for answer in ranks[2])
    alone = fitted(METHODS[name], seed=7)
    assert torch.equal(first["params"], second["params"])
    torch.testing.assert_close(first["params"], alone["params"], rtol=1e-4, atol=1e-6)
    assert first["epsilon"] == second["epsilon"] == alone["epsilon"]


def test_one_process_that_stops_ends_the_others(ranks: Ranks) -> None:
    first, second = (answer["stopped"] for answer in ranks[2])
    assert torch.equal(first["params"], second["params"])
    assert first["stopped_by"] == second["stopped_by"] != "steps"


def test_a_sampler_by_rank_makes_samples_of_all_ranks_batches(ranks: Ranks) -> None:
    first, second = (answer["verbs"] for answer in ranks[2])
    alone = verbs()
    assert first["size"] == second["size"] == alone["size"] == 20
    assert torch.equal(first["params"], second["params"])
    torch.testing.assert_close(first["params"], alone["params"], rtol=1e-3, atol=1e-4)
    assert first["epsilon"] == alone["epsilon"]
    assert "on several processes there is none yet" in first["read"]


def test_a_killed_rank_ends_the_other_in_words_and_the_same_call_goes_on(ranks: Ranks) -> None:
    folder, said, answers = ranks
    assert "another process of this training is gone" in said
    first, second = (answer["loop"] for answer in answers)
    assert first["begun"] == second["begun"] >= 2
    assert torch.equal(first["params"], second["params"])
    assert first["epsilon"] == second["epsilon"] == pytest.approx(4.0, rel=1e-2)
    kinds = [entry.kind for entry in qg.Ledger(folder / "ledger.jsonl").entries()]
    assert kinds.count("reserve") == 1  # paid once
    kept = qg.load(folder / "run")
    assert torch.equal(torch.as_tensor(kept.params), first["params"])


def test_a_kept_fit_whose_rank_was_killed_goes_on_by_the_same_call(ranks: Ranks) -> None:
    folder, _, answers = ranks
    assert "another process of this training is gone" in torch.load(folder / "killed fit-0.pt")["said"]
    first, second = (answer["kept fit"] for answer in answers)
    assert first["first"] == second["first"] >= 2  # it did not begin anew
    assert torch.equal(first["params"], second["params"])
    assert first["epsilon"] == second["epsilon"] == pytest.approx(4.0, rel=1e-2)
    kinds = [entry.kind for entry in qg.Ledger(folder / "dp-sgd.jsonl").entries()]
    assert kinds.count("reserve") == 1
    assert torch.equal(torch.as_tensor(qg.load(folder / "dp-sgd").params), first["params"])
    for answer in answers:
        assert answer["refused folder"]
    assert "started with another algorithm" in answers[0]["refused folder"]


def test_a_kept_fit_of_fresh_records_ends(ranks: Ranks) -> None:
    first, second = (answer["kept srm"] for answer in ranks[2])
    assert first["first"] == 0
    assert torch.equal(first["params"], second["params"])
    assert first["epsilon"] == second["epsilon"]


def test_other_sums_are_of_other_samples_and_every_process_says_what_they_cost(ranks: Ranks) -> None:
    """Charged as independent, the sample that was released before must not be released again."""
    folder, _, answers = ranks
    for answer in (each["other sums"] for each in answers):
        assert answer["after"][0] != answer["before"][0]
        assert sorted(answer["after"]) == [0, 1, 2]
        assert answer["epsilon"] == answers[0]["other sums"]["epsilon"] > 4.5
    kinds = [entry.kind for entry in qg.Ledger(folder / "others.jsonl").entries()]
    assert kinds.count("reserve") == 2


def test_data_in_shards_are_one_data_set_that_is_paid_for_once(ranks: Ranks) -> None:
    folder, _, answers = ranks
    alone = sharded()
    for answer in answers:
        assert answer["shards"]["n"] == 61 == alone["n"]
        torch.testing.assert_close(answer["shards"]["params"], alone["params"], rtol=1e-4, atol=1e-6)
        assert answer["paid shards"]["epsilon"] == answers[0]["paid shards"]["epsilon"]
        assert torch.equal(answer["paid shards"]["params"], answers[0]["paid shards"]["params"])
    assert [entry.kind for entry in qg.Ledger(folder / "shards.jsonl").entries()].count("reserve") == 1
    with pytest.raises(ValueError, match="sharded, person"):
        qt.PrivateLoop(
            network(), nn.CrossEntropyLoss(), (X, Y), batch_size=9, steps=2, max_grad_norm=1.0,
            noise_multiplier=1.0, sharded=True, person=[0] * 61,
        )  # fmt: skip


def test_a_trainer_on_two_processes_charges_once(ranks: Ranks) -> None:
    folder, _, answers = ranks
    first, second = (answer["trainer"] for answer in answers)
    assert torch.equal(first["params"], second["params"])
    assert first["size"] == 20
    assert first["epsilon"] == second["epsilon"]
    assert [entry.kind for entry in qg.Ledger(folder / "trainer.jsonl").entries()].count("reserve") == 1


def test_what_several_processes_cannot_do_is_said(ranks: Ranks) -> None:
    for answer in ranks[2]:
        said = answer["refusals"]
        assert "use a method that releases sums" in said["choose"]
        assert "Give it to every process, or to none" in said["one folder"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", in_shards.CASES)
def test_shards_on_two_processes_are_the_module_of_one(name: str, ranks: Ranks) -> None:
    first, second = (answer["fsdp"][name] for answer in ranks[2])
    alone = in_shards.CASES[name]()
    assert first["epsilon"] == second["epsilon"] == alone["epsilon"]
    assert torch.equal(first["params"], second["params"])
    # The same seed gives the same noise: were it added by both processes, or by none, parameters would be others.
    torch.testing.assert_close(first["params"], alone["params"], rtol=1e-4, atol=2e-5)
    for what in set(alone) & {"condition", "clean"}:
        assert first[what] == alone[what]
    for what in set(alone) & {"scores", "slope"}:
        torch.testing.assert_close(first[what], alone[what], rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_each_process_keeps_the_optimizers_state_of_its_own_shard(ranks: Ranks) -> None:
    for name in ("loop", "loop, adapters"):
        first, second = (answer["fsdp"][name] for answer in ranks[2])
        assert first["numbers"] + second["numbers"] == in_shards.CASES[name]()["numbers"]
        assert min(first["numbers"], second["numbers"]) > 0
        assert len(first["seen"]) == in_shards.STEPS + 1
        assert not second["seen"]  # it had no callbacks
        assert first["whole"] == second["whole"] == 0  # what was gathered for a step is freed


def test_a_kept_loop_of_shards_goes_on(ranks: Ranks) -> None:
    folder, _, answers = ranks
    folder = folder / "fsdp"
    for answer in answers:
        paused, resumed = answer["fsdp"]["paused"], answer["fsdp"]["resumed"]
        assert (paused["begun"], resumed["begun"]) == (0, 2)
        assert torch.equal(resumed["start"], paused["params"])
        assert not torch.equal(resumed["params"], paused["params"])
        assert resumed["epsilon"] == pytest.approx(4.0, rel=1e-2)
    saved = torch.as_tensor(qg.load(folder / "run").params)
    assert torch.equal(saved, answers[0]["fsdp"]["resumed"]["params"])
    kinds = [entry.kind for entry in qg.Ledger(folder / "ledger.jsonl").entries()]
    assert kinds.count("reserve") == 1


def test_a_kept_loop_of_shards_goes_on_without_them(ranks: Ranks) -> None:
    left = ranks[2][0]["fsdp"]["left"]
    alone = in_shards.kept(ranks[0] / "fsdp" / "left")
    assert alone["begun"] == 2
    assert torch.equal(alone["start"], left["params"])
    assert alone["epsilon"] == pytest.approx(4.0, rel=1e-2)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_shards_its_model_and_charges_once(ranks: Ranks, tmp_path: Path) -> None:
    folder, _, answers = ranks
    first, second = (answer["fsdp"]["trained"] for answer in answers)
    alone = in_shards.trained(tmp_path)
    assert max(first["numbers"], second["numbers"]) < alone["numbers"] == first["numbers"] + second["numbers"]
    assert torch.equal(first["params"], second["params"])
    torch.testing.assert_close(first["params"], alone["params"], rtol=1e-4, atol=1e-6)
    assert first["epsilon"] == second["epsilon"] == alone["epsilon"]
    kinds = [entry.kind for entry in qg.Ledger(folder / "fsdp" / "trained" / "trainer.jsonl").entries()]
    assert kinds.count("reserve") == 1
    transformers = pytest.importorskip("transformers")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder / "fsdp" / "trained" / "out")
    assert torch.equal(flat(loaded), first["params"])  # what is saved is whole


def test_an_interrupted_trainer_of_shards_goes_on(ranks: Ranks) -> None:
    folder, _, answers = ranks
    first, second = (answer["fsdp"]["trained on"] for answer in answers)
    assert torch.equal(first["params"], second["params"])
    assert first["steps"] == second["steps"] == 4
    assert first["epsilon"] == pytest.approx(4.0, rel=1e-2)
    kinds = [entry.kind for entry in qg.Ledger(folder / "fsdp" / "trained on" / "trainer.jsonl").entries()]
    assert kinds.count("reserve") == 1


def test_what_shards_cannot_do_is_said(ranks: Ranks) -> None:
    for answer in ranks[2]:
        said = answer["fsdp"]["refusals"]
        for name in ("sums", "objective", "explain"):
            assert "is in shards, and a record's gradient needs it whole" in said[name]
        assert "the optimizer holds parameters of another module" in said["optimizer"]
        assert "Shard the module by fully_shard alone" in said["tensor parallel"]
