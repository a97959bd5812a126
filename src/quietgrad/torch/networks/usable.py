"""The user's loss of one record in two forms, and modules that cannot be trained privately.

loss(output, target)      of a model's output for a batch of one, record = (x, …, y) or a dictionary with labels
loss(model, *record)      with the model itself; loss(model, **record) or loss(model, record) of dictionaries
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from quietgrad.core.errors import DataError
from quietgrad.torch.networks.trees import PyTree

log = logging.getLogger("quietgrad")

LossFunction = Callable[..., Tensor]
Errors = Literal["zero", "raise"]  # what an exception of model or loss on one record does
_TARGETS = ("labels", "label", "target", "targets", "y")


def takes_model(loss: LossFunction) -> bool:
    """Whether a loss is written as loss(model, *record): by its first parameter's name, or by having more than two.

    >>> takes_model(nn.CrossEntropyLoss()), takes_model(lambda model, x, y: 0)
    (False, True)
    """
    call = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return False
    own = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if own and own[0].name in ("model", "module", "net", "network"):
        return True
    return len([p for p in own if p.default is p.empty]) > 2


class RecordLoss:
    """The loss of a batch of one: one number."""

    def __init__(self, module: nn.Module, loss: LossFunction) -> None:
        self.module, self.loss = module, loss
        self._of_model = takes_model(loss)
        self._whole = self._of_model and [p.kind for p in inspect.signature(loss).parameters.values()][1:] == [
            inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]

    def __call__(self, record: PyTree) -> Tensor:
        value = self._value(record)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise DataError(
                f"the loss of one record has shape {shape}: it must be one number. Take the mean or the sum over a "
                "record's own positions."
            )
        return value.reshape(())

    def mean(self, batch: PyTree) -> Tensor:
        """The mean loss of a batch of several records: one client's local objective."""
        value = self._value(batch)
        if not isinstance(value, Tensor) or value.dim() > 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise DataError(
                f"the loss of a batch has shape {shape}: it must be one number, or one per record. Take the mean "
                "over a record's own positions."
            )
        return value.mean()

    def _value(self, record: PyTree) -> Any:
        named = isinstance(record, dict | UserDict)
        if self._of_model:
            if named:
                return self.loss(self.module, record) if self._whole else self.loss(self.module, **record)
            # loss(model, batch) takes a record of several parts whole.
            several = isinstance(record, tuple | list) and not (self._whole and len(record) > 1)
            return self.loss(self.module, *(record if several else (record,)))
        if named:
            named_inputs = dict(record)
            name = next((name for name in _TARGETS if name in named_inputs), None)
            if name is None:
                raise DataError(
                    "records are dictionaries without 'labels', 'label', 'target' or 'y': write the loss as "
                    "loss(model, **record)."
                )
            target = named_inputs.pop(name)
            return self.loss(self.module(**named_inputs), target)
        if not isinstance(record, tuple | list) or len(record) < 2:
            raise DataError(
                "a record must be (x, y), with several inputs (x1, x2, y); else write the loss as "
                "loss(model, record)."
            )
        *inputs, target = record
        if len(inputs) == 1 and isinstance(inputs[0], dict):
            return self.loss(self.module(**inputs[0]), target)
        if len(inputs) == 1 and isinstance(inputs[0], tuple | list):
            inputs = list(inputs[0])
        return self.loss(self.module(*inputs), target)


def warn_of_divided_weights(loss: object) -> None:
    """Warn of class weights that have no effect: a mean over one record's label divides its weight out again.

    >>> warn_of_divided_weights(nn.CrossEntropyLoss(weight=torch.ones(2), reduction="sum"))
    """
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return
    if loss.reduction == "mean" and loss.weight is not None:
        warnings.warn(
            f"{type(loss).__name__}(weight=...): torch's mean divides by the weights of the batch, which is one "
            "record here, so a record with one label loses its weight. Write reduction='sum' (with make_private "
            "also loss_reduction='mean'): a record then counts by its class's weight, and sums are divided by the "
            "public size of a sample.",
            stacklevel=4,
        )


