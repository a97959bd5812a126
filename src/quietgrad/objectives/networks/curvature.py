"""∇²F(θ)·v of a torch module's risk by differentiating twice; an evaluation, not private."""

from __future__ import annotations

from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from quietgrad.objectives.networks.module import ModuleObjective, evaluating
from quietgrad.objectives.networks.randomness import RecordKeys
from quietgrad.objectives.networks.records import Examples
from quietgrad.objectives.networks.trees import Places, mapped, tensors_of


def hessian_product(objective: ModuleObjective, records: Examples, params: Tensor, vector: Tensor) -> Tensor:
    """∇²F(θ)·v in evaluation mode, with the regulariser: v·∇ of the gradient, record by record.

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
        places = Places(objective.module)
        keys = RecordKeys(bytes(32), np.arange(len(records)))
        for rows in keys.passes(objective.micro_batch):
            for group in records.read(keys.rows(rows)):
                for k in range(len(tensors_of(group.record)[0])):
                    record = mapped(engine.on_device(group.record), itemgetter(k))
                    with places.holding(engine.unflatten(theta)):
                        total += _along(engine.loss_of(record), theta, vector)
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
