# %% [markdown]
# # PyTorch, coming from Opacus
#
# The verbs are the ones you know. What is new: the whole cost is written down before the first step, samples are secret
# Poisson samples whatever the loader did, and model and criterion are run for one record at a time, so that ε holds
# without a condition.

# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X = torch.randn(4000, 8)
y = (X[:, 0] + 0.5 * X[:, 1] > 0).long()
people = TensorDataset(X[:2000], y[:2000])  # the other 2000 are made up as well, and nobody's secret
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

# %% [markdown]
# ## Your own loop

# %%
import quietgrad.torch as qt

optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(people, batch_size=100)
model, optimizer, loader, criterion = qt.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=3.0,
    target_delta=1e-5,
    epochs=3,
    max_grad_norm=1.0,
    criterion=nn.CrossEntropyLoss(),
)
for _ in range(3):
    for x, label in loader:
        optimizer.zero_grad()
        criterion(model(x), label).backward()
        optimizer.step()
with torch.no_grad():
    right = (model(X[2000:]).argmax(1) == y[2000:]).float().mean()
print(f"accuracy {right:.3f}, {loader.privacy}")

# %% [markdown]
# Whatever else a loop does to a batch or a loss (`loss.item()`, a loss function of its own) still runs, and the statement
# then says what ε rests on. `qt.PrivateLoop` hands out samples that cannot be read at all.

# %% [markdown]
# A score of real people is data: of the records trained on, it is covered by no ε, and held-out people are people too.
# [`private_score`](../estimators.md) releases one with noise, of any model with `predict_proba`.

# %% [markdown]
# ## Or hand the loop over
#
# `qt.fit` takes one loss per example and any algorithm of the table; the result states what was proved.

# %%
import quietgrad as qg

fresh = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
losses = lambda output, label: nn.functional.cross_entropy(output, label, reduction="none")
result = qt.fit(
    fresh,
    losses,
    people,
    qg.DPSGD(steps=60, batch_size=100, learning_rate=0.5),
    budget=qg.Budget(epsilon=3.0, delta=1e-5),
)
result

# %% [markdown]
# ## What runs how
#
# Which layers have a kernel, which fall back and which are refused, and why: see
# [PyTorch](../torch.md) and [the proof](../torch-proof.md).
