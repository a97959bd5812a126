# %% [markdown]
# # A private logistic regression, with intervals and a report
#
# A table of people, a question, and a promise. Everything you say about the table before the fit (names, ranges,
# classes) is public; everything else is found under the promise or not at all.

# %%
import numpy as np
import pandas as pd

rng = np.random.default_rng(7)
n = 20_000
age, income = rng.uniform(18, 90, n), rng.lognormal(10, 0.5, n).clip(0, 200_000)
X = pd.DataFrame({"age": age, "income": income})
y = (rng.random(n) < 1 / (1 + np.exp(-(0.06 * (age - 50) + income / 60_000 - 0.4)))).astype(int)

# %% [markdown]
# ## Fit
#
# `classes` and `feature_bounds` are declared: they are known without looking. The ledger keeps what is spent on these
# people, for this fit and for every later one.

# %%
from quietgrad.estimators import PrivateLogisticRegression

model = PrivateLogisticRegression(
    epsilon=1.0,
    delta=1e-6,
    classes=[0, 1],
    feature_bounds={"age": (18, 90), "income": (0, 200_000)},
    inference=True,
    ledger="ledger.jsonl",
    account="patients",
).fit(X[:16_000], y[:16_000])
model.privacy_

# %% [markdown]
# ## How sure are the coefficients?
#
# With `inference=True` a part of the budget bought standard errors. They cover the sampling of people and the noise.

# %%
print(model.summary())

# %% [markdown]
# ## How good is it?
#
# Held-out people are people too. Their score is a release like any other, with its own account.

# %%
from quietgrad.estimators import private_score

score = private_score(
    model, X[16_000:], y[16_000:], epsilon=0.3, delta=1e-6, ledger="ledger.jsonl", account="held-out"
)
print(f"accuracy {score.accuracy[0]:.3f} ± {score.accuracy[1]:.3f}, AUC {score.auc[0]:.3f} ± {score.auc[1]:.3f}")

# %% [markdown]
# ## What was spent

# %%
import quietgrad as qg

qg.Ledger("ledger.jsonl")

# %% [markdown]
# ## A report to hand on
#
# `quietgrad report` writes one page that loads nothing from elsewhere: the promise, the releases, the account, what is
# not covered. `quietgrad certificate` writes the same claim for a program that does not trust you.

# %%
from quietgrad.estimators.runs import to_run
from quietgrad.report.page import write_report
from pathlib import Path

to_run(model, "run")
print(write_report([Path("run")], Path("report.html"), ledger=Path("ledger.jsonl")).name, "written")
