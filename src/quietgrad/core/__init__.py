"""The core: all that must be right for a stated ε, besides the clipped sums. It imports nothing above itself.

Clipped sums are made in :mod:`quietgrad.tables` and :mod:`quietgrad.torch.networks`.

A run is opened under terms, released through a session, and closed with a statement:

>>> import numpy as np
>>> from quietgrad.core import Budget, Terms, opened
>>> from quietgrad.methods.dp_sgd import DPGD
>>> from quietgrad.objectives import Logistic
>>> X = np.linspace(-1.0, 1.0, 4000)[:, None]
>>> y = (X[:, 0] > 0) * 1.0
>>> terms = Terms.of(Budget(epsilon=1.0, delta=1e-6), account="patients")
>>> with opened(Logistic(), (X, y), lambda n: DPGD(steps=30), terms) as run:  # count, plan, keep, reserve, open
...     state = run.method.init(run.start)
...     while not state.done:
...         state = run.method.step(state, run.session)  # asks the session for noisy sums, and moves
...     print(run.close("steps"))  # what is proved
(1, 1e-06)-DP, add-remove, proved by gaussian-exact

From the loop down:

================  ==================================================================================================
``session``       ``opening`` (:class:`Terms`, :func:`opened`), the curator, the session that clips, sums and adds
                  noise, queries, transcripts, kept runs, statements
``plans``         what a method will release, and the noise that meets a budget
``ledger``        who pays (``account``), and the hash-chained file that records it
``sampling``      which records take part in a release
``noise``         the random source and the mechanisms: the one place that adds noise
``accounting``    budgets, events, and the accountants that prove their ε
================  ==================================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quietgrad.core.exports import lazy_names

if TYPE_CHECKING:
    from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
    from quietgrad.core.ledger.account import Account
    from quietgrad.core.ledger.ledger import Ledger
    from quietgrad.core.plans.schedule import Plan, plan
    from quietgrad.core.session.opening import Keeping, OpenRun, Terms, opened, opening, reopened
    from quietgrad.core.session.statement import Privacy

__all__ = [
    "Account",
    "Budget",
    "Keeping",
    "Ledger",
    "OpenRun",
    "Plan",
    "Privacy",
    "PrivacyUnit",
    "Relation",
    "Terms",
    "opened",
    "opening",
    "plan",
    "reopened",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "core.accounting.budget": "Budget PrivacyUnit Relation",
        "core.ledger.account": "Account",
        "core.ledger.ledger": "Ledger",
        "core.plans.schedule": "Plan plan",
        "core.session.opening": "Keeping OpenRun Terms opened opening reopened",
        "core.session.statement": "Privacy",
    },
)
