"""Which way per-example gradients are computed: the fastest that gives, on made-up examples, those of autograd.

    layers   one forward and one backward pass for the batch, taken apart layer by layer
    vmap     the whole model by vmap(grad)
    alone    one example at a time: whatever autograd can differentiate

A way also says how random numbers are drawn. If the module draws none, nothing is set up for it. Else each draw of
a batch gets a row from every record's stream; where a draw has no row per record (a coin for the whole batch, a
mask for a weight), examples are taken apart by vmap or alone, so that each has its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.objectives.networks import checks
from quietgrad.objectives.networks.anatomy import Plan, plan_units
from quietgrad.objectives.networks.collector import Collector, Network, Piece
from quietgrad.objectives.networks.contributions import Combination, Workspace
from quietgrad.objectives.networks.fallback import model_gradients, refilled
from quietgrad.objectives.networks.meetings import CannotMeet
from quietgrad.objectives.networks.places import UnplannedRows
from quietgrad.objectives.networks.randomness import (
    DrawTrace,
    RecordDraws,
    RecordKeys,
    UnplannedDraw,
    even_odds,
    example_axes,
    generators,
    preserved,
    seed_generators,
    torch_generator,
)
from quietgrad.objectives.networks.tape import (
    Batch,
    Unit,
    per_example_losses,
    select,
    tensors_of,
    with_parameters,
)

__all__ = ["Recorded", "Way", "choose_way", "joined"]

Draws = Literal["none", "rows", "record", "generator"]
_CLOSE = {torch.float64: 1e-7, torch.float32: 2e-3}
_WEIGHTS = (1.0, -2.0, 0.5, 3.0)  # of the made-up examples, so that no two errors cancel
_EXAMPLES, _CROWD = 16, 300
_DEMOTIONS = 8  # how often a plan is made anew for parameters that did not fit
_BY_VALUE = {"poisson", "_standard_gamma"}  # how much they draw depends on what they are given
_TRIED = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Recorded(NamedTuple):
    """What a forward pass gave, and the contributions that follow from its outputs' gradients, once."""

    output: Any
    pieces: Callable[[Sequence[Tensor]], list[Piece]]


