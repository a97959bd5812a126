"""Trainings of modules in shards (``fully_shard``): alone they are whole, on two processes in shards."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import QuietgradError

X = torch.randn(61, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
BUDGET = qg.Budget(4.0, 1e-5)
STEPS = 4
FIT = qg.DPSGD(steps=STEPS, batch_size=20, learning_rate=0.5, clip=1.0)


class Adapted(nn.Module):
    """A frozen layer in bfloat16 and an adapter beside it, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 9).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up, self.head = nn.Linear(6, 2, bias=False), nn.Linear(2, 9, bias=False), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.base(x.bfloat16()).float() + self.up(self.down(x))))
        return scores


def network(kind: str) -> Any:
    """Rows do not divide by two, so that shards are uneven."""
    torch.manual_seed(1)
    model: Any = Adapted()
    if kind == "whole":
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 2))
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        if kind == "whole":
            fully_shard([model[0], model[3]], mesh=mesh)
        else:
            fully_shard(model.base, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def flat(model: nn.Module) -> Tensor:
    whole = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters()]
    return torch.cat([value.detach().float().flatten() for value in whole])


def fitted(kind: str) -> dict[str, Any]:
    model = network(kind)
    scores = {"seen": 0.0}

    def evaluate(model: nn.Module) -> dict[str, float]:
        scores["seen"] += 1.0
        return {"right": float((model(X).argmax(1) == Y).double().mean())}

    made = qt.fit(
        model, nn.CrossEntropyLoss(), (X, Y), FIT, budget=BUDGET, n_public=61, progress=False, seed=7,
        evaluate=evaluate, every=2,
    )  # fmt: skip
    return {"params": flat(model), "result": made.params, "epsilon": made.privacy.epsilon, **scores}


def looped(kind: str) -> dict[str, Any]:
    model = network(kind)
    optimizer = torch.optim.Adam((param for param in model.parameters() if param.requires_grad), lr=0.05)
    seen: list[float] = []
    loop = qt.PrivateLoop(
        model, nn.CrossEntropyLoss(), (X, Y), optimizer=optimizer, budget=BUDGET, steps=STEPS, batch_size=20,
        max_grad_norm=1.0, n_public=61, seed=7,
        callbacks=[] if dist.is_initialized() and dist.get_rank() else [lambda p: seen.append(float(p.params[0]))],
    )  # fmt: skip
    for number, batch in enumerate(loop):
        loop.step(batch)
        if number == 1:
            with torch.no_grad():
                model(X[:3])  # a forward pass of FSDP's own, which leaves its root whole
    gc.collect()
    known = [each for each in gc.get_objects() if type(each) is nn.Parameter and each.shape == (9, 6)]
    whole = [each for each in known if each.untyped_storage().size()]  # FSDP keeps its own without memory
    state = [value for known in optimizer.state.values() for value in known.values() if value.dim()]
    sizes = [(value.to_local() if dist.is_initialized() else value).numel() for value in state]
    return {
        "params": flat(model),
        "epsilon": loop.privacy.epsilon,
        "numbers": sum(sizes),
        "seen": seen,
        "whole": len(whole) if dist.is_initialized() else 0,
    }


def verbs(kind: str, criterion: bool = True, **settings: Any) -> dict[str, Any]:
    model = network(kind)
    trained = [param for param in model.parameters() if param.requires_grad]
    made = qt.make_private(
        module=model, optimizer=torch.optim.SGD(trained, lr=0.2, momentum=0.9), noise_multiplier=1.0, epochs=1,
        data_loader=DataLoader(TensorDataset(X, Y), batch_size=20), max_grad_norm=1.0, seed=7, n_public=61,
        criterion=nn.CrossEntropyLoss() if criterion else None, **settings,
    )  # fmt: skip
    private, optimizer, loader = made[:3]
    private.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss: Any = (made[3] if criterion else nn.functional.cross_entropy)(private(x), y)
        loss.backward()
        optimizer.step()
    if not dist.is_initialized() or not dist.get_rank():
        float(loss)  # one process alone logs
    private.eval()
    inputs = X[:2].clone().requires_grad_()
    private(inputs).sum().backward()  # to the inputs, and to no parameter
    with torch.no_grad():
        scores = private(X[:2])
    grads = [param.grad is None for param in trained] if optimizer.zero_grad() is None else []
    return {
        "params": flat(model), "epsilon": loader.privacy.epsilon, "condition": loader.privacy.condition,
        "scores": scores, "slope": inputs.grad, "clean": all(grads),
    }  # fmt: skip


def kept(folder: Path, end: int | None = None) -> dict[str, Any]:
    """A loop that is paused after ``end`` samples, and goes on when it is called again, with shards or without."""
    model = network("whole")
    loop = qt.PrivateLoop(
        model, nn.CrossEntropyLoss(), (X, Y), optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        budget=BUDGET, steps=STEPS, batch_size=20, max_grad_norm=1.0, n_public=61, folder=folder / "run",
        checkpoint_seconds=0.0, ledger=folder / "ledger.jsonl",
    )  # fmt: skip
    begun, start = loop.handed_out, flat(model)
    for batch in loop:
        loop.step(batch)
        if loop.handed_out == end:
            loop.pause()
            break
    return {"begun": begun, "start": start, "params": flat(model), "epsilon": loop.privacy.epsilon}


