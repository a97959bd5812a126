"""Texts and series: recurrent networks, bags of words, transformers, Hugging Face models and trainers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

import quietgrad.torch as qt
from quietgrad.torch.hugging_face import DPTrainer
from quietgrad.training.result import Privacy
from tests.torch_scripts import script
from tests.torch_scripts.vision import BATCH, CLASSES, N, all_steps, loop_of, verbs

WORDS = 20


class Reviews(Dataset[Any]):
    """Texts of several lengths with a label."""

    def __init__(self) -> None:
        self.texts = [torch.randint(1, WORDS, (int(length),)) for length in torch.randint(3, 12, (N,))]

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.texts[index], index % 2


def padded(batch: list[Any]) -> tuple[Tensor, Tensor]:
    """The collate function of Opacus' imdb example."""
    return pad_sequence([text for text, _ in batch], batch_first=True), torch.tensor([label for _, label in batch])


class SampleNet(nn.Module):
    """The network of Opacus' imdb example."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pool = nn.Embedding(WORDS, 8), nn.AdaptiveAvgPool1d(1)
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.pool(self.emb(x).transpose(1, 2)).squeeze(2)
        return self.fc2(F.relu(self.fc1(x)))


@script()
def imdb_opacus_with_pad() -> Privacy:
    loader = DataLoader(Reviews(), batch_size=BATCH, collate_fn=padded)
    model, optimizer, loader, criterion = verbs(
        SampleNet(), None, data_loader=loader, criterion=nn.CrossEntropyLoss(), pad=16
    )
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return loader.privacy


@script(conditional=True)
def imdb_opacus_example() -> Privacy:
    loader = DataLoader(Reviews(), batch_size=BATCH, collate_fn=padded)
    model, optimizer, loader = verbs(SampleNet(), None, data_loader=loader, pad=16)
    losses = []
    for data, label in loader:
        optimizer.zero_grad()
        predictions = model(data).squeeze(1)
        loss = nn.CrossEntropyLoss()(predictions, label)
        (predictions.argmax(1) == label).float().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return loader.privacy


@script()
def lstm_of_packed_sequences() -> Privacy:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.lstm, self.out = nn.Embedding(WORDS, 6), nn.LSTM(6, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Any:
            packed = pack_padded_sequence(self.emb(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
            _, (h, _) = self.lstm(packed)
            return self.out(h[-1])

    def collate(batch: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
        lengths = torch.tensor([len(text) for text, _ in batch])
        return (
            pad_sequence([text for text, _ in batch], batch_first=True),
            lengths,
            torch.tensor([y for _, y in batch]),
        )

    return all_steps(loop_of(Packed(), nn.CrossEntropyLoss(), Reviews(), collate_fn=collate))


# --- characters ---------------------------------------------------------------------------------------------------


class CharNN(nn.Module):
    """The classifier of names of Opacus' char-lstm example; its state comes from the loop."""

    def __init__(self, layer: Any = nn.LSTM) -> None:
        super().__init__()
        self.emb, self.lstm, self.out = nn.Embedding(WORDS, 6), layer(6, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor, hidden: Any = None) -> tuple[Tensor, Any]:
        x, hidden = self.lstm(self.emb(x), hidden)
        return self.out(x[:, -1]), hidden


def zeros(size: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, size, 8), torch.zeros(1, size, 8)


@script()
def char_lstm_with_its_state_in_the_loss() -> Privacy:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits, _ = model(x, zeros(x.shape[0]))
        return F.cross_entropy(logits, y)

    return all_steps(loop_of(CharNN(), loss, Reviews(), collate_fn=padded, pad=16))


@script(conditional=True)
def char_lstm_opacus_example() -> Privacy:
    loader = DataLoader(Reviews(), batch_size=BATCH, collate_fn=padded)
    model, optimizer, loader = verbs(CharNN(qt.DPLSTM), None, data_loader=loader, pad=16)
    for x, y in loader:
        optimizer.zero_grad()
        logits, _ = model(x, zeros(x.shape[0]))
        F.cross_entropy(logits, y).backward()
        optimizer.step()
    return loader.privacy


class NextCharacter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.gru, self.out = nn.Embedding(WORDS, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.gru(self.emb(x))[0])


def lines() -> TensorDataset:
    text = torch.randint(WORDS, (N, 9))
    return TensorDataset(text[:, :-1], text[:, 1:])


