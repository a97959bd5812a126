# %% [markdown]
# # Five hospitals
#
# Five institutions train one model. None shows its records, and the coordinator sees no hospital's gradient: only sums
# are opened, with noise inside that nobody knows whole. The records here are made up.

# %%
import numpy as np

rng = np.random.default_rng(3)
truth = np.array([1.5, -1.0, 0.5])


def hospital(n):
    X = rng.normal(size=(n, 3))
    X /= np.maximum(1, np.linalg.norm(X, axis=1, keepdims=True))
    return X, (rng.random(n) < 1 / (1 + np.exp(-4 * X @ truth))).astype(float)


# %% [markdown]
# ## One process first
#
# `simulate` runs the real protocol between parties in one process. `trust="secure"` with `secure="masks"` is the
# setting above; `"curator"` would trust the coordinator, `"local"` nobody at all. The row *adversary* of the result says
# who would have to work together to learn what.

# %%
import quietgrad as qg
from quietgrad.federation import Party, simulate

parties = [Party(*hospital(n)) for n in (900, 1500, 2100, 700, 1800)]
budget = qg.Budget(epsilon=1.0, delta=1e-6)
method = qg.DPGD(steps=15, learning_rate=4.0)
result = simulate(
    method, qg.objectives.Logistic(row_bound=1.0), parties, budget=budget, trust="secure", secure="masks"
)
result.privacy

# %% [markdown]
# ## What the secure sum costs
#
# With a coordinator whom all trust, the same ε needs a little less noise. In the secure run each hospital adds a quarter
# of the variance, not a fifth, so that one hospital that works with the coordinator (`colluders=1`, the default) still
# faces the whole noise of the other four. On 20 000 new made-up patients:

# %%
trusting = simulate(method, qg.objectives.Logistic(row_bound=1.0), parties, budget=budget, trust="curator")
X, y = hospital(20_000)
for name, run in (("secure", result), ("trusted curator", trusting)):
    print(f"{name:16} accuracy {((X @ run.params > 0) == y).mean():.3f}")

# %% [markdown]
# ## Then over the network
#
# `quietgrad federate provision`, `server` and `party` run the same plan between real machines; each hospital reads the
# plan, approves it once, and keeps its own ledger. See [over the network](../federation-network.md).
