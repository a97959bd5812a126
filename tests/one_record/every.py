"""The table: every module with its records, and what may be refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from tests.one_record.cases import (
    CLASSES,
    FEATURES,
    Case,
    Texts,
    images,
    sequences,
    table,
    tokens,
)
from tests.one_record.layers import (
    Attends,
    Bag,
    Bilinear,
    Complex,
    Draws,
    Mean,
    Pair,
    Recurrent,
    Sampled,
    Unpooled,
    Whole,
    conv,
    double,
    frozen,
    half,
    halves,
    unused,
)
from tests.one_record.modules import (
    MIXING,
    Between,
    Branches,
    Centered,
    Checkpointed,
    Chosen,
    Counts,
    Energy,
    Equilibrium,
    Experts,
    Function,
    H,
    Hyper,
    Jacobians,
    KeepsTensors,
    MeanInBackward,
    OwnRule,
    Ragged,
    Raw,
    Remembers,
    Renormalised,
    Renormed,
    RunningMean,
    Straight,
    Tied,
    Writes,
    between,
    hooked,
    hooked_back,
    normed,
)

ALONE = (
    "std().item()",
    "unique rows",
    "through numpy",
    "through lists",
)  # one record at a time: fewer


def few() -> Any:
    return table(50)


MODULES: dict[str, Case] = {
    **{name: Case(between(change), few if name in ALONE else table) for name, change in MIXING.items()},
    "forward and backward hooks": Case(hooked, few),
    "branches": Case(Branches, few),
    "dynamic shapes": Case(Ragged, few),
    "equilibrium": Case(Equilibrium, few),
    "mixture of experts": Case(Experts, few),
    "hypernetwork": Case(Hyper),
    "autograd inside": Case(lambda: Energy("autograd"), few),
    "torch.func inside": Case(lambda: Energy("func"), few),
    "straight-through Function": Case(lambda: Function(Straight), few),
    "Function that mixes backward": Case(lambda: Function(MeanInBackward), few),
    "Function with a rule of its own": Case(lambda: Function(OwnRule), few),
    "operator with a rule of its own": Case(Centered, few),
    "jacobians inside": Case(Jacobians, few),
    **{f"gradients hooked: {kind}": Case(hooked_back(kind), few) for kind in ("module", "before", "tensor")},
    "checkpoint": Case(lambda: Checkpointed(False)),
    "checkpoint, reentrant": Case(lambda: Checkpointed(True), few),
    "weight norm": Case(normed("weight")),
    "orthogonal": Case(normed("orthogonal"), rtol=1e-3),
    "tied": Case(Tied, tokens, lambda out, y: F.cross_entropy(out, y)),
    **{
        f"raw: {how}": Case(partial(Raw, how))
        for how in ("cosine", "prototypes", "solve", "in place", "addmm", "gather", "einsum", "stacked", "where",
                    "topk", "matrix exponential", "fft")
    },
    "bilinear and PReLU": Case(Bilinear),
    "LSTM": Case(lambda: Recurrent(nn.LSTM(4, H, batch_first=True), H), sequences),
    "LSTM, packed": Case(lambda: Recurrent(nn.LSTM(4, H, batch_first=True), H, True), sequences),
    "LSTM, two ways": Case(
        lambda: Recurrent(nn.LSTM(4, H, 2, batch_first=True, bidirectional=True), 2 * H), sequences
    ),
    "LSTM, projected": Case(lambda: Recurrent(nn.LSTM(4, H, batch_first=True, proj_size=3), 3), sequences),
    "GRU": Case(lambda: Recurrent(nn.GRU(4, H, batch_first=True), H), sequences),
    "RNN": Case(lambda: Recurrent(nn.RNN(4, H, batch_first=True, nonlinearity="relu"), H), sequences),
    "cross attention": Case(Attends, sequences),
    "nn.Transformer": Case(Whole, sequences),
    "encoder layer": Case(
        lambda: Recurrent(
            nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), Pair()), 4
        ),
        sequences,
    ),
    "conv, grouped and dilated": Case(
        lambda: conv(nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2, groups=4), width=16), images
    ),
    "conv, circular": Case(
        lambda: conv(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.AdaptiveAvgPool2d(2), width=12),
        images,
    ),
    "conv, same": Case(lambda: conv(nn.Conv2d(2, 3, 4, padding="same"), nn.AvgPool2d(4), width=12), images),
    "conv1d and transposed": Case(
        lambda: conv(nn.Conv1d(5, 4, 2), nn.ConvTranspose1d(4, 2, 2, groups=2), width=8), sequences
    ),
    "conv3d": Case(lambda: conv(nn.Unflatten(1, (1, 2)), nn.Conv3d(1, 2, (2, 3, 3)), width=72), images),
    "unpooled": Case(Unpooled, images),
    "grid_sample": Case(Sampled, images, rtol=1e-3),
    "norms": Case(
        lambda: conv(nn.GroupNorm(1, 2), nn.InstanceNorm2d(2, affine=True), nn.LayerNorm([2, 8, 8]),
                     nn.LocalResponseNorm(2), nn.Conv2d(2, 2, 5), nn.RMSNorm([4, 4]), width=32),
        images,
    ),
    "pixel shuffle, unfold": Case(
        lambda: conv(nn.Conv2d(2, 4, 1), nn.PixelShuffle(2), nn.Unfold(4, stride=4), width=256), images
    ),
    "EmbeddingBag": Case(lambda: Bag("mean"), tokens),
    "EmbeddingBag, max": Case(lambda: Bag("max"), tokens),
    "EmbeddingBag, sum": Case(lambda: Bag("sum"), tokens),
    "sparse embedding": Case(lambda: Mean(sparse=True), tokens),
    "texts of several lengths": Case(Mean, lambda: Texts(60)),
    "frozen first layer": Case(frozen, table),
    "experts chosen by a question": Case(lambda: Chosen()),
    "double precision": Case(lambda: Between(lambda x: x).double(), double),
    **{
        f"draws: {how}": Case(partial(Draws, how), few, random=True)
        for how in ("python", "numpy", "equal masks", "gumbel", "permutation", "multinomial", "rrelu",
                    "dropout of the batch", "dropout")
    },
}  # fmt: skip
"""Everything here must run, equal plain autograd on one record at a time, and stay within C."""

STATEFUL: dict[str, Case] = {
    "remembers the last batch": Case(Remembers, few),
    "counts its calls": Case(Counts),
    "keeps tensors": Case(KeepsTensors),
    "running mean in a buffer": Case(RunningMean, few),
    "spectral norm": Case(normed("spectral")),
    "embedding with max_norm": Case(Renormalised, tokens),
    "max_norm, functional": Case(lambda: Renormed(max_norm=0.5), tokens),
    "frequencies, functional": Case(lambda: Renormed(scale_grad_by_freq=True), tokens),
    "batch_norm, functional": Case(between(lambda x: F.batch_norm(x, None, None, training=True))),
    "instance_norm over the batch": Case(between(lambda x: F.instance_norm(x.T[None])[0].T)),
    "unused parameter": Case(unused, table),
    "writes into a parameter": Case(Writes, few),
    "writes into its input": Case(between(lambda x: x.mul_(2.0).sub_(x.mean(0)))),
    "batch norm": Case(
        lambda: nn.Sequential(nn.Linear(FEATURES, H), nn.BatchNorm1d(H), nn.Linear(H, CLASSES))
    ),
    "instance norm that tracks": Case(
        lambda: conv(nn.InstanceNorm2d(2, track_running_stats=True), nn.Conv2d(2, 2, 8), width=2), images
    ),
    "bfloat16": Case(half, halves),
    "complex parameters": Case(Complex),
}  # fmt: skip
"""These may be refused in a sentence; what runs stays within C."""
