"""The loss of one record, in the two forms that people write losses in.

loss(output, target)      of a model's output for a batch of one, record = (x, …, y) or a dictionary with labels
loss(model, *record)      with the model itself; loss(model, **record) or loss(model, record) of dictionaries
"""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from quietgrad.errors import DataError

__all__ = ["LossFunction", "RecordLoss", "takes_model"]

LossFunction = Callable[..., Tensor]
_TARGETS = ("labels", "label", "target", "targets", "y")


def takes_model(loss: LossFunction) -> bool:
    """Whether a loss is written as loss(model, *record): by its first parameter's name, or by having more than two.

    >>> takes_model(nn.CrossEntropyLoss()), takes_model(lambda model, x, y: 0)
    (False, True)
    """
    call = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return False
    own = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if own and own[0].name in ("model", "module", "net", "network"):
        return True
    return len([p for p in own if p.default is p.empty]) > 2


class RecordLoss:
    """The loss of a batch of one: one number."""

    def __init__(self, module: nn.Module, loss: LossFunction) -> None:
        self.module, self.loss = module, loss
        self._of_model = takes_model(loss)
        self._whole = self._of_model and [p.kind for p in inspect.signature(loss).parameters.values()][1:] == [
            inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]

    def __call__(self, record: Any) -> Tensor:
        value = self._value(record)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise DataError(
                f"the loss of one record has shape {shape}: it must be one number. Take the mean or the sum over a "
                "record's own positions."
            )
        return value.reshape(())

    def _value(self, record: Any) -> Any:
        named = isinstance(record, dict | UserDict)
        if self._of_model:
            if named:
                return self.loss(self.module, record) if self._whole else self.loss(self.module, **record)
            return self.loss(self.module, *(record if isinstance(record, tuple | list) else (record,)))
        if named:
            named_inputs = dict(record)
            name = next((name for name in _TARGETS if name in named_inputs), None)
            if name is None:
                raise DataError(
                    "records are dictionaries without 'labels', 'label', 'target' or 'y': write the loss as "
                    "loss(model, **record)."
                )
            target = named_inputs.pop(name)
            return self.loss(self.module(**named_inputs), target)
        if not isinstance(record, tuple | list) or len(record) < 2:
            raise DataError(
                "a record must be (x, y), with several inputs (x1, x2, y); else write the loss as "
                "loss(model, record)."
            )
        *inputs, target = record
        if len(inputs) == 1 and isinstance(inputs[0], dict):
            return self.loss(self.module(**inputs[0]), target)
        if len(inputs) == 1 and isinstance(inputs[0], tuple | list):
            inputs = list(inputs[0])
        return self.loss(self.module(*inputs), target)
