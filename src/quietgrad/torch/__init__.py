"""quietgrad for PyTorch users: ``import quietgrad.torch as qt``.

:func:`fit` trains a module with any algorithm of quietgrad. :func:`objective` gives it to ``minimize``,
``simulate`` and federations. :class:`PrivateLoop` serves a custom training loop with any optimizer;
:func:`make_private` and :func:`make_private_with_epsilon` do so under Opacus' names. :func:`explain`
reports how a model is differentiated. :func:`clipped_gradient_sum` and :func:`clipped_difference_sum` are the sums
that all of these rest on.
"""

# ruff: noqa: E402  (the version is checked before parts of torch that depend on it are imported)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from quietgrad.torch.tested_versions import require_tested

require_tested(torch.__version__)

from quietgrad.methods.callbacks import CSVLog, MLflowLog, Progress, TensorBoardLog
from quietgrad.methods.epoch_schedules import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
    TableGradClip,
    TableNoise,
)
from quietgrad.torch.clipped_sums import clipped_difference_sum, clipped_gradient_sum, explain
from quietgrad.torch.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention, ModuleValidator, causal_lm_loss
from quietgrad.torch.loops.distributed import DifferentiallyPrivateDistributedDataParallel
from quietgrad.torch.loops.private_loop import PrivateLoop
from quietgrad.torch.loops.wrappers import BatchMemoryManager
from quietgrad.torch.networks.module import objective
from quietgrad.torch.networks.records import Multiple, Padding
from quietgrad.torch.opacus import PrivacyEngine, make_private, make_private_with_epsilon
from quietgrad.torch.opacus_accounting import get_noise_multiplier
from quietgrad.torch.opacus_table import opacus_name
from quietgrad.torch.training import fit, resume

__all__ = [
    "fit",
    "objective",
    "resume",
    "PrivateLoop",
    "make_private",
    "make_private_with_epsilon",
    "PrivacyEngine",
    "get_noise_multiplier",
    "Padding",
    "Multiple",
    "explain",
    "ModuleValidator",
    "BatchMemoryManager",
    "DifferentiallyPrivateDistributedDataParallel",
    "DPLSTM",
    "DPGRU",
    "DPRNN",
    "DPMultiheadAttention",
    "ExponentialNoise",
    "StepNoise",
    "LambdaNoise",
    "TableNoise",
    "ExponentialGradClip",
    "StepGradClip",
    "LambdaGradClip",
    "TableGradClip",
    "clipped_gradient_sum",
    "clipped_difference_sum",
    "causal_lm_loss",
    "CSVLog",
    "TensorBoardLog",
    "MLflowLog",
    "Progress",
]

if not TYPE_CHECKING:  # a type checker would take any name for one

    def __getattr__(name: str) -> Any:
        """Opacus' other public names: what they are here, or a thing that says what to use."""
        if name.startswith("__"):
            raise AttributeError(name)
        return opacus_name(name)
