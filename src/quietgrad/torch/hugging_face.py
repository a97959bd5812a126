"""``DPTrainer``: a ``transformers.Trainer`` whose training loop is private."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer

from quietgrad.torch.loop_processes import several
from quietgrad.torch.losses import causal_lm_loss
from quietgrad.torch.privacy_engine import PrivacyEngine
from quietgrad.torch.rows import plain

__all__ = ["DPTrainer"]

LossOfOutputs = Callable[[Any, Tensor], Tensor]


def _loss_of(model: Any) -> LossOfOutputs:
    """The loss of a kind of model."""
    name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return lambda outputs, labels: causal_lm_loss(outputs.logits, labels)
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        return lambda outputs, labels: cross_entropy(outputs.logits, labels)
    raise ValueError(
        f"DPTrainer: {name} has no loss that is known to take its examples one by one; give loss=lambda outputs, "
        "labels: …, the mean of one loss per example."
    )


class DPTrainer(Trainer):  # type: ignore[misc]
    """Trains as a ``Trainer`` does, with Poisson samples, clipped gradients and noise.

    Args:
        privacy: arguments of :func:`quietgrad.torch.make_private_with_epsilon` (``target_epsilon``,
            ``target_delta``, ``max_grad_norm``), or of :func:`quietgrad.torch.make_private`
            (``noise_multiplier``, ``max_grad_norm``). The epochs are those of the training arguments.
        loss: loss(outputs, labels) → the mean of one loss per example. The default is
            :func:`quietgrad.torch.causal_lm_loss` for causal language models and cross-entropy for one label per
            example. A model's own loss is not used: its examples weigh each other.

    All other arguments are the ``Trainer``'s. ``epsilon(delta)`` is what training has cost so far.
    """

    model: Any

    def __init__(
        self, *args: Any, privacy: Mapping[str, Any], loss: LossOfOutputs | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.args.gradient_accumulation_steps != 1:
            raise ValueError(
                "gradient_accumulation_steps: a step must use one sample, or its amplification is another one; set "
                "per_device_train_batch_size to the size of the sample and micro_batch in privacy to what fits."
            )
        if several():
            raise ValueError("DPTrainer trains in one process; on several use make_private in a loop of your own.")
        self._privacy = dict(privacy)
        self._loss = loss or _loss_of(self.model)
        self._loader: Any = None
        self._engine = PrivacyEngine()
        self.model_accepts_loss_kwargs = False  # tokens of the batch are not counted before the model has seen it
        self.args.max_grad_norm = 0.0  # records' gradients are clipped; what is released needs no second clipping
        self.args.ignore_data_skip = True  # a resumed run draws fresh samples: there is nothing to skip

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train privately; the trained model is ``self.model`` afterwards, as it was given."""
        module, settings = self.model, self.args
        assert isinstance(module, nn.Module)
        self._set_signature_columns_if_needed()
        records: Any = self.train_dataset
        loader: DataLoader[Any] = DataLoader(
            records, batch_size=settings.train_batch_size, collate_fn=self.data_collator,
            num_workers=settings.dataloader_num_workers, drop_last=settings.dataloader_drop_last,
        )  # fmt: skip
        epochs = math.ceil(settings.num_train_epochs)
        if settings.max_steps > 0:
            epochs = math.ceil(settings.max_steps / max(1, len(loader)))
        make = (
            self._engine.make_private_with_epsilon
            if "target_epsilon" in self._privacy and "noise_multiplier" not in self._privacy
            else self._engine.make_private
        )
        private, self.optimizer, self._loader = make(
            module=module, optimizer=self.create_optimizer(), data_loader=loader, epochs=epochs, **self._privacy
        )
        try:
            self.model = self.model_wrapped = private
            return super().train(*args, **kwargs)
        finally:
            self.model = self.model_wrapped = module

    def get_train_dataloader(self) -> Any:
        """The private loader."""
        return self._loader

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean of one loss per example, of the model's outputs."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self._loss(outputs, labels)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As a ``Trainer``'s; what is logged needs no marks of whose it is."""
        loss: Tensor = plain(super().training_step(*args, **kwargs))
        return loss

    def epsilon(self, delta: float) -> float:
        """What training has cost so far."""
        return self._engine.get_epsilon(delta)
