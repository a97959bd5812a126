"""A loop that is kept in a folder: what is settled beforehand, and where it stands between two steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quietgrad.algorithms.own_loop import OwnLoop
from quietgrad.errors import DataError
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.ledger_state import DEFAULT
from quietgrad.torch.checkpoints import pack, unpack
from quietgrad.torch.clip_rules import ClipRule
from quietgrad.torch.loops import Pace, Promise
from quietgrad.torch.processes import several
from quietgrad.training.runs import Run, is_kept, open_run, over

__all__ = ["LOOP", "agreed", "found", "put_back", "settled", "stands"]

LOOP = "loop"  # the kind of these runs
Parameters = Mapping[str, nn.Parameter]


def found(folder: str | Path | None, ledger: Any, pace: Pace, seed: int | None, every: float) -> Run | None:
    """The loop that was interrupted and is kept in ``folder``; ``None`` if a new one begins."""
    if folder is None:
        return None
    if several():
        raise ValueError("folder: a loop of several processes is not kept. Leave folder out, or use one process.")
    if pace.epochs is None and pace.steps is None:
        raise ValueError("folder: a loop that is kept needs its length beforehand; give epochs or steps.")
    if over(folder) is not None:
        raise DataError(
            f"{folder}: the loop that was kept here is over: quietgrad.load reads its result. For a new loop make "
            "the same call again."
        )
    if not is_kept(folder):
        return None
    if seed is not None:
        raise ValueError("seed: the loop that is kept in this folder is private; leave seed out.")
    return open_run(folder, kind=LOOP, ledger=ledger, every=every)


def settled(params: Parameters, optimizer: Optimizer | None, people: Any, n_is_declared: bool) -> dict[str, Any]:
    """What the header says besides the plan."""
    return {
        "parameters": {name: list(param.shape) for name, param in params.items()},
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "people": people,
        "n_is_declared": n_is_declared,
    }


def agreed(
    kept: Run, asked: Mapping[str, Any], pace: Pace, promise: Promise, size: int, rule: ClipRule,
    n_public: int | None, account: str, cap: Budget | None,
) -> tuple[int, ...]:  # fmt: skip
    """The samples of each epoch, if what the call says is what the folder says; else ``DataError``."""
    plan = kept.plan
    kept.agree_on_account(None if account == DEFAULT else account, cap)
    for what in ("parameters", "optimizer", "people"):
        kept.agree(what, asked[what] or "none", kept.header.settings[what] or "none")
    stretches, lengths = promise.paced(pace).stretches(plan.n_public, size)
    said = OwnLoop(stretches, rule.config(), promise.sampling).config()
    for what in sorted({*said, *plan.config}):
        kept.agree(what, [said.get(what)], [plan.config.get(what)])
    assert plan.budget is not None
    kept.agree("budget", promise.budget.to_json(), plan.budget.to_json())
    kept.agree("noise_multiplier", promise.noise_multiplier, plan.noise_multiplier)
    kept.agree("n_public", n_public, plan.n_public)
    return lengths


def stands(params: Parameters, optimizer: Optimizer | None, rule: ClipRule) -> dict[str, Any]:
    """Where a loop stands between two samples: parameters, gradients that wait for a step, optimizer, clip rule."""
    content = {
        "params": {name: param.detach() for name, param in params.items()},
        "grads": {name: param.grad for name, param in params.items() if param.grad is not None},
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "rule": rule.state(),
    }
    tensors: dict[str, Tensor] = {}
    return {"said": json.dumps(pack(content, "loop", tensors)), "tensors": tensors}


def put_back(state: Mapping[str, Any], params: Parameters, optimizer: Optimizer | None, rule: ClipRule) -> None:
    """Go on from what :func:`stands` said."""
    content = unpack(json.loads(state["said"]), state["tensors"])
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(content["params"][name])
            grad = content["grads"].get(name)
            param.grad = None if grad is None else grad.to(param)
    if optimizer is not None:
        optimizer.load_state_dict(content["optimizer"])
    rule.load_state(content["rule"])
