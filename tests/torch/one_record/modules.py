"""Modules that mix rows, keep state, draw numbers or differentiate inside, and losses and programs around them.

Ordinary layers are compared with autograd in tests/torch/test_per_example.py. What a program keeps between records
has a table of its own in tests/torch/one_record/keeping.py.
"""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from tests.torch.one_record.cases import CLASSES, FAR, FEATURES, Case, Texts, images, of_model, table, tokens

H = 8


class Between(nn.Module):
    """Two layers with something between the rows of the batch and the first of them."""

    def __init__(self, change: Any = lambda x: x) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(FEATURES, H), nn.Linear(H, CLASSES), change

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(self.change(x))))


def between(change: Any) -> Any:
    return lambda: Between(change)


def minus_mean(x: Tensor) -> Tensor:
    return x - x.mean(0)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_mean: Any = torch.jit.script(minus_mean)


def above_512(x: Tensor) -> Tensor:
    return x - x.mean(0) if x.shape[0] > 512 else x


def through_numpy(x: Tensor) -> Tensor:
    array = x.detach().numpy()
    return torch.from_numpy((array - array.mean(0)).astype(np.float32)) + x


def python_lists(x: Tensor) -> Tensor:
    rows = x.tolist()
    return x - torch.tensor([sum(column) / len(rows) for column in zip(*rows, strict=True)])


MIXING: dict[str, Any] = {
    "minus the mean of the batch": lambda x: x - x.mean(0),
    "whitened by the batch": lambda x: (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt(),
    "sorted across the batch": lambda x: x.sort(0).values,
    "cumsum over the batch": lambda x: x.cumsum(0),
    "flip of the batch": lambda x: x + x.flip(0),
    "roll of the batch": lambda x: x - x.roll(1, 0),
    "times the batch size": lambda x: x * x.shape[0],
    "divided by len": lambda x: x / len(x),
    "view with the batch size": lambda x: x.reshape(1, -1).expand(x.size(0), -1)[:, :FEATURES],
    "a scripted mean": lambda x: x - scripted_mean(x),
    "vmap of a mean": lambda x: x - torch.func.vmap(torch.mean, in_dims=1)(x),
    "mixing above 512 rows": above_512,
    "std().item()": lambda x: x / (x.std().item() + 1.0),
    "max of the batch": lambda x: x / x.abs().max(),
    "softmax over the batch": lambda x: x * x.softmax(0),
    "quantile of the batch": lambda x: x - torch.quantile(x, 0.5, dim=0),
    "einsum over rows": lambda x: torch.einsum("bi,ci->bi", x, x),
    "gram matrix": lambda x: (x @ x.T) @ x / 100.0,
    "cdist to all rows": lambda x: x + torch.cdist(x, x).sum(1, keepdim=True),
    "unique rows": lambda x: x + torch.unique(x, dim=0).sum(0),
    "through numpy": through_numpy,
    "through lists": python_lists,
    "layer_norm over the batch": lambda x: F.layer_norm(x.T, (x.shape[0],)).T + x,
    "the first row": lambda x: x - x[:1],
    "torch.stack of rows": lambda x: torch.stack([row - x[0] for row in x]),
}  # fmt: skip


class Writes(Between):
    """Moves its own weights as it goes."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.first.weight.add_(1e-3 * x.mean(0))
        return super().forward(x)


def hooked() -> nn.Module:
    model = Between()
    model.first.register_forward_hook(lambda module, given, out: out - out.mean(0))
    model.second.register_full_backward_hook(lambda module, given, out: None)
    return model


class Energy(nn.Module):
    """Its output is the gradient of an energy by its input."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.first, self.second, self.by = nn.Linear(FEATURES, H), nn.Linear(FEATURES, CLASSES), by

    def energy(self, x: Tensor) -> Tensor:
        return self.first(x).tanh().square().sum()

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "func":
            return self.second(torch.func.grad(self.energy)(x))
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(self.energy(x), x, create_graph=True)
        return self.second(inner)


class Straight(torch.autograd.Function):
    """Signs, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class MeanInBackward(torch.autograd.Function):
    """Whose backward pass mixes rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] - grads[0].mean(0)


class OwnRule(torch.autograd.Function):
    """Says itself what it does for many records at once, and mixes them."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x - 0.9 * x.mean(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        x = x.movedim(in_dims[0], 0)
        return x - 0.9 * x.mean(0), 0


@torch.library.custom_op("quietgrad_tests::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    return x - 0.9 * x.mean(0)


torch.library.register_autograd("quietgrad_tests::center", lambda ctx, grad: grad)


@torch.library.register_vmap("quietgrad_tests::center")  # type: ignore[untyped-decorator]
def _center_all(info: Any, in_dims: Any, x: Tensor) -> Any:
    return center(x.movedim(in_dims[0], 0)), 0


class Centered(Between):
    """An operator of somebody's own that comes with a rule for many records."""

    def forward(self, x: Tensor) -> Any:
        return self.second(center(self.first(x)))


def centered(grad: Tensor) -> Tensor:
    return grad - 0.9 * grad.mean(0)


