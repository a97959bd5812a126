"""Opacus's recurrent layers and attention by name: torch's own, whose gradients are clipped here as they are."""

from __future__ import annotations

from torch.nn import GRU as DPGRU
from torch.nn import LSTM as DPLSTM
from torch.nn import RNN as DPRNN
from torch.nn import MultiheadAttention as DPMultiheadAttention

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention"]
