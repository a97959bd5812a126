# %% [markdown]
# # A private logistic regression, with intervals and a report
#
# In this lesson you fit a private model to a table of patients, read its intervals, release a private score, look at the
# ledger, and write a report and a model card. You need pandas. The table is synthetic.

# %%
import numpy as np
import pandas as pd

rng = np.random.default_rng(7)
n = 20_000
age, income = rng.uniform(18, 90, n), rng.lognormal(10, 0.5, n).clip(0, 200_000)
X = pd.DataFrame({"age": age, "income": income})
y = (rng.random(n) < 1 / (1 + np.exp(-(0.06 * (age - 50) + income / 60_000 - 0.4)))).astype(int)
X.head(3).round()

# %% [markdown]
# ## Before the fit: what is public?
#
# Everything you say about the table before the fit must be public: names, ranges, classes. Take it from a code book. A
# range computed with `X.min()` would be a release without noise. What you leave out is estimated privately and costs part
# of the budget.
#
# You also choose the budget. ε = 1 with δ = 10⁻⁷, at most 1/(100 n), means: an attacker who knows every other row and accepts 5 % false alarms
# detects one patient's row at most 13.6 % of the time.
#
# ## Fit
#
# `ledger` and `account` say where the cost is recorded. An account is a group of people. All fits on one account add up.

# %%
from quietgrad.estimators import PrivateLogisticRegression

model = PrivateLogisticRegression(
    epsilon=1.0,
    delta=1e-7,
    classes=[0, 1],
    feature_bounds={"age": (18, 90), "income": (0, 200_000)},
    inference=True,
    ledger="ledger.jsonl",
    account="patients",
).fit(X[:16_000], y[:16_000])
model.privacy_

# %% [markdown]
# *add-remove* is the neighbouring relation: two tables that differ by one row look alike. *gaussian-exact* is the
# accountant that proved ε. The number of rows is secret under add-remove, so a small part of ε was spent on counting them.
#
# ## How certain are the coefficients?
#
# With `inference=True` a part of the budget bought standard errors. They cover both the sampling of people and the
# privacy noise. The true coefficients of this synthetic table are 0.06 per year and 1/60 000 per unit of income.

# %%
print(model.summary())

# %% [markdown]
# ## How good is it on new people?
#
# `model.score` would look at people without noise, and its result must not leave the building. `private_score` releases
# accuracy and AUC with noise. The held-out people have an account of their own.

# %%
from quietgrad.estimators import private_score

score = private_score(
    model, X[16_000:], y[16_000:], epsilon=0.3, delta=1e-6, ledger="ledger.jsonl", account="held-out"
)
print(f"accuracy {score.accuracy[0]:.3f} ± {score.accuracy[1]:.3f}, AUC {score.auc[0]:.3f} ± {score.auc[1]:.3f}")

# %% [markdown]
# ## What was spent
#
# The ledger lists both accounts. A second fit on the patients would add up in the first one. A cap would refuse the fit
# that exceeds it, before any row is read.

# %%
import quietgrad as qg

ledger = qg.Ledger("ledger.jsonl")
for account, delta in (("patients", 1e-7), ("held-out", 1e-6)):
    total = ledger.spent(account, delta=delta, relation="add-remove")
    print(f"{account}: ε = {total.epsilon:.3g} at δ = {delta:g}")

# %%
from quietgrad.core.errors import BudgetError

try:
    PrivateLogisticRegression(
        epsilon=1.0, delta=1e-7, classes=[0, 1], ledger="ledger.jsonl", account="patients", cap=qg.Budget(1.2, 1e-7)
    ).fit(X[:16_000], y[:16_000])
except BudgetError as refusal:
    print(refusal)

# %% [markdown]
# ## A report and a model card to hand on
#
# `to_run` saves the model as a run. `quietgrad report` writes one page that loads nothing from elsewhere: the guarantee,
# the releases, the account, and what is not covered. `quietgrad card` writes a model card, and `quietgrad certificate` the
# same claim for a program that does not trust you.

# %%
from pathlib import Path

from quietgrad.estimators import to_run
from quietgrad.assurance.report.page import write_report

score.save(to_run(model, "run"))
print(write_report([Path("run")], Path("report.html"), ledger=Path("ledger.jsonl")).name, "written")

# %% [markdown]
# Next: [tables and scikit-learn](../estimators.md) for raw files, additive models and searches;
# [user-level privacy](../people.md) if a patient can have several rows.
