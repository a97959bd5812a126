# %% [markdown]
# # A language model with private adapters
#
# In this lesson you train LoRA adapters on a small GPT whose base is frozen in bfloat16, and put adapter, model card and
# certificate into one folder of the shape that model hubs read. The weights are random and the text is made here, so
# that the page runs in seconds. With a real checkpoint only the two lines that make model and text change.

# %%
from pathlib import Path

import peft
import torch
import transformers

import quietgrad as qg
import quietgrad.torch as qt

torch.manual_seed(0)
TEXT = "the patient reports mild severe chest back pain since monday friday and takes no daily medication"
WORDS = TEXT.split()
TOKEN = {word: number for number, word in enumerate(["<pad>", *WORDS])}
generator = torch.Generator().manual_seed(0)


def note() -> str:
    """One synthetic note: five to nine words."""
    length = int(torch.randint(5, 10, (1,), generator=generator))
    return " ".join(
        WORDS[int(k)] for k in torch.randint(0, len(WORDS), (length,), generator=generator).sort().values
    )


notes = [note() for _ in range(600)]
ids = torch.zeros(600, 9, dtype=torch.long)
for row, text in zip(ids, notes, strict=True):
    row[: len(text.split())] = torch.tensor([TOKEN[word] for word in text.split()])
labels = ids.masked_fill(ids == 0, -100)
print(notes[0])

# %% [markdown]
# ## A frozen base, and adapters in float32
#
# `peft` freezes the base and adds adapters. The base stays in bfloat16. What is trained is float32, and so is everything
# that is clipped.

# %%
config = transformers.GPT2Config(
    vocab_size=len(TOKEN), n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
)
base = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
model = peft.get_peft_model(
    base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
)
trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
print(len(trained), "matrices are trained,", {str(param.dtype) for param in trained.values()})
print("frozen:", {str(param.dtype) for param in model.parameters() if not param.requires_grad})

# %% [markdown]
# ## Training
#
# `qt.causal_lm_loss` gives every note the same weight, however long it is. The loop is kept in a folder: interrupted, the same
# call goes on.


# %%
def loss(model, x, y):
    """The loss of one note; padding is left out."""
    return qt.causal_lm_loss(model(input_ids=x, attention_mask=(x != 0).long()).logits, y)


loop = qt.PrivateLoop(
    model,
    loss,
    (ids, labels),
    optimizer=torch.optim.AdamW(trained.values(), lr=0.02),
    batch_size=60,
    epochs=3,
    max_grad_norm=0.5,
    clipping="automatic",
    budget=qg.Budget(4.0, 1e-4),
    n_public=600,
    folder="run",
    ledger="ledger.jsonl",
    account="notes",
)
for batch in loop:
    loop.step(batch)
print(loop.privacy)

# %% [markdown]
# ## A folder for a hub
#
# The adapter is saved by `peft`; card and certificate are made from the run, which proves its ε again.

# %%
from quietgrad.assurance.certificates import issue
from quietgrad.assurance.report.card import write_cards

hub = Path("hub")
model.save_pretrained(hub)
write_cards(Path("run"), hub / "README.md")
issue("run").write(hub / "certificate.json")
print(sorted(path.name for path in hub.iterdir()))

# %% [markdown]
# To publish it, push the folder: `hf upload NAME/notes-adapter hub`. Readers check the claim with
# `quietgrad verify certificate.json`, or with `quietgrad-verify`, which shares no code with the library.
