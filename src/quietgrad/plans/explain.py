"""A plan in words: each release, its sensitivity, its amplification, and the accountant that proved the total."""

from __future__ import annotations

from quietgrad.plans.schedule import Plan, Slot
from quietgrad.privacy.budget import Relation, Unit

_NEIGHBOURS = {
    Relation.ADD_REMOVE: "adding or removing one record",
    Relation.REPLACE_ONE: "replacing one record by any other",
}
# Not "a record contributes at most C": counts and moments of fixed length have a C of their own under replace-one.
_MOVES = {
    Relation.ADD_REMOVE: "a record more or less moves it by at most C (L2)",
    Relation.REPLACE_ONE: "a record replaced moves it by at most 2C (L2)",
}


def explain(plan: Plan) -> str:
    """Return the text that :meth:`quietgrad.plans.schedule.Plan.explain` prints."""
    text = plan.unit.in_words(_records(plan))
    if plan.records_public is None:
        return text
    head, _, rest = text.partition("\n")
    return f"{head}\nin all: {plan.declared}\n{rest}"


def _records(plan: Plan) -> str:
    whom = "" if plan.unit is Unit.RECORD else "; one is a person with everything that is recorded of them"
    known = "a public number" if plan.counted is None else "counted privately"
    head = f"{plan.algorithm} on n = {plan.n_public} records ({known}{whom})"
    if plan.budget is None:
        return f"{head}\nNOT PRIVATE: no noise is added, and no ε can be stated."
    relation = plan.budget.relation
    lines = [
        head,
        f"promise: {_NEIGHBOURS[relation]} ({relation}) changes every output's odds by at most e^ε, but for δ",
        *("  " + _slot(plan, slot, relation) for slot in plan.schedule.slots),
    ]
    lines.append(f"composition: {_composition(plan)}")
    proof = plan.proof
    lines.append(
        f"cost: ε = {proof.epsilon:.4g} at δ = {proof.delta:g} ({relation}), "
        f"proved by the {proof.accountant} accountant" + ("" if plan.condition is None else f", {plan.condition}")
    )
    if plan.paper_noise:
        lines.append(
            f"noise: as printed in the paper ({plan.paper_noise}); the ε above is what is true of it, "
            f"whatever was claimed (budget asked: ε = {plan.budget.epsilon:g})"
        )
    return "\n".join(lines)


def _slot(plan: Plan, slot: Slot, relation: Relation) -> str:
    times = f"up to {slot.count}×" if slot.law else f"{slot.count}×"
    text = f"{times} {slot.name!r}: {slot.mechanism.what} over {slot.sampling.describe()}; {_MOVES[relation]}; "
    if plan.schedule.composition == "filter":
        return text + "noise chosen per release within one zCDP filter"
    text += slot.mechanism.describe(slot.multiplier(plan.noise_multiplier))
    return text + ("; the number of releases is drawn before the run" if slot.law else "")


def _composition(plan: Plan) -> str:
    for slot in plan.schedule.slots:
        if slot.mechanism.together:
            return slot.mechanism.together
    return {
        "sequential": "adaptive, all releases on the same people",
        "parallel": "each record is used in one release only, so the worst release counts",
        "filter": "adaptive noise levels under a hard zCDP filter",
        "select": "a secret random number of rounds, of which only the best leaves",
    }[plan.schedule.composition]