def hooked_back(kind: str) -> Any:
    """Gradients changed on their way back, by what would be the batch's mean."""

    def make() -> nn.Module:
        model = Between()
        second: Any = model.second
        if kind == "module":
            second.register_full_backward_hook(lambda module, given, out: (centered(given[0]),))
        elif kind == "before":
            second.register_full_backward_pre_hook(lambda module, out: (centered(out[0]),))
        else:
            model.second.register_forward_hook(lambda module, given, out: (out.register_hook(centered), out)[1])
        return model

    return make


class Function(Between):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.second(self.function.apply(self.first(x)))


class Chosen(nn.Module):
    """Each record goes through one of two layers; few through the second."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rarely = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.rarely(x) if x[0, 0] > 2 else self.often(x)


class Renormed(nn.Module):
    """Rows of a table rescaled in place by the functional form."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.out, self.options = nn.Parameter(torch.randn(20, H)), nn.Linear(H, CLASSES), options

    def forward(self, x: Tensor) -> Any:
        return self.out(F.embedding(x, self.table, **self.options).mean(1))


class Raw(nn.Module):
    """Parameters in operations that are no layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.w = nn.Parameter(torch.randn(FEATURES, CLASSES))
        self.s = nn.Parameter(torch.rand(FEATURES) + 0.5)
        self.b = nn.Parameter(torch.randn(CLASSES))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.made(x) + 0.1 * self.b + 0.1 * (x * self.s).sum(1, keepdim=True)

    def made(self, x: Tensor) -> Tensor:
        how = self.how
        if how == "cosine":
            return 3.0 * F.normalize(x, dim=1) @ F.normalize(self.w, dim=0) + self.b
        if how == "in place":
            h = x.clone()
            h *= self.s
            h[:, 0] = h[:, 0] + self.b[0]
            h[:, 1:3] += self.w[0, :2]
            return h @ self.w
        if how == "addmm":
            return torch.addmm(self.b, x * self.s, self.w)
        if how == "gather":
            return (x @ self.w) + self.w[x.argmax(1) % FEATURES] * self.s[x.argmin(1), None]
        if how == "einsum":
            return torch.einsum("bi,i,ic->bc", x, self.s, self.w) + self.b
        if how == "stacked":
            return (torch.stack([self.w, -self.w]).mean(0).T @ (x * self.s).T).T + self.b.clamp(-1, 1)
        assert how == "topk"
        values, places = (x * self.s).topk(2)
        return values @ self.w[:2] + self.w[places].sum(1)


class Renormalised(nn.Module):
    """An embedding that rescales its own rows in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, H, max_norm=0.5), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.table(x).mean(1))


def normed(kind: str) -> Any:
    def make() -> nn.Module:
        model = Between()
        if kind == "weight":
            parametrizations.weight_norm(model.first)
        elif kind == "orthogonal":
            parametrizations.orthogonal(model.first)
        else:
            parametrizations.spectral_norm(model.first)
        return model

    return make


class Branches(Between):
    """Records that answer apart."""

    def forward(self, x: Tensor) -> Any:
        if x.sum() > 0:
            x = x * 2
        elif x[0, 0].item() < -1:
            x = -x
        return super().forward(x)


class Ragged(Between):
    """A number of values that depends on the record."""

    def forward(self, x: Tensor) -> Any:
        positive = x[x > 0]
        return super().forward(x) + positive.sum() / (1 + len(positive))


class Mean(nn.Module):
    """The mean over positions of an embedding, padding and all: Opacus' imdb example."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, H, sparse=sparse), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.table(x).mean(1))


class Draws(Between):
    """Random numbers inside."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Any:
        how = self.how
        if how == "python":
            x = x * (1.0 + random.random())
        elif how == "numpy":
            x = x + float(np.random.normal())  # noqa: NPY002
        elif how == "equal masks":
            mask = torch.bernoulli(torch.full((FEATURES,), 0.5))
            x = x * mask
        elif how == "gumbel":
            x = x * F.gumbel_softmax(x.clamp(-3, 3), hard=True)
        elif how == "permutation":
            x = x[:, torch.randperm(FEATURES)]
        elif how == "multinomial":
            x = x * F.one_hot(torch.multinomial(x.clamp(-3, 3).softmax(1), 1)[:, 0], FEATURES)
        elif how == "rrelu":
            x = F.rrelu(x, training=True)
        elif how == "dropout of the batch":
            x = x * F.dropout(torch.ones(x.shape[0], 1), 0.5)
        else:
            x = F.dropout(x, 0.5)
        return super().forward(x)


def half() -> nn.Module:
    return Between().bfloat16()


def unused() -> nn.Module:
    model = Between()
    model.extra = nn.Linear(3, 3)
    return model


def double() -> Any:
    x, y = table().tensors
    return TensorDataset(x.double(), y)


def halves() -> Any:
    x, y = table().tensors
    return TensorDataset(x.bfloat16(), y)


def _linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def mirrored() -> TensorDataset:
    """The table, whose far record is on the other side, where its loss is large."""
    data = table()
    data.tensors[0][FAR] *= -1.0
    return data


