"""Hugging Face models in a private loop: keywords, dictionaries, empty samples, adapters that really move."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import quietgrad.torch as qt
from quietgrad.errors import BudgetError, DataError
from quietgrad.privacy.accounting import account
from quietgrad.privacy.events import poisson_gaussian

transformers = pytest.importorskip("transformers", reason="needs quietgrad[hf]")
pytest.importorskip("peft", reason="needs quietgrad[hf]")

QUIET = 1e-7


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


class Words(Dataset[Any]):
    """Sequences of tokens of different lengths."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rows = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(3, 30, (4 + index % 3,), generator=rows)}


def encoded(records: list[dict[str, Tensor]]) -> Any:
    """As a tokenizer's collator gives it."""
    ids = nn.utils.rnn.pad_sequence([record["input_ids"] for record in records], batch_first=True)
    labels = ids.masked_fill(ids == 0, -100)
    return transformers.BatchEncoding({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels})


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=30, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=8,
        )
    )  # fmt: skip


def private(model: nn.Module, **settings: Any) -> Any:
    known: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_size": 6, "collate_fn": encoded}
    settings = known | settings
    loader: Any = DataLoader(Words(), batch_size=settings.pop("batch_size"), collate_fn=settings.pop("collate_fn"))
    trained = [param for param in model.parameters() if param.requires_grad]
    return qt.make_private(
        module=model, optimizer=torch.optim.AdamW(trained, lr=0.01), data_loader=loader, **settings
    )


@pytest.mark.filterwarnings("ignore:seed=3")
def test_keywords_give_the_clipped_gradients_of_autograd() -> None:
    plain = llama()
    model, optimizer, loader = private(plain, noise_multiplier=QUIET, max_grad_norm=0.3, seed=3, micro_batch=4)
    batch = next(iter(loader))
    assert isinstance(batch, transformers.BatchEncoding)
    expected = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    for k in range(len(batch["input_ids"])):
        one = {name: value.as_subclass(Tensor)[k : k + 1] for name, value in batch.items()}
        labels = one.pop("labels")
        alone: Any = qt.causal_lm_loss(plain(**one).logits, labels)
        grads = torch.autograd.grad(alone, list(plain.parameters()))
        weight = min(1.0, 0.3 / float(torch.cat([g.flatten() for g in grads]).norm()))
        for name, grad in zip(expected, grads, strict=True):
            expected[name] += weight * grad / 6
    labels = batch.to("cpu").pop("labels")
    output = model(**batch, inputs_embeds=None, use_cache=False)
    assert isinstance(output, transformers.modeling_outputs.CausalLMOutputWithPast)
    assert output["logits"] is output.logits
    loss: Any = qt.causal_lm_loss(output.logits, labels)
    loss.backward()
    optimizer.step()
    for name, param in plain.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(param.grad, expected[name], rtol=2e-3, atol=1e-6)


def test_empty_samples_step_and_another_call_is_tried_for_itself() -> None:
    model, optimizer, loader = private(llama(), batch_size=1)
    sizes = []
    for number, batch in enumerate(loader):
        if number % 2:
            del batch["attention_mask"]
        labels = batch.pop("labels")
        sizes.append(len(labels))
        loss: Any = qt.causal_lm_loss(model(**batch).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 0 in sizes  # of 24 samples at rate 1/24 none is empty with probability 10⁻⁵
    assert len(loader.privacy._engines) == 2


def test_a_loss_of_the_whole_batch_and_unknown_objects_are_refused() -> None:
    model, _, loader = private(llama())
    batch = next(iter(loader))
    with pytest.raises(ValueError, match="leave the labels out"):
        model(**batch)
    with pytest.raises(TypeError, match="nobody follows"):
        model(input_ids=batch["input_ids"], past_key_values=object())
    with pytest.raises(BudgetError, match="did not come from the private loader"):
        model(input_ids=batch["input_ids"], attention_mask=torch.ones(len(batch["input_ids"]), 6))


def test_constants_of_a_call_do_not_follow_the_records() -> None:
    """A mean of the batch in a keyword would be in every row's gradient: a record would move all of them."""

    def measured(records: list[dict[str, Tensor]]) -> Any:
        batch = encoded(records)
        batch["scale"] = float(batch["input_ids"].float().mean())
        return batch

    with pytest.raises(DataError, match="of the whole batch"):
        private(llama(), collate_fn=measured)
    model, _, loader = private(llama())
    batches = iter(loader)
    first, second = (next(batches) for _ in range(2))
    del first, second["labels"]
    model(**second, use_cache=False)
    third = next(batches)
    del third["labels"]
    with pytest.raises(BudgetError, match="another number, flag or text"):
        model(**third, use_cache=True)
    with pytest.raises(TypeError, match="list of numbers"):
        model(**third, use_cache=False, num_items=[3, 4])


def test_a_collator_that_mixes_is_seen_in_a_batch_encoding() -> None:
    def mixing(records: list[dict[str, Tensor]]) -> Any:
        batch = encoded(records)
        batch["weights"] = batch["input_ids"].float() / batch["input_ids"].float().mean()
        return batch

    with pytest.raises(DataError, match="depend on the other records"):
        private(llama(), collate_fn=mixing)


def trainer(folder: Path, epochs: int = 1, log_losses: bool = False, **settings: Any) -> Any:
    from quietgrad.torch.hugging_face import DPTrainer

    known: dict[str, Any] = {"save_only_model": True, "save_steps": 2, "logging_steps": 1, "disable_tqdm": True}
    given = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=12, num_train_epochs=epochs, report_to=[], use_cpu=True,
        **known | {key: value for key, value in settings.items() if key not in ("model_init", "model", "ledger")},
    )  # fmt: skip
    model = {"model_init": llama} if "model_init" in settings else {"model": settings.get("model") or llama()}
    return DPTrainer(
        **model, args=given, train_dataset=Words(), data_collator=encoded, log_losses=log_losses,
        privacy={"noise_multiplier": 1.0, "max_grad_norm": 1.0, "ledger": settings.get("ledger")},
    )  # fmt: skip


