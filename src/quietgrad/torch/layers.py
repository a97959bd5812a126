"""Opacus' layers, ``ModuleValidator`` and a loss for language models, by their usual names."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from quietgrad.torch.networks.usable import mixing_layers, modes_kept, refuse_unusable_modules

__path__: list[str] = []  # Opacus' paths below it, such as opacus.layers.dp_rnn, are found by their names

DPLSTM = nn.LSTM  # torch's own: their gradients are clipped as they are
DPGRU = nn.GRU
DPRNN = nn.RNN
DPMultiheadAttention = nn.MultiheadAttention


def causal_lm_loss(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the mean over examples of each one's mean loss per token, shifted by one.

    A mean over all tokens of a batch divides by their number. A long example would then reduce the weight of the
    others, and padding the weight of all. Here an example has the same weight in every batch.

    >>> import torch
    >>> logits = torch.randn(2, 4, 5)
    >>> labels = torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100]])
    >>> alone = [causal_lm_loss(logits[k : k + 1], labels[k : k + 1]) for k in range(2)]
    >>> bool(torch.isclose(causal_lm_loss(logits, labels), torch.stack(alone).mean()))
    True
    """
    wanted = labels[:, 1:]
    each = cross_entropy(logits[:, :-1].transpose(1, 2), wanted, reduction="none", ignore_index=ignore_index)
    counted = (wanted != ignore_index).sum(1).clamp(min=1)
    return (each.sum(1) / counted).mean()


class _NoRegistry:
    """Opacus' tables of layers."""

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise ValueError(
            "ModuleValidator.VALIDATORS, FIXERS: there is no table of layers. validate and fix know BatchNorm and "
            "InstanceNorm; change a layer of your own before make_private."
        )


class ModuleValidator:
    """Opacus' checks of a module, under its names.

    Recurrent layers and attention need no replacement here.

    >>> model = nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU())
    >>> ModuleValidator.is_valid(model), ModuleValidator.fix(model)[1].num_groups
    (False, 24)
    >>> ModuleValidator.is_valid(ModuleValidator.fix(model))
    True
    """

    VALIDATORS = FIXERS = _NoRegistry()

    @staticmethod
    def validate(module: nn.Module, *, strict: bool = False) -> list[Exception]:
        """The reasons why the module could not be made private; with ``strict`` the first is raised."""
        with modes_kept(module, training=True):  # the mode that it will be trained in
            errors: list[Exception] = list(mixing_layers(module))
        try:
            refuse_unusable_modules(module)
        except ValueError as error:
            errors.append(error)
        if strict and errors:
            raise errors[0]
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether nothing is known that speaks against it."""
        return not cls.validate(module)

    @staticmethod
    def fix(module: nn.Module, *, replace_bn_with_in: bool = False) -> nn.Module:
        """A copy in which batch normalisation is group normalisation, and instance norms keep no statistics.

        A group norm takes the weight and the bias of the batch norm it is for; its statistics are those of each
        example. With ``replace_bn_with_in`` it is an instance norm. Make the optimizer of the copy's parameters.
        """
        fixed = copy.deepcopy(module)
        if (new := _replacement(fixed, replace_bn_with_in)) is not None:
            return new
        for parent in list(fixed.modules()):
            for name, layer in list(parent.named_children()):
                if (new := _replacement(layer, replace_bn_with_in)) is not None:
                    setattr(parent, name, new)
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module, *, replace_bn_with_in: bool = False) -> nn.Module:
        """:meth:`fix`, and raise if that was not enough."""
        fixed = cls.fix(module, replace_bn_with_in=replace_bn_with_in)
        cls.validate(fixed, strict=True)
        return fixed


_INSTANCE_NORMS = {
    nn.BatchNorm1d: nn.InstanceNorm1d, nn.BatchNorm2d: nn.InstanceNorm2d, nn.BatchNorm3d: nn.InstanceNorm3d,
}  # fmt: skip


def _replacement(layer: nn.Module, as_instance_norm: bool) -> nn.Module | None:
    if isinstance(layer, nn.modules.batchnorm._LazyNormBase):
        raise ValueError("a lazy norm has no shape yet: run the module once on an example first.")
    if isinstance(layer, _BatchNorm):
        channels = layer.num_features
        # A vector has one number per channel: a group of its own would be normalised to zero.
        groups = 1 if isinstance(layer, nn.BatchNorm1d) else _groups(channels)
        new: nn.Module = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
        kind = next((each for each in _INSTANCE_NORMS if isinstance(layer, each)), None)
        if as_instance_norm and kind is not None:
            new = _INSTANCE_NORMS[kind](channels, eps=layer.eps, affine=layer.affine)
        if layer.affine:
            new.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
        found = next(layer.parameters(), None)
        new.to(device=None if found is None else found.device, dtype=None if found is None else found.dtype)
        for own, theirs in zip(new.parameters(), layer.parameters(), strict=True):
            own.requires_grad_(theirs.requires_grad)
        return new.train(layer.training)
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return None


def _groups(channels: int) -> int:
    """The most groups, at most 32, that divide the channels."""
    return max(groups for groups in range(1, min(32, channels) + 1) if channels % groups == 0)


def __getattr__(name: str) -> Any:
    """Opacus' other layers, by the path ``opacus.layers``."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("quietgrad.torch"), name)
