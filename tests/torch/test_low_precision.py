"""A frozen base in low precision, adapters in float32: what is clipped is float32, and autograd's gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quietgrad as qg
import quietgrad.torch as qt


class Int8Linear(nn.Module):
    """Weights of eight bits, a scale for each row."""

    codes: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale)


class Adapted(nn.Module):
    """A frozen base and a low-rank adapter beside it."""

    def __init__(self, base: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.dtype = base.requires_grad_(False), dtype
        self.down, self.up, self.head = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base(x.to(self.dtype)).float() + self.up(self.down(x))
        scores: Tensor = self.head(torch.tanh(hidden))
        return scores


def adapted(kind: str) -> nn.Module:
    torch.manual_seed(0)
    base = nn.Linear(6, 8, bias=False)
    if kind == "int8":
        return Adapted(Int8Linear(base), torch.float32)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[kind]
    return Adapted(base.to(dtype), dtype)


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "int8"])
def test_gradients_of_adapters_are_autograds_in_float32(kind: str) -> None:
    model, x, y = adapted(kind), torch.randn(5, 6), torch.arange(5) % 3
    sums, norms = qt.clipped_gradient_sum(model, nn.CrossEntropyLoss(), (x, y), 0.3)
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    wanted = {name: torch.zeros_like(param) for name, param in trained}
    for k in range(5):
        loss = nn.functional.cross_entropy(model(x[k : k + 1]), y[k : k + 1])
        own = torch.autograd.grad(loss, [param for _, param in trained])
        length = float(torch.cat([g.flatten() for g in own]).norm())
        assert float(norms[k]) == pytest.approx(length, rel=2e-3)
        for (name, _), g in zip(trained, own, strict=True):
            wanted[name] += g * min(1.0, 0.3 / length)
    for name, value in wanted.items():
        assert sums[name].dtype == torch.float32
        torch.testing.assert_close(sums[name], value, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_a_fit_moves_the_adapters_and_leaves_the_base(kind: str) -> None:
    model = adapted(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(40, 6)
    result = qt.fit(
        model, nn.CrossEntropyLoss(), (x, torch.arange(40) % 3), qg.DPSGD(steps=2, batch_size=10),
        budget=qg.Budget(4.0, 1e-5), n_public=40, progress=False,
    )  # fmt: skip
    assert result.params.dtype == torch.float32
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"down.weight", "up.weight", "head.weight", "head.bias"}
    assert all(value.dtype == before[name].dtype for name, value in model.state_dict().items())


def test_lora_of_peft_on_a_bfloat16_language_model() -> None:
    transformers = pytest.importorskip("transformers", reason="needs quietgrad[hf]")
    peft = pytest.importorskip("peft", reason="needs quietgrad[hf]")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=12, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    base: Any = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(base, lora)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1)
    ids = torch.randint(3, 20, (4, 7))

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return qt.causal_lm_loss(model(input_ids=x).logits, y)

    model.eval()
    sums, norms = qt.clipped_gradient_sum(model, loss, (ids, ids), 1e6)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert {value.dtype for value in trained.values()} == {torch.float32}
    assert set(sums) == set(trained)
    losses = torch.stack([loss(model, ids[k : k + 1], ids[k : k + 1]) for k in range(4)])
    own = torch.autograd.grad(losses.sum(), list(trained.values()))
    assert bool(norms.isfinite().all())
    whole = torch.cat([g.flatten() for g in own])
    made = torch.cat([sums[name].flatten() for name in trained])
    assert float((whole - made).norm() / whole.norm()) < 0.05  # the base rounds to eight bits in either


def test_explain_says_times_ratios_and_what_would_help() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    batch = (torch.randn(6, 4), torch.zeros(6, dtype=torch.long))
    found = qt.explain(model, batch, nn.CrossEntropyLoss())
    assert found.records == 6
    assert found.plain_seconds is not None
    assert found.private_seconds is not None
    assert found.ratio == pytest.approx(found.private_seconds / found.plain_seconds)
    assert "6 records: " in str(found)
    assert "for a plain gradient" in str(found)
    slow = type(found)(found.parts, 6, 1e-3, 5e-3)
    assert slow.advice == ("Give it larger samples: 6 records are few for one pass.",)
    assert "adapters (LoRA)" in type(found)(found.parts, 64, 1e-3, 5e-3).advice[0]

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            scaled: Tensor = self.layer(x) * float(x.detach().abs().sum())
            return scaled

    asked = qt.explain(Alone(), batch, nn.CrossEntropyLoss())
    assert asked.parts[0].how != "one record at a time" or asked.advice[0].startswith("Let all records run at once")
