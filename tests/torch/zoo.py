"""The models people train, small and randomly initialised: what they are called with, and what they predict.

torchvision and timm are looked for in the folder `zoo` of the virtual environment (`make setup` puts them there):
the registry's torchvision is built for CUDA. Its models are Python, and its compiled operators on boxes, which no
model here uses, are declared so that it can be imported. Among the other packages it would break who imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, CLASSES = 48, 12, 3
Inputs = tuple[Tensor, ...]


class Case(NamedTuple):
    """A model with a batch: its inputs, its targets and its loss, one per example."""

    model: nn.Module
    x: Inputs
    y: Tensor
    loss: Callable[[Any, Tensor], Tensor]


def classified(output: Any, y: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits, y, reduction="none")


def continued(output: Any, y: Tensor) -> Tensor:
    """The mean over an example's own tokens."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)


@cache
def vision() -> Any:
    """torchvision, or a skip.

    Its folder is on the path for the import alone: a process that a test starts inherits the path, and there
    torchvision would lack the operators that are defined here.
    """
    operators = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            operators.define(schema)  # type: ignore[no-untyped-call]
    vision.operators = operators  # type: ignore[attr-defined]  # they are there as long as it is
    place = str(Path(sys.prefix) / "zoo")
    sys.path.append(place)
    try:
        for name in ("timm", "torchvision"):
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
        return pytest.importorskip("torchvision", reason="torchvision is not installed: make setup")
    finally:
        sys.path.remove(place)


def _images(size: int, count: int) -> tuple[Inputs, Tensor]:
    return (torch.randn(count, 3, size, size),), torch.randint(CLASSES, (count,))


def _tokens(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and a mask that ends somewhere else for every example."""
    tokens = torch.randint(3, VOCABULARY, (count, length))
    lengths = torch.randint(length // 2, length + 1, (count, 1))
    return tokens, (torch.arange(length) < lengths).long()


def _image(build: Callable[[int], nn.Module]) -> Callable[[int, int], Case]:
    def case(count: int, scale: int) -> Case:
        vision()
        return Case(build(scale), *_images(_side(scale), count), classified)

    return case


def _side(scale: int) -> int:
    """Images four times as large as in the tests are twice as high."""
    return 32 if scale == 1 else 64


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels) if channels % 4 == 0 else nn.GroupNorm(1, channels)


def _resnet(wide: int) -> nn.Module:
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=CLASSES, norm_layer=_group_norm)
    return model


def _mobilenet(wide: int) -> nn.Module:
    from torchvision.models import mobilenet_v2

    model: nn.Module = mobilenet_v2(num_classes=CLASSES, width_mult=0.35, norm_layer=_group_norm, dropout=0.0)
    return model


def _vit(wide: int) -> nn.Module:
    from torchvision.models import VisionTransformer

    model: nn.Module = VisionTransformer(_side(wide), 8, 2, 2, 32 * wide, 64 * wide, num_classes=CLASSES)
    nn.init.normal_(model.heads.head.weight)  # type: ignore[union-attr, arg-type]  # it begins at zero
    return model


def _swin(wide: int) -> nn.Module:
    from torchvision.models import SwinTransformer

    model: nn.Module = SwinTransformer(
        [4, 4], 16 * wide, [2, 2], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=CLASSES
    )
    return model


def _convnext(wide: int) -> nn.Module:
    from torchvision.models import ConvNeXt
    from torchvision.models.convnext import CNBlockConfig

    blocks = [CNBlockConfig(16 * wide, 32 * wide, 1), CNBlockConfig(32 * wide, None, 1)]
    model: nn.Module = ConvNeXt(blocks, layer_scale=0.5, num_classes=CLASSES)
    return model


def _timm_vit(wide: int) -> nn.Module:
    timm = pytest.importorskip("timm", reason="timm is not installed: make setup")
    model: nn.Module = timm.models.vision_transformer.VisionTransformer(
        img_size=_side(wide), patch_size=8, embed_dim=32 * wide, depth=2, num_heads=2, num_classes=CLASSES,
        init_values=0.5,
    )  # fmt: skip
    return model


_NAMES = {
    "bert": "BertForSequenceClassification",
    "distilbert": "DistilBertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "t5": "T5ForConditionalGeneration",
}


def _config(name: str, wide: int) -> Any:
    import transformers as hf

    common = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    encoder = common | {
        "hidden_size": 32 * wide, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64 * wide,
        "max_position_embeddings": 160, "num_labels": CLASSES, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    if name == "bert":
        return hf.BertConfig(**encoder)
    if name == "roberta":
        return hf.RobertaConfig(**encoder)
    if name == "distilbert":
        return hf.DistilBertConfig(
            **common, dim=32 * wide, n_layers=2, n_heads=2, hidden_dim=64 * wide, num_labels=CLASSES, dropout=0.0,
            attention_dropout=0.0, seq_classif_dropout=0.0, max_position_embeddings=160,
        )  # fmt: skip
    if name == "gpt2":
        return hf.GPT2Config(
            **common,
            n_embd=32 * wide,
            n_layer=2,
            n_head=2,
            n_positions=160,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    if name == "llama":
        return hf.LlamaConfig(
            **common, hidden_size=32 * wide, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=64 * wide,
        )  # fmt: skip
    return hf.T5Config(
        **common | {"decoder_start_token_id": 0},
        d_model=32 * wide,
        d_kv=16 * wide,
        d_ff=64 * wide,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
    )


def _text(name: str) -> Callable[[int, int], Case]:
    def case(count: int, scale: int) -> Case:
        hf = pytest.importorskip(
            "transformers", reason="transformers is not installed: pip install 'quietgrad[zoo]'"
        )
        config = _config(name, scale)
        config.use_cache = False
        model: nn.Module = getattr(hf, _NAMES[name])(config).train()
        length = LENGTH * scale
        tokens, mask = _tokens(count, length)
        if name in ("bert", "distilbert", "roberta"):
            return Case(model, (tokens, mask), torch.randint(CLASSES, (count,)), classified)
        targets = torch.randint(VOCABULARY, (count, length))
        if name == "t5":
            return Case(
                _Seq2Seq(model), (tokens, mask, torch.randint(3, VOCABULARY, (count, length))), targets, continued
            )
        return Case(_Causal(model), (tokens, mask), targets, continued)

    return case


class _Causal(nn.Module):
    """GPT-2 takes a cache in the second place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Any:
        return self.model(input_ids=tokens, attention_mask=mask).logits


class _Seq2Seq(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor, before: Tensor) -> Any:
        return self.model(input_ids=tokens, attention_mask=mask, decoder_input_ids=before).logits


def _lora_on(case: Callable[[int, int], Case], targets: str) -> Callable[[int, int], Case]:
    """The same model with adapters on the layers whose names match; nothing else is trained."""

    def adapted(count: int, scale: int) -> Case:
        made = case(count, scale)
        peft = pytest.importorskip("peft", reason="peft is not installed: make setup")
        config = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=targets,
            lora_dropout=0.0,
            init_lora_weights=False,
            fan_in_fan_out=targets == _FUSED,
        )
        model: nn.Module = peft.get_peft_model(made.model, config)
        return made._replace(model=model.train())

    return adapted