def test_a_trainer_resumes_with_what_its_checkpoint_cost(tmp_path: Path) -> None:
    """Weights alone, as save_only_model saves them, forgot it: four steps were stated as two."""
    first = trainer(tmp_path)
    first.train()
    second = trainer(tmp_path, epochs=2)
    second.train(resume_from_checkpoint=True)
    event = poisson_gaussian(rate=0.5, noise_multiplier=1.0, steps=4)
    assert second.state.global_step == 4
    assert second.epsilon(1e-5) == pytest.approx(account(event, delta=1e-5, relation="add-remove"))
    first.save_model(str(tmp_path / "saved"))
    third = trainer(tmp_path / "on", model=transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved"))
    third.train()
    event = poisson_gaussian(rate=0.5, noise_multiplier=1.0, steps=6)  # those of the second count there too
    assert third.epsilon(1e-5) == pytest.approx(account(event, delta=1e-5, relation="add-remove"))
    (tmp_path / "checkpoint-2" / "quietgrad.json").unlink()
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(BudgetError, match="does not say what it cost"):
        trainer(tmp_path, epochs=2, ledger=ledger).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not ledger.exists()


@pytest.mark.parametrize("asked", [False, True])
def test_a_trainer_tells_exact_losses_only_if_asked(
    asked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer(tmp_path, log_losses=asked)
    done = made.train()
    kept = (tmp_path / "checkpoint-2" / "trainer_state.json").read_text()
    told = [key for line in [*made.state.log_history, done.metrics] for key in line if "loss" in key]
    assert set(told) == ({"loss_not_private", "train_loss_not_private"} if asked else set())
    assert ("loss" in kept) is asked
    assert ("loss" in capsys.readouterr().out) is asked
    assert math.isnan(done.training_loss) is not asked
    assert made.state.total_flos == 0  # as many as the secret samples had tokens


@pytest.mark.parametrize(
    "settings", [{"model_init": True}, {"neftune_noise_alpha": 5.0}, {"include_num_input_tokens_seen": "all"}]
)
def test_what_would_train_or_tell_beside_the_private_loop_is_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        trainer(tmp_path, **settings)


def test_a_trainer_moves_the_adapters_and_nothing_else() -> None:
    """The example checks that itself; here that it says so, with the ε that was asked for."""
    path = Path(__file__).parent.parent / "examples" / "lora_causal_lm.py"
    told = runpy.run_path(str(path))["main"](
        ["--records", "80", "--epochs", "1", "--batch-size", "20", "--public-steps", "2", "--epsilon", "3"]
    )
    assert 2.98 < told["epsilon"] <= 3.0
    assert told["moved"] == 16


def gpt2() -> Any:
    """Its table of tokens is its output layer too."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=30, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def limited(folder: Path, epochs: int, model: Any, save_steps: int = 2) -> Any:
    from quietgrad.torch.hugging_face import DPTrainer

    args = transformers.TrainingArguments(
        str(folder), num_train_epochs=epochs, per_device_train_batch_size=12, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="steps", save_steps=save_steps,
    )  # fmt: skip
    return DPTrainer(
        model=model, args=args, train_dataset=Words(), data_collator=encoded,
        privacy={"target_epsilon": 8.0, "target_delta": 1e-5, "max_grad_norm": 1.0},
    )  # fmt: skip


def test_tied_weights_are_saved_resumed_and_read_back_with_what_they_cost(tmp_path: Path) -> None:
    first = limited(tmp_path, 1, gpt2())
    first.train()
    saved = tmp_path / "checkpoint-2"
    assert (saved / "config.json").is_file()
    read = transformers.GPT2LMHeadModel.from_pretrained(saved)
    torch.testing.assert_close(read.lm_head.weight, first.model.lm_head.weight)
    engine = qt.PrivacyEngine()
    engine.make_private(
        module=read, optimizer=torch.optim.SGD(read.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(Words(), batch_size=6, collate_fn=encoded),
    )  # fmt: skip
    assert engine.get_epsilon(1e-5) == pytest.approx(first.epsilon(1e-5))  # an own loop knows it too


def test_steps_that_an_interruption_lost_end_the_training_with_a_warning(tmp_path: Path) -> None:
    def interrupted(_: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt

    stop: Any = type("Stop", (transformers.TrainerCallback,), {"on_step_end": interrupted})
    first = limited(tmp_path, 2, gpt2())
    first.add_callback(stop())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = limited(tmp_path, 2, gpt2())
    with pytest.warns(UserWarning, match="are not given back"):
        second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 3  # one of the four is lost
    assert second.epsilon(1e-5) <= 8.0
