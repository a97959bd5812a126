"""``DPTrainer``: the Trainer's own loss of one record, an allow list of what is told, what each training costs."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import Dataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.events import poisson_gaussian
from quietgrad.core.errors import DataError

transformers = pytest.importorskip("transformers", reason="needs quietgrad[hf]")
pytest.importorskip("peft", reason="needs quietgrad[hf]")
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from quietgrad.torch.hugging_face import DPTrainer  # noqa: E402

N, BATCH, WORDS, PAD = 24, 12, 20, 19
QUIET = 1e-7


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


class Texts(Dataset[Any]):
    """What a tokenizer makes of texts of several lengths."""

    def __init__(self, masks: bool = True, own: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.texts = [torch.randint(1, PAD, (3 + k % 4,), generator=generator) for k in range(N)]
        self.masks, self.own = masks, own

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = self.texts[index]
        mask = {"attention_mask": torch.ones_like(text)} if self.masks else {}
        return {"input_ids": text, **mask, "labels": text if self.own else index % 3}


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=12, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def gpt2() -> Any:
    """Its table of tokens is its output layer too."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=12, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def tokenizer() -> Any:
    vocabulary = {f"w{k}": k for k in range(PAD)} | {"[PAD]": PAD}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="w0")


def trainer(folder: Path, made: type[DPTrainer] = DPTrainer, **settings: Any) -> Any:
    """A trainer; settings that it takes itself go to it, the others to the training arguments or to privacy."""
    own = ("model", "train_dataset", "data_collator", "processing_class", "compute_loss_func", "callbacks", "pad",
           "eval_dataset", "optimizers", "model_init")  # fmt: skip
    promised = ("noise_multiplier", "max_grad_norm", "target_epsilon", "target_delta", "ledger", "seed", "budget",
                "sampling", "noise_schedule", "clip_schedule")  # fmt: skip
    privacy: dict[str, Any] = {"max_grad_norm": 1.0} | {k: settings.pop(k) for k in promised if k in settings}
    if not {"target_epsilon", "budget"} & set(privacy):
        privacy.setdefault("noise_multiplier", 1.0)
    parts: dict[str, Any] = {"train_dataset": Texts()} | {k: settings.pop(k) for k in own if k in settings}
    if "model_init" not in parts:
        parts.setdefault("model", bert())
    known: dict[str, Any] = {
        "per_device_train_batch_size": BATCH, "max_steps": 4, "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True, "report_to": [], "use_cpu": True,
    }  # fmt: skip
    args = transformers.TrainingArguments(str(folder / "out"), **(known | settings))
    return made(args=args, privacy=privacy, **parts)


def epsilon(steps: int, multiplier: float = 1.0) -> float:
    event = poisson_gaussian(rate=BATCH / N, noise_multiplier=multiplier, steps=steps)
    return account(event, delta=1e-5, relation="add-remove")


# --- the loss of one record ---------------------------------------------------------------------------------------


class Halved(DPTrainer):
    """A subclass with a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return 0.5 * model(**inputs).loss


def focal(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    cross = F.cross_entropy(outputs.logits, labels, reduction="none")
    return ((1 - (-cross).exp()) ** 2 * cross).mean()


def smoothed(model: Any, record: dict[str, Tensor]) -> Tensor:
    labels = record.pop("labels")
    return F.cross_entropy(model(**record).logits, labels, label_smoothing=0.2)


LOSSES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "smoothed": (DPTrainer, {"label_smoothing_factor": 0.2}, smoothed),
    "compute_loss_func": (
        DPTrainer, {"compute_loss_func": focal}, lambda model, record: focal(model(**record), record["labels"])
    ),
    "a subclass's": (Halved, {}, lambda model, record: 0.5 * model(**record).loss),
}  # fmt: skip


def everybody(folder: Path, made: Any = DPTrainer, **settings: Any) -> Tensor:
    """The clipped sum of all records that a step of the trainer makes."""
    model = settings.setdefault("model", bert())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    before = flat(model)
    trainer(
        folder, made, per_device_train_batch_size=N, max_steps=1, noise_multiplier=QUIET, seed=0, max_grad_norm=0.5,
        optimizers=(optimizer, schedule), logging_strategy="no",
        **settings,
    ).train()  # fmt: skip
    return (before - flat(model)) * N


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().double().flatten() for param in model.parameters()])


def by_autograd(model: Any, loss: Any, data: Any) -> Tensor:
    total = torch.zeros(sum(param.numel() for param in model.parameters()), dtype=torch.float64)
    for index in range(N):
        record = {name: torch.as_tensor(value)[None] for name, value in data[index].items()}
        model.zero_grad()
        loss(model, record).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        one = torch.cat([grad.double().flatten() for grad in grads])
        total += one * min(1.0, 0.5 / float(one.norm()))
    return total


@pytest.mark.filterwarnings("ignore:seed=0")
@pytest.mark.parametrize("name", LOSSES)
def test_the_trainers_own_loss_is_the_loss_of_one_record(name: str, tmp_path: Path) -> None:
    made, settings, loss = LOSSES[name]
    found = everybody(tmp_path, made, **settings)
    expected = by_autograd(bert().train(), loss, Texts())
    assert float((found - expected).norm()) <= 1e-3 * float(expected.norm())


@pytest.mark.filterwarnings("ignore:seed=0")
@pytest.mark.parametrize(("pad", "masks", "own"), [
    (None, True, False), (8, False, False), (qt.Multiple(4), True, False), (8, True, True),
])  # fmt: skip
def test_padding_by_a_tokenizer_changes_no_gradient(pad: Any, masks: bool, own: bool, tmp_path: Path) -> None:
    """Records get the tokenizer's token, a mask where they have none, and labels that do not count."""
    make, tokens = (gpt2, {}) if own else (bert, {"processing_class": tokenizer()})
    found = everybody(
        tmp_path, model=make(), train_dataset=Texts(masks, own), pad=pad,
        data_collator=transformers.default_data_collator, **tokens,
    )  # fmt: skip
    expected = by_autograd(make().train(), lambda model, record: model(**record).loss, Texts(own=own))
    assert float((found - expected).norm()) <= 1e-3 * float(expected.norm())


