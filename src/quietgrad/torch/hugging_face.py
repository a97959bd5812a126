"""``DPTrainer``: a ``transformers.Trainer`` whose steps are those of a :class:`~quietgrad.torch.PrivateLoop`.

The Trainer's own ``compute_loss`` is the loss of one record: labels that are smoothed, ``compute_loss_func``, the
model's own ``.loss`` and what a subclass writes are honoured as they are. Its loop, schedules, evaluation,
callbacks and checkpoints are the Trainer's; it sees batches that cannot be read.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from quietgrad.algorithms.own_loop import OwnLoop
from quietgrad.errors import BudgetError, DataError
from quietgrad.files import parse_json, read_bytes, write_atomically
from quietgrad.objectives.networks.records import Padding, as_padding
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.events import composed
from quietgrad.sampling import RandomAllocation
from quietgrad.torch.checkpoints import LoopCost, epsilon_of, seal, unsealed
from quietgrad.torch.private_loop import PrivateBatch, PrivateLoop
from quietgrad.torch.processes import several
from quietgrad.training.result import Privacy

__all__ = ["DPTrainer"]

_COST = "quietgrad.json"  # beside weights: what they cost; in the output folder: how far its last training has come
_WEIGHTS = ("*.safetensors", "*.bin")
_PUBLIC = ("epoch", "learning_rate", "step")
_MINUTE = 60.0

_ALONE = "DPTrainer trains in one process; use PrivateLoop under torchrun"
_FLOAT32 = "what is clipped is computed in float32; leave it out"
# Training arguments that cannot be honoured: the only values that they may have, and why; what to do instead.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "include_num_input_tokens_seen": (("no", False), "tokens of a secret sample are data; leave it out"),
    "skip_memory_metrics": ((True,), "the memory of a step tells how long its records were; leave it out"),
    "debug": (([], ""), "it prints activations, which are data; leave it out"),
    "auto_find_batch_size": ((False,), "whether a step failed depends on its records; set the batch size"),
    "train_sampling_strategy": (("random",), "samples are drawn by chance alone; leave it out, and use pad="),
    "data_seed": ((None,), "samples that can be drawn again are not secret; leave it out"),
    "fp16": ((False,), _FLOAT32),
    "bf16": ((False,), _FLOAT32),
    "torch_compile": ((False,), "a compiled model hides its layers; leave it out"),
    "use_liger_kernel": ((False,), "fused kernels have no gradient of one record; leave it out"),
    "fsdp": (([], "", None), _ALONE),
    "deepspeed": ((None,), _ALONE),
    "parallelism_config": ((None,), _ALONE),
}


class _Samples:
    """What the Trainer takes for its data loader: an epoch of samples that cannot be read."""

    def __init__(self, loop: PrivateLoop) -> None:
        self._loop, self._length = loop, loop.epoch_length
        self._batches = iter(loop)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PrivateBatch]:
        for _ in range(self._length):
            if self._loop.handed_out < self._loop.total:
                yield next(self._batches)


class _EndOfPlan(TrainerCallback):  # type: ignore[misc]
    """Ends a resumed training with its last sample: some of its plan may be in no checkpoint."""

    def __init__(self, loop: PrivateLoop) -> None:
        self._loop = loop

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._loop.handed_out >= self._loop.total and state.global_step < state.max_steps:
            warnings.warn(
                f"DPTrainer: training ends after step {state.global_step} of {state.max_steps}: no further step is "
                "left of what was promised. Steps that were made before an interruption and are in no checkpoint "
                "are not given back; save more often to lose fewer (save_steps).",
                stacklevel=2,
            )
            control.should_training_stop = True


class DPTrainer(Trainer):  # type: ignore[misc]
    """Trains as a ``Trainer`` does, with secret samples, clipped gradients of single records, and noise.

    Args:
        privacy: ``target_epsilon`` and ``target_delta``, or ``budget``: the noise follows from it and from the
            steps of the training arguments; or ``noise_multiplier`` (and ``target_delta``). ``max_grad_norm`` is C,
            the bound of one record's gradient; without it the training arguments' is. All other arguments of
            :class:`~quietgrad.torch.PrivateLoop` may stand here: ``ledger``, ``account``, ``person``, ``clipping``,
            ``sampling``.
        pad: pads each record by its own length (:class:`~quietgrad.torch.Padding`); with a tokenizer by its padding
            token. Records without an attention mask get one. Without ``pad`` records are grouped by their length.
        public_stop: training that ends before its last step (an early stop, a callback) costs its whole plan,
            because what ended it may be data. ``True`` declares that nothing that was seen had a part in it; it
            then costs the steps that were made.

    All other arguments are the ``Trainer``'s. Every one is honoured, or refused by name. A sample's expected size
    is ``per_device_train_batch_size`` times ``gradient_accumulation_steps``, and the first of these is what is
    computed at a time. Released gradients are not clipped again, and a sample has no short last batch to drop.
    ``data_collator`` is called with one record; workers of a data loader are not used. What is logged is ``step``,
    ``epoch``, ``learning_rate``, ``epsilon`` and ``eval_*``, and run times in whole minutes: losses, memory, tokens
    and operations of secret samples are data. ``train()`` can be called again, and is charged again. Checkpoints
    are ordinary, and a sealed file in each says what it cost.
    """

    model: Any

    def __init__(
        self,
        *args: Any,
        privacy: Mapping[str, Any],
        pad: Any = None,
        public_stop: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.args: Any = self.args
        self._refuse()
        self._privacy, self._public_stop = dict(privacy), public_stop
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        self._pad = _for_tokenizer(as_padding(self._privacy.pop("pad", pad)), tokenizer)
        self._sample_size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        self._privacy.setdefault("micro_batch", self.args.train_batch_size)
        self._privacy.setdefault("max_grad_norm", self.args.max_grad_norm)
        self.args = copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1  # a sample is one step of the Trainer's
        self.args.max_grad_norm = 0.0
        self.args.ignore_data_skip = True  # a resumed training draws fresh samples: there is nothing to skip
        self._loop: PrivateLoop | None = None
        self._continued: LoopCost | None = None  # the interrupted training that the loop is the rest of
        self._costs: dict[str, LoopCost] = {}  # of trainings before

    def _refuse(self) -> None:
        if self.model_init is not None:
            raise ValueError("model_init: a private training begins with the model that is there; give model=.")
        for name, (allowed, why) in _ONLY.items():
            value = getattr(self.args, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: {why}.")
        optimizer = str(self.args.optim).lower()
        if "lomo" in optimizer or "layerwise" in optimizer:
            raise ValueError(
                f"optim={optimizer!r}: it steps during the backward pass, before noise is added; use another, such "
                "as adamw_torch."
            )
        if several() or self.args.n_gpu > 1:
            raise ValueError("DPTrainer trains in one process and on one device; use PrivateLoop under torchrun.")

    # --- training -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train privately, or go on from a checkpoint; charged as planned in either case."""
        folder = resume_from_checkpoint or None
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        before, settings = self._loop, self._settled()
        if before is not None:
            if folder is None:
                before.close(data_dependent=not self._public_stop)
            self._costs = {cost.name: cost for cost in self._now()}
            self._note()
        self._loop = self._continued = None
        if folder is not None:
            settings |= self._resumed(Path(folder), settings)
        self._loop = loop = PrivateLoop(
            self.model, self._loss, self.train_dataset, collate_fn=self._collator(), pad=self._pad,
            batch_size=self._sample_size, **settings,
        )  # fmt: skip
        if before is not None:
            before.close(data_dependent=False)  # what is left of it is charged anew
        end = _EndOfPlan(loop)
        self.add_callback(end)
        try:
            done: Any = super().train(folder, *args, **kwargs)
        finally:
            self.remove_callback(end)
        if loop.handed_out < loop.plan.schedule.releases:
            loop.close(data_dependent=not self._public_stop)
        self._note()
        return done._replace(training_loss=math.nan, metrics=self._allowed(done.metrics))

    def _settled(self) -> dict[str, Any]:
        """The arguments in the words of a loop."""
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

    def _resumed(self, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
        """What is other for a loop that goes on from a checkpoint: its steps and noise. What was spent counts."""
        costs = {cost.name: cost for cost in _read(folder, _weights(folder))}
        last = list(costs.values())[-1]
        planned, budget, noise = last.plan.schedule.releases, settings.get("budget"), last.plan.noise_multiplier
        stretches = OwnLoop.from_config(last.plan.config).stretches
        if settings.get("noise_multiplier") not in (None, noise) or {size for _, size, _ in stretches} != {
            self._sample_size
        }:
            raise DataError(
                f"{folder}: was trained with other noise or other batches than are given; give the same."
            )
        if budget is not None and (budget != last.plan.budget or len(stretches) > 1):
            raise DataError(f"{folder}: was trained for another budget than is given; give the same.")
        reached = {cost.name: cost for cost in _read_if(Path(self.args.output_dir))}.get(last.name)
        if reached is None or reached.used < last.used:
            warnings.warn(
                f"{self.args.output_dir}/{_COST}: does not say how far the interrupted training came, so all of "
                "its steps count as made.",
                stacklevel=3,
            )
            reached = replace(last, used=planned)
        # The rest draws its samples anew. Where some belong together, what was begun of them is paid for whole.
        (held,) = {slot.sampling for slot in last.plan.schedule.slots}
        if isinstance(held, RandomAllocation):
            whole = held.times(reached.used) * held.steps_per_epoch
            reached = replace(reached, used=min(whole, planned))
        self._costs |= costs | {last.name: reached}
        more: dict[str, Any] = {"noise_multiplier": noise, "epochs": None}
        if budget is None:
            n = settings.get("n_public") or len(self.train_dataset)
            total = settings.get("steps") or settings["epochs"] * math.ceil(n / self._sample_size)
        else:
            total, self._continued = planned - reached.used + _global_step(folder), self._costs.pop(last.name)
            more |= {
                "budget": None,
                "delta": budget.delta,
                "relation": budget.relation,
                "n_public": last.plan.n_public,
            }
        more["steps"] = total - _global_step(folder)
        if more["steps"] < 1:
            raise BudgetError(f"{folder}: no step is left of what was planned. Use the model as it is.")
        return more

    def _loss(self, model: nn.Module, record: Any) -> Tensor:
        """The Trainer's loss of one record."""
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
        """The samples of the private loop."""
        assert self._loop is not None
        return _Samples(self._loop)

    def num_examples(self, dataloader: Any) -> int:
        """The public number of records, or of people."""
        if isinstance(dataloader, _Samples) and self._loop is not None:
            return self._loop.plan.n_public
        return super().num_examples(dataloader)  # type: ignore[no-any-return]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> None:
        return None  # a model takes the mean over a record's own tokens

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Release the noisy gradient of a sample into the parameters; its loss is not told."""
        assert self._loop is not None
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._note()
        self._loop.backward(inputs)
        return torch.zeros((), device=self.args.device)

    def floating_point_ops(self, inputs: Any) -> int:
        """None are counted: they tell the size of a secret sample."""
        return 0

    # --- what is told ---------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what is public, and the scores of the evaluation data."""
        told = self._allowed(logs)
        if self._loop is not None and not any(key.startswith("eval_") for key in told):
            told["epsilon"] = self._so_far()
        super().log(told, *args, **kwargs)

    def _so_far(self) -> float:
        """An upper bound of ε so far; of one training alone a proved point of its plan, which costs nothing."""
        assert self._loop is not None
        plan = self._loop.plan
        assert plan.budget is not None
        return (
            self.epsilon(plan.budget.delta)
            if self._costs or self._continued
            else plan.epsilon_by(self._loop.handed_out)
        )

    def _allowed(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        told = {key: value for key, value in logs.items() if key in _PUBLIC or key.startswith("eval_")}
        told = {key: value for key, value in told.items() if not key.endswith("_per_second")}
        runtimes = {key: value for key, value in logs.items() if key.endswith("_runtime")}
        return told | {key: _MINUTE * math.ceil(value / _MINUTE) for key, value in runtimes.items()}

    def _now(self) -> list[LoopCost]:
        """What every training of this trainer cost, or was resumed from, so far."""
        known, begun = dict(self._costs), self._continued
        own = [] if self._loop is None else [LoopCost.of(self._loop)]
        if begun is not None:
            own = [replace(begun, used=begun.used + sum(cost.used for cost in own))]
        return [*known.values(), *own]

    def epsilon(self, delta: float) -> float:
        """What all training has cost so far."""
        return epsilon_of(self._now(), delta)

    @property
    def privacy(self) -> Privacy:
        """The statement of all training so far."""
        if self._loop is None:
            raise BudgetError("privacy: nothing is trained yet; call train() first.")
        said, costs = self._loop.privacy, self._now()
        if (len(costs) == 1 and self._continued is None) or said.delta is None:
            return said
        events = [event for event in (cost.event for cost in costs) if event is not None]
        note = "composed with the earlier trainings of this trainer, or of the checkpoint that it went on from"
        return replace(
            said, epsilon=epsilon_of(costs, said.delta), events=composed(events), notes=(*said.notes, note)
        )

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _note(self) -> None:
        """How far the training has come, kept before each release: a later one that is resumed counts all of it."""
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / _COST, json.dumps(seal(self._now())).encode())

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self._loop is not None:
            folder = Path(self.args.output_dir if output_dir is None else output_dir)
            name = _COST if folder != Path(self.args.output_dir) else f"model-{_COST}"
            write_atomically(folder / name, json.dumps(seal(self._now(), _weights(folder))).encode())


def _weights(folder: Path) -> Iterator[bytes]:
    """What a seal in a folder is beside: its weights."""
    for pattern in _WEIGHTS:
        for file in sorted(folder.glob(pattern)):
            if file.name != "training_args.bin":
                yield file.name.encode()
                yield file.read_bytes()


def _read(folder: Path, beside: Iterator[bytes] | Sequence[bytes] = ()) -> list[LoopCost]:
    """What the sealed file in a folder says; one that was edited, or put beside other weights, is refused."""
    try:
        sealed = parse_json(read_bytes(folder / _COST))
    except (OSError, ValueError):
        raise DataError(
            f"{folder}: has no {_COST} that says what its weights cost. Resume from a checkpoint that DPTrainer "
            "saved, or load the weights by from_pretrained and train anew."
        ) from None
    return unsealed(sealed, beside)


def _read_if(folder: Path) -> list[LoopCost]:
    return _read(folder) if (folder / _COST).exists() else []


def _global_step(folder: Path) -> int:
    return int(parse_json(read_bytes(folder / "trainer_state.json"))["global_step"])


def _for_tokenizer(pad: Padding | None, tokenizer: Any) -> Padding | None:
    """The padding with a tokenizer's own token, where it has one."""
    token = getattr(tokenizer, "pad_token_id", None)
    if pad is None or token is None or "input_ids" in pad.values:
        return pad
    return replace(pad, values={**pad.values, "input_ids": token})
