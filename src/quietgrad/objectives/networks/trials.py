"""Trials on made-up examples: whether a way of differentiating gives what autograd gives of one example at a time.

What differs by more than rounding can explain is wrong. Rounding explains much where a gradient jumps: an example
with an activation at a corner of a ReLU may be rounded to the other side in another batch, and has another gradient
there. So an example that fails is tried by the definition itself, at parameters that were moved by a few roundings:
if its gradient moves as far, it says nothing about the way, and the others decide. They must be most of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quietgrad.objectives.networks import checks
from quietgrad.objectives.networks.collector import Network
from quietgrad.objectives.networks.contributions import Combination, Workspace
from quietgrad.objectives.networks.randomness import RecordKeys, even_odds
from quietgrad.objectives.networks.tape import Batch, per_example_losses, select, with_parameters
from quietgrad.objectives.networks.ways import Way, theta_device

__all__ = ["EXAMPLES", "Trial", "definition", "differing", "forward", "more_trials", "steady_in_a_crowd"]

_CLOSE = {torch.float64: 1e-7, torch.float32: 2e-3}
_WEIGHTS = (1.0, -2.0, 0.5, 3.0)  # of the made-up examples, so that no two errors cancel
EXAMPLES, _CROWD = 16, 300
_FEW = 8  # one example in so many may be left out, if its gradient jumps at one of the nudges
_NUDGES = (4, 4, 4, 16, 16, 16, 64, 64, 64)  # in roundings: those of a deep network add up


@dataclass(frozen=True)
class Trial:
    """Made-up examples and their gradients by the definition; ``even``: coins are fair, so that masks differ."""

    x: Batch
    y: Batch
    expected: list[Tensor]
    even: bool = False


def more_trials(slow: Way, params: dict[str, Tensor], make: checks.MadeUp, fit: int) -> list[Trial]:
    """Examples of both signs whose whole numbers all differ, in two orders.

    A module may sort its examples inside: then the rows of a layer are the batch's in another order, which examples
    that are equal in what they are sorted by do not show. With fair coins no two records' masks are equal, so that
    a mask that went to another record shows too.
    """
    size = sum(value.numel() for value in params.values())
    count = min(EXAMPLES, affordable(slow.space, size, fit))
    keys = RecordKeys(bytes(32), np.arange(count))
    trials = []
    for seed in (11, 12):

        def one(x: Batch, y: Batch, even: bool = seed == 12) -> Trial:
            with even_odds(even):
                return Trial(x, y, definition(slow, params, x, y, keys)[1], even)

        trial = make.taken(seed, count, "normal", one)
        if trial is None or 2 * sum(bool(g.isfinite().all()) for g in trial.expected) < count:
            trial = make.taken(seed, count, "uniform", one)  # a logarithm takes no others, and nothing is compared
        trials.append(trial)
    return trials


def steady_in_a_crowd(way: Way, slow: Way, theta: Tensor, make: checks.MadeUp, fit: int) -> bool:
    """Whether several hundred examples get, layer by layer, the norms of small batches in another order."""
    count = min(_CROWD, fit)
    if way.plan is None or count <= EXAMPLES:
        return True
    if written := 2 * way.plan.written_out(1):
        count = min(count, max(2 * EXAMPLES, affordable(way.space, written, fit)))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    keys = RecordKeys(bytes(32), np.arange(count))
    even = way.draws == "rows"

    def takes(x: Batch, y: Batch) -> tuple[Batch, Batch, Tensor]:
        return x, y, forward(way.network, way.network.unflatten(theta), x, y)

    # What the module takes decides on the examples, never what this way of computing can do with them.
    found = make.taken(13, count, "normal", takes)
    if found is None or 2 * int(found[2].isfinite().sum()) < count:
        found = make.taken(13, count, "uniform", takes)
    x, y, _ = found
    with even_odds(even):
        whole = _norms(way, theta, x, y, keys)
        parts = [
            _norms(way, theta, select(x, part), select(y, part), keys.rows(part.numpy()))
            for part in torch.split(order, EXAMPLES)
        ]
    if any(part.keys() != whole.keys() for part in parts):
        return False
    back = order.argsort()
    wanted = {where: torch.cat([part[where] for part in parts])[back] for where in whole}
    off = _any_layer(_far(way, theta, whole, wanted))
    return len(off) <= count // _FEW and all(_wavers(slow, theta, x, y, keys, i, even) for i in off)


def definition(
    way: Way, params: dict[str, Tensor], x: Batch, y: Batch, keys: RecordKeys
) -> tuple[Tensor, list[Tensor]]:
    """Losses, and each example's gradient as one vector, by plain autograd on that example alone."""
    module, loss_fn = way.network.module, way.network.loss_fn
    losses, gradients = [], []
    for loss, found in checks.alone(module, loss_fn, params, x, y, way.one(keys, theta_device(params))):
        losses.append(loss)
        gradients.append(torch.cat([g.flatten() for g in found.values()]))
    return torch.cat(losses), gradients


