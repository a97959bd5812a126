"""Scripts after Opacus' examples and tutorials, Hugging Face's and others', with the import changed, small.

Registered with :mod:`benchmarks.scripts`, which runs them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import quietgrad.torch as qt
from benchmarks.scripts import BATCH, CLASSES, WORDS, N, epoch, private, shape

CONDITIONAL = "runs, conditional"


# --- Opacus' examples --------------------------------------------------------------------------------------------


@shape("cnn", "residual", expected=CONDITIONAL)
def opacus_mnist(model: nn.Module, data: Any) -> Any:
    """examples/mnist.py"""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0)
    loader: Any = DataLoader(data, batch_size=BATCH, num_workers=0, pin_memory=False)
    engine = qt.PrivacyEngine(secure_mode=False)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    model.train()
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _batch_idx, (x, target) in enumerate(loader):
        x, target = x.to("cpu"), target.to("cpu")
        optimizer.zero_grad()
        loss = criterion(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert engine.get_epsilon(delta=1e-5) > 0.0
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, target in DataLoader(data, batch_size=16):
            output = model(x)
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    return loader.privacy


@shape("cnn", "residual", expected=CONDITIONAL)
def opacus_cifar10(model: nn.Module, data: Any) -> Any:
    """examples/cifar10.py: a fixed module, pieces of a batch, a rate set by hand, a checkpoint."""
    model = qt.ModuleValidator.fix(model)
    qt.ModuleValidator.validate(model, strict=True)
    optimizer: Any = torch.optim.RMSprop(model.parameters(), lr=0.01)
    engine = qt.PrivacyEngine()
    loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_epsilon=8.0, target_delta=1e-5, epochs=1,
        max_grad_norm=[1.0] * len(list(model.parameters())), clipping="per_layer",
    )  # fmt: skip
    for group in optimizer.param_groups:
        group["lr"] = 0.005
    top1 = []
    with qt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=8, optimizer=optimizer) as pieces:
        for images, target in pieces:
            output = model(images)
            loss: Any = F.cross_entropy(output, target)
            preds = output.detach().argmax(axis=1)
            top1.append(float((preds == target).float().mean()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/last.tar")
    return loader.privacy


class _Reviews(Dataset[Any]):
    """Texts of several lengths."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, place: int) -> Any:
        made = torch.Generator().manual_seed(place)
        return torch.randint(1, WORDS, (3 + place % 4,), generator=made), place % CLASSES


def _padded(batch: list[Any]) -> Any:
    texts = [text for text, _ in batch]
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor([label for _, label in batch])


@shape("lstm", expected=CONDITIONAL)
def opacus_imdb(model: nn.Module, data: Any) -> Any:
    """examples/imdb.py: texts padded by collate_fn."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.fc1, self.fc2 = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
            self.pool = nn.AdaptiveAvgPool1d(1)

        def forward(self, x: Tensor) -> Any:
            x = self.pool(self.emb(x).transpose(1, 2)).squeeze()
            return self.fc2(F.relu(self.fc1(x)))

    net: Any = Net()
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=0.02)
    loader: Any = DataLoader(_Reviews(), batch_size=BATCH, collate_fn=_padded, pin_memory=True)
    net, optimizer, loader = qt.PrivacyEngine().make_private(
        module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=0.8, max_grad_norm=1.0,
        poisson_sampling=False,
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss()
    net.train()
    for texts, label in loader:
        optimizer.zero_grad()
        predictions = net(texts).squeeze(1)
        loss = criterion(predictions, label)
        (predictions.argmax(1) == label).float().mean().item()
        loss.backward()
        optimizer.step()
    return loader.privacy


class _Names(nn.Module):
    """examples/char-lstm-classification.py"""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embedding, self.out_layer = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES)
        self.layer = kind(8, 8, num_layers=2, batch_first=True, bidirectional=False, dropout=0.0)

    def forward(self, x: Tensor, hidden: Any = None) -> Any:
        x, hidden = self.layer(self.embedding(x), hidden)
        return self.out_layer(x[:, -1, :])


@shape("lstm")
def opacus_char_lstm(model: nn.Module, data: Any) -> Any:
    return epoch(private(_Names(qt.DPLSTM), data))


@shape("gru")
def opacus_char_gru(model: nn.Module, data: Any) -> Any:
    return epoch(private(_Names(qt.DPGRU), data))


@shape("lstm")
def opacus_char_rnn(model: nn.Module, data: Any) -> Any:
    return epoch(private(_Names(qt.DPRNN), data))


@shape("transformer")
def opacus_attention(model: nn.Module, data: Any) -> Any:
    """DPMultiheadAttention in a model of one's own."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES)
            self.attention = qt.DPMultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            x = self.table(x)
            return self.out(self.attention(x, x, x)[0].mean(1))

    return epoch(private(Net(), data))