# --- what is told -------------------------------------------------------------------------------------------------


def test_logs_are_an_allow_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public = [{"input_ids": torch.arange(3) + k, "labels": k % 3} for k in range(4)]
    made = trainer(
        tmp_path, eval_dataset=public, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        neftune_noise_alpha=5.0,
    )  # fmt: skip
    done = made.train()
    rows = [*made.state.log_history, done.metrics]
    told = {key for row in rows for key in row if not key.startswith("eval_")}
    assert told == {"step", "epoch", "learning_rate", "epsilon", "train_runtime"}
    assert all(value % 60 == 0 for row in rows for key, value in row.items() if key.endswith("_runtime"))
    assert any("eval_loss" in row for row in rows)
    assert [row["epsilon"] for row in rows if "learning_rate" in row] == sorted(
        row["epsilon"] for row in rows if "learning_rate" in row
    )
    assert math.isnan(done.training_loss)
    kept = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert (kept["total_flos"], kept["num_input_tokens_seen"]) == (0, 0)
    assert "'loss'" not in capsys.readouterr().out


REFUSED: dict[str, Any] = {
    "include_num_input_tokens_seen": "all", "skip_memory_metrics": False, "debug": "underflow_overflow",
    "auto_find_batch_size": True, "train_sampling_strategy": "group_by_length", "data_seed": 1, "bf16": True,
    "torch_compile": True, "optim": "lomo",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.*: .*;"):
        trainer(tmp_path, **{name: REFUSED[name]})
    with pytest.raises(ValueError, match="model_init"):
        trainer(tmp_path, model_init=bert)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({"fsdp_version": 1}, "Use version 2"),
        ({"cpu_offload": CPUOffloadPolicy()}, "cpu_offload"),
        ({"activation_checkpointing": True}, "activation_checkpointing"),
        ({"mixed_precision_policy": object()}, "mixed_precision"),
    ],
)
def test_shardings_that_were_not_run_are_refused(says: dict[str, Any], why: str, tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.is_fsdp_enabled = True
    plugin = {
        "fsdp_version": 2,
        "cpu_offload": None,
        "activation_checkpointing": False,
        "mixed_precision_policy": None,
    }
    made.accelerator.state.fsdp_plugin = SimpleNamespace(**(plugin | says))
    try:
        with pytest.raises(ValueError, match=why):
            made._refuse_sharding()
    finally:
        del made.accelerator.state.fsdp_plugin  # accelerate's state is that of the process


# --- what a training costs ----------------------------------------------------------------------------------------


class Stops(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def __init__(self, at: int, how: str) -> None:
        self.at, self.how = at, how

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at:
            if self.how == "killed":
                raise KeyboardInterrupt
            if self.how == "fewer":
                state.max_steps = self.at
            control.should_training_stop = True


@pytest.mark.parametrize("how", ["stop", "fewer"])
def test_a_stop_before_the_end_costs_the_plan(how: str, tmp_path: Path) -> None:
    """What ended it may be data; priced as if it were public, a stop after two of four steps looked cheap."""
    ledger = tmp_path / "ledger.jsonl"
    made = trainer(tmp_path, callbacks=[Stops(2, how)], ledger=ledger)
    made.train()
    assert made.state.global_step == 2
    paid = epsilon(4)
    assert made.state.log_history[-1]["epsilon"] == pytest.approx(paid, rel=1e-3)
    assert made.state.log_history[-1]["epsilon"] == made.privacy.epsilon
    assert made.epsilon(1e-5) == pytest.approx(paid)
    made.log({"learning_rate": 1.0})
    assert made.state.log_history[-1]["epsilon"] == made.privacy.epsilon
    assert made.privacy.epsilon == pytest.approx(paid, rel=1e-3)
    assert qg.Ledger(ledger).spent("default", delta=1e-5, relation="add-remove").epsilon == pytest.approx(
        paid, rel=1e-3
    )


def test_a_second_training_is_a_new_charge_and_the_card_says_what_all_cost(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    for _ in range(2):
        made = trainer(
            tmp_path, ledger=ledger, max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=3
        )
        made.train()
        assert (made.privacy.releases, made._loop.expected_batch) == ({"stretch-0": 2}, 12.0)
        assert made.epsilon(1e-5) == pytest.approx(epsilon(2))
    made.train()
    assert made.privacy.releases == {"stretch-0": 2}
    assert made.epsilon(1e-5) == pytest.approx(epsilon(4), rel=1e-3)
    spent = qg.Ledger(ledger).spent("default", delta=1e-5, relation="add-remove").epsilon
    assert spent == pytest.approx(epsilon(6), rel=1e-3)
    made.create_model_card(model_name="private")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"{made.privacy}" in card
    assert f"its 2 trainings together: ε = {made.epsilon(1e-5):.4g}" in card


def test_a_trainer_follows_schedules_and_the_card_says_them(tmp_path: Path) -> None:
    made = trainer(
        tmp_path, noise_schedule=qt.StepNoise(step_size=1, gamma=0.5), max_steps=-1, num_train_epochs=3,
        clip_schedule=qt.StepGradClip(step_size=2, gamma=0.5),
    )  # fmt: skip
    made.train()
    length = made._loop.epoch_length
    assert made.privacy.releases == {f"stretch-{epoch}": length for epoch in range(3)}
    assert made._loop.plan.config["clip_factors"] == [[2 * length, 1.0], [length, 0.5]]
    made.create_model_card(model_name="private")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "- noise_schedule: StepNoise(step_size=1, gamma=0.5), of epochs" in card
    assert f"max_grad_norm: {made._loop.plan.config['clip']:g};" in card


def killed(folder: Path, **settings: Any) -> Any:
    first = trainer(folder, callbacks=[Stops(3, "killed")], save_strategy="steps", save_steps=2, **settings)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    return first


class Watches(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen[state.global_step] = flat(model)


@pytest.mark.parametrize(
    ("same", "only", "sampling"),
    [
        (False, False, "poisson"),
        (True, True, "random-allocation"),
    ],
)
def test_an_interrupted_training_goes_on_as_if_nothing_had_happened(
    same: bool, only: bool, sampling: str, tmp_path: Path
) -> None:
    """The third step was made before the interruption; its release is made again, free, with the same noise."""
    settings: dict[str, Any] = {
        "target_epsilon": 8.0, "save_only_model": only, "optim": "sgd", "sampling": sampling
    }  # fmt: skip
    first = killed(tmp_path, **settings)
    third = flat(first.model)
    first.remove_callback(Stops)
    second, watch = first if same else trainer(tmp_path, **settings), Watches()
    second.add_callback(watch)
    second.train(resume_from_checkpoint=True)
    assert list(watch.seen) == [3, 4]
    if not only:  # else the schedule of learning rates begins anew
        torch.testing.assert_close(watch.seen[3], third, rtol=0, atol=0)
    assert 7.9 < second.epsilon(1e-5) <= 8.0
    assert second.privacy.epsilon == pytest.approx(second.epsilon(1e-5), rel=1e-3)


def test_other_weights_are_charged_again(tmp_path: Path) -> None:
    killed(tmp_path)
    weights = tmp_path / "out" / "checkpoint-2" / "model.safetensors"
    own = bytearray(weights.read_bytes())
    own[-4:] = torch.tensor([0.5]).numpy().tobytes()
    weights.write_bytes(own)
    second = trainer(tmp_path)
    second.train(resume_from_checkpoint=True)
    assert second.epsilon(1e-5) >= epsilon(8) * 0.999  # the plan twice: a release was made with other weights


def test_a_training_without_noise_runs_and_says_that_it_is_not_private(tmp_path: Path) -> None:
    made = trainer(tmp_path, noise_multiplier=0, save_strategy="steps", save_steps=2, eval_dataset=Texts())
    with pytest.warns(UserWarning, match="not private"):
        made.train()
    assert str(made.privacy) == "NOT PRIVATE"
    assert made.epsilon(1e-5) == made.privacy.epsilon == math.inf
    assert made.state.log_history[0]["epsilon"] == math.inf
    assert not list((tmp_path / "out").glob("private-run-*"))
    made.create_model_card(model_name="debugging")
    assert "NOT PRIVATE" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"resume_from_checkpoint: .*noise_multiplier=0"):
        made.train(resume_from_checkpoint=True)


def test_resuming_without_a_checkpoint_charges_nothing(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    first = trainer(tmp_path, callbacks=[Stops(2, "killed")], ledger=ledger, save_strategy="no")
    with pytest.raises(KeyboardInterrupt):
        first.train()
    before = ledger.read_bytes()
    with pytest.raises(DataError, match=r"holds no checkpoint to go on from\. Call train\(\)"):
        trainer(tmp_path, ledger=ledger).train(resume_from_checkpoint=True)
    assert ledger.read_bytes() == before


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"target_epsilonn": 1.0}, "target_epsilonn.*Did you mean 'target_epsilon'"),
        (3, "privacy: must be a dictionary, not int"),
        ({"noise_multiplier": 1.0, "epochs": 3}, "'epochs': the Trainer's own arguments"),
        ({"max_grad_norm": 1.0}, "give target_epsilon"),
    ],
)
def test_privacy_is_read_before_anything_else(privacy: Any, words: str, tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path / "out"), report_to=[], use_cpu=True)
    with pytest.raises((TypeError, ValueError), match=words):
        DPTrainer(model=bert(), args=args, train_dataset=Texts(), privacy=privacy)


