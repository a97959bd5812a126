"""∇²F(θ)·v of a torch module's risk by differentiating twice; an evaluation, not private."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from quietgrad.objectives.networks.examples import Examples
from quietgrad.objectives.networks.module import ModuleObjective, evaluating


def hessian_product(objective: ModuleObjective, records: Examples, params: Tensor, vector: Tensor) -> Tensor:
    """∇²F(θ)·v in evaluation mode, with the regulariser: v·∇ of the gradient, batch by batch.

    >>> from torch import nn
    >>> module = nn.Linear(2, 1, bias=False)
    >>> loss = ModuleObjective(module, lambda out, y: 0.5 * (out[:, 0] - y) ** 2)
    >>> records = loss.prepare((torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2)))
    >>> hessian_product(loss, records, torch.zeros(2), torch.ones(2))
    tensor([0.5000, 2.0000])
    """
    engine = objective.engine
    total = torch.zeros_like(params)
    theta = params.detach().clone().requires_grad_()
    with torch.enable_grad(), evaluating(objective.module):
        for x, y, _ in records.parts(None, objective.micro_batch):
            inputs, targets = objective._on_device(x), objective._on_device(y)
            arguments = inputs if isinstance(inputs, tuple) else (inputs,)
            output = functional_call(objective.module, engine.unflatten(theta), arguments)
            total += _along(engine.loss_fn(output, targets).sum(), theta, vector)
        total /= len(records)
        slope = objective.regularizer.gradient(theta)
        if slope.requires_grad:
            (bend,) = torch.autograd.grad(slope @ vector, theta)
            total += bend
    return total


def _along(loss: Tensor, theta: Tensor, vector: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, theta, create_graph=True)
    if not gradient.requires_grad:
        return torch.zeros_like(theta)  # a loss linear in θ
    (product,) = torch.autograd.grad(gradient @ vector, theta)
    return product