@shape("cnn", expected=CONDITIONAL)
def opacus_dcgan(model: nn.Module, data: Any) -> Any:
    """examples/dcgan.py: the discriminator sees private pictures and made ones; the generator follows it."""
    critic: Any = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    artist = nn.Sequential(nn.Linear(4, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8)))
    first: Any = torch.optim.Adam(critic.parameters(), lr=1e-3)
    second = torch.optim.Adam(artist.parameters(), lr=1e-3)
    critic, first, loader = qt.PrivacyEngine().make_private(
        module=critic, optimizer=first, data_loader=DataLoader(data, batch_size=BATCH), noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    criterion = nn.BCEWithLogitsLoss()
    for real, _ in loader:
        first.zero_grad()
        output = critic(real).squeeze(1)
        loss = criterion(output, torch.ones_like(output))
        loss.backward()
        first.step()
        second.zero_grad()
        made = artist(torch.randn(BATCH, 4))
        scores = critic(made).squeeze(1)
        criterion(scores, torch.ones_like(scores)).backward()
        second.step()
    return loader.privacy


# --- Opacus' tutorials -------------------------------------------------------------------------------------------


def _bert(**settings: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=16, num_labels=CLASSES, **settings,
        )
    )  # fmt: skip


@shape("transformer", expected=CONDITIONAL)
def opacus_text_classifier(model: nn.Module, data: Any) -> Any:
    """tutorials/building_text_classifier.ipynb: the last layers of BERT, batches as dictionaries."""
    bert: Any = _bert()
    for param in bert.parameters():
        param.requires_grad = False
    for layer in (bert.bert.encoder.layer[-1], bert.bert.pooler, bert.classifier):
        for param in layer.parameters():
            param.requires_grad = True
    trained = [param for param in bert.parameters() if param.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=5e-4, eps=1e-8)
    rows = TensorDataset(data.tensors[0], torch.ones_like(data.tensors[0]), data.tensors[1])
    engine = qt.PrivacyEngine()
    bert.train()
    bert, optimizer, loader = engine.make_private_with_epsilon(
        module=bert, optimizer=optimizer, data_loader=DataLoader(rows, batch_size=BATCH), target_delta=1e-5,
        target_epsilon=7.5, epochs=1, max_grad_norm=0.1,
    )  # fmt: skip
    with qt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=8, optimizer=optimizer) as pieces:
        for batch in pieces:
            optimizer.zero_grad()
            batch = tuple(t.to("cpu") for t in batch)
            inputs = {"input_ids": batch[0], "attention_mask": batch[1], "labels": batch[2]}
            outputs = bert(**inputs)
            loss = outputs[0]
            loss.backward()
            float(loss)
            optimizer.step()
    return loader.privacy


@shape("residual")
def opacus_image_classifier(model: nn.Module, data: Any) -> Any:
    """tutorials/building_image_classifier.ipynb with the private criterion."""
    if not qt.ModuleValidator.is_valid(model):
        model = qt.ModuleValidator.fix(model)
    errors = qt.ModuleValidator.validate(model, strict=False)
    assert not errors
    made = private(model, data, optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3))
    return epoch(made)


@shape("cnn")
def opacus_ghost_tutorial(model: nn.Module, data: Any) -> Any:
    """tutorials/building_..._with_fast_gradient_clipping.ipynb"""
    model, optimizer, criterion, loader = qt.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(data, batch_size=BATCH), max_grad_norm=1.0, grad_sample_mode="ghost",
        criterion=nn.CrossEntropyLoss(reduction="mean"),
    )  # fmt: skip
    return epoch((model, optimizer, loader, criterion))


@shape("mlp", "cnn")
def opacus_wrap_model_false(model: nn.Module, data: Any) -> Any:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks, optimizer, loader, criterion = qt.PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=BATCH), wrap_model=False,
        noise_multiplier=1.0, max_grad_norm=1.0, criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    told = epoch((model, optimizer, loader, criterion))
    hooks.cleanup()
    return told


@shape("mlp", expected="refused")
def opacus_checkpoint(model: nn.Module, data: Any) -> Any:
    engine = qt.PrivacyEngine()
    engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(data, batch_size=BATCH), max_grad_norm=1.0,
    )  # fmt: skip
    return engine.save_checkpoint(path="nowhere.pt", module=model)


@shape("mlp", expected="refused")
def opacus_step_hook(model: nn.Module, data: Any) -> Any:
    return private(model, data)[1].attach_step_hook(lambda optimizer: None)


@shape("mlp", expected="refused")
def opacus_generator(model: nn.Module, data: Any) -> Any:
    return qt.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(data, batch_size=BATCH), max_grad_norm=1.0,
        noise_generator=torch.Generator().manual_seed(1),
    )  # fmt: skip


