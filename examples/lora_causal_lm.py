"""Fine-tune a small causal language model with LoRA adapters, privately, and see that the adapters moved.

The text is what Python says of itself (``help()``'s topics): a third of the sentences are public and teach a small
model to read, the others are the private records. Needs ``pip install 'quietgrad[hf]'``.

    python examples/lora_causal_lm.py --epsilon 4
"""

from __future__ import annotations

import argparse
import tempfile
from pydoc_data.topics import topics  # type: ignore[import-not-found]
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import quietgrad.torch as qt
from quietgrad.torch.hugging_face import DPTrainer

LENGTH = 32  # bytes of a record
PAD = 256


def sentences() -> list[bytes]:
    """Sentences of the topics, each once, whitespace made one space, in no order."""
    whole = [" ".join(part.split()) for topic in topics.values() for part in topic.split("\n\n")]
    texts = sorted({text for part in whole for text in part.split(". ") if len(text) >= 20})
    return [texts[int(k)].encode() for k in torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))]


class Texts(Dataset[dict[str, Tensor]]):
    """Byte by byte, the beginning of each sentence."""

    def __init__(self, texts: list[bytes]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor(list(self.texts[index][:LENGTH]))}


def collate(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Padded at the end; the loss leaves padding out."""
    ids = torch.nn.utils.rnn.pad_sequence(
        [record["input_ids"] for record in records], batch_first=True, padding_value=PAD
    )
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": ids.masked_fill(ids == PAD, -100),
    }


def mean_loss(model: torch.nn.Module, texts: list[bytes]) -> float:
    """Of held-out sentences."""
    batch = collate([Texts(texts)[k] for k in range(len(texts))])
    labels = batch.pop("labels")
    model.eval()
    with torch.no_grad():
        return float(qt.causal_lm_loss(model(**batch).logits, labels))


def taught(texts: list[bytes], steps: int) -> GPT2LMHeadModel:
    """A small model that has read public text."""
    config = GPT2Config(
        vocab_size=257, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=PAD, eos_token_id=PAD
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = collate([Texts(texts)[int(k)] for k in torch.randint(0, len(texts), (32,))])
        labels = batch.pop("labels")
        optimizer.zero_grad()
        loss: Any = qt.causal_lm_loss(model(**batch).logits, labels)
        loss.backward()
        optimizer.step()
    return model


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, print, and return what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--public-steps", type=int, default=100)
    parser.add_argument("--records", type=int, default=0, help="at most so many private records; 0: all")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    texts = sentences()
    held_out, rest = texts[:400], texts[400:]
    public, private = rest[: len(rest) // 3], rest[len(rest) // 3 :]
    private = private[: given.records] if given.records else private
    model = get_peft_model(
        taught(public, given.public_steps),
        LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True),
    )
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    start = mean_loss(model, held_out)
    with tempfile.TemporaryDirectory() as folder:
        trainer = DPTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder, num_train_epochs=given.epochs, per_device_train_batch_size=given.batch_size,
                learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
                logging_strategy="no",
            ),
            train_dataset=Texts(private),
            data_collator=collate,
            privacy={"target_epsilon": given.epsilon, "target_delta": 1e-5, "max_grad_norm": 0.5},
        )  # fmt: skip
        trainer.train()
    end = mean_loss(model, held_out)
    moved = {name for name, param in model.named_parameters() if not torch.equal(param.detach(), before[name])}
    adapters = {name for name in before if "lora_" in name}
    # An optimizer that holds other tensors than the model computes with trains nothing, and nobody notices.
    assert moved == adapters, f"moved: {sorted(moved ^ adapters)} should (not) have"
    spent = trainer.epsilon(1e-5)
    print(f"{len(private)} private sentences, {len(adapters)} adapter matrices, all of them moved")
    print(f"loss per byte of held-out sentences: {start:.3f} before, {end:.3f} after, ε = {spent:.2f} at δ = 1e-5")
    return {"before": start, "after": end, "epsilon": spent, "moved": float(len(moved))}


if __name__ == "__main__":
    main()
