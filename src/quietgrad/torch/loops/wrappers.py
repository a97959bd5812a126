"""Model, optimizer and loader of a custom training loop under Opacus' verbs.

The model runs record by record while the loop trains on a sample. The optimizer is the user's own object, whose
steps use released gradients. The loader hands out secret samples, as handles.
"""

from __future__ import annotations

import copy
import copyreg
import logging
from collections.abc import Callable, Iterable, Iterator, Sized
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.session.statement import Privacy
from quietgrad.torch.loops.distributed import process_count
from quietgrad.torch.loops.handle_loop import HandleLoop, pieces_of
from quietgrad.torch.loops.opacus_names import OpacusOptimizer, of_model
from quietgrad.torch.loops.private_batch import plain
from quietgrad.torch.loops.streams import read_stream
from quietgrad.torch.loops.whole_module import is_shard
from quietgrad.torch.networks.trees import Args, Kwargs, ModuleState, mapped

log = logging.getLogger("quietgrad")
_CALLBACK: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
_OWN = ("_module", "_loop")
_COMPILED = (
    "torch.compile: a compiled model would fuse the operations at which records' gradients are taken. "
    "Train with the private model as it is."
)


class PrivateModule(nn.Module):
    """The user's module under another class: the same layers, parameters, buffers, names and attributes.

    In training mode, with a sample of the private loader in hand, a call is recorded for the step. In any other
    call the parameters are constants: gradients go to the inputs, and none without noise to a parameter. A
    copy, a pickle and a state are the plain module's.
    """

    _module: nn.Module
    _loop: HandleLoop

    def __init__(self, module: nn.Module, loop: HandleLoop) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_loop", loop)
        for store in ("_modules", "_parameters", "_buffers", "training", "_non_persistent_buffers_set"):
            self.__dict__[store] = module.__dict__[store]

    @property
    def module(self) -> nn.Module:
        return self._module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output. In training it is recorded for the next step."""
        # Asked here and not in a function of its own: a compiler that cannot take this one runs it as it is.
        if torch.compiler.is_compiling() or callable(_CALLBACK()):
            raise ValueError(_COMPILED)
        return _called(self._module, self._loop, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _OWN:
                raise
        try:
            return getattr(self._module, name)
        except AttributeError:
            return of_model(self._module, name)

    def __getitem__(self, key: Any) -> Any:
        own: Any = self._module
        return own[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            super().__setattr__(name, value)
        setattr(self._module, name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state into the module, whatever made it. Its cost is in the account of its own training data."""
        _refuse_assign(args, kwargs)
        return self._module.load_state_dict(*args, **kwargs)

    def compile(self, *_: object, **__: object) -> None:
        """Leave the model as it is, which a line of the log says."""
        log.warning(_COMPILED)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and what came back to the records in hand."""
        self._loop.clear()
        self._module.zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self._module, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return _reduced(self._module, protocol)


class PrivateInPlace(nn.Module):
    """The user's module itself, made private: of a subclass of its class, which has the same name.

    A call is that of a :class:`PrivateModule`. A copy and a pickle are the plain module's.
    """

    _private: ClassVar[HandleLoop]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or callable(_CALLBACK()):
            raise ValueError(_COMPILED)
        loop = self._private
        with loop.model.as_given():
            return _called(self, loop, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return of_model(self, name)

    def compile(self, *_: object, **__: object) -> None:
        """Leave the model as it is, which a line of the log says."""
        log.warning(_COMPILED)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and what came back to the records in hand."""
        self._private.clear()
        super().zero_grad(set_to_none)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state into the module, whatever made it."""
        _refuse_assign(args, kwargs)
        return super().load_state_dict(*args, **kwargs)

    def cleanup(self) -> None:
        """Opacus' name: make it the plain module again. The loop then ends."""
        given = self._private.model.given
        assert given is not None
        self.__class__ = given  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        with self._private.model.as_given():
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        with self._private.model.as_given():
            return _reduced(self, protocol)


