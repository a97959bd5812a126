# %% [markdown]
# # Five hospitals
#
# In this lesson five hospitals train one model. No hospital shows its records, and the coordinator sees no hospital's
# gradient. Only sums are opened, with noise inside that no member knows as a whole. The records are synthetic.

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
# setting above. `"curator"` would trust the coordinator; with `"local"` each hospital adds its own noise and trusts no
# other member. `DPGD` is gradient descent with noise; `row_bound=1.0` declares that no row is longer than 1.

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
# The row *adversary* says who would have to collude to learn what. The row *releases* counts the noisy sums: one for each
# step. (ε, δ) holds for every record of every hospital.
#
# ## What the secure sum costs
#
# With a trusted coordinator the same ε needs a little less noise. In the secure run each hospital adds a quarter of the
# variance, not a fifth. One hospital that colludes with the coordinator (`colluders=1`, the default) then still faces the
# whole noise of the other four. On 20 000 new synthetic patients:

# %%
trusting = simulate(method, qg.objectives.Logistic(row_bound=1.0), parties, budget=budget, trust="curator")
X, y = hospital(20_000)
for name, run in (("secure", result), ("trusted curator", trusting)):
    print(f"{name:16} accuracy {((X @ run.params > 0) == y).mean():.3f}")

# %% [markdown]
# ## What if one hospital trusts no other member?
#
# With `trust="local"` each hospital adds noise for its own records before it sends anything. The sum then has five times
# the variance, and the model pays for it:

# %%
local = simulate(method, qg.objectives.Logistic(row_bound=1.0), parties, budget=budget, trust="local")
print(f"local accuracy {((X @ local.params > 0) == y).mean():.3f}")

# %% [markdown]
# ## Then over the network
#
# `quietgrad federate provision`, `server` and `party` run the same plan between machines. Each hospital reads the plan,
# approves it once, and keeps its own ledger. See [deploy over TLS](../federation-network.md). Hospitals that already run
# NVIDIA FLARE or Flower use it as a job or an app: [FLARE](../flare.md), [Flower](../flower.md).
