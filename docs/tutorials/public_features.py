# %% [markdown]
# # Features of a public network
#
# In this lesson you train a small network on public pictures, freeze it, and fit a private linear model on its features.
# The private pictures pay for the linear model alone. You need torch. It takes a minute.
#
# ## Public pictures and private ones
#
# scikit-learn ships 1797 handwritten digits of 8 × 8 pixels. We take the first 1000 as the public ones, as if another
# institute had published them. The others play the private records; 200 of them are held out.

# %%
from sklearn.datasets import load_digits

pixels, digits = load_digits(return_X_y=True)
pixels = pixels / 16
X_public, y_public = pixels[:1000], digits[:1000]
X, y = pixels[1000:1597], digits[1000:1597]
X_test, y_test = pixels[1597:], digits[1597:]
X.shape, X_test.shape

# %% [markdown]
# ## Train on the public pictures
#
# This is plain torch. No private record is seen, so nothing is charged. If you tuned the network on the private pictures,
# even once, its weights would not be public any more. No program can check that; it is your statement.

# %%
import torch

torch.manual_seed(0)
body = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(),
    torch.nn.Linear(256, 32), torch.nn.ReLU(),
)  # fmt: skip
head = torch.nn.Linear(32, 10)
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=3e-3)
inputs, labels = torch.tensor(X_public, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(y_public)
for _ in range(30):
    for batch in torch.randperm(1000).split(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(body(inputs[batch])), labels[batch]).backward()
        optimizer.step()

# %% [markdown]
# ## Freeze it
#
# `Frozen` keeps a copy of the network and asks it about one record at a time. A row of features therefore depends on that
# row alone, and costs no privacy. The digest names the network: weights that differ in one bit have another one.

# %%
from quietgrad.features import Frozen

features = Frozen(body, shape=(1, 8, 8))
features.rows(X[:3]).shape, features.digest

# %% [markdown]
# ## Fit on the private pictures
#
# The estimator gets pixels, and makes features of them at the fit and at every prediction. We compare with a model of the
# pixels themselves, whose range is public.

# %%
from quietgrad.estimators import PrivateLogisticRegression

budget = {"epsilon": 0.5, "delta": 1e-4, "classes": list(range(10)), "ledger": "ledger.jsonl", "account": "writers"}
of_pixels = PrivateLogisticRegression(**budget, feature_bounds=[(0, 1)] * 64).fit(X, y)
of_features = PrivateLogisticRegression(**budget, features=features).fit(X, y)
print(f"pixels    {of_pixels.score(X_test, y_test):.2f}")
print(f"features  {of_features.score(X_test, y_test):.2f}   (of held-out pictures, scored without noise)")

# %% [markdown]
# ## The digest is part of the claim
#
# The privacy statement names the network, and the certificate binds the statement. Who checks the claim can ask for the
# weights and compare.

# %%
print(*(note for note in of_features.privacy_.notes if "sha256" in note))

# %% [markdown]
# A saved model remembers the digest, too. It predicts with the same network only:

# %%
from quietgrad.errors import DataError
from quietgrad.estimators import from_run, to_run

to_run(of_features, "runs/digits")
assert (from_run("runs/digits", features=features).predict(X_test) == of_features.predict(X_test)).all()

with torch.no_grad():
    body[0].weight[0, 0, 0, 0] += 1e-6
try:
    from_run("runs/digits", features=Frozen(body, shape=(1, 8, 8)))
except DataError as refusal:
    print(refusal)

# %% [markdown]
# ## From the command line
#
# The command line takes the network as an ONNX file, which holds its code as well as its weights
# (`pip install 'quietgrad[onnx]'`; `torch.onnx.export` writes such a file). The run keeps a copy of the file for predictions.
#
# ```
# quietgrad train digits.csv --label digit --classes 0,1,2,3,4,5,6,7,8,9 --features body.onnx --epsilon 1 --out runs/digits
# ```
#
# Next: [Public features](../features.md) says what is checked and what is not.
