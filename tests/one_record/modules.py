"""Modules: ordinary ones of every kind, and those that mix rows, keep state, draw numbers, differentiate inside."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.one_record.cases import (
    CLASSES,
    FEATURES,
)  # fmt: skip

H = 8


class Between(nn.Module):
    """Two layers with something between the rows of the batch and the first of them."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(FEATURES, H), nn.Linear(H, CLASSES), change

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(self.change(x))))


def between(change: Any) -> Any:
    return lambda: Between(change)


# --- rows of the batch in reach of each other, if there were any --------------------------------------------------


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


# --- modules that keep something --------------------------------------------------------------------------------


class Remembers(Between):
    """Keeps the last batch's mean in an attribute, as code that was copied from a notebook does."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.last: Any = 0.0

    def forward(self, x: Tensor) -> Any:
        before, self.last = self.last, float(x.detach().mean())
        return super().forward(x - before)


class Counts(Between):
    """Scales by how often it was called."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        scale = self.calls if bool(x.sum() > 0) else -self.calls
        return super().forward(x) * scale


class KeepsTensors(Between):
    """Keeps activations for a regulariser that nobody asks for."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.kept.append(x)
        return super().forward(torch.cat(self.kept[-2:]).mean(0, keepdim=True))


class RunningMean(Between):
    """An exponential mean of the batches in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Any:
        self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return super().forward(x - self.mean)


class Writes(Between):
    """Moves its own weights as it goes."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.first.weight.add_(1e-3 * x.mean(0))
        return super().forward(x)


def hooked() -> nn.Module:
    model = Between(lambda x: x)
    model.first.register_forward_hook(lambda module, given, out: out - out.mean(0))
    model.second.register_full_backward_hook(lambda module, given, out: None)
    return model


# --- modules that differentiate, iterate, route -----------------------------------------------------------------


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

    def __init__(self) -> None:
        super().__init__(lambda x: x)

    def forward(self, x: Tensor) -> Any:
        return self.second(center(self.first(x)))


class Jacobians(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, H), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Any:
        jacobian = torch.func.jacrev(lambda z: self.first(z).tanh().sum(0))(x)
        _, tangent, *_ = torch.func.jvp(lambda z: self.first(z).tanh(), (x,), (torch.ones_like(x),))
        return self.second(jacobian.sum((1, 2))[None] + tangent)


def centered(grad: Tensor) -> Tensor:
    return grad - 0.9 * grad.mean(0)


def hooked_back(kind: str) -> Any:
    """Gradients changed on their way back, by what would be the batch's mean."""

    def make() -> nn.Module:
        model = Between(lambda x: x)
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
        super().__init__(lambda x: x)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.second(self.function.apply(self.first(x)))


class Equilibrium(nn.Module):
    """Iterates until its own state stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.inner, self.out = nn.Linear(FEATURES, H), nn.Linear(H, H), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Any:
        z = torch.zeros(len(x), H)
        for _ in range(6):
            new = torch.tanh(0.5 * self.inner(z) + self.into(x))
            if (new - z).norm().item() < 0.3:
                break
            z = new
        return self.out(z)


class Experts(nn.Module):
    """A mixture of experts that routes rows by nonzero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 3)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        chosen = weights.argmax(1)
        out = torch.zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            out[rows] = weights[rows, number, None] * expert(x[rows])
        return out


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


class Hyper(nn.Module):
    """Makes the weights of a layer from the record."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(FEATURES, FEATURES * CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.make(x).view(len(x), CLASSES, FEATURES), x[:, :, None])[:, :, 0]


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
        if how == "prototypes":
            return -torch.cdist(x * self.s, self.w.T)
        if how == "solve":
            return torch.linalg.solve(torch.eye(CLASSES) * 9 + self.w[:CLASSES], (x @ self.w).T).T + self.b
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
        if how == "where":
            return torch.where(x[:, :1] > 0, x @ self.w, (x * self.s) @ self.w.abs()) + self.b
        if how == "topk":
            values, places = (x * self.s).topk(2)
            return values @ self.w[:2] + self.w[places].sum(1)
        if how == "matrix exponential":
            return x[:, :CLASSES] @ torch.matrix_exp(self.w[:CLASSES] * 0.1) + self.b
        assert how == "fft"
        return (torch.fft.rfft(x * self.s).abs() @ self.w[:4]) + self.b


class Renormalised(nn.Module):
    """An embedding that rescales its own rows in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, H, max_norm=0.5), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.table(x).mean(1))


class Checkpointed(Between):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(lambda x: x)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        def inner(x: Tensor) -> Any:
            return torch.tanh(self.first(x))

        x = x.detach().requires_grad_() if self.reentrant else x
        return self.second(checkpoint(inner, x, use_reentrant=self.reentrant))


class Tied(nn.Module):
    """An embedding that is the last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, H)
        self.out = nn.Linear(H, 20, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Any:
        return self.out(self.table(x)).mean(1)


def normed(kind: str) -> Any:
    def make() -> nn.Module:
        model = Between(lambda x: x)
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

    def __init__(self) -> None:
        super().__init__(lambda x: x)

    def forward(self, x: Tensor) -> Any:
        if x.sum() > 0:
            x = x * 2
        elif x[0, 0].item() < -1:
            x = -x
        return super().forward(x)


class Ragged(Between):
    """A number of values that depends on the record."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)

    def forward(self, x: Tensor) -> Any:
        positive = x[x > 0]
        return super().forward(x) + positive.sum() / (1 + len(positive))
