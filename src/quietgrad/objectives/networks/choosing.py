"""Which way per-example gradients are computed: the fastest that gives, on made-up examples, those of autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.objectives.networks import checks
from quietgrad.objectives.networks.anatomy import plan_units
from quietgrad.objectives.networks.collector import Network
from quietgrad.objectives.networks.contributions import Workspace
from quietgrad.objectives.networks.meetings import CannotMeet
from quietgrad.objectives.networks.randomness import (
    DrawTrace,
    RecordDraws,
    RecordKeys,
    UnplannedDraw,
    example_axes,
    generators,
    preserved,
    torch_generator,
)
from quietgrad.objectives.networks.tape import Batch, per_example_losses, select, with_parameters
from quietgrad.objectives.networks.trials import (
    EXAMPLES,
    Trial,
    definition,
    differing,
    forward,
    more_trials,
    steady_in_a_crowd,
)
from quietgrad.objectives.networks.ways import Draws, Way, theta_device

__all__ = ["choose_way"]

_DEMOTIONS = 8  # how often a plan is made anew for parameters that did not fit
_BY_VALUE = {"poisson", "_standard_gamma"}  # how much they draw depends on what they are given
_TRIED = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def choose_way(
    network: Network,
    space: Workspace,
    slots: dict[nn.Parameter, slice],
    theta: Tensor,
    x: Batch,
    y: Batch,
    *,
    by_layers: bool,
) -> Way:
    """Refuse what mixes examples or keeps statistics; else the fastest way that agrees with autograd."""
    module, loss_fn = network.module, network.loss_fn
    why = "" if by_layers else "strategy='functional'"
    checks.refuse_mixing_layers(module)
    params = network.unflatten(theta)
    probe, (x, y) = (x, y), checks.made_up(x, y, 0)
    with preserved(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about what is only tried out
        checks.refuse_changed_buffers(module, lambda: forward(network, params, x, y))
        draws, axes, steady = _how_it_draws(network, params, x, y)
        made: list[checks.MadeUp] = []
        sizes = {p.shape[0] for p in module.parameters() if p.dim()}
        checks.refuse_changed_buffers(
            module,
            lambda: made.append(checks.MadeUp(*probe, lambda xs, ys: forward(network, params, xs, ys), sizes)),
        )
        (make,) = made
        fit = checks.examples_that_fit(module, loss_fn, params, x, y)
        if steady:
            checks.refuse_mixing(module, loss_fn, params, make, fit)
        keys = RecordKeys(bytes(32), np.arange(4))
        slow = Way(network, space, draws="record" if draws == "rows" else draws)
        expected = None
        if draws != "generator":
            try:
                expected = definition(slow, params, x, y, keys)
            except UnplannedDraw:  # a checkpoint draws again: torch's own generator is rewound for it
                slow = Way(network, space, draws="generator")
        if expected is None:
            expected = definition(slow, params, x, y, keys)
        again, _ = definition(slow, params, x, y, keys)
        if not torch.equal(expected[0].nan_to_num(), again.nan_to_num()):
            raise ValueError(
                "the same example gives different losses when it is asked twice: the module keeps a state, or "
                "draws from a generator of its own. Draw from torch's default generator; it is seeded per record."
            )
        if slow.draws == "none":
            precision = checks.coarsest(*params.values(), *module.parameters())
            checks.refuse_other_losses(forward(network, params, x, y), expected[0], precision)
            checks.refuse_crowd(lambda xs, ys: forward(network, params, xs, ys), make, fit, precision)
        if _loss_uses_parameters(network, slots, params, x, y):
            # The tape ends at the layers' outputs: what reaches parameters around them is lost.
            by_layers, why = False, "loss_fn uses parameters"
        trials = [Trial(x, y, expected[1])]
        if draws not in ("none", "rows") or slow.draws == "generator":
            why = "random numbers are drawn that are no example's own"

        def wrong(way: Way) -> dict[str, str] | None:
            """Parameters whose gradients are not the definition's; None if all is well, empty if nothing works."""
            try:
                found = differing(way, slow, theta, trials[0])
                if not found and len(trials) == 1:
                    trials.extend(more_trials(slow, params, make, fit))
                for trial in trials[1:]:
                    found = found or differing(way, slow, theta, trial)
                if found:
                    return dict.fromkeys(found, "its gradients by examples were not those of autograd")
                return None if steady_in_a_crowd(way, slow, theta, make, fit) else {}
            except CannotMeet as failure:
                return dict.fromkeys(failure.names, failure.why)
            except _TRIED:
                return {}

        if by_layers and slow.draws != "generator" and draws in ("none", "rows"):
            variants = _variants(network, params, make, fit, x)
            demoted: dict[str, str] = {}
            tracing = _tracing(draws, axes, theta.device)
            for _ in range(_DEMOTIONS):
                try:
                    plan = plan_units(module, slots, params, network.slices, variants, tracing, demoted)
                except _TRIED as error:
                    why = f"it could not be followed on two examples ({type(error).__name__})"
                    break
                if isinstance(plan, str):
                    why = plan
                    break
                why = "the layers' gradients by examples were not those of autograd"
                way = Way(network, space, plan, False, draws, axes)
                failed = wrong(way)
                if failed is None:
                    return way
                if not failed.keys() - demoted.keys():
                    break
                demoted |= failed
        if slow.draws != "generator":
            # vmap puts the examples in front of every draw.
            whole = Way(network, space, None, True, "none", (), why)
            if draws != "none":
                whole = replace(whole, draws="rows", axes=(0,) * 10**4)
            if wrong(whole) is None:
                return whole
    return replace(slow, why=why)