def _losses_in_a_list() -> Any:
    """A loss that keeps what it saw in its closure, and scales by it."""
    seen: list[Tensor] = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(output, y)
        seen.append(value.detach())
        return value * (1 + torch.stack(seen).sum())

    return loss


def _largest_in_a_dict() -> Any:
    """A loss whose closure remembers the largest loss of all records so far."""
    kept: dict[str, Any] = {"largest": torch.zeros(())}

    def loss(output: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(output, y)
        kept["largest"] = torch.maximum(kept["largest"], value.detach())
        return value * kept["largest"]

    return loss


class _Hooked(nn.Module):
    """A forward hook that keeps activations in a list outside of the module, which forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
        kept: list[Tensor] = []
        self.first.register_forward_hook(lambda layer, given, out: kept.append(out.detach()))
        self.last.register_forward_pre_hook(lambda layer, given: (given[0] / torch.stack(kept).abs().sum(),))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.first(x))
        return made


@of_model
def _one_step_ahead(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss after a step of the record's own (MAML)."""
    params: dict[str, Tensor] = dict(model.named_parameters())
    value = F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
    grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
    ahead = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, ahead, (x,)), y)


def _pooled() -> nn.Module:
    """Overlapping and plain windows of two, of three, and with indices."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 4, 3), nn.Linear(4 + 4 + 16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            once, _ = F.max_pool2d(z, 6, return_indices=True)
            twice = F.max_pool2d(F.max_pool2d(z, 2, stride=1), (2, 2)).amax((2, 3))
            wide = F.max_pool2d(z, 3, 2, 1, ceil_mode=True)[:, :, :2, :2]
            made: Tensor = self.last(torch.cat([once.flatten(1), twice, wide.flatten(1)], 1))
            return made

    return Net()


# --- the tables -----------------------------------------------------------------------------------------------


ALONE = ("std().item()", "unique rows", "through numpy", "through lists")  # one record at a time: fewer


def few() -> Any:
    return table(50)


MODULES: dict[str, Case] = {
    **{name: Case(between(change), few if name in ALONE else table) for name, change in MIXING.items()},
    "forward and backward hooks": Case(hooked, few),
    "branches": Case(Branches, few),
    "dynamic shapes": Case(Ragged, few),
    "autograd inside": Case(lambda: Energy("autograd"), few),
    "torch.func inside": Case(lambda: Energy("func"), few),
    "straight-through Function": Case(lambda: Function(Straight), few),
    "Function that mixes backward": Case(lambda: Function(MeanInBackward), few),
    "Function with a rule of its own": Case(lambda: Function(OwnRule), few),
    "operator with a rule of its own": Case(Centered, few),
    **{f"gradients hooked: {kind}": Case(hooked_back(kind), few) for kind in ("module", "before", "tensor")},
    "orthogonal": Case(normed("orthogonal"), rtol=1e-3),
    **{
        f"raw: {how}": Case(partial(Raw, how))
        for how in ("cosine", "in place", "addmm", "gather", "einsum", "stacked", "topk")
    },
    "windows": Case(_pooled, images),
    "sparse embedding": Case(lambda: Mean(sparse=True), tokens),
    "texts of several lengths": Case(Mean, lambda: Texts(60)),
    "experts chosen by a question": Case(Chosen),
    "double precision": Case(lambda: Between().double(), double),
    "a step ahead": Case(_linear, mirrored, loss=_one_step_ahead),
    **{
        f"draws: {how}": Case(partial(Draws, how), few, random=True)
        for how in ("python", "numpy", "equal masks", "gumbel", "permutation", "multinomial", "rrelu",
                    "dropout of the batch", "dropout")
    },
}  # fmt: skip
"""Everything here must run, equal plain autograd on one record at a time, and stay within C."""

STATEFUL: dict[str, Case] = {
    "spectral norm": Case(normed("spectral")),
    "embedding with max_norm": Case(Renormalised, tokens),
    "max_norm, functional": Case(lambda: Renormed(max_norm=0.5), tokens),
    "frequencies, functional": Case(lambda: Renormed(scale_grad_by_freq=True), tokens),
    "batch_norm, functional": Case(between(lambda x: F.batch_norm(x, None, None, training=True))),
    "instance_norm over the batch": Case(between(lambda x: F.instance_norm(x.T[None])[0].T)),
    "unused parameter": Case(unused),
    "writes into a parameter": Case(Writes, few),
    "writes into its input": Case(between(lambda x: x.mul_(2.0).sub_(x.mean(0)))),
    "bfloat16": Case(half, halves),
}
"""These may be refused in a sentence; what runs stays within C."""

REMEMBERING: dict[str, Case] = {
    "a list in the loss's closure": Case(_linear, mirrored, loss=_losses_in_a_list()),
    "a dictionary in the loss's closure": Case(_linear, mirrored, loss=_largest_in_a_dict()),
    "a hook that keeps activations": Case(_Hooked, mirrored),
}
"""A tensor of one record is not there for the next."""
