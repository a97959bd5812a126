"""What a loop was told about its loss, held against what its losses turn out to be."""

from __future__ import annotations

from quietgrad.errors import BudgetError
from quietgrad.torch.loss_replay import Given, Held, Weighing, guessed

__all__ = ["LossWeights"]

_WHY = (
    "The size of a sample is secret and would be in every record's gradient before it is clipped. Nothing was "
    "released."
)
_SMALL = 8  # in a batch so small any constant may be a multiple of its size


class LossWeights:
    """Whether losses are means or sums, as declared; ``None`` is a mean that nobody vouches for."""

    def __init__(self, declared: str | None) -> None:
        self.mean = declared != "sum"
        self._declared = declared is not None
        self._numbers: dict[int, tuple[float, ...]] = {}  # factors that may be sizes, by the size of the batch

    def check(self, output: Given, losses: list[Held]) -> None:
        """Raise BudgetError unless the losses that sent gradients to an output weigh its examples as declared."""
        size = len(output.places)
        for found in output.found or [guessed(losses, output)]:
            kind = self._kind(found, size)
            if kind == "mixed":
                raise BudgetError(
                    "the weight of an example in the loss depends on the other examples of the batch: it is "
                    "neither the mean nor the sum of one loss per example (a mean with class weights or "
                    "ignore_index, a division by a count of labels or masks, examples compared with each other). "
                    "Use reduction='sum' and loss_reduction='sum', or qt.causal_lm_loss for language models. "
                    "Nothing was released."
                )
            if kind == "" and not self._declared:
                raise BudgetError(
                    "whether the loss is a mean or a sum over the batch cannot be told: make it of the model's "
                    "outputs by torch functions of the whole batch and call loss.backward(), or say which it is, "
                    "make_private(loss_reduction='mean') or 'sum', and answer for it. Nothing was released."
                )
            if kind == "sum" and self.mean:
                raise BudgetError(
                    "the loss is a sum over the batch, and loss_reduction is 'mean': give make_private "
                    f"loss_reduction='sum', or the loss reduction='mean'. {_WHY}"
                )
            if kind == "mean" and not self.mean:
                raise BudgetError(
                    "the loss is a mean over the batch, and loss_reduction is 'sum': leave loss_reduction out, or "
                    f"give the loss reduction='sum'. {_WHY}"
                )

    def _kind(self, found: Weighing, size: int) -> str:
        """A factor that is the size in this batch is one if it follows the size, and a constant if it stays."""
        if not found.numbers:
            return found.kind
        others = [known for other, known in self._numbers.items() if other != size]
        self._numbers[size] = found.numbers
        if found.numbers in others:
            return found.kind
        if others and size >= _SMALL:
            return found.by_size
        wanted = "mean" if self.mean else "sum"
        return wanted if wanted in (found.kind, found.by_size) else found.kind