def _tracing(
    draws: Draws, axes: tuple[int, ...], device: torch.device
) -> Callable[[int], AbstractContextManager[Any]]:
    """The context in which the first examples of a batch draw: the first the same, alone or with others."""
    if draws == "none":
        return lambda count: nullcontext()
    return lambda count: RecordDraws(RecordKeys(bytes(32), np.arange(count)).draws, axes, device)


def _variants(network: Network, params: dict[str, Tensor], make: checks.MadeUp, fit: int, x: Batch) -> list[Batch]:
    """Examples to plan on: varied, at both ends of the whole numbers (a mask is all or nothing), and as seen."""

    def taken(xs: Batch, ys: Batch) -> Batch:
        forward(network, params, xs, ys)
        return xs

    found = [make.taken(21, min(EXAMPLES, fit), kind, taken) for kind in ("normal", "zero", "up")]
    return [*(each for each in found if each is not None), x]


def _how_it_draws(
    network: Network, params: dict[str, Tensor], x: Batch, y: Batch
) -> tuple[Draws, tuple[int, ...], bool]:
    """How the module draws, along which axes, and whether it can be made to draw the same on other examples."""
    device = theta_device(params)
    seen = []
    for count in (2, 1):
        part = slice(0, count)
        before = generators()
        with DrawTrace() as trace:
            forward(network, params, select(x, part), select(y, part))
        if generators() != before:
            return "generator", (), True
        seen.append(trace.seen)
    where = torch_generator(device)
    with RecordDraws(np.zeros(1, np.uint64), None, device):
        forward(network, params, x, y)
    hidden = not torch.equal(where, torch_generator(device))  # drawn where no operation says so
    names = [[name for name, _ in each] for each in seen]
    steady = not set(names[0]) & _BY_VALUE
    if not hidden and not any(seen):
        return "none", (), steady
    axes = example_axes(*([shape for _, shape in each] for each in seen)) if names[0] == names[1] else None
    return ("record", (), steady) if axes is None or hidden else ("rows", axes, steady)


def _loss_uses_parameters(
    network: Network, slots: dict[nn.Parameter, slice], params: dict[str, Tensor], x: Batch, y: Batch
) -> bool:
    """Whether loss_fn uses parameters other than through the module's output: a penalty in it, say.

    Refused if a parameter is used through the tensor itself (kept in a list): the module is given other ones, so it
    would count as a constant in every way of differentiating.
    """
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}

    def used(forward: AbstractContextManager[Any]) -> set[int]:
        with torch.enable_grad(), with_parameters(network.module, leaves):
            with forward:
                output = network.module(*_args(x))
            return _leaves_of(per_example_losses(network.loss_fn, output, x, y))

    everywhere = used(nullcontext())
    for name, param in zip(network.slices, slots, strict=True):
        if id(param) in everywhere:
            raise ValueError(
                f"parameter {name!r} is used by loss_fn or the module through a reference to the tensor itself, "
                "which stands still while the module is trained: its gradient would be lost. For a penalty use "
                "regularizer=; else ask the module for its parameters at each call."
            )
    return bool(used(torch.no_grad()) & {id(leaf) for leaf in leaves.values()})


def _leaves_of(result: Tensor) -> set[int]:
    """Which tensors autograd would give a gradient to, by identity."""
    found, seen, ahead = set(), set(), [result.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(id(getattr(node, "variable", None)))
        ahead += [following for following, _ in node.next_functions]
    return found


def _args(x: Batch) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else x