@contextmanager
def modes_kept(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Put the module into one mode, and restore each layer's mode afterwards.

    A module that is in training mode stays as it is: a layer in evaluation mode is frozen on purpose.
    """
    modes = {layer: layer.training for layer in module.modules()}
    if not (training and module.training):
        module.train(training)
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def uncompiled(module: nn.Module) -> nn.Module:
    """The module as it was written: ``torch.compile`` is taken off it, and a line of the log says so.

    >>> layers = nn.Sequential(nn.Linear(2, 2))
    >>> layers[0].compile(backend="eager")
    >>> uncompiled(layers)[0]._compiled_call_impl is None
    True
    """
    made_plain: list[str] = []
    parts: object = module
    if not isinstance(parts, nn.Module):  # what is none is refused where modules are checked
        return module
    while "_orig_mod" in module._modules:
        module, made_plain = module._modules["_orig_mod"], ["the module"]  # type: ignore[assignment]
    for name, layer in list(module.named_modules()):
        if layer._compiled_call_impl is not None:
            layer._compiled_call_impl = None
            made_plain.append(f"layer {name!r}" if name else "the module")
        for child, held in list(layer._modules.items()):
            while held is not None and "_orig_mod" in held._modules:
                held = layer._modules[child] = held._modules["_orig_mod"]
                made_plain.append(f"layer {f'{name}.{child}'.lstrip('.')!r}")
    if made_plain:
        log.warning(
            "torch.compile was taken off %s: records' gradients are made of its layers as they were written. "
            "Compile the trained module again to predict with it.",
            ", ".join(dict.fromkeys(made_plain)),
        )
    return module


def _is_lightning(layer: nn.Module) -> bool:
    kinds = [kind for kind in type(layer).__mro__ if kind.__name__ == "LightningModule"]
    return any(kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning") for kind in kinds)


def refuse_unusable_modules(module: nn.Module) -> None:
    """Raise ValueError for a module whose layers cannot be reached or have no values."""
    for name, layer in module.named_modules():
        where = f"layer {name!r}" if name else "the module"
        if _is_lightning(layer):
            raise ValueError(
                f"{where} is a LightningModule, whose own methods reach the trainer, its logs and metrics, where a "
                "record could leave something for the next one. Give the network that it holds, with "
                "make_private(module=self.net, wrap_model=False), and call self.net(x) in training_step."
            )
        if isinstance(layer, torch.jit.ScriptModule):
            raise ValueError(f"{where} was compiled by torch.jit, which hides its layers: give the Python module.")
        if hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None:
            raise ValueError(
                f"{where} was compiled by torch.compile, which fuses the layers whose inputs and gradients are "
                "needed here. Give the module it was made of (compiled._orig_mod)."
            )
        if isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{where} is {type(layer).__name__}, which sums gradients before they are clipped: give the module "
                "inside it, and use qt.PrivateLoop under torchrun for several processes."
            )
    spans: list[tuple[int, int, str]] = []
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run the module once on an example first.")
        if param.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device and has no values: load the module first.")
        if param.is_complex():
            raise ValueError(f"parameter {name!r} is complex: hold its real and imaginary part as two parameters.")
        if param.is_contiguous() and param.numel() and param.data_ptr():  # shards have no memory of their own
            start = param.data_ptr()
            spans.append((start, start + param.numel() * param.element_size(), name))
    spans.sort()
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise ValueError(
                f"parameters {first!r} and {second!r} share memory without being one parameter: each would be "
                "trained as if the other stood still. Register one nn.Parameter under both names."
            )


def refuse_shards(params: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for parameters in shards: a module is made whole for a pass."""
    for name, param in params:
        if hasattr(param, "full_tensor"):
            raise ValueError(
                f"fully_shard: parameter {name!r} is in shards, and a record's gradient needs it whole. Train the "
                "module by qt.PrivateLoop, qt.make_private or qt.fit, which gather it for each step."
            )


def refuse_mixing_layers(module: nn.Module) -> None:
    """Raise ValueError for a layer that mixes examples, or that changes its own buffers or weights in a pass."""
    for error in mixing_layers(module):
        raise error


def mixing_layers(module: nn.Module) -> Iterator[ValueError]:
    """Yield an error for each layer that mixes examples, or that changes its own buffers or weights in a pass."""
    for name, layer in module.named_modules():
        where = f"layer {name!r} ({type(layer).__name__})"
        power_iteration = isinstance(layer, _SpectralNorm) or any(
            isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values()
        )
        if power_iteration and layer.training:
            yield ValueError(
                f"{where} is or has a spectral_norm, whose buffers follow the weights: every pass in training mode "
                "is a step of its power iteration, so that what an example contributes would depend on how many "
                "passes there were before. Put the layer into evaluation mode after model.train(), which keeps "
                "its singular vectors as they are, or use weight_norm."
            )
        if isinstance(layer, _InstanceNorm) and layer.track_running_stats and layer.training:
            yield ValueError(
                f"{where} stores statistics of the data in its buffers, unprotected. "
                "Build it with track_running_stats=False."
            )
        # In evaluation mode it is a fixed affine map of each example: a frozen backbone may keep it.
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            yield ValueError(
                f"{where} computes statistics across the batch, so per-example gradients do not exist. Replace it "
                "with GroupNorm or LayerNorm (`qt.ModuleValidator.fix(model)`). If its statistics are fixed, call "
                f"model.get_submodule({name!r}).eval() after model.train()."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq:
            yield ValueError(
                f"{where} scales gradients by how often a token occurs in the whole batch, so examples affect each "
                "other. Build it with scale_grad_by_freq=False."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            yield ValueError(
                f"{where} rescales its weights during the forward pass (max_norm). Build it with "
                "max_norm=None and bound the rows in your optimiser if you need to."
            )