# --- Lightning and accelerate ------------------------------------------------------------------------------------


@shape("mlp", "cnn")
def lightning_as_in_opacus(model: nn.Module, data: Any) -> Any:
    """examples/mnist_lightning.py: the module makes itself private when its optimizer is asked for."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.engine = model, qt.PrivacyEngine()
            optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
            self.made = [
                self.engine.make_private(
                    module=self.net, optimizer=optimizer, data_loader=DataLoader(data, batch_size=BATCH),
                    noise_multiplier=1.0, max_grad_norm=1.0, criterion=nn.CrossEntropyLoss(), wrap_model=False,
                )
            ]  # fmt: skip

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, target = batch
            return self.made[0][3](self(x), target)

        def train_dataloader(self) -> Any:
            return self.made[0][2]

        def on_train_epoch_end(self) -> None:
            self.log("epsilon", self.engine.get_epsilon(1e-5), on_epoch=True, prog_bar=True)

        def configure_optimizers(self) -> Any:
            return self.made[0][1]

    module = Module()
    lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, num_sanity_val_steps=0,
    ).fit(module)  # fmt: skip
    return module.made[0][2].privacy


@shape("mlp", "cnn")
def accelerate_accumulating(model: nn.Module, data: Any) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    model, optimizer, loader, criterion = private(model, data)
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = criterion(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return loader.privacy


# --- Hugging Face ------------------------------------------------------------------------------------------------


def _trainer_privacy(**settings: Any) -> Any:
    from transformers import TrainingArguments

    from quietgrad.torch.hugging_face import DPTrainer

    kind = settings.pop("kind", DPTrainer)
    with tempfile.TemporaryDirectory() as folder:
        known: dict[str, Any] = {
            "per_device_train_batch_size": BATCH, "max_steps": 3, "save_strategy": "no", "disable_tqdm": True,
            "report_to": [], "use_cpu": True, "logging_strategy": "no",
        }  # fmt: skip
        args = TrainingArguments(folder, **(known | settings.pop("args", {})))
        privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
        made = kind(args=args, privacy=privacy, **settings)
        made.train()
        if made.eval_dataset is not None:
            made.evaluate()
        return made.privacy


def _tokens(data: Any) -> list[dict[str, Any]]:
    return [{"input_ids": x.tolist(), "labels": int(y)} for x, y in data]


@shape("transformer")
def trainer_of_bert(model: nn.Module, data: Any) -> Any:
    rows = _tokens(data)
    return _trainer_privacy(
        model=_bert(), train_dataset=rows, eval_dataset=rows[:8],
        compute_metrics=lambda p: {"right": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        args={"warmup_steps": 1, "weight_decay": 0.01, "label_smoothing_factor": 0.1,
              "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"},
    )  # fmt: skip


@shape("transformer")
def trainer_with_callbacks(model: nn.Module, data: Any) -> Any:
    from transformers import EarlyStoppingCallback

    rows = _tokens(data)
    return _trainer_privacy(
        model=_bert(), train_dataset=rows, eval_dataset=rows[:8], callbacks=[EarlyStoppingCallback(1)],
        args={"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_strategy": "steps",
              "save_steps": 1, "metric_for_best_model": "eval_loss"},
    )  # fmt: skip


def _gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=12, bos_token_id=1, eos_token_id=2)
    )


def _lora(base: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )


def _conversations(data: Any) -> list[dict[str, Any]]:
    """A prompt of three tokens that is not learned, and an answer."""
    return [{"input_ids": x.tolist(), "labels": [-100] * 3 + x.tolist()[3:]} for x, _ in data]


@shape("transformer")
def causal_lm_by_trainer(model: nn.Module, data: Any) -> Any:
    return _trainer_privacy(model=_gpt(), train_dataset=_conversations(data))


@shape("transformer")
def sft_of_adapters(model: nn.Module, data: Any) -> Any:
    """Supervised fine-tuning as TRL does it: prompts are not learned, adapters on a bfloat16 base are."""
    return _trainer_privacy(model=_lora(_gpt().to(torch.bfloat16)), train_dataset=_conversations(data))


@shape("transformer")
def sft_loop(model: nn.Module, data: Any) -> Any:
    """The same as a loop: the model returns its loss."""
    rows = [{name: torch.tensor(value) for name, value in row.items()} for row in _conversations(data)]
    made = _lora(_gpt())
    trained = [param for param in made.parameters() if param.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-3)
    loader: Any = DataLoader(rows, batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    made, optimizer, loader, _ = private(made, rows, optimizer=optimizer, loader=loader)
    made.train()
    for batch in loader:
        optimizer.zero_grad()
        made(**batch).loss.backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        assert (Path(folder) / "adapter_model.safetensors").exists()
    return loader.privacy


@shape("transformer")
def sft_trainer_of_trl(model: nn.Module, data: Any) -> Any:
    """TRL's own trainer, with the private one before it."""
    from datasets import Dataset as Table
    from transformers import PreTrainedTokenizerFast, Trainer
    from trl import SFTConfig, SFTTrainer

    from quietgrad.torch.hugging_face import DPTrainer

    class PrivateSFT(DPTrainer, SFTTrainer):  # type: ignore[misc]
        """Supervised fine-tuning with DPTrainer's steps; SFTTrainer's own loss also logs accuracies of records."""

        compute_loss = Trainer.compute_loss

    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(k): k for k in range(WORDS)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2", unk_token="0")
    rows = Table.from_list([{"text": " ".join(map(str, x.tolist()))} for x, _ in data])
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, per_device_train_batch_size=BATCH, max_steps=2, save_strategy="no", disable_tqdm=True,
            report_to=[], use_cpu=True, logging_strategy="no", max_length=8, bf16=False,
            gradient_checkpointing=False,
        )  # fmt: skip
        made = PrivateSFT(
            model=_gpt(), args=args, train_dataset=rows, processing_class=tokenizer,
            privacy={"noise_multiplier": 1.0, "max_grad_norm": 1.0},
        )  # fmt: skip
        made.train()
        return made.privacy


