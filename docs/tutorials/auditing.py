# %% [markdown]
# # Auditing a claim
#
# In this lesson you attack a private algorithm, find noise that is missing, and check a claim that another person signed.
#
# An ε is a statement about all attacks. An audit mounts some of them and fails if one does better than ε allows. It
# cannot prove a claim. It can refute a false one, and it says when it was too weak to refute any.

# %%
import quietgrad as qg

method, budget = qg.DPGD(steps=10), qg.Budget(6.0, 1e-5)
report = qg.audit.run(method, budget=budget, n=50, runs=4000)
print(report.verdict, f"ε ≥ {report.epsilon_lower:.2f} seen, ε ≤ {report.epsilon_claimed:.2f} claimed")

# %% [markdown]
# `epsilon_lower` is proved by the attack, except with probability 10⁻⁶. It lies below the claim, so the claim stands. It
# does not lie far below, so the attack was strong.
#
# ## Half the noise is found
#
# Now the noise is half of what ε needs, as if a factor 2 had been forgotten in the code:

# %%
plan = qg.plan(method, n=50, budget=budget)
weak = qg.audit.run(
    method, budget=budget, n=50, runs=4000, claimed=plan, noise_multiplier=plan.noise_multiplier / 2
)
print(weak.verdict, "by", weak.layer)

# %% [markdown]
# ## Check another person's claim
#
# A finished run is audited from its folder (`quietgrad audit RUN`), and its report then shows the result. A certificate is
# checked without any run: two accountants prove ε again from the listed releases.

# %%
import numpy as np
from quietgrad.assurance.certificates import SigningKey, check, issue, new_key, public_key

rows = np.random.default_rng(0).normal(size=(500, 3))
result = qg.minimize(
    qg.objectives.Logistic(), (rows, (rows[:, 0] > 0) * 1.0), qg.DPGD(steps=10), budget=qg.Budget(1.0, 1e-5)
)
result.save("run")
new_key("signer.key")
document = SigningKey.read("signer.key").sign(issue("run"))
verdict = check(document, public_key=public_key("signer.key.pub"))
print(verdict.claim, "→", "holds" if verdict.ok else "does not hold")
for line in verdict.not_shown[:2]:
    print("not shown:", line)

# %% [markdown]
# If ε is halved afterwards, the check fails without any key: the releases do not prove it. With the signer's public key
# every other edit is detected too, because the signature covers the whole document.

# %%
import copy

from quietgrad.assurance.certificates import PrivacyCertificate

halved, looser = copy.deepcopy(document.body), copy.deepcopy(document.body)
halved["claim"]["epsilon"] /= 2
looser["claim"]["delta"] *= 2
for forged, key in (
    (PrivacyCertificate(halved), None),
    (PrivacyCertificate(looser, document.signature), public_key("signer.key.pub")),
):
    print([finding.what for finding in check(forged, public_key=key).findings if finding.ok is False])