def _reduced(module: nn.Module, protocol: SupportsIndex) -> Any:
    """How the plain module is pickled in the place of a private one."""
    pickled: Any = module.__reduce_ex__(protocol)
    made, *rest = pickled
    # Pickle would look for the class of the private one.
    return (object.__new__ if made is copyreg.__newobj__ else made, *rest)  # type: ignore[attr-defined]


def private_in_place(module: nn.Module, loop: HandleLoop) -> nn.Module:
    """The module, the same object, from now on of ``loop``."""
    given = loop.model.given = type(module)
    names = {"_private": loop, "__module__": given.__module__, "__qualname__": given.__qualname__}
    private: Any = type(given.__name__, (PrivateInPlace, given), names)
    module.__class__ = private
    return module


def _called(module: nn.Module, loop: HandleLoop, args: Args, kwargs: Kwargs) -> Any:
    """Call the module: plainly, recorded for the step, or with its parameters as constants."""
    if not torch.is_grad_enabled():
        return module(*plain(args), **plain(kwargs))
    if module.training and loop.sample is not None:
        return loop.call(args, kwargs)
    with loop.whole():
        constants = {name: param.detach() for name, param in module.named_parameters()}
        with ModuleState(module).holding(constants):
            return mapped(module(*plain(args), **plain(kwargs)), _not_trained_on)


def _refuse_assign(args: Args, kwargs: Kwargs) -> None:
    if kwargs.get("assign") or (len(args) > 2 and args[2]):
        raise ValueError(
            "load_state_dict(assign=True) puts new parameters into the module, which neither the optimizer nor "
            "the private loop would know: nothing would train. Load without assign."
        )


def _not_trained_on(value: Tensor) -> Tensor:
    """An output from which no gradient goes back to a parameter; it may to an input, of which it is made."""
    if not value.is_floating_point() or value.requires_grad:
        return value
    leaf = value.detach().requires_grad_()
    leaf.register_hook(_refuse_backward)  # type: ignore[no-untyped-call]
    return leaf.view_as(leaf)


def _refuse_backward(_: Tensor) -> None:
    raise BudgetError(
        "backward() from an output of the private model that no step can use: it was called in evaluation mode, or "
        "without a fresh batch of the private loader. Each step needs one fresh batch; call model.train() before "
        "it, and wrap evaluations in torch.no_grad()."
    )


class PrivateOptimizer(OpacusOptimizer):
    """Mixin of a private optimizer. The optimizer stays an instance of its class, and schedulers work on it."""

    _opt_called: bool

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Release the noisy clipped sum of the sample, make it the gradient, and step.

        A ``closure`` is called once, beforehand, and what it returns is returned.
        """
        if options:
            raise TypeError(
                f"optimizer.step({next(iter(options))}=...): a private step takes a closure and no options."
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        loop, self._opt_called = self._loop, True
        check_optimizer(self, loop.parameters().values())  # parameters may have joined since
        if loop.write_gradients():  # of a piece of the sample not: the step comes with the last one
            super().step()
            loop.has_stepped()
        return result

    # Learning-rate schedulers wrap a step to see that it was called, and warn of one that they did not wrap; one
    # wrapped before the loop was made private would be the public step.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and what came back to the records in hand; a sample's earlier pieces are kept."""
        self._loop.clear()
        super().zero_grad(set_to_none)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a private optimizer cannot be copied or pickled: two would share one loop. Save its state_dict()."
        )


def made_private(optimizer: Optimizer, loop: HandleLoop) -> Optimizer:
    """The optimizer, the same object, from now on of ``loop``."""
    known = type(optimizer)
    if not isinstance(optimizer, PrivateOptimizer):
        for name in ("step", "zero_grad"):  # a scheduler's or a profiler's wrapper around the public step
            optimizer.__dict__.pop(name, None)
        private: Any = type(f"Private{known.__name__}", (PrivateOptimizer, known), {})
        optimizer.__class__ = private
    assert isinstance(optimizer, PrivateOptimizer)
    optimizer._loop = loop
    return optimizer


