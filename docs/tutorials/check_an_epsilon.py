# %% [markdown]
# # Check another program's ε
#
# In this lesson you check an ε that another program printed, find one that is false, and keep one budget over several
# programs. You are a data protection officer, a reviewer or a curious colleague. You have files and trust no program.
#
# `quietgrad-verify` is a package of its own (`pip install quietgrad-verify`). It shares no code with quietgrad.
#
# ## A claim
#
# A colleague trained a model with Opacus. She made a claim of the run: which releases there were, and on what ε rests.
# She used `adapters.from_opacus(engine, delta=1e-5, data_loader=loader, optimizer=optimizer)`. Here the same releases are
# written by hand, because Opacus is not installed where this page is built.

# %%
from quietgrad_verify import adapters, check

step = {"event": "poisson", "rate": 0.1, "inner": adapters.gaussian(3.0)}
claim = adapters.make_claim(
    adapters.repeated(step, 30),
    delta=1e-5,
    relation="add-remove",
    program="opacus",
    program_version="1.6.0",
    read_from="PrivacyEngine",
    stated=0.762,
    conditions=["the batches were this loader's and stayed secret", "losses and layers treat records apart"],
)
verdict = check(claim)
print(verdict.ok, "·", verdict.headline)

# %% [markdown]
# Read the verdict in three parts. *Findings* say what was checked:

# %%
for finding in verdict.findings:
    print(f"{finding.what:<10} {finding.ok!s:<6} {finding.words}")

# %% [markdown]
# *Open* are the fields that nothing holds fast. The file is not signed, so anybody could have written another unit or
# another condition into it. The headline repeats none of them.

# %%
print(", ".join(verdict.open))

# %% [markdown]
# *Not shown* is what no file can show. Ask the author about these:

# %%
print("\n".join(verdict.not_shown[:4]))

# %% [markdown]
# On a terminal the same is `quietgrad-verify claim.json --html verdict.html`. It ends with exit code 0 if the claim is proved, 1
# if it is not, and 2 if the file cannot be read.
#
# ## A false ε
#
# Another colleague shuffled the data and cut it into batches, as most training loops do. The accountant priced Poisson
# samples all the same. The adapter sees the loader and prices what happened: each record is in one batch of each of three
# epochs, without any amplification.

# %%
shuffled = adapters.make_claim(
    adapters.repeated(adapters.gaussian(3.0), 3),
    delta=1e-5,
    relation="replace-one",
    program="opacus",
    program_version="1.6.0",
    read_from="PrivacyEngine",
    stated=0.762,
    conditions=["every record was in at most one batch of an epoch"],
    notes=["batches came from a shuffled loader, and were priced as Poisson samples"],
)
print(next(finding.words for finding in check(shuffled).findings if finding.what == "printed"))

# %% [markdown]
# Three more are found this way: replace-one priced as add-remove, adaptive clipping whose count is not priced, and the ε
# of one round that is published as the total.
#
# ## Who says so
#
# A signature binds every field. Now the unit and the condition stand in the headline.

# %%
import tempfile
from pathlib import Path

from quietgrad.assurance.certificates import PrivacyCertificate, SigningKey, new_key
from quietgrad_verify import read

home = Path(tempfile.mkdtemp())
public = new_key(home / "signer.key")
signed = SigningKey.read(home / "signer.key").sign(PrivacyCertificate(claim.body))
file = signed.write(home / "claim.json")
print(check(read(file), public_key=public).headline)

# %% [markdown]
# ## One budget over all programs
#
# The same people are in all these runs, so their costs add up. The institution caps its account at ε = 2 and charges every
# claim to it.

# %%
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.errors import BudgetError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.assurance.certificates import charge_claim
from quietgrad.assurance.certificates import read as read_certificate

ledger = Ledger(home / "ledger.jsonl")
ledger.set_cap("patients", Budget(2.0, 1e-5, "replace-one"))
charge_claim(ledger, read_certificate(file), "patients")
print(f"spent: {ledger.spent('patients', delta=1e-5, relation='replace-one').epsilon:.2f}")

try:
    charge_claim(ledger, PrivacyCertificate(shuffled.body), "patients")
except BudgetError as error:
    print("refused:", str(error)[:80])

# %% [markdown]
# On a terminal: `quietgrad ledger add ledger.jsonl claim.json --account patients`. The entry is conditional, and
# `quietgrad ledger show` repeats under what.
#
# What is in a file, and what each field is worth: [the format](../certificate-format.md).