class Interrupted(RuntimeError):
    """Ends a training."""


def _trainer(folder: Path, steps: int, stop_at: int | None = None, **privacy: Any) -> Any:
    """A trainer of a language model with tied weights. On two processes accelerate shards it.

    accelerate turns FSDP on for GPUs and the like alone, so its state is set here. Everything else is its own.
    """
    import transformers
    from accelerate.state import DistributedType, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from quietgrad.torch.hugging_face import DPTrainer

    class OnCPU(DPTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if self.args.fsdp:
                state = self.accelerator.state
                state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
                state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
                self.is_fsdp_enabled = True

    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: object, state: Any, control: object, **_: object) -> None:
            if state.global_step == stop_at:
                raise Interrupted

    together = dist.is_initialized()
    args = transformers.TrainingArguments(
        str(folder / "out"), per_device_train_batch_size=10 if together else 20, max_steps=steps, save_steps=2,
        disable_tqdm=True, report_to=[], use_cpu=True, learning_rate=0.01, fsdp=True if together else None,
    )  # fmt: skip
    torch.manual_seed(1)
    words = torch.randint(0, 33, (61, 6), generator=torch.Generator().manual_seed(0))
    config = transformers.GPT2Config(
        vocab_size=33, n_positions=6, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return OnCPU(
        model=transformers.GPT2LMHeadModel(config), args=args, callbacks=[Stop()],
        train_dataset=[{"input_ids": each, "labels": each} for each in words],
        privacy={"target_epsilon": 4.0, "max_grad_norm": 1.0, "n_public": 61, "ledger": folder / "trainer.jsonl",
                 **privacy},
    )  # fmt: skip


def trained(folder: Path) -> dict[str, Any]:
    made = _trainer(folder, 2, seed=7)
    made.train()
    made.save_model()
    local = [param.to_local() if hasattr(param, "to_local") else param for param in made.model.parameters()]
    here = sum(value.numel() for value in local)
    return {"params": flat(made.model), "epsilon": made.privacy.epsilon, "numbers": here}


def trained_on(folder: Path) -> dict[str, Any]:
    """A training that is interrupted after its checkpoint, and goes on."""
    first = _trainer(folder, 4, stop_at=3)
    with suppress(Interrupted):
        first.train()
    second = _trainer(folder, 4)
    second.train(resume_from_checkpoint=True)
    return {"params": flat(second.model), "epsilon": second.privacy.epsilon, "steps": second._loop.handed_out}


def refusals() -> dict[str, str]:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    said = {}
    model = network("whole")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    tensor_parallel = parallelize_module(nn.Sequential(nn.Linear(6, 4)), mesh, {"0": ColwiseParallel()})
    asked: dict[str, Any] = {
        "sums": lambda: qt.clipped_gradient_sum(model, nn.CrossEntropyLoss(), (X, Y), 1.0),
        "objective": lambda: qg.minimize(
            qt.objective(model, nn.CrossEntropyLoss()), (X, Y), FIT, budget=BUDGET, n_public=61
        ),
        "optimizer": lambda: qt.PrivateLoop(
            model, nn.CrossEntropyLoss(), (X, Y), optimizer=torch.optim.SGD(nn.Linear(6, 9).parameters(), lr=0.1),
            batch_size=9, steps=2, max_grad_norm=1.0, noise_multiplier=1.0,
        ),
        "tensor parallel": lambda: qt.fit(tensor_parallel, nn.CrossEntropyLoss(), (X, Y), FIT, budget=BUDGET),
    }  # fmt: skip
    for name, ask in asked.items():
        try:
            ask()
        except (ValueError, QuietgradError) as error:
            said[name] = str(error)
    explained = qt.explain(model, (X[:4], Y[:4]), nn.CrossEntropyLoss())
    return said | {"explain": str(explained)}


CASES: dict[str, Any] = {
    "fit": lambda: fitted("whole"),
    "fit, adapters": lambda: fitted("adapters"),
    "loop": lambda: looped("whole"),
    "loop, adapters": lambda: looped("adapters"),
    "verbs": lambda: verbs("whole"),
    "verbs, adapters": lambda: verbs("adapters"),
    "verbs, conditional": lambda: verbs("whole", criterion=False),
    "verbs, per layer": lambda: verbs("whole", clipping="per_layer"),
}


def all_cases(folder: Path) -> dict[str, Any]:
    """What each process makes of the cases."""
    out: dict[str, Any] = {name: case() for name, case in CASES.items()}
    return out | {
        "paused": kept(folder, end=2),
        "resumed": kept(folder),
        "left": kept(folder / "left", end=2),
        "refusals": refusals(),
        # At the end: accelerate's state stays as they leave it.
        "trained": trained(folder / "trained"),
        "trained on": trained_on(folder / "trained on"),
    }
