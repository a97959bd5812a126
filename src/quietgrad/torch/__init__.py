"""quietgrad for PyTorch users: ``import quietgrad.torch as qt``.

:func:`fit` trains a module with any algorithm of quietgrad. :func:`make_private` and
:func:`make_private_with_epsilon` keep your own loop and optimizer. :func:`explain` tells how a
model is differentiated and what that costs. :func:`clipped_gradient_sum` and
:func:`clipped_difference_sum` are the sums that all of these rest on.
"""

from __future__ import annotations

from quietgrad.torch.callbacks import CSVLog, Progress, TensorBoardLog
from quietgrad.torch.clipping import clipped_difference_sum, clipped_gradient_sum
from quietgrad.torch.explaining import explain
from quietgrad.torch.opacus_verbs import PrivacyEngine, make_private, make_private_with_epsilon
from quietgrad.torch.training import fit, resume

__all__ = [
    "fit",
    "resume",
    "make_private",
    "make_private_with_epsilon",
    "PrivacyEngine",
    "explain",
    "clipped_gradient_sum",
    "clipped_difference_sum",
    "CSVLog",
    "TensorBoardLog",
    "Progress",
]
