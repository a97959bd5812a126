# %% [markdown]
# # PyTorch, coming from Opacus
#
# In this lesson you port an Opacus loop, and then hand the loop over to `qt.fit`. The verbs are the ones you know. Three
# things are new:
#
# - the whole cost is written to a ledger before the first step;
# - batches are secret Poisson samples, whatever the loader did;
# - model and criterion run on one record at a time, so that ε holds without a condition.

# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X = torch.randn(4000, 8)
y = (X[:, 0] + 0.5 * X[:, 1] > 0).long()
people = TensorDataset(X[:2000], y[:2000])  # the other 2000 are for testing; all are synthetic
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

# %% [markdown]
# ## A custom training loop
#
# Pass the criterion, and a fourth value comes back. Everything else is as in Opacus.

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
# Anything else that a loop does to a batch or a loss (`loss.item()`, a loss function of its own) still runs. The
# statement then has a condition that says what ε rests on. `qt.PrivateLoop` hands out samples that cannot be read at all,
# so its ε never has a condition.

# %% [markdown]
# A score of real people is data. A score on training records is covered by no ε, and held-out people are people too.
# [`private_score`](../estimators-results.md) releases a score with noise, of any model with `predict_proba`.

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
# ## Which layers are fast?
#
# `qt.explain` lists for each parameter whether a kernel makes its clipped sum, or whether it is copied for each record.

# %%
print(qt.explain(fresh, (X[:8], y[:8]), nn.CrossEntropyLoss()))

# %% [markdown]
# Next: [PyTorch](../torch.md) for data, padding and the table of verbs; [the proof](../torch-proof.md) of why one record
# moves a sum by at most C.
