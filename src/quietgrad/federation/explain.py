"""A federated plan in words: beside what is released, who takes part, who is trusted, and what that costs."""

from __future__ import annotations

import math

from quietgrad.federation.plan import MATCHED, FederatedPlan
from quietgrad.plans.explain import explain as of_one_table
from quietgrad.privacy.budget import PrivacyUnit
from quietgrad.sampling import FixedSize


def explain(plan: FederatedPlan) -> str:
    """The plan in words, with who takes part, who is trusted, and what that costs in noise."""
    shown = [f"{name} ({size})" for name, size in zip(plan.names, plan.sizes, strict=True)]
    people = ", ".join(shown if len(shown) <= 20 else [*shown[:10], f"… {len(shown)} in all"])
    lines = [of_one_table(plan), f"parties: {people}; a round needs {plan.quorum} of them"]
    if plan.cohort:
        lines.append(
            f"cohorts: {plan.cohort} of {len(plan.names)}, drawn anew in every round, in the open: nothing is "
            f"claimed for it; a mean has {len(plan.names) / plan.cohort:.4g} times the noise of everybody's"
        )
    if plan.secure == "masks":
        lines.append(f"masks: {neighbourhood(plan)}")
    if plan.correlated is not None and plan.quorum < plan.invited:
        lines.append(
            "absences: every round keeps enough noise whoever is missing; a missing share is never taken back, "
            "so the sums of later rounds have more noise"
        )
    lines += [f"retries: {plan.spare} spare rounds of each kind are in the cost"] if plan.spare else []
    lines += [f"batches: {text}" for text in [local_batches(plan)] if text]
    if plan.unit is PrivacyUnit.PERSON:
        lines.append(f"people: {multiplicity(plan)}")
    if plan.largest_factor != 1.0:
        lines.append(
            f"weights: one record counts up to {plan.largest_factor:.4g}·C, and the noise is as much louder"
        )
    who = {"curator": "the coordinator, who sees exact sums", "local": "nobody", "secure": "nobody alone"}[
        plan.trust
    ]
    noise = f"; variance of the noise {plan.variance_factor:.4g} times that of one table" if plan.is_private else ""
    return "\n".join([*lines, f"trusted: {who}{'' if plan.secure is None else f' ({plan.secure})'}{noise}"])


def multiplicity(plan: FederatedPlan) -> str:
    """In how many parties a person may be, and what that costs, in words."""
    times = plan.parties_per_person
    if plan.matched:
        return (
            f"{MATCHED}, and whoever is known to several is kept by one of them, so parties' people are "
            "disjoint; the parties have each other's lists"
        )
    if times == 1:
        return "each is known to one party only, as all of them declare, so parties' people are disjoint"
    not_matched = f"one may be known to {times} parties, as all of them declare; ids are not matched"
    if plan.trust == "local":
        return f"{not_matched}: each party has its own noise, and all {times} are in the price"
    return f"{not_matched}: in a sum they count up to {times}·C, and the noise is as loud"


def neighbourhood(plan: FederatedPlan) -> str:
    """Among whom secrets are shared, with the probabilities that rest on it."""
    terms = plan.terms(1)
    graph = terms.graph
    deviate = "may deviate" if terms.server_may_deviate else "must be honest about who dropped"
    if graph.complete:
        return f"everybody holds shares of everybody, {graph.threshold} open a secret; the coordinator {deviate}"
    return (
        f"each party draws {graph.neighbours} holders of her shares ({graph.threshold} open a secret) and "
        f"masks with {graph.partners} of them; privacy fails with probability "
        f"2^{math.log2(graph.failure):.1f} per drawing (in δ), a round is lost for lack of holders with "
        f"2^{math.log2(graph.lost):.1f}; the coordinator {deviate}"
    )


def local_batches(plan: FederatedPlan) -> str:
    """Fixed local batches in words; empty if every party samples at the one public rate."""
    fixed = [slot.sampling for slot in plan.schedule.slots if isinstance(slot.sampling, FixedSize)]
    if not fixed:
        return ""
    pairs = zip(plan.batch_sizes(fixed[-1].batch_size), plan.sizes, strict=True)
    return f"fixed local batches, {', '.join(f'{b} of {n}' for b, n in pairs)}; ε is the most sampled party's"
