"""``DPTrainer``: a ``transformers.Trainer`` whose steps are those of a :class:`~quietgrad.torch.PrivateLoop`.

The Trainer's own ``compute_loss`` is the loss of one record: labels that are smoothed, ``compute_loss_func``, the
model's own ``.loss`` and what a subclass writes are honoured as they are. Its loop, schedules, evaluation,
callbacks and checkpoints are the Trainer's; it sees batches that cannot be read.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.errors import BudgetError, DataError, SettingError
from quietgrad.core.files import parse_json, read_bytes, write_atomically
from quietgrad.core.session.kept import forget, is_kept
from quietgrad.core.session.statement import Privacy
from quietgrad.torch.loops.base import epsilon_of
from quietgrad.torch.loops.distributed import is_leader, process_count
from quietgrad.torch.loops.private_loop import PrivateBatch, PrivateLoop
from quietgrad.torch.loops.whole_module import is_shard
from quietgrad.torch.loops.wrappers import check_kind
from quietgrad.torch.networks.object_kinds import is_installed
from quietgrad.torch.networks.records import Multiple, Padding, as_padding

_RUN = "private-run-"  # folders of trainings in the output folder
_PUBLIC = ("epoch", "learning_rate", "step")
_MINUTE = 60.0

_WHOLE = (
    "a record's gradient needs every parameter whole; leave it out, and shard by fsdp if the model is too large"
)
_SHARD_IT = "shard the model by fully_shard and train it with qt.PrivateLoop"
_FLOAT32 = "what is clipped is computed in float32; leave it out"
# Training arguments that cannot be honoured: the only values that they may have, and why; what to do instead.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "include_num_input_tokens_seen": (("no", False), "tokens of a secret sample are data; leave it out"),
    "skip_memory_metrics": ((True,), "the memory of a step reveals the lengths of its records; leave it out"),
    "debug": (([], ""), "it prints activations, which are data; leave it out"),
    "auto_find_batch_size": ((False,), "whether a step failed depends on its records; set the batch size"),
    "train_sampling_strategy": (("random",), "samples are drawn by chance alone; leave it out, and use pad="),
    "data_seed": ((None,), "samples that can be drawn again are not secret; leave it out"),
    "fp16": ((False,), _FLOAT32),
    "bf16": ((False,), _FLOAT32),
    "torch_compile": ((False,), "a compiled model hides its layers; leave it out"),
    "use_liger_kernel": ((False,), "fused kernels have no gradient of one record; leave it out"),
    "deepspeed": ((None,), _WHOLE),
    "parallelism_config": ((None,), _WHOLE),
}


# What `privacy=` may hold besides arguments of PrivateLoop, and what the Trainer's own arguments say.
_TARGETS = ("target_epsilon", "target_delta")
_TRAINERS = (
    "model", "loss", "data", "batch_size", "optimizer", "epochs", "steps", "collate_fn", "folder", "callbacks",
    "checkpoint_seconds",
)  # fmt: skip


def _read_privacy(privacy: object) -> dict[str, Any]:
    """``privacy=`` as a dictionary whose names are known."""
    known = [name for name in inspect.signature(PrivateLoop).parameters if name not in _TRAINERS]
    if not isinstance(privacy, Mapping):
        raise TypeError(
            f"privacy: must be a dictionary, not {type(privacy).__name__}, e.g. privacy={{'target_epsilon': 8.0, "
            "'target_delta': 1e-5, 'max_grad_norm': 1.0}."
        )
    for name in privacy:
        if name in _TRAINERS:
            raise ValueError(f"privacy, {name!r}: the Trainer's own arguments say it; leave it out of privacy.")
        if name not in known and name not in _TARGETS:
            near = difflib.get_close_matches(str(name), [*known, *_TARGETS], 1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"privacy: has no setting {name!r}.{meant} It takes {', '.join([*_TARGETS, *known])}.")
    if not {"target_epsilon", "budget", "noise_multiplier"} & set(privacy):
        raise ValueError("privacy: give target_epsilon (and target_delta), a budget, or a noise_multiplier.")
    return dict(privacy)


class _Samples:
    """Data loader for the Trainer: an epoch of samples that cannot be read."""

    def __init__(self, loop: PrivateLoop) -> None:
        self._loop, self._length = loop, loop.epoch_length
        self._batches = iter(loop)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PrivateBatch]:
        for _ in range(self._length):
            if self._loop.handed_out < self._loop.total:
                yield next(self._batches)


class DPTrainer(Trainer):  # type: ignore[misc]
    """Trains as a ``Trainer`` does, with secret samples, clipped gradients of single records, and noise.

    Args:
        privacy: ``target_epsilon`` and ``target_delta``, or ``budget``: the noise follows from it and from the
            steps of the training arguments; or ``noise_multiplier``. ``max_grad_norm`` is C; without it the
            training arguments' is. All other arguments of :class:`~quietgrad.torch.PrivateLoop` may stand here.
        pad: pads each record by its own length (:class:`~quietgrad.torch.Padding`); with a tokenizer by its padding
            token. Records without an attention mask get one. Without ``pad`` records are grouped by their length.

    Training that ends before its last step (an early stop, a callback) costs its whole plan, because what ended it
    may be data. A second ``train()`` is a new run, charged as one. All other arguments are the ``Trainer``'s,
    honoured or refused by name. A sample's expected size is ``per_device_train_batch_size`` times
    ``gradient_accumulation_steps``; the first of these is what is computed at a time. ``data_collator`` is called
    with one record. What is logged is ``step``, ``epoch``, ``learning_rate``, ``epsilon`` and ``eval_*``, and run
    times in whole minutes: all else depends on secret samples. Checkpoints are ordinary. Each training is a run in
    a folder ``private-run-…`` of the output; after an interruption ``train(resume_from_checkpoint=True)`` goes on,
    and nothing is spent twice. The training argument ``fsdp`` shards the model by ``fully_shard`` where accelerate
    does, which is on GPUs and the like; version 1, ``cpu_offload`` and ``activation_checkpointing`` are refused.
    """

    model: Any
    # What a loss of one record may keep something in, among the many things that a Trainer holds.
    _program_attributes = ("compute_loss", "compute_loss_func", "label_smoother")

    def __init__(
        self,
        *args: Any,
        privacy: Mapping[str, Any],
        pad: int | Multiple | Padding | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.args: Any = self.args
        self._refuse()
        self._privacy = _read_privacy(privacy)
        if self.optimizer is not None:
            check_kind(self.optimizer)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        token = getattr(tokenizer, "pad_token_id", None)
        self._pad = as_padding(self._privacy.pop("pad", pad))
        if self._pad is not None and token is not None and "input_ids" not in self._pad.values:
            self._pad = replace(self._pad, values={**self._pad.values, "input_ids": token})
        self._sample_size = self.args.train_batch_size * self.args.gradient_accumulation_steps * process_count()
        self._privacy.setdefault("micro_batch", self.args.train_batch_size)
        self._privacy.setdefault("max_grad_norm", self.args.max_grad_norm)
        self.args = copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1  # a sample is one step of the Trainer's
        self.args.max_grad_norm = 0.0
        self.args.ignore_data_skip = True  # a resumed training draws fresh samples: there is nothing to skip
        self._begun: PrivateLoop | None = None
        self._earlier: list[PrivateLoop] = []

    def _refuse(self) -> None:
        if self.model_init is not None:
            raise ValueError("model_init: a private training begins with the model that is there; give model=.")
        for name, (allowed, why) in _ONLY.items():
            value = vars(self.args)[name]
            if value not in allowed:
                raise SettingError(f"{{{name}}}: {why}.", **{name: value})
        kind = type(self)
        if kind.compute_loss is not Trainer.compute_loss:
            for each in kind.__mro__:
                if each is not Trainer and "compute_loss" in vars(each) and is_installed(each.__module__):
                    raise ValueError(
                        f"{each.__name__}.compute_loss: another package's loss may keep what it computes of a "
                        "record (accuracies, numbers of tokens) for its logs. Write `compute_loss = "
                        f"Trainer.compute_loss` in {kind.__name__}, with transformers' Trainer: the loss is then "
                        "the model's own."
                    )
        optimizer = str(self.args.optim).lower()
        if "lomo" in optimizer or "layerwise" in optimizer:
            raise ValueError(
                f"optim={optimizer!r}: it steps during the backward pass, before noise is added; use another, such "
                "as adamw_torch."
            )
        if self.args.n_gpu > 1:
            raise ValueError("DPTrainer trains on one device in each process; start one for each with torchrun.")
        self._refuse_sharding()

    def _refuse_sharding(self) -> None:
        """Raise unless the model is whole, or accelerate shards it by ``fully_shard``.

        accelerate's launcher sets these things too, so accelerate's state is asked and not the training arguments.
        """
        if self.is_deepspeed_enabled:
            raise ValueError(f"deepspeed: {_WHOLE}.")
        if not self.is_fsdp_enabled:
            if self.args.fsdp:  # accelerate would ignore it without a word
                raise SettingError(
                    "{fsdp}: accelerate shards a model on GPUs and the like alone; here every process would hold "
                    f"it whole. Leave it out, or {_SHARD_IT}.",
                    fsdp=self.args.fsdp,
                )
            if any(is_shard(param) for param in self.model.parameters()):
                raise ValueError(
                    "model: it is in shards already, and accelerate does not know of it. Give it whole, with "
                    f"fsdp=True in the training arguments, or {_SHARD_IT}."
                )
            return
        plugin = self.accelerator.state.fsdp_plugin
        if self.is_fsdp_xla_enabled or plugin.fsdp_version != 2:
            raise ValueError(
                "fsdp: version 1 and XLA's keep parameters as parts of one flat vector, where a record's gradient "
                "has no layers. Use version 2 (fully_shard), the default."
            )
        unable = {
            "cpu_offload": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            "activation_checkpointing": bool(plugin.activation_checkpointing),
            "mixed_precision": plugin.mixed_precision_policy is not None,
        }
        for name, is_set in unable.items():
            if is_set:
                raise ValueError(f"fsdp, {name}: DPTrainer cannot honour it together with fsdp; leave it out.")

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, of a kind that takes one gradient in a step."""
        made = super().create_optimizer(*args, **kwargs)
        check_kind(made)
        return made

    # --- training -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train privately, or go on from the last checkpoint of an interrupted training."""
        checkpoint = resume_from_checkpoint or None
        if checkpoint is True:
            checkpoint = self._last_checkpoint()
        settings = self._settled()
        if checkpoint is not None and not self._is_kept:
            raise ValueError(
                "resume_from_checkpoint: a training without noise (noise_multiplier=0) is for debugging and is not "
                "kept. Train anew: call train() without it."
            )
        if self.is_fsdp_enabled:
            # Before the loop is made, which takes parameters as the optimizer will hold them. The Trainer finds the
            # model sharded and leaves it so.
            self.model = self.model_wrapped = fsdp2_prepare_model(self.accelerator, self.model)
        if self._begun is not None and checkpoint is not None:
            self._begun.let_go()  # it goes on below
        elif self._begun is not None:
            self._earlier.append(self._begun)  # a second training is a new run, charged as one
        loop = PrivateLoop(
            self.model, self._loss, self.train_dataset, collate_fn=self._collator(), pad=self._pad,
            batch_size=self._sample_size, folder=self._folder(checkpoint) if self._is_kept else None,
            checkpoint_seconds=math.inf, **settings,
        )  # fmt: skip
        self._begun = loop
        if checkpoint is not None:
            state = parse_json(read_bytes(Path(checkpoint) / "trainer_state.json"))
            if loop.handed_out != int(state["global_step"]):
                loop.let_go()
                raise DataError(
                    f"{checkpoint}: the interrupted training was saved after step {loop.handed_out}: resume from "
                    "the checkpoint of that step. Nothing was spent."
                )
        try:
            done: Any = super().train(checkpoint, *args, **kwargs)
        except BaseException:
            loop.let_go()
            raise
        loop.close()
        return done._replace(training_loss=math.nan, metrics=self._allowed(done.metrics))

    @property
    def _is_kept(self) -> bool:
        """Whether trainings are kept in folders: one without noise is for debugging."""
        return self._privacy.get("noise_multiplier") != 0

    def _last_checkpoint(self) -> str:
        found: str | None = get_last_checkpoint(self.args.output_dir)
        if found is None:
            raise DataError(
                f"resume_from_checkpoint=True: {self.args.output_dir} holds no checkpoint to go on from. Call "
                "train() without it for a new training, which is charged as one; save_strategy and save_steps say "
                "how often a checkpoint is written. Nothing was spent."
            )
        return found

    def _folder(self, checkpoint: str | bool | None) -> Path:
        """The folder of a training: a new one, or that of the interrupted one which goes on."""
        output = Path(self.args.output_dir)
        known = sorted(output.glob(f"{_RUN}*"))
        if checkpoint is None:
            if known and is_kept(known[-1]):
                forget(known[-1])  # its cost stays in the ledger
            return output / f"{_RUN}{len(known) + 1:03}"
        if not known or not is_kept(known[-1]):
            raise DataError(
                f"{output}: holds no interrupted private training, so no step is left of one. Load the weights by "
                "from_pretrained and train anew, which is charged."
            )
        return known[-1]

    def _settled(self) -> dict[str, Any]:
        settings = dict(self._privacy)
        epsilon, delta = settings.pop("target_epsilon", None), settings.pop("target_delta", 1e-5)
        if epsilon is not None:
            relation = Relation.parse(settings.pop("relation", Relation.ADD_REMOVE))
            settings["budget"] = Budget(epsilon, delta, relation)
        elif "budget" not in settings:
            settings["delta"] = delta
        if self.args.max_steps > 0:
            return settings | {"steps": self.args.max_steps}
        epochs = self.args.num_train_epochs
        if epochs != int(epochs):
            raise ValueError(
                f"num_train_epochs={epochs}: how many steps a part of an epoch has depends on the number of "
                "records, which is private; give whole epochs, or max_steps."
            )
        return settings | {"epochs": int(epochs)}

    @property
    def _loop(self) -> PrivateLoop:
        if self._begun is None:
            raise BudgetError("nothing is trained yet; call train() first.")
        return self._begun

    def _loss(self, model: nn.Module, record: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = self.compute_loss(model, dict(record))
        return loss

    def _collator(self) -> Callable[[list[Any]], Any]:
        inner = self._get_collator_with_removed_columns(self.data_collator, description="training")
        masks = self._pad is not None

        def collate(records: list[Any]) -> dict[str, Any]:
            batch = dict(inner(records))
            if masks and "input_ids" in batch and "attention_mask" not in batch:
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            return batch

        return collate

    def get_train_dataloader(self) -> Any:
        return _Samples(self._loop)

    def num_examples(self, dataloader: object) -> int:
        """The public number of records, or of people."""
        if isinstance(dataloader, _Samples):
            return self._loop.plan.n_public
        found: int = super().num_examples(dataloader)
        return found

    def _get_num_items_in_batch(self, batch_samples: object, device: object) -> None:
        return None  # a model takes the mean over a record's own tokens

    def training_step(self, model: nn.Module, inputs: PrivateBatch, num_items_in_batch: object = None) -> Tensor:
        """Release the noisy gradient of a sample into the parameters; its loss is not returned."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._loop.backward(inputs)
        return torch.zeros((), device=self.args.device)

    def floating_point_ops(self, inputs: object) -> int:
        """None are counted: they tell the size of a secret sample."""
        return 0

    # --- what is logged -------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what is public, and the scores of the evaluation data."""
        told = self._allowed(logs)
        if self._begun is not None and not any(key.startswith("eval_") for key in told):
            told["epsilon"] = self._charged()
        Trainer.log(self, told, *args, **kwargs)  # a trainer between the two would add what it computed of records

    def _charged(self) -> float:
        """Return the ε of the steps so far while more may follow, or the ε that a finished training is charged."""
        loop = self._loop
        if not self._is_kept:
            return math.inf
        if not self.is_in_train and not loop.paused:  # the Trainer's last line is written after its last step
            charged = loop.close().epsilon
            if charged is not None:
                return charged
        # Once a callback has asked for a stop the whole plan is charged, also in lines before the last one.
        ended = not self.is_in_train or self.control.should_training_stop
        steps = loop.plan.schedule.releases if ended else loop.handed_out
        return loop.plan.epsilon_by(steps)  # an upper bound, at no cost

    def _allowed(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        told = {key: value for key, value in logs.items() if key in _PUBLIC or key.startswith("eval_")}
        told = {key: value for key, value in told.items() if not key.endswith("_per_second")}
        runtimes = {key: value for key, value in logs.items() if key.endswith("_runtime")}
        return told | {key: _MINUTE * math.ceil(value / _MINUTE) for key, value in runtimes.items()}

    def epsilon(self, delta: float) -> float:
        """Return the ε of this trainer's trainings so far. A ledger's account also holds what others spent."""
        return epsilon_of([*self._earlier, self._loop], delta)

    @property
    def privacy(self) -> Privacy:
        return self._loop.privacy

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's own card, with what is proved of the training."""
        super().create_model_card(*args, **kwargs)
        if not is_leader():
            return
        card = Path(self.args.output_dir) / "README.md"
        if self._begun is None or not card.exists():
            return
        write_atomically(card, f"{card.read_text(encoding='utf-8').rstrip()}\n\n{self._privacy_section()}".encode())

    def _privacy_section(self) -> str:
        loop, stated = self._loop, self.privacy
        lines = [
            "## Privacy", "", f"Trained by DP-SGD with quietgrad: {stated}.", "",
            f"- privacy unit: {loop.plan.unit}",
            f"- noise multiplier: {loop.plan.noise_multiplier:.4g}; max_grad_norm: {loop.plan.config['clip']:g}; "
            f"clipping: {loop.clipping.kind}",
            f"- steps: {loop.handed_out}; expected records in a step: {loop.expected_batch:g}",
        ]  # fmt: skip
        schedules = {name: self._privacy.get(name) for name in ("noise_schedule", "clip_schedule")}
        lines += [f"- {name}: {each}, of epochs" for name, each in schedules.items() if each is not None]
        if self._earlier and stated.epsilon is not None:
            delta = loop.plan.budget.delta if loop.plan.budget is not None else 1e-5
            count = len(self._earlier) + 1
            lines.append(f"- its {count} trainings together: ε = {self.epsilon(delta):.4g} at δ = {delta:g}")
        if stated.condition is not None:
            lines.append(f"- ε holds {stated.condition}")
        lines += [f"- {note}" for note in stated.notes]
        return "\n".join(lines) + "\n"

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        if self._is_kept:
            self._loop.save()
