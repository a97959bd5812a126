"""What a finished run may say about its privacy, proved from what it released."""

from __future__ import annotations

from quietgrad.curators.base import Session, Spent
from quietgrad.plans.counting import COUNT
from quietgrad.privacy.events import Composed, composed
from quietgrad.training.result import SEEDED, Privacy

ADVERSARY = "anyone who sees every released number; the curator and its machine are trusted"


def statement(session: Session, spent: Spent, account: str | None, notes: tuple[str, ...]) -> Privacy:
    """State what ``spent`` proves about the people of ``account``, and what it does not cover."""
    the_plan = session.plan
    sampling = "; ".join(f"{slot.name}: {slot.sampling.describe()}" for slot in the_plan.schedule.slots)
    sampling = the_plan.unit.in_words(sampling)
    if the_plan.records_public is not None:
        notes = (*notes, the_plan.declared)
    if the_plan.budget is None or spent.event is None:
        return Privacy(
            epsilon=None,
            delta=None,
            relation=None,
            accountant=None,
            noise_multiplier=0.0,
            events=None,
            releases=spent.releases,
            sampling=sampling,
            adversary=ADVERSARY,
            account=account,
            is_private=False,
            notes=("not private", *notes),
            unit=the_plan.unit,
        )
    from quietgrad.privacy.accounting import prove

    budget = the_plan.budget
    # A filter's run is charged what it spent, but how much that is depends on data: what is proved is its total.
    whole = session.epochs == 1 and (spent.event == the_plan.event or the_plan.schedule.composition == "filter")
    charged = spent.event.parts if session.epochs > 1 and isinstance(spent.event, Composed) else (spent.event,)
    first = None if the_plan.counted is None else the_plan.counted.event(budget.relation)
    released = the_plan.total if whole else composed([*([] if first is None else [first]), *charged])
    proof = the_plan.proof if whole else prove(released, delta=budget.delta, relation=budget.relation)
    epsilon, releases = proof.epsilon, spent.releases
    if the_plan.counted is not None:
        # Another count would have led to another plan; what is promised of all of them is the budget.
        epsilon, releases = max(epsilon, budget.epsilon), {COUNT: 1, **releases}
        notes = (the_plan.counted.describe(the_plan.unit), *notes)
    if the_plan.paper_noise:
        notes = (f"noise as printed for {the_plan.paper_noise}; ε is what is proved, not what was claimed", *notes)
    if budget.delta * the_plan.n_public >= 1.0:
        notes = ("δ is not below 1/n: a mechanism that publishes a random record would satisfy it", *notes)
    if session.epochs > 1:
        again = "resumed on other sums than it was interrupted on: fresh noise was drawn and charged again"
        notes = (again, *notes)
    notes = (*getattr(session, "charged", ()), *notes)
    if session.seeded:
        notes = (SEEDED, *notes)
    return Privacy(
        epsilon=epsilon,
        delta=budget.delta,
        relation=budget.relation,
        accountant=proof.accountant,
        noise_multiplier=the_plan.noise_multiplier,
        events=released,
        releases=releases,
        sampling=sampling,
        adversary=ADVERSARY,
        account=account,
        is_private=not session.seeded,
        notes=notes,
        unit=the_plan.unit,
        condition=the_plan.condition,
    )
