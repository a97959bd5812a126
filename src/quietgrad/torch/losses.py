"""Losses in which examples do not weigh each other."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

__all__ = ["causal_lm_loss"]


def causal_lm_loss(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """The mean over examples of each one's mean loss per token of its own, shifted by one as language models are.

    A mean over all tokens of a batch divides by how many there are: a long example would make the others lighter,
    and padding all of them. Here an example weighs the same in any batch.

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
