"""Modules that cannot be trained privately: layers out of reach, without values, or with statistics of batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

__all__ = ["mixing_layers", "refuse_mixing_layers", "refuse_unusable_modules"]


def refuse_unusable_modules(module: nn.Module) -> None:
    """Raise ValueError for a module whose layers cannot be reached or have no values."""
    for name, layer in module.named_modules():
        where = f"layer {name!r}" if name else "the module"
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
                "inside it, and use qt.fit under torchrun for several processes."
            )
    spans: list[tuple[int, int, str]] = []
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run the module once on an example first.")
        if param.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device and has no values: load the module first.")
        if param.is_complex():
            raise ValueError(f"parameter {name!r} is complex: hold its real and imaginary part as two parameters.")
        if param.is_contiguous() and param.numel():
            start = param.data_ptr()
            spans.append((start, start + param.numel() * param.element_size(), name))
    spans.sort()
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise ValueError(
                f"parameters {first!r} and {second!r} share memory without being one parameter: each would be "
                "trained as if the other stood still. Register one nn.Parameter under both names."
            )


def refuse_mixing_layers(module: nn.Module) -> None:
    """Raise ValueError for a layer whose output for one example depends on the others."""
    for error in mixing_layers(module):
        raise error


def mixing_layers(module: nn.Module) -> Iterator[ValueError]:
    """What is to be said of each layer whose output for one example depends on the others."""
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
                f"{where} mixes the examples of a batch, so no example has a gradient of its own. "
                f"Use torch.nn.GroupNorm(num_groups, {layer.num_features}) or LayerNorm instead; with fixed "
                "statistics put this layer into evaluation mode after model.train()."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq:
            yield ValueError(
                f"{where} scales gradients by how often a token occurs in the whole batch, which mixes "
                "examples. Build it with scale_grad_by_freq=False."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            yield ValueError(
                f"{where} rescales its weights during the forward pass (max_norm). Build it with "
                "max_norm=None and bound the rows in your optimiser if you need to."
            )