@script()
def language_model_with_view() -> Privacy:
    """`logits.view(-1, V)`, whatever V is."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, WORDS), target.reshape(-1))

    return all_steps(loop_of(NextCharacter(), loss, lines()))


# --- bags and flat texts ------------------------------------------------------------------------------------------


class BagOfWords(nn.Module):
    """The classifier of PyTorch's text tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(WORDS, 8), nn.Linear(8, 2)

    def forward(self, text: Tensor, offsets: Tensor) -> Any:
        return self.out(self.bag(text, offsets))


def flat(batch: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """All texts in one tensor, with the places where each begins."""
    lengths = [0, *(len(text) for text, _ in batch)]
    return (
        torch.cat([t for t, _ in batch]),
        torch.tensor(lengths[:-1]).cumsum(0),
        torch.tensor([y for _, y in batch]),
    )


@script()
def flat_text_with_offsets() -> Privacy:
    return all_steps(loop_of(BagOfWords(), nn.CrossEntropyLoss(), Reviews(), collate_fn=flat))


@script()
def transformer_encoder_with_a_mask() -> Privacy:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(WORDS, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.encoder, self.out = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            mask = x == 0
            states = self.encoder(self.emb(x), src_key_padding_mask=mask).masked_fill(mask[..., None], 0)
            return self.out(states.sum(1) / (~mask).sum(1, keepdim=True))

    return all_steps(loop_of(Encoder(), nn.CrossEntropyLoss(), Reviews(), pad=16))


# --- Hugging Face -------------------------------------------------------------------------------------------------


def bert(kind: str = "BertForSequenceClassification", **settings: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=20, **settings,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=20, bos_token_id=1,
                                eos_token_id=1)
    )  # fmt: skip


class Encoded(Dataset[Any]):
    """What a tokenizer makes of each text; ``labels``: a class, or the text itself."""

    def __init__(self, labels: str = "class") -> None:
        self.reviews, self.labels = Reviews(), labels

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        text, label = self.reviews[index]
        mask = torch.ones_like(text)
        return {"input_ids": text, "attention_mask": mask, "labels": label if self.labels == "class" else text}


def own_loss(model: Any, **batch: Tensor) -> Tensor:
    return model(**batch).loss


@script()
def bert_in_a_private_loop() -> Privacy:
    return all_steps(loop_of(bert(), own_loss, Encoded(), pad=qt.Multiple(8)))


@script()
def bert_by_its_own_loss_in_opacus_verbs() -> Privacy:
    loader = DataLoader(Encoded(), batch_size=BATCH)
    model, optimizer, loader = verbs(bert(), None, data_loader=loader, pad=16)
    for batch in loader:
        batch = {name: value.to("cpu") for name, value in batch.items()}
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return loader.privacy


@script()
def tagging_with_ignored_tokens() -> Privacy:
    model = bert("BertForTokenClassification", num_labels=3)

    class Tagged(Encoded):
        def __getitem__(self, index: int) -> dict[str, Any]:
            record = super().__getitem__(index)
            return record | {"labels": record["input_ids"] % 3}

    return all_steps(loop_of(model, own_loss, Tagged(), pad=16))


@script()
def gpt2_with_lora_in_a_private_loop() -> Privacy:
    model = get_peft_model(
        gpt2(), LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    )
    return all_steps(loop_of(model, own_loss, Encoded("text"), pad=16))


@script()
def t5_from_text_to_text() -> Privacy:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return all_steps(
        loop_of(transformers.T5ForConditionalGeneration(config), own_loss, Encoded("text"), pad=qt.Multiple(8))
    )


def trainer(model: Any, folder: Path, data: Any, arguments: Mapping[str, Any] = {}, **settings: Any) -> DPTrainer:
    known: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH, "max_steps": 3, "report_to": [],
        "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    return DPTrainer(
        model=model, args=transformers.TrainingArguments(**(known | dict(arguments))), train_dataset=data,
        privacy={"noise_multiplier": 1.0, "max_grad_norm": 1.0}, **settings,
    )  # fmt: skip


@script()
def bert_by_dp_trainer(folder: Path) -> Privacy:
    made = trainer(bert(), folder, Encoded(), pad=16)
    made.train()
    return made.privacy


@script()
def gpt2_with_lora_by_dp_trainer(folder: Path) -> Privacy:
    model = get_peft_model(
        gpt2(), LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    )
    made = trainer(model, folder, Encoded("text"), {"learning_rate": 1e-3}, pad=16)
    made.train()
    return made.privacy


__all__ = ["CLASSES", "trainer"]