# --- loops of other shapes ---------------------------------------------------------------------------------------


@shape("mlp", "cnn")
def enumerated_loader(model: nn.Module, data: Any) -> Any:
    """torch's own tutorial: what a loader hands out is taken apart in the body."""
    net, optimizer, loader, criterion = private(model, data)
    for _i, batch in enumerate(loader, 0):
        inputs, labels = batch
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
    assert len(loader) == N // BATCH
    assert len(loader.dataset) == N
    return loader.privacy


@shape("mlp")
def iterator_by_hand(model: nn.Module, data: Any) -> Any:
    net, optimizer, loader, criterion = private(model, data, epochs=2)
    batches = iter(loader)
    for _ in range(6):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        optimizer.zero_grad(set_to_none=False)
        criterion(net(x), y).backward()
        optimizer.step()
    return loader.privacy


class _Rows(Dataset[Any]):
    """Records as dictionaries."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> Any:
        x, y = self.data[place]
        return {"image": x, "label": y, "name": f"picture {place}"}


@shape("mlp", "cnn")
def dictionaries(model: nn.Module, data: Any) -> Any:
    net, optimizer, loader, criterion = private(model, data, loader=DataLoader(_Rows(data), batch_size=BATCH))
    for batch in loader:
        optimizer.zero_grad()
        criterion(net(batch["image"].float()), batch["label"].long()).backward()
        optimizer.step()
    return loader.privacy


@shape("mlp", expected=CONDITIONAL)
def own_loss_of_logits(model: nn.Module, data: Any) -> Any:
    net, optimizer, loader = private(model, data, criterion=None)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(F.log_softmax(net(x), dim=1), y, reduction="mean")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return loader.privacy


@shape("mlp", expected=CONDITIONAL)
def mixup(model: nn.Module, data: Any) -> Any:
    """Records are mixed with others in the loop's own code: ε is conditional, and says on what."""
    net, optimizer, loader = private(model, data, criterion=None)
    for x, y in loader:
        optimizer.zero_grad()
        noisy = x + 0.1 * torch.randn_like(x)
        loss: Any = F.cross_entropy(net(noisy), y)
        loss.backward()
        optimizer.step()
    return loader.privacy


@shape("mlp")
def exponential_average(model: nn.Module, data: Any) -> Any:
    shadow = {name: value.detach().clone() for name, value in model.named_parameters()}
    net, optimizer, loader, criterion = private(model, data)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for name, value in net.named_parameters():
                shadow[name].lerp_(value, 0.1)
    return loader.privacy


@shape("mlp")
def warmup_then_plateau(model: nn.Module, data: Any) -> Any:
    net, optimizer, loader, criterion = private(model, data, epochs=2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for _ in range(2):
        told = epoch((net, optimizer, loader, criterion))
        net.eval()
        with torch.no_grad():
            plateau.step(float(F.cross_entropy(net(data.tensors[0]), data.tensors[1])))
    return told


@shape("cnn")
def channels_last(model: nn.Module, data: Any) -> Any:
    lasting: Any = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return epoch(private(lasting, data))


@shape("mlp", "cnn")
def double_precision(model: nn.Module, data: Any) -> Any:
    x, y = data.tensors
    return epoch(private(model.double(), TensorDataset(x.double(), y)))


@shape("mlp")
def bfloat16_model(model: nn.Module, data: Any) -> Any:
    x, y = data.tensors
    return epoch(private(model.to(torch.bfloat16), TensorDataset(x.bfloat16(), y)))