@dataclass(frozen=True)
class Way:
    """How a module's per-example gradients are computed, and how its random numbers are drawn.

    ``draws``: "none"; "rows" of a batch, along ``axes``; for one "record" at a time by its stream; or by torch's,
    numpy's and Python's own "generator", seeded for one record at a time.
    """

    network: Network
    space: Workspace
    plan: Plan | None = None
    vectorised: bool = False
    draws: Draws = "none"
    axes: tuple[int, ...] = ()
    why: str = ""  # the module is not taken apart

    @property
    def units(self) -> list[Unit] | None:
        """The module's layers and operations, if it is taken apart."""
        return None if self.plan is None else self.plan.units

    @property
    def alone(self) -> bool:
        """Whether examples are taken one at a time."""
        return self.plan is None and not self.vectorised

    def pieces(
        self, theta: Tensor, previous: Tensor | None, x: Batch, y: Batch, mix: Combination, keys: RecordKeys
    ) -> list[Piece]:
        """What every parameter gets from every example."""
        device = theta.device
        before = torch_generator(device)
        try:
            pieces = self._pieces(theta, previous, x, y, mix, keys)
            if torch.equal(before, torch_generator(device)):
                return pieces
        except (UnplannedDraw, UnplannedRows):
            if self.alone:
                raise
        # The module drew, or gave a layer rows, as it did not on made-up examples. One record at a time, by the
        # same streams, each record contributes what it would have contributed without the one that caused this.
        slow = Way(self.network, self.space, draws="record")
        with preserved():
            return slow._pieces(theta, previous, x, y, mix, keys)

    def record(
        self, theta: Tensor, args: tuple[Tensor, ...], mix: Combination, keys: RecordKeys
    ) -> Recorded | None:
        """A forward pass whose gradients can be taken later; None if the module is not taken apart, or not so."""
        if self.plan is None:
            return None
        before = torch_generator(theta.device)
        collector = Collector(self.network, self.plan, mix, self.space, self._drawing(keys, theta.device))
        try:
            recording = collector.record(theta, args)
        except (UnplannedDraw, UnplannedRows):
            return None
        if not torch.equal(before, torch_generator(theta.device)):
            return None
        return Recorded(recording.result, lambda grads: collector.finish(recording, grads))

    def _pieces(
        self, theta: Tensor, previous: Tensor | None, x: Batch, y: Batch, mix: Combination, keys: RecordKeys
    ) -> list[Piece]:
        if self.plan is not None:
            drawing = self._drawing(keys, theta.device)
            return Collector(self.network, self.plan, mix, self.space, drawing).collect(theta, previous, x, y)
        change = None
        if previous is not None:
            change = self._rows(previous, x, y, keys).mul_(-mix.scale)
        now = self._rows(theta, x, y, keys)
        if change is not None:
            change += now
        return [(slice(0, len(theta)), mix.stored(now, change))]

    def _drawing(self, keys: RecordKeys, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
        if self.draws == "none":
            return nullcontext
        return lambda: RecordDraws(keys.draws, self.axes, device)

    def _rows(self, point: Tensor, x: Batch, y: Batch, keys: RecordKeys) -> Tensor:
        module, loss_fn, unflatten, _ = self.network
        if self.vectorised:
            with self._drawing(keys, point.device)():
                rows = model_gradients(module, loss_fn, unflatten, point, x, y)
            return rows
        _, gradients = checks.alone(module, loss_fn, unflatten(point.detach()), x, y, self.one(keys, point.device))
        return torch.stack([torch.cat([g.flatten().to(point.dtype) for g in one.values()]) for one in gradients])

    def one(self, keys: RecordKeys, device: torch.device) -> Callable[[int], AbstractContextManager[Any]]:
        """The context in which row i alone draws."""
        if self.draws == "none":
            return lambda i: nullcontext()
        return lambda i: _seeded(keys, i, None if self.draws == "generator" else device)

    def losses(self, params: dict[str, Tensor], x: Batch, y: Batch, keys: RecordKeys) -> Tensor:
        """The loss of each example, drawn as its gradient is."""
        module, loss_fn = self.network.module, self.network.loss_fn

        def run(xs: Batch, ys: Batch) -> Tensor:
            return per_example_losses(loss_fn, module(*_args(xs)), xs, ys)

        device = theta_device(params)
        with with_parameters(module, params):
            whole: tuple[Tensor] | None = self._together(lambda: run(x, y), keys, device)
            if whole is not None:
                return whole[0]
            return torch.cat([run(select(x, row), select(y, row)) for row in self._apart(keys, device)])

    def outputs(self, args: tuple[Tensor, ...], keys: RecordKeys) -> Any:
        """The module's output with its own parameters, drawn as the gradient is."""
        module = self.network.module
        device = next(module.parameters()).device
        whole = self._together(lambda: module(*args), keys, device)
        if whole is not None:
            return whole[0]
        return joined([module(*select(args, row)) for row in self._apart(keys, device)])

    def _together(self, run: Callable[[], Any], keys: RecordKeys, device: torch.device) -> tuple[Any] | None:
        """What a forward pass of the batch gives, if its draws can be given to its rows."""
        if self.draws != "none" and (self.draws != "rows" or self.plan is None):
            return None
        before = torch_generator(device)
        try:
            with self._drawing(keys, device)():
                result = run()
        except UnplannedDraw:
            return None
        return (result,) if torch.equal(before, torch_generator(device)) else None

    def _apart(self, keys: RecordKeys, device: torch.device) -> Iterator[slice]:
        """Row after row, each within the context of its own draws."""
        for i in range(len(keys.indices)):
            with _seeded(keys, i, None if self.draws == "generator" else device):
                yield slice(i, i + 1)


@contextmanager
def _seeded(keys: RecordKeys, row: int, device: torch.device | None) -> Iterator[Any]:
    """Row ``row`` draws by its own stream (on ``device``), or by the generators, seeded for it."""
    words = keys.draws[row : row + 1]
    with preserved():
        seed_generators(int(words[0]))
        if device is None:
            yield None
        else:
            with RecordDraws(words, None, device) as draws:
                yield draws


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
        checks.refuse_changed_buffers(module, lambda: _forward(network, params, x, y))
        draws, axes, steady = _how_it_draws(network, params, x, y)
        made: list[checks.MadeUp] = []
        sizes = {p.shape[0] for p in module.parameters() if p.dim()}
        checks.refuse_changed_buffers(
            module,
            lambda: made.append(checks.MadeUp(*probe, lambda xs, ys: _forward(network, params, xs, ys), sizes)),
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
                expected = _definition(slow, params, x, y, keys)
            except UnplannedDraw:  # a checkpoint draws again: torch's own generator is rewound for it
                slow = Way(network, space, draws="generator")
        if expected is None:
            expected = _definition(slow, params, x, y, keys)
        again, _ = _definition(slow, params, x, y, keys)
        if not torch.equal(expected[0].nan_to_num(), again.nan_to_num()):
            raise ValueError(
                "the same example gives different losses when it is asked twice: the module keeps a state, or "
                "draws from a generator of its own. Draw from torch's default generator; it is seeded per record."
            )
        if slow.draws == "none":
            checks.refuse_other_losses(_forward(network, params, x, y), expected[0])
            checks.refuse_crowd(lambda xs, ys: _forward(network, params, xs, ys), make, fit)
        if _loss_uses_parameters(network, slots, params, x, y):
            by_layers, why = (
                False,
                "loss_fn uses parameters",
            )  # the tape ends at the layers' outputs: what reaches parameters around them is lost
        trials = [Trial(x, y, expected[1])]
        if draws not in ("none", "rows") or slow.draws == "generator":
            why = "random numbers are drawn that are no example's own"

        def wrong(way: Way) -> dict[str, str] | None:
            """Parameters whose gradients are not the definition's; None if all is well, empty if nothing works."""
            try:
                found = _differing(way, theta, trials[0], keys)
                if not found and len(trials) == 1:
                    trials.extend(_more_trials(slow, params, make, fit))
                for trial in trials[1:]:
                    found = found or _differing(way, theta, trial)
                if found:
                    return dict.fromkeys(found, "its gradients by examples were not those of autograd")
                return None if _steady(way, theta, make, fit) else {}
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
        _forward(network, params, xs, ys)
        return xs

    found = [make.taken(21, min(_EXAMPLES, fit), kind, taken) for kind in ("normal", "zero", "up")]
    return [*(each for each in found if each is not None), x]


@dataclass(frozen=True)
class Trial:
    """Made-up examples and their gradients by the definition; ``even``: coins are fair, so that masks differ."""

    x: Batch
    y: Batch
    expected: list[Tensor]
    even: bool = False


def _more_trials(slow: Way, params: dict[str, Tensor], make: checks.MadeUp, fit: int) -> list[Trial]:
    """Examples of both signs whose whole numbers all differ, in two orders.

    A module may sort its examples inside: then the rows of a layer are the batch's in another order, which examples
    that are equal in what they are sorted by do not show. With fair coins no two records' masks are equal, so that
    a mask that went to another record shows too.
    """
    count = min(_EXAMPLES, fit)
    keys = RecordKeys(bytes(32), np.arange(count))
    trials = []
    for seed in (11, 12):

        def one(x: Batch, y: Batch, even: bool = seed == 12) -> Trial:
            with even_odds(even):
                return Trial(x, y, _definition(slow, params, x, y, keys)[1], even)

        trial = make.taken(seed, count, "normal", one)
        if trial is None or 2 * sum(bool(g.isfinite().all()) for g in trial.expected) < count:
            trial = make.taken(seed, count, "uniform", one)  # a logarithm takes no others, and nothing is compared
        trials.append(trial)
    return trials


def _steady(way: Way, theta: Tensor, make: checks.MadeUp, fit: int) -> bool:
    """Whether several hundred examples get, layer by layer, the norms of small batches in another order."""
    count = min(_CROWD, fit)
    if way.plan is None or count <= _EXAMPLES:
        return True
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    keys = RecordKeys(bytes(32), np.arange(count))

    def takes(x: Batch, y: Batch) -> tuple[Batch, Batch, Tensor]:
        return x, y, _forward(way.network, way.network.unflatten(theta), x, y)

    # What the module takes decides on the examples, never what this way of computing can do with them.
    found = make.taken(13, count, "normal", takes)
    if found is None or 2 * int(found[2].isfinite().sum()) < count:
        found = make.taken(13, count, "uniform", takes)
    x, y, _ = found
    with even_odds(way.draws == "rows"):
        whole = _norms(way, theta, x, y, keys)
        parts = [
            _norms(way, theta, select(x, part), select(y, part), keys.rows(part.numpy()))
            for part in torch.split(order, _EXAMPLES)
        ]
    if any(part.keys() != whole.keys() for part in parts):
        return False
    wanted = {where: torch.cat([part[where] for part in parts]) for where in whole}
    return not _far(way, theta, {where: norms[order] for where, norms in whole.items()}, wanted)


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
            _forward(network, params, select(x, part), select(y, part))
        if generators() != before:
            return "generator", (), True
        seen.append(trace.seen)
    where = torch_generator(device)
    with RecordDraws(np.zeros(1, np.uint64), None, device):
        _forward(network, params, x, y)
    hidden = not torch.equal(where, torch_generator(device))  # drawn where no operation says so
    names = [[name for name, _ in each] for each in seen]
    steady = not set(names[0]) & _BY_VALUE
    if not hidden and not any(seen):
        return "none", (), steady
    axes = example_axes(*([shape for _, shape in each] for each in seen)) if names[0] == names[1] else None
    return ("record", (), steady) if axes is None or hidden else ("rows", axes, steady)


def theta_device(params: dict[str, Tensor]) -> torch.device:
    return next(iter(params.values())).device


def _forward(network: Network, params: dict[str, Tensor], x: Batch, y: Batch) -> Tensor:
    with torch.no_grad(), with_parameters(network.module, params):
        return per_example_losses(network.loss_fn, network.module(*_args(x)), x, y)


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


def _definition(
    way: Way, params: dict[str, Tensor], x: Batch, y: Batch, keys: RecordKeys
) -> tuple[Tensor, list[Tensor]]:
    module, loss_fn = way.network.module, way.network.loss_fn
    device = next(iter(params.values())).device
    losses, gradients = checks.alone(module, loss_fn, params, x, y, way.one(keys, device))
    return losses, [torch.cat([g.flatten().double() for g in one.values()]) for one in gradients]


def _differing(way: Way, theta: Tensor, trial: Trial, keys: RecordKeys | None = None) -> list[str]:
    """Parameters whose norms, or a weighted sum, are not those of the definition."""
    good = [i for i, g in enumerate(trial.expected) if bool(g.isfinite().all())]
    if not good:
        return []  # nothing to compare: such an example counts as zero
    keys = keys or RecordKeys(bytes(32), np.arange(len(trial.expected)))
    rows = torch.tensor(good, device=theta.device)
    mix = Combination(gradient=True, change=False)
    part = select(trial.x, rows), select(trial.y, rows)
    with even_odds(trial.even):
        pieces = way._pieces(theta.detach(), None, *part, mix, keys.rows(np.array(good)))
    found = {where.start: piece.squared_norms()[:, 0].double().sqrt() for where, piece in pieces}
    expected = torch.stack([trial.expected[i] for i in good])
    # A parameter that no piece holds must have no gradient.
    parts = [where for where, _ in pieces]
    parts += [where for where in way.network.slices.values() if not any(_within(where, p) for p in parts)]
    nothing = theta.new_zeros(len(good), dtype=torch.float64)
    wanted = {where.start: expected[:, where].norm(dim=1) for where in parts}
    far = _far(way, theta, {where: found.get(where, nothing) for where in wanted}, wanted)
    # Distinct weights, so that no two errors cancel.
    weights = [_WEIGHTS[i % len(_WEIGHTS)] * (1 + i // len(_WEIGHTS)) for i in good]
    total = torch.zeros_like(theta, dtype=torch.float64)
    for where, piece in pieces:
        piece.add_weighted(theta.new_tensor(weights)[:, None], total[where])
    gap = total - expected.T @ expected.new_tensor(weights)
    bound = _tolerance(way, theta) * max(map(abs, weights)) * float(expected.norm(dim=1).sum())
    if float(gap.norm()) > bound:
        far |= {where.start for where in parts if float(gap[where].norm()) > bound / len(parts)}
    return [name for name, where in way.network.slices.items() if any(s == where.start for s in far)] or (
        list(way.network.slices) if far else []
    )


def _within(where: slice, whole: slice) -> bool:
    return bool(whole.start <= where.start and where.stop <= whole.stop)


def _norms(way: Way, theta: Tensor, x: Batch, y: Batch, keys: RecordKeys) -> dict[int, Tensor]:
    """Each example's norm in each layer."""
    pieces = way._pieces(theta.detach(), None, x, y, Combination(gradient=True, change=False), keys)
    return {where.start: piece.squared_norms()[:, 0].double().sqrt().cpu() for where, piece in pieces}


def _far(way: Way, theta: Tensor, found: dict[int, Tensor], wanted: dict[int, Tensor]) -> set[int]:
    """Layers whose norms do not agree, each by its own size.

    Or by a hundredth of the largest layer's: some gradients, of a bias before a normalisation, are but rounding.
    """
    largest = max(float(norms.nan_to_num().max()) for norms in wanted.values())
    far = set()
    for where, norms in wanted.items():
        gap = (found[where] - norms).nan_to_num(0.0, 0.0, 0.0).abs().max()
        if not torch.equal(norms.isfinite(), found[where].isfinite()) or float(gap) > _tolerance(way, theta) * max(
            float(norms.nan_to_num().max()), largest / 100
        ):
            far.add(where)
    return far


def _tolerance(way: Way, theta: Tensor) -> float:
    low = any(p.dtype not in _CLOSE for p in way.network.module.parameters())
    return 5e-2 if low else _CLOSE[theta.dtype]


def joined(parts: list[Any]) -> Any:
    """One output of the outputs of consecutive parts."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(tensors_of(part) for part in parts), strict=True)
    return refilled(parts[0], iter([torch.cat(pieces) for pieces in columns]))


def _args(x: Batch) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else x