def check_kind(optimizer: object) -> None:
    """Raise unless it is a torch optimizer that takes one dense gradient in a step."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: must be a torch optimizer of the module's parameters, not {type(optimizer).__name__}, "
            "e.g. torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    if isinstance(optimizer, SparseAdam):
        raise ValueError("SparseAdam takes sparse gradients only, and a noisy one is dense: use Adam instead.")
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS evaluates its closure many times in a step, and each would be a release: use SGD, Adam or "
            "another optimizer that needs one gradient in a step."
        )


def check_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Raise ValueError unless all that ``optimizer`` steps are among the parameters of the private module."""
    check_kind(optimizer)
    known = list(params)
    own, in_shards = {id(param) for param in known}, any(is_shard(param) for param in known)
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", range(len(group["params"])))
        for name, param in zip(names, group["params"], strict=True):
            if id(param) not in own:
                late = " If it was made before fully_shard, which puts other parameters in: make it afterwards."
                raise ValueError(
                    f"the optimizer holds parameters of another module: {name!r} of its group {number}, of shape "
                    f"{tuple(param.shape)}. Their gradients would not be private, and nothing was stepped. Make "
                    f"one module of all that is trained and give it to make_private.{late if in_shards else ''}"
                )


class PrivateLoader:
    """Secret samples of a loader's data set, an epoch being as many as the loader had batches.

    Records are read here, one by one: ``collate_fn`` is called with one record, and workers are not used. Every
    sample is handed out once: a new iterator goes on where the last one stopped, and ends it.
    """

    def __init__(self, loader: DataLoader[object], loop: HandleLoop) -> None:
        self.loop = loop
        self.original = loader
        self.dataset: Any = loader.dataset
        self._iterators = 0

    def __getattr__(self, name: str) -> Any:
        """What else the given loader has: its sampler, workers and ``collate_fn``; setting them changes nothing."""
        if name in ("original", "loop"):
            raise AttributeError(name)
        return getattr(self.original, name)

    @property
    def privacy(self) -> Privacy:
        return self.loop.privacy

    @property
    def sample_rate(self) -> float:
        """Opacus' name for the probability of a record to be in a sample: its public size over n."""
        return self.loop.expected_batch / self.loop.plan.n_public

    @property
    def batch_size(self) -> float:
        """The public size of a sample, as declared; the size of a sample itself is private."""
        return self.loop.expected_batch

    def __len__(self) -> int:
        return self.loop.epoch_length

    def __iter__(self) -> Iterator[Any]:
        return self.pieces(None)

    def pieces(self, most: int | None) -> Iterator[Any]:
        """An epoch's samples, whole or in pieces of whole people with at most ``most`` records."""
        self._iterators += 1
        mine, loop = self._iterators, self.loop
        for _ in range(len(self)):
            for batch in loop.batches(most):
                yield batch
                if self._iterators != mine:
                    raise BudgetError(
                        "this iterator ended when a newer one was made on the same private loader: a sample is "
                        "handed out once. Use one iterator at a time."
                    )


class BatchMemoryManager:
    """Cuts each sample of a private loader into physical batches, under Opacus' name.

    The loop steps on every piece. A piece's clipped sum is kept; the step comes with the last piece of a sample,
    which stays one release. Into how many pieces a sample is cut is public, and enough for pieces of at most
    ``max_physical_batch_size`` records in a sample of up to four standard deviations above the expected size. Only
    a sample that is larger still has larger pieces: more of them would tell its size. People without
    ``records_per_person`` are cut by how many records they have, and ε is conditional.
    """

    def __init__(self, *, data_loader: object, max_physical_batch_size: int, optimizer: Optimizer) -> None:
        if not isinstance(data_loader, PrivateLoader) or not isinstance(optimizer, PrivateOptimizer):
            raise TypeError("BatchMemoryManager: give it the loader and the optimizer that make_private returned.")
        if data_loader.loop is not optimizer._loop:
            raise ValueError("BatchMemoryManager: loader and optimizer are of different private loops.")
        if max_physical_batch_size < 1:
            raise ValueError(f"max_physical_batch_size={max_physical_batch_size}: must be ≥ 1.")
        self._loader, self._most = data_loader, int(max_physical_batch_size)

    def __enter__(self) -> BatchMemoryManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader.loop.partial = False

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    def __len__(self) -> int:
        """Pieces of an epoch; of people whose numbers of records are not bounded, if all had one."""
        return len(self._loader) * pieces_of(self._most, self._loader.batch_size / process_count())

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._loader.pieces(self._most)
        finally:
            self._loader.loop.partial = False


