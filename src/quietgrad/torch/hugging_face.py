"""``DPTrainer``: a ``transformers.Trainer`` whose training loop is private."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from quietgrad.files import write_atomically
from quietgrad.torch.loop_processes import several
from quietgrad.torch.losses import causal_lm_loss
from quietgrad.torch.privacy_engine import PrivacyEngine
from quietgrad.torch.private_module import PrivateModule
from quietgrad.torch.provenance import IN_FOLDERS, loading, record_in
from quietgrad.torch.rows import plain

__all__ = ["DPTrainer"]

LossOfOutputs = Callable[[Any, Tensor], Tensor]
_EXACT = ("loss", "train_loss")


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


class _EndOfBudget(TrainerCallback):  # type: ignore[misc]
    """Ends training with its last sample: an interrupted run may have used some that are in no checkpoint."""

    def __init__(self, private: PrivateModule) -> None:
        self._loop = private._loop

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._loop.handed_out >= self._loop.total and state.global_step < state.max_steps:
            warnings.warn(
                f"DPTrainer: training ends after step {state.global_step} of {state.max_steps}: no further step is "
                "left of what was promised. Steps that were made before an interruption and are in no checkpoint "
                "are not given back; save more often to lose fewer (save_strategy='steps').",
                stacklevel=2,
            )
            control.should_training_stop = True


class DPTrainer(Trainer):  # type: ignore[misc]
    """Trains as a ``Trainer`` does, with Poisson samples, clipped gradients and noise.

    Args:
        privacy: arguments of :func:`quietgrad.torch.make_private_with_epsilon` (``target_epsilon``,
            ``target_delta``, ``max_grad_norm``), or of :func:`quietgrad.torch.make_private`
            (``noise_multiplier``, ``max_grad_norm``). The epochs are those of the training arguments.
        loss: loss(outputs, labels) → the mean of one loss per example. The default is
            :func:`quietgrad.torch.causal_lm_loss` for causal language models and cross-entropy for one label per
            example. A model's own loss is not used: its examples weigh each other.
        log_losses: also log the exact losses of batches, which are data and in no ε: as ``loss_not_private`` and
            ``train_loss_not_private``. Without it ``TrainOutput.training_loss`` is not a number.

    All other arguments are the ``Trainer``'s. ``epsilon(delta)`` is what training has cost so far. Checkpoints say
    what they cost, and one that does not is not resumed from.
    """

    model: Any

    def __init__(
        self,
        *args: Any,
        privacy: Mapping[str, Any],
        loss: LossOfOutputs | None = None,
        log_losses: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.model_init is not None:
            raise ValueError(
                "model_init: train() would put a new model into the place of the private one, and that cannot be "
                "trained on private records; give model=."
            )
        if self.args.neftune_noise_alpha is not None:
            raise ValueError(
                "neftune_noise_alpha: its noise follows the longest record of the batch, so examples would change "
                "each other; leave it out."
            )
        if self.args.include_num_input_tokens_seen != "no":
            raise ValueError(
                "include_num_input_tokens_seen: how many tokens a secret sample has is data and would be logged; "
                "leave it out."
            )
        if self.args.gradient_accumulation_steps != 1:
            raise ValueError(
                "gradient_accumulation_steps: a step must use one sample, or its amplification is another one; set "
                "per_device_train_batch_size to the size of the sample and micro_batch in privacy to what fits."
            )
        if several():
            raise ValueError("DPTrainer trains in one process; on several use make_private in a loop of your own.")
        self._privacy = dict(privacy)
        self._loss = loss or _loss_of(self.model)
        self._log_losses = log_losses
        self._loader: Any = None
        self._private: PrivateModule | None = None
        self._engine = PrivacyEngine()
        self.model_accepts_loss_kwargs = False  # tokens of the batch are not counted before the model has seen it
        self.args.max_grad_norm = 0.0  # records' gradients are clipped; what is released needs no second clipping
        self.args.ignore_data_skip = True  # a resumed run draws fresh samples: there is nothing to skip

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train privately; the trained model is ``self.model`` afterwards, as it was given."""
        module, settings = self.model, self.args
        assert isinstance(module, nn.Module)
        resumed = args[0] if args else kwargs.get("resume_from_checkpoint")
        folder = get_last_checkpoint(settings.output_dir) if resumed is True else resumed
        if folder:
            record_in(folder)  # before anything is reserved
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
        self._private = private
        end = _EndOfBudget(private)
        self.add_callback(end)
        try:
            self.model = self.model_wrapped = private
            done: Any = super().train(*args, **kwargs)
        finally:
            self.model = self.model_wrapped = module
            self.remove_callback(end)
        return done._replace(
            training_loss=done.training_loss if self._log_losses else math.nan, metrics=self._marked(done.metrics)
        )

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
        """As a ``Trainer``'s; the batch's exact loss stays here unless it was asked for."""
        loss: Tensor = plain(super().training_step(*args, **kwargs))
        return loss if self._log_losses else torch.zeros_like(loss)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what is public, and under names that say so what is not; a sample's exact loss only if asked for."""
        super().log(self._marked(logs), *args, **kwargs)

    def _marked(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        known = {key: value for key, value in logs.items() if key not in _EXACT}
        exact = {f"{key}_not_private": logs[key] for key in _EXACT if key in logs}
        known.pop("grad_norm", None)  # asked for before the step, when there is no gradient
        return known | exact if self._log_losses else known

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """None are counted: they tell the size of a secret sample."""
        return 0

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._private is not None:  # before the weights: what they say they cost is never too little
            folder = Path(self.args.output_dir if output_dir is None else output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / IN_FOLDERS, json.dumps(self._private._loop.state()).encode())
        with self._as_given():
            super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with loading(self.model, record_in(resume_from_checkpoint)), self._as_given():
            super()._load_from_checkpoint(resume_from_checkpoint, self.model)

    def _load_best_model(self) -> None:
        with loading(self.model, record_in(str(self.state.best_model_checkpoint))), self._as_given():
            super()._load_best_model()

    @contextmanager
    def _as_given(self) -> Iterator[None]:
        """The model as it was given: its own class writes its configuration, and tied weights once."""
        before = self.model
        if isinstance(before, PrivateModule):
            self.model = before.module
        try:
            yield
        finally:
            self.model = before

    def epsilon(self, delta: float) -> float:
        """What training has cost so far."""
        return self._engine.get_epsilon(delta)
