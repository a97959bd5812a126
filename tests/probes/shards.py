"""The noise of a module in shards on two gloo processes, and the samples of a run that goes on there."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from quietgrad.assurance.audit.report import AuditFinding
from quietgrad.core.accounting.budget import Budget
from quietgrad.torch.loops.private_loop import PrivateLoop
from tests.probes import found

_NUMBERS = 4000  # of noise: their mean square has a standard deviation of 2.2 %
_WITHIN = 0.15
_SECONDS = 120.0


def _process(rank: int, home: Path, work: Callable[[Path], Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{home}/meeting", rank=rank, world_size=2)
    torch.save(work(home), home / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _on_two(work: Callable[[Path], Any]) -> list[Any]:
    """What two processes make of ``work``. They are forked, so that they have what this one has patched."""
    with tempfile.TemporaryDirectory() as folder:
        home, forked = Path(folder), torch.multiprocessing.get_context("fork")
        both = [forked.Process(target=_process, args=(rank, home, work)) for rank in range(2)]
        for one in both:
            one.start()
        for one in both:
            one.join(_SECONDS)
        if any(one.exitcode != 0 for one in both):
            for one in both:
                one.kill()
            raise RuntimeError("a process of the probe failed, and said why.")
        return [torch.load(home / f"{rank}.pt") for rank in range(2)]


def _noise(home: Path) -> Any:
    """The release of a module in shards whose gradients are zero: noise alone."""
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Linear(1, _NUMBERS, bias=False)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    data = torch.zeros(40, 1), torch.zeros(40, dtype=torch.int64)
    loop = PrivateLoop(
        model, nn.CrossEntropyLoss(), data, batch_size=20, noise_multiplier=1.0, max_grad_norm=1.0, steps=1, seed=7
    )
    return loop.backward(next(iter(loop))) * loop.expected_batch


def probe_noise_of_shards() -> AuditFinding:
    """Whether two processes add the noise of one: its mean square in units of (σC)², alike on both.

    The seed is fixed; with fresh noise a sound loop would be 6.7 standard deviations from the limits.
    """
    first, second = _on_two(_noise)
    square = float(first.square().mean())
    alike = torch.equal(first, second)
    ok = alike and abs(square - 1.0) <= _WITHIN
    return found("L0 noise", "a module in shards, 2 processes", "mean square", 1.0, square, ok=ok)


def _samples(home: Path) -> Any:
    """Who was in the first sample of a kept loop, and in that of its continuation on other sums."""
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    seen: list[list[int]] = []
    for labels in (y, 1 - y):
        torch.manual_seed(0)
        loop = PrivateLoop(
            nn.Linear(3, 2), nn.CrossEntropyLoss(), (x, labels), batch_size=20, max_grad_norm=1.0, steps=2,
            budget=Budget(4.0, 1e-5), n_public=60, folder=home / "run", ledger=home / "ledger.jsonl",
            checkpoint_seconds=1e9,
        )  # fmt: skip
        session: Any = loop._session
        shares: list[Any] = []
        share = session.share

        def watched(batch: Any, share: Any = share, shares: list[Any] = shares) -> Any:
            shares.append(share(batch))
            return shares[-1]

        session.share = watched
        loop.backward(next(iter(loop)))
        seen.append(shares[-1].indices.tolist())  # the one whose sum was released
        loop.let_go()
    return seen


def probe_samples_of_epochs() -> AuditFinding:
    """Whether a sum that is charged anew is of a sample that is drawn anew.

    Two samples of 60 records at rate 1/3 are the same with probability (5/9)^60 < 1e-15.
    """
    again = sum(before == after for before, after in _on_two(_samples))
    return found("L0 reuse", "2 processes, a run that goes on", "samples again", 0.0, float(again), ok=not again)