class LoaderContents(NamedTuple):
    """A loader, its records, the average size of a sample, and ``drop_last``."""

    loader: DataLoader[object]
    data: Any
    batch_size: int
    drop_last: bool


def read_loader(
    loader: DataLoader[object] | PrivateLoader, n_public: int | None, relation: str | Relation
) -> LoaderContents:
    """Return the contents of a loader that goes once through its data set, or through a part of it.

    A loader that an earlier loop's was made of is the same again. On several processes a ``DistributedSampler``
    deals the records out by rank, so a sample is as large as the batches of all ranks.
    """
    loader = loader.original if isinstance(loader, PrivateLoader) else loader
    if not all(hasattr(loader, name) for name in ("dataset", "batch_sampler", "collate_fn")):
        raise TypeError(
            f"data_loader: must be a torch DataLoader, not {type(loader).__name__}, e.g. DataLoader(data, "
            "batch_size=64, shuffle=True)."
        )
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        if loader.batch_size is None:
            raise DataError(
                "the stream makes its own batches: give the loader a batch_size, and let it yield records."
            )
        records = read_stream(dataset, n_public, relation)
        return LoaderContents(loader, records, loader.batch_size, bool(loader.drop_last))
    if not isinstance(dataset, Sized):
        raise DataError(
            f"a data set of type {type(dataset).__name__} has no length, so no sample of known probability can be "
            "drawn from it. Use a map-style data set."
        )
    batches: Any = loader.batch_sampler
    ranks = 1
    if type(batches).__name__ == "BatchSamplerShard":  # accelerate's, on several processes
        ranks = 1 if batches.split_batches else process_count()
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler:
        raise DataError(
            f"batches of {type(loader.batch_sampler).__name__} have no law that can be accounted for. Give the "
            "loader a batch_size instead."
        )
    sampler: Any = batches.sampler
    size, drop_last = ranks * int(batches.batch_size), bool(batches.drop_last)
    if type(sampler) is SubsetRandomSampler:
        chosen = [int(place) for place in sampler.indices]
        if len(set(chosen)) < len(chosen):
            raise DataError("SubsetRandomSampler: an index is given twice, so its record would count twice.")
        return LoaderContents(loader, Subset(dataset, chosen), size, drop_last)
    if type(sampler) is DistributedSampler:
        if sampler.num_replicas != process_count():
            raise DataError(
                f"DistributedSampler: deals records out to {sampler.num_replicas} processes, and there are "
                f"{process_count()}. Initialise torch.distributed first, or give shuffle=True instead."
            )
        return LoaderContents(loader, dataset, size * process_count(), drop_last)
    plain = type(sampler) is SequentialSampler or (
        (type(sampler) is RandomSampler or type(sampler).__name__ == "SeedableRandomSampler")
        and not sampler.replacement and sampler.num_samples == len(dataset)
    )  # fmt: skip
    if not plain:
        raise DataError(
            f"{type(sampler).__name__}: samples drawn by it cannot be accounted for, and it is not replaced behind "
            "your back. Give the loader shuffle=True or nothing; its batches become secret samples."
        )
    return LoaderContents(loader, dataset, size, drop_last)