class LanguageModel(nn.Module):
    """Tokens, a recurrent layer, the next token."""

    def __init__(self, kind: Callable[..., nn.RNNBase], width: int, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.cell = kind(width, width, batch_first=True, **options)
        self.head = nn.Linear(width * (1 + self.cell.bidirectional), VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.cell(self.embed(x))[0])
        return output


class Experts(nn.Module):
    """A mixture of experts: each token goes to the best two of four, by a router that learns."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x)
        scores = self.router(z)
        best = scores.topk(2, -1)
        gates = torch.zeros_like(scores).scatter(-1, best.indices, best.values.softmax(-1))
        hidden = F.silu(torch.einsum("btd,edh->bteh", z, self.up))
        mixed = torch.einsum("bteh,ehd,bte->btd", hidden, self.down, gates)
        output: Tensor = self.head(self.norm(z + mixed))
        return output


def _language(build: Callable[[int], nn.Module]) -> Callable[[int, int], Case]:
    def case(count: int, scale: int) -> Case:
        length = LENGTH * scale
        x, y = torch.randint(VOCABULARY, (2, count, length))
        return Case(build(32 * scale), (x,), y, continued)

    return case


CASES: dict[str, Callable[[int, int], Case]] = {
    "torchvision ResNet-18, GroupNorm": _image(_resnet),
    "torchvision ViT": _image(_vit),
    "torchvision Swin": _image(_swin),
    "torchvision ConvNeXt": _image(_convnext),
    "torchvision MobileNetV2, GroupNorm": _image(_mobilenet),
    "timm ViT, layer scale": _image(_timm_vit),
    "BERT": _text("bert"),
    "DistilBERT": _text("distilbert"),
    "RoBERTa": _text("roberta"),
    "GPT-2": _text("gpt2"),
    "Llama": _text("llama"),
    "T5": _text("t5"),
    "LSTM language model": _language(lambda width: LanguageModel(nn.LSTM, width)),
    "GRU language model": _language(lambda width: LanguageModel(nn.GRU, width)),
    "mixture of experts": _language(Experts),
}

# Adapters where peft can put them: not into a recurrent layer, nor into weights that a model multiplies with itself
# (torchvision's Swin reads `qkv.weight`, past any adapter; the experts are bare parameters).
_FUSED = r".*c_attn"  # GPT-2's own layer, whose weight is transposed
_ADAPTED = {
    "BERT": r".*(query|value)",
    "DistilBERT": r".*[qv]_lin",
    "RoBERTa": r".*(query|value)",
    "GPT-2": _FUSED,
    "Llama": r".*[qv]_proj",
    "T5": r".*\.[qv]",
    "torchvision ResNet-18, GroupNorm": r".*layer\d\.\d\.conv\d",
    "torchvision ViT": r".*mlp\.[03]",
    "torchvision Swin": r".*mlp\.[03]",
    "torchvision ConvNeXt": r".*block\.[35]",
    "torchvision MobileNetV2, GroupNorm": r".*features\.([2-9]|1\d)\.conv\.2",
    "timm ViT, layer scale": r".*attn\.(qkv|proj)",
    "LSTM language model": r"embed|head",
    "mixture of experts": r"router|head",
}
CASES |= {f"{name}, LoRA": _lora_on(CASES[name], targets) for name, targets in _ADAPTED.items()}