def affordable(space: Workspace, size: int, fit: int) -> int:
    """How many examples' gradients of that size a trial keeps: as the memory budget says, but eight in any case."""
    return min(fit, max(8, int(space.limit // (8 * max(1, size)))))


def differing(way: Way, slow: Way, theta: Tensor, trial: Trial) -> list[str]:
    """Parameters whose norms, or a weighted sum, are not those of the definition."""
    keys = RecordKeys(bytes(32), np.arange(len(trial.expected)))
    rows = [i for i, g in enumerate(trial.expected) if bool(g.isfinite().all())]
    most, left_out = -(-len(rows) // _FEW), 0
    while rows:  # else there is nothing to compare: such an example counts as zero
        names, off = _compared(way, theta, trial, keys, rows)
        left_out += len(off)
        if not names:
            return []
        if not off or left_out > most:
            return names
        if not all(_wavers(slow, theta, trial.x, trial.y, keys, i, trial.even) for i in off):
            return names
        rows = [i for i in rows if i not in off]
    return []


def _compared(
    way: Way, theta: Tensor, trial: Trial, keys: RecordKeys, good: list[int]
) -> tuple[list[str], list[int]]:
    """Parameters whose norms, or a weighted sum, are off, and the examples with such norms."""
    rows = torch.tensor(good, device=theta.device)
    mix = Combination(gradient=True, change=False)
    part = select(trial.x, rows), select(trial.y, rows)
    with even_odds(trial.even):
        pieces = way._pieces(theta.detach(), None, *part, mix, keys.rows(np.array(good)))
    found = {where.start: piece.squared_norms()[:, 0].double().sqrt() for where, piece in pieces}
    # A parameter that no piece holds must have no gradient.
    parts = [where for where, _ in pieces]
    parts += [where for where in way.network.slices.values() if not any(_within(where, p) for p in parts)]
    # Distinct weights, so that no two errors cancel.
    weights = [_WEIGHTS[i % len(_WEIGHTS)] * (1 + i // len(_WEIGHTS)) for i in good]
    gap = torch.zeros_like(theta, dtype=torch.float64)
    wanted = {where.start: theta.new_zeros(len(good), dtype=torch.float64) for where in parts}
    lengths = 0.0
    for place, (i, weight) in enumerate(zip(good, weights, strict=True)):  # one at a time: they are long
        row = trial.expected[i].double()
        lengths += float(row.norm())
        gap.sub_(row, alpha=weight)
        for where in parts:
            wanted[where.start][place] = row[where].norm()
    off = _far(way, theta, {where: found.get(where, torch.zeros_like(wanted[where])) for where in wanted}, wanted)
    far = set(off)
    for where, piece in pieces:
        piece.add_weighted(theta.new_tensor(weights)[:, None], gap[where])
    bound = _tolerance(way, theta) * max(map(abs, weights)) * lengths
    if float(gap.norm()) > bound:
        far |= {where.start for where in parts if float(gap[where].norm()) > bound / len(parts)}
    names = [name for name, where in way.network.slices.items() if where.start in far]
    return names or (list(way.network.slices) if far else []), [good[i] for i in _any_layer(off)]


def _wavers(slow: Way, theta: Tensor, x: Batch, y: Batch, keys: RecordKeys, row: int, even: bool) -> bool:
    """Whether the gradient of one example, by the definition, jumps when the parameters move by a few roundings.

    By as much as would be off, in a layer or as a whole. The gradient of a smooth loss moves by thousands of times
    less, whatever a kernel makes of it: what a kernel gets wrong is not excused.
    """
    one = slice(row, row + 1)
    coins = torch.Generator().manual_seed(row)

    def at(point: Tensor) -> Tensor:
        with even_odds(even):
            params = slow.network.unflatten(point)
            return definition(slow, params, select(x, one), select(y, one), keys.rows(np.array([row])))[1][0]

    here = at(theta).double()
    for size in _NUDGES:
        signs = torch.randint(0, 2, theta.shape, generator=coins).to(theta) * 2 - 1
        there = at(theta * (1 + size * torch.finfo(theta.dtype).eps * signs))
        bound = _tolerance(slow, theta)
        largest = float(here.norm())
        for where in slow.network.slices.values():
            if float((here[where] - there[where]).norm()) > bound * max(float(here[where].norm()), largest / 100):
                return True
    return False


def _within(where: slice, whole: slice) -> bool:
    return bool(whole.start <= where.start and where.stop <= whole.stop)


def _norms(way: Way, theta: Tensor, x: Batch, y: Batch, keys: RecordKeys) -> dict[int, Tensor]:
    """Each example's norm in each layer."""
    pieces = way._pieces(theta.detach(), None, x, y, Combination(gradient=True, change=False), keys)
    return {where.start: piece.squared_norms()[:, 0].double().sqrt().cpu() for where, piece in pieces}


def _far(way: Way, theta: Tensor, found: dict[int, Tensor], wanted: dict[int, Tensor]) -> dict[int, Tensor]:
    """Layers whose norms do not agree, each by its own size, and of which examples.

    Or by a hundredth of the largest layer's: some gradients, of a bias before a normalisation, are but rounding.
    """
    largest = max(float(norms.nan_to_num().max()) for norms in wanted.values())
    far = {}
    for where, norms in wanted.items():
        gap = (found[where] - norms).nan_to_num(0.0, 0.0, 0.0).abs()
        bound = _tolerance(way, theta) * max(float(norms.nan_to_num().max()), largest / 100)
        off = (gap > bound) | (norms.isfinite() != found[where].isfinite())
        if off.any():
            far[where] = off
    return far


def _any_layer(far: dict[int, Tensor]) -> list[int]:
    """Examples that are off in one of the layers."""
    if not far:
        return []
    found: list[int] = torch.stack(list(far.values())).any(0).nonzero().flatten().tolist()
    return found


def _tolerance(way: Way, theta: Tensor) -> float:
    return _CLOSE.get(checks.coarsest(theta, *way.network.module.parameters()), 5e-2)


def forward(network: Network, params: dict[str, Tensor], x: Batch, y: Batch) -> Tensor:
    """The loss of each example."""
    with torch.no_grad(), with_parameters(network.module, params):
        return per_example_losses(network.loss_fn, network.module(*_args(x)), x, y)


def _args(x: Batch) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else x