def test_an_optimizer_that_evaluates_often_is_refused_by_name(tmp_path: Path) -> None:
    model = bert()
    with pytest.raises(ValueError, match="LBFGS evaluates"):
        trainer(tmp_path, model=model, optimizers=(torch.optim.LBFGS(model.parameters()), None))


def test_what_a_training_goes_on_from_is_its_own(tmp_path: Path) -> None:
    killed(tmp_path)
    out = tmp_path / "out"
    with pytest.raises(DataError, match="noise_multiplier"):
        trainer(tmp_path, noise_multiplier=2.0).train(resume_from_checkpoint=True)
    state = out / "checkpoint-2" / "trainer_state.json"
    whole = state.read_text()
    state.write_text(json.dumps({**json.loads(whole), "global_step": 1}))
    with pytest.raises(DataError, match="saved after step 2"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    state.write_text(whole)
    sealed = out / "private-run-001" / "checkpoint.safetensors"
    kept = sealed.read_bytes()
    sealed.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(DataError, match="altered"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    sealed.unlink()
    with pytest.raises(DataError, match="no interrupted private training"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_an_example_moves_the_adapters_and_nothing_else() -> None:
    """The example checks that itself; here that it says so, with the ε that was asked for."""
    path = Path(__file__).parents[2] / "examples" / "lora_causal_lm.py"
    told = runpy.run_path(str(path))["main"](
        ["--records", "80", "--epochs", "1", "--batch-size", "20", "--public-steps", "2", "--epsilon", "3"]
    )
    assert 2.98 < told["epsilon"] <= 3.0
    assert told["moved"] == 16


_Trainer: Any = transformers.Trainer


class Logging(_Trainer):  # type: ignore[misc]
    """A trainer of another package, as TRL's: its loss keeps accuracies of records, and its logs show them."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        loss = super().compute_loss(model, inputs)
        self.kept.append(float(loss))
        return loss

    def log(self, logs: dict[str, float], *args: Any) -> None:
        super().log({**logs, "accuracy": 0.5}, *args)


Logging.__module__ = "peft"  # stands for an installed package


def test_a_loss_of_another_package_is_refused_and_its_logs_are_left_out(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(
        str(tmp_path / "out"), per_device_train_batch_size=BATCH, max_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}

    class Mixed(DPTrainer, Logging):
        pass

    with pytest.raises(ValueError, match=r"Logging\.compute_loss: another package's loss may keep"):
        Mixed(model=bert(), args=args, train_dataset=Texts(), privacy=privacy, pad=8)

    class Plain(Mixed):
        compute_loss = transformers.Trainer.compute_loss

    trainer = Plain(model=bert(), args=args, train_dataset=Texts(), privacy=privacy, pad=8)
    trainer.train()
    assert trainer.state.log_history
    assert not any("accuracy" in line for line in trainer.state.log_history)
