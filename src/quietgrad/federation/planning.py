"""Parties of a federation, and the plan that is made for them without their data, and explained.

An algorithm declares what it asks (``asks``): the kind of each query, its clips, the lengths of its vectors. A
number that follows from earlier releases, such as SPIDER's clip M‖x − x′‖, has an interval. Noise follows a
query's bound, so ε does not depend on where in the interval the number is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.accounting import prove
from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.errors import SettingError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.plans.explain import explain as of_one_table
from quietgrad.core.plans.schedule import calibrate_plan
from quietgrad.core.session.base import Session
from quietgrad.core.session.objectives import Objective
from quietgrad.core.vectors import Vector
from quietgrad.data.dataset import split_dirichlet, split_even, split_uneven
from quietgrad.federation.plan import FederatedPlan, Shape, Trust
from quietgrad.federation.secure.terms import Mode, coarse_reach, threat_model
from quietgrad.federation.wire import Template, template
from quietgrad.methods.base import Algorithm
from quietgrad.methods.minimizing import check_people
from quietgrad.tables.person_ids import factorize_ids
from quietgrad.tables.privacy_units import Combine, RecordsWithIds
from quietgrad.tables.table import rows_in


@dataclass(frozen=True, eq=False)
class Party:
    """One data holder.

    Args:
        X, y: its records; with ``y=None`` ``X`` is whatever the objective takes.
        name: how it is called in plans, errors and results; ``party-1`` … if left out.
        n_public: its declared number of records. Under add-remove the true number is private: declare one, or the
            length of the data is taken and thereby declared public.
        ledger, account, cap: its own ledger, as in :func:`quietgrad.minimize`.
        ids: whole numbers that name its records across all parties, for sampling by record in tests.
        person: one id per record, of the person it is about; ``n_public`` then counts people. Ids mean the same
            people at every party.
    """

    X: Any
    y: Any = None
    name: str | None = None
    n_public: int | None = None
    ledger: Ledger | str | Path | None = None
    account: str = "default"
    cap: Budget | None = None
    ids: npt.ArrayLike | None = None
    person: Any = None

    @property
    def data(self) -> Any:
        """The data as the objective takes them."""
        return self.X if self.y is None else (self.X, self.y)

    @property
    def held(self) -> Any:
        """The data, with the person of each record if that is known."""
        return self.data if self.person is None else RecordsWithIds(self.data, self.person)

    @cached_property
    def size(self) -> int:
        """The declared number of records, or people, or the true one."""
        if self.n_public is not None:
            return self.n_public
        first = self.X
        while self.y is None and isinstance(first, tuple):  # (X, y) of a network, or ((X1, X2), y)
            first = first[0]
        rows = rows_in(first)
        return rows if self.person is None else factorize_ids(self.person, rows)[1]


def deal(
    X: Any,
    y: npt.ArrayLike,
    m: int,
    *,
    unevenness: float = 1.0,
    dirichlet: float | None = None,
    seed: int | None = 0,
) -> list[Party]:
    """Split one table among m parties.

    Sizes are even, or n_max/n_min = ``unevenness``, or labels are skewed.

    Args:
        unevenness: n_max/n_min, sizes between them geometric; 1 is even. (Paper 002's u has two groups of sizes.)
        dirichlet: α of label shares drawn from Dirichlet(α) instead; small α makes the parties' labels differ.
        seed: of the shuffle; ``None`` keeps the order (even and uneven splits only).
    """
    labels = np.asarray(y)
    if dirichlet is not None:
        if unevenness != 1.0 or seed is None:
            raise ValueError("dirichlet: needs a seed, and sizes follow from the labels; leave unevenness out.")
        parts = split_dirichlet(labels, m, dirichlet, seed)
    elif unevenness == 1.0:
        parts = split_even(len(labels), m, seed)
    else:
        parts = split_uneven(len(labels), m, unevenness, seed)
    return [Party(X[part], labels[part], ids=part) for part in parts]


LONG = 1 << 16
"""Numbers in a vector from which on a 32-bit ring is worth its coarser grid."""
Weights = str | Sequence[float]
"""``"size"`` (n_j/n), ``"equal"`` (1/m), or one number per party."""


def factors(weights: Weights, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """Return each party's factor w_j·n/n_j of its sum, so that the average of parties has weights w_j.

    >>> factors("size", (30, 10)), factors("equal", (30, 10))
    ((1.0, 1.0), (0.6666666666666666, 2.0))
    """
    m, n = len(sizes), sum(sizes)
    if weights == "size":
        return (1.0,) * m
    given = [1.0] * m if weights == "equal" else [] if isinstance(weights, str) else [float(w) for w in weights]
    if len(given) != m or not all(0.0 <= w < math.inf for w in given) or not sum(given) > 0.0:
        raise ValueError(
            f"weights={weights!r}: must be 'size', 'equal' or {m} numbers ≥ 0, one per party, that do not sum to 0."
        )
    return tuple(w / sum(given) * n / size for w, size in zip(given, sizes, strict=True))


def federate(
    algorithm: Algorithm,
    objective: Objective,
    *,
    names: Sequence[str],
    sizes: Sequence[int],
    shape: Shape,
    budget: Budget | None,
    trust: Trust = "curator",
    secure: Mode | None = None,
    weights: Weights = "size",
    quorum: int | None = None,
    colluders: int = 1,
    servers: int | None = None,
    spare: int = 0,
    noise_multiplier: float | None = None,
    unit: str | PrivacyUnit = "record",
    parties_per_person: int | None = None,
    records_public: int | None = None,
    combine: Combine = "mean",
    records_per_person: int | None = None,
    start: Vector | None = None,
    ring: int | None = None,
    parties_per_round: int | None = None,
) -> FederatedPlan:
    """Calibrate ``algorithm`` for many parties, without touching a record.

    Args:
        names: the parties in order.
        sizes: public number of records, or of people, of each party.
        budget: the guarantee for every record of every party; ``None`` adds no noise.
        noise_multiplier: fix the noise; the plan's ε is then whatever it proves to be.
        unit: ``"person"`` if sizes count people with several records each.
        records_public: how many records people have together at all parties, if that is public.
        start: where the run starts, if not where the objective says.
        ring: bits of a word of masked sums, 32 or 64; chosen by the lengths of vectors and sums unless given.
        parties_per_round: how many parties a round asks.
        weights, servers, the others: as in :func:`~quietgrad.federation.simulation.simulate` and
            :class:`~quietgrad.federation.plan.FederatedPlan`.

    >>> from quietgrad.methods.dp_sgd import DPGD
    >>> from quietgrad.tables.losses import Logistic
    >>> plan = federate(DPGD(steps=3), Logistic(), names=["a", "b"], sizes=[60, 40], shape=Shape(2, 2),
    ...                 budget=Budget(1.0, 1e-5), trust="secure", secure="masks")
    >>> plan.dims, plan.templates["gradient"][0]["query.clip"], plan.variance_factor
    ({'gradient': 2}, 1.0, 2.0)
    """
    privacy_unit = PrivacyUnit.parse(unit)
    if algorithm.by_party:
        if privacy_unit is PrivacyUnit.PERSON:
            raise ValueError(f"{algorithm.name}: its privacy unit is a party; leave out person=.")
        # Who the parties are is public, and each is one unit, however many records it holds.
        privacy_unit, sizes, records_public = PrivacyUnit.PARTY, [1] * len(names), None
    if privacy_unit is PrivacyUnit.PERSON and parties_per_person is None:
        raise ValueError("parties_per_person: say how many parties may know one person, 1 if none is known to two.")
    names, sizes = tuple(names), tuple(int(size) for size in sizes)
    if len(names) != len(sizes) or any(size < 1 for size in sizes):
        raise ValueError(f"sizes={sizes}: must be one whole number ≥ 1 for each of {len(names)} parties.")
    n = sum(sizes)
    if budget is not None and not algorithm.private:
        raise SettingError(
            f"{algorithm.name} is a non-private baseline: pass {{budget=None}}, or use its private form."
        )
    schedule = algorithm.schedule(n)
    schedule = replace(schedule, slots=tuple(slot.lengthened(spare) for slot in schedule.slots))
    count = {None: 0, "masks": 0, "servers": 2, "mpc": 3}.get(secure, 0)
    if servers is not None:
        if not count:
            raise ValueError(f"servers={servers}: only secure='servers' and 'mpc' use servers.")
        count = servers
    if any(slot.mechanism.one_curator for slot in schedule.slots):
        search = getattr(algorithm, "search", None)
        other = ", or search='hessians', which is made of sums" if search == "threshold" else ""
        raise ValueError(
            f"{algorithm.name}: its noisy search needs one curator of all records; use minimize{other}."
        )
    if budget is not None:
        schedule = schedule.under(budget.relation)
        algorithm.check_budget(budget)
    plan = FederatedPlan(
        algorithm=algorithm.name,
        config=json.loads(json.dumps(algorithm.config())),
        schedule=schedule,
        n_public=n,
        budget=budget,
        noise_multiplier=1.0 if budget is not None else 0.0,
        names=names,
        sizes=sizes,
        factors=factors(weights, sizes),
        quorum=(parties_per_round or len(names)) if quorum is None else quorum,
        colluders=colluders if secure == "masks" else 1,
        servers=tuple(f"server-{k + 1}" for k in range(count)),
        unit=privacy_unit,
        parties_per_person=1 if parties_per_person is None else parties_per_person,
        trust=trust, secure=secure, spare=spare, shape=shape, records_public=records_public,
        combine=combine, records_per_person=records_per_person, parties_per_round=parties_per_round,
    )  # fmt: skip
    check_people(algorithm, plan.asks(objective))
    initial = objective.initial(shape) if start is None else start
    templates, dims = declared(algorithm, objective, plan, initial)
    plan = replace(plan, templates=templates, dims=dims)
    if budget is None:
        return plan
    planned = _calibrated(replace(plan, ring=ring or 64), budget, noise_multiplier)
    if ring is not None or not fits_32_bits(planned):
        return planned
    coarse = _calibrated(replace(plan, ring=32), budget, noise_multiplier)
    return coarse if fits_32_bits(coarse) else planned


def _calibrated(plan: FederatedPlan, budget: Budget, noise_multiplier: float | None) -> FederatedPlan:
    if noise_multiplier is None:
        return calibrate_plan(lambda z: replace(plan, noise_multiplier=z), budget)
    return replace(plan, noise_multiplier=noise_multiplier)


def fits_32_bits(plan: FederatedPlan) -> bool:
    """Whether masked sums are long enough to gain from a 32-bit ring, and no party's sum is too large for it.

    A party's sum of b records is at most b/z in units of σ. Of a random b six standard deviations more are kept
    free; what is larger still is shortened, which costs accuracy and no privacy.
    """
    if plan.secure != "masks" or plan.correlated is not None or max(plan.dims.values()) < LONG:
        return False
    reach = coarse_reach(len(plan.names), plan.quorum - plan.colluders)
    for slot in plan.schedule.slots:
        for j, size in enumerate(plan.sizes):
            sampling = slot.sampling.at_party(plan.sizes, j)
            records = 0.0 if sampling is None else sampling.expected_batch(size)
            if records + 6.0 * math.sqrt(records) > reach * plan.multiplier(slot.name):
                return False
    return True


def declared(
    algorithm: Algorithm, objective: Objective, plan: FederatedPlan, initial: Vector
) -> tuple[dict[str, tuple[Template, ...]], dict[str, int]]:
    """By slot, the queries that ``algorithm`` says it asks, and how long their answers are."""
    templates: dict[str, tuple[Template, ...]] = {}
    dims: dict[str, int] = {}
    # What is known before a run: all that a declaration of queries may depend on.
    public_facts = SimpleNamespace(
        objective=objective, plan=plan, regularizer=objective.regularizer,
        expected_batch=lambda slot: plan.schedule[slot].sampling.expected_batch(plan.n_public),
    )  # fmt: skip
    for slot, asked in algorithm.asks(initial, cast(Session, public_facts)):
        if slot not in {each.name for each in plan.schedule.slots}:
            continue
        query, allowed = template(asked)
        if math.isinf(query.bound) and plan.secure is not None:
            raise SettingError("a secure sum needs a finite bound on every record: clip, or use {trust='curator'}.")
        templates[slot] = (*templates.get(slot, ()), allowed)
        dims[slot] = query.dim(plan.shape)
    if missing := [slot.name for slot in plan.schedule.slots if slot.name not in templates]:
        what = f"does not declare what it asks in slot {missing[0]!r}"
        raise ValueError(f"{algorithm.name}: {what}; with these settings it is for one curator.")
    return templates, dims


def explain(plan: FederatedPlan) -> str:
    """The plan in words, with who takes part, who is trusted, and what that costs in noise."""
    shown = [f"{name} ({size})" for name, size in zip(plan.names, plan.sizes, strict=True)]
    people = ", ".join(shown if len(shown) <= 20 else [*shown[:10], f"… {len(shown)} in all"])
    lines = [of_one_table(plan), f"parties: {people}; a round needs {plan.quorum} of them"]
    if plan.secure == "masks":
        lines.append(f"masks: {neighbourhood(plan)}")
    if plan.correlated is not None and plan.quorum < len(plan.names):
        lines.append(
            "absences: every round keeps enough noise with any party missing; a missing share is never taken back, "
            "so the sums of later rounds have more noise"
        )
    if plan.ring == 32:
        lines.append("integers: words of 32 bits, σ = 2^20 grid units, sums rounded with a secret dither")
    if plan.parties_per_round is not None:
        lines.append(
            f"rounds: each asks {plan.parties_per_round} of {len(plan.names)} parties, drawn in public. It saves "
            "work and buys no privacy: every party is charged for every round"
        )
    lines += [f"retries: {plan.spare} spare rounds of each kind are in the cost"] if plan.spare else []
    lines += [f"batches: {text}" for text in [local_batches(plan)] if text]
    if plan.unit is PrivacyUnit.PERSON:
        lines.append(f"people: {multiplicity(plan)}")
    lines += [f"{words}" for words in party_statements(plan)]
    if max(plan.factors) != 1.0:
        lines.append(f"weights: one record counts up to {max(plan.factors):.4g}·C, and the noise is as much louder")
    who = {"curator": "the coordinator, who sees exact sums", "local": "no member", "secure": "no member alone"}
    noise = f"; variance of the noise {plan.variance_factor:.4g} times that of one table" if plan.is_private else ""
    return "\n".join(
        [*lines, f"trusted: {who[plan.trust]}{'' if plan.secure is None else f' ({plan.secure})'}{noise}"]
    )


def party_statements(plan: FederatedPlan) -> tuple[str, ...]:
    """Return statements beside the ε of a plan whose unit is a party: its neighbours, and who draws parties."""
    if plan.unit is not PrivacyUnit.PARTY or plan.budget is None:
        return ()
    statements = [
        "who the parties are is public; a neighbour has the same parties, of which one holds nothing or other data"
    ]
    if plan.coordinator_draws:
        most = max(slot.sampling.coordinator_draws or 0 for slot in plan.schedule.slots)
        statements.append(
            "two statements: the stated ε holds against the coordinator, who draws the parties and knows whom, "
            f"because each party takes part {most} times at most; against those who see released models alone "
            f"{_viewers(plan, plan.budget)}"
        )
    if plan.answer_after is not None and plan.trust != "curator":
        statements.append(
            "each party draws for itself after its presence is settled, trains whatever it draws, and answers "
            f"{plan.answer_after:g} s after it is asked; what fails or is late is a masked zero"
        )
    return tuple(statements)


def _viewers(plan: FederatedPlan, budget: Budget) -> str:
    """The smaller ε of a plan whose parties are drawn in secret from those who see models alone, in words."""
    if budget.relation is Relation.REPLACE_ONE:  # a capped coin is proved to cost no more under add-remove only
        return "no smaller one is proved under replace-one"
    viewed = plan.party_event(0, None, viewers=True)
    assert viewed is not None
    return f"it is {prove(viewed, delta=budget.delta, relation=budget.relation).epsilon:.4g}"


def multiplicity(plan: FederatedPlan) -> str:
    """In how many parties a person may be, and what that costs, in words."""
    times = plan.parties_per_person
    if times == 1:
        return "each is known to one party only, as all of them declare, so parties' people are disjoint"
    not_matched = f"one may be known to {times} parties, as all of them declare; ids are not matched"
    if plan.own_noise:
        return f"{not_matched}: each party has its own noise, and the cost includes all {times}"
    return f"{not_matched}: in a sum they count up to {times}·C, and the noise is as loud"


def neighbourhood(plan: FederatedPlan) -> str:
    """Describe who holds shares of secrets, with the probabilities that rest on it."""
    terms = plan.terms(1)
    graph = terms.graph
    deviate = "may deviate" if terms.server_may_deviate else "must be honest about who dropped"
    if graph.complete:
        return f"all hold shares of all, {graph.threshold} open a secret; the coordinator {deviate}"
    return (
        f"each party draws {graph.neighbours} holders of her shares ({graph.threshold} open a secret) and "
        f"masks with {graph.partners} of them; privacy fails with probability "
        f"2^{math.log2(graph.failure):.1f} per drawing (in δ), a round is lost for lack of holders with "
        f"2^{math.log2(graph.lost):.1f}; the coordinator {deviate}"
    )


def local_batches(plan: FederatedPlan) -> str:
    """Fixed local batches in words; empty if every party samples at the one public rate."""
    batches = [slot.sampling.local_batches(plan.sizes) for slot in plan.schedule.slots]
    fixed = next((batch for batch in reversed(batches) if batch is not None), None)
    if fixed is None:
        return ""
    pairs = zip(fixed, plan.sizes, strict=True)
    return f"fixed local batches, {', '.join(f'{b} of {n}' for b, n in pairs)}; ε is the most sampled party's"


# Certificates hold these texts: they stay as they are.
ADVERSARIES = {
    "curator": "anyone who sees every released number, other parties included; the coordinator sees each party's "
    "exact sums and is trusted",
    "local": "everyone but the party itself: the coordinator and all other parties together; each party adds noise "
    "for its own records and trusts nobody (ICRL-DP)",
}


def adversary(plan: FederatedPlan) -> str:
    if not plan.is_private:
        return "nobody: NOT PRIVATE, the plan adds no noise and every sum and model is exact"
    if plan.trust in ADVERSARIES:
        return ADVERSARIES[plan.trust]
    rows = threat_model(plan.terms(max(plan.dims.values()))).rows
    return "; ".join(f"{question}: {answer}" for question, answer in rows)
