"""Making a federated plan without data: price the algorithm, and rehearse it to learn which queries it asks.

The rehearsal steps the algorithm through a door that answers made-up numbers. What it asks is public, so the
parties can pin it: the kind of each query, its clips, the lengths of its vectors. A number that changes during the
rehearsal, such as SPIDER's clip M‖x − x′‖, is left free; noise follows a query's bound, so ε does not depend on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quietgrad.errors import ExhaustedError
from quietgrad.federation.plan import FederatedPlan, Shape, Trust
from quietgrad.federation.queries import Scores, Template, flat, merged, pack
from quietgrad.federation.weights import Weights, factors
from quietgrad.objectives.base import Query
from quietgrad.objectives.people import Combine
from quietgrad.plans.price import price
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.budget import Budget, Relation, Unit
from quietgrad.secure.terms import Mode
from quietgrad.training.minimizing import check_people
from quietgrad.vectors import Vector, zeros_like

_REHEARSED_NUMBERS = 3e7  # vector entries a rehearsal may touch
_REHEARSED_STEPS = 20_000


def federate(
    algorithm: Any,
    objective: Any,
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
    cohort: int | None = None,
    noise_multiplier: float | None = None,
    unit: str | Unit = "record",
    parties_per_person: int | None = None,
    matched: str = "",
    records_public: int | None = None,
    combine: Combine = "mean",
    records_per_person: int | None = None,
) -> FederatedPlan:
    """Price ``algorithm`` for many parties, without touching a record.

    Args:
        algorithm: a method of :mod:`quietgrad.algorithms`.
        objective: the loss; it holds no data.
        names, sizes: the parties and their public numbers of records.
        shape: the public shape of the records.
        budget: the promise to every record of every party; ``None`` adds no noise.
        trust, secure, quorum, colluders, spare, cohort: see :class:`~quietgrad.federation.plan.FederatedPlan`.
        weights: ``"size"`` (n_j/n: every record the same), ``"equal"`` (1/m: every party the same), or one number
            per party, which are divided by their sum.
        servers: how many servers ``"servers"`` uses; 2 unless given. ``"mpc"`` has 3.
        noise_multiplier: fix the noise; the plan's ε is then whatever it proves to be.
        unit: ``"person"`` if sizes count people with several records each.
        parties_per_person: with people, how many parties one may be known to: 1 if nobody is known to two.
        matched: instead, the digest of the lists by which the parties found who is known to several of them.
        records_public: how many records people have together at all parties, if that is public.
        combine, records_per_person: how a person's records count.

    >>> from quietgrad.algorithms.dp_gd import DPGD
    >>> from quietgrad.objectives.tables.glm import Logistic
    >>> plan = federate(DPGD(steps=3), Logistic(), names=["a", "b"], sizes=[60, 40], shape=Shape(2, 2),
    ...                 budget=Budget(1.0, 1e-5), trust="secure", secure="masks")
    >>> plan.dims, plan.templates["gradient"][0]["query.clip"], plan.variance_factor
    ({'gradient': 2}, 1.0, 2.0)
    """
    whom = Unit.parse(unit)
    if whom is Unit.PERSON and parties_per_person is None and not matched:
        raise ValueError(
            "parties_per_person: say how many parties may know one person, 1 if nobody is known to two: people in "
            "several parties add up, and no party can tell by itself. Or match their ids, and say so by matched."
        )
    names, sizes = tuple(names), tuple(int(size) for size in sizes)
    if len(names) != len(sizes) or any(size < 1 for size in sizes):
        raise ValueError(f"sizes={sizes}: must be one whole number ≥ 1 for each of {len(names)} parties.")
    n = sum(sizes)
    if budget is not None and not algorithm.private:
        raise ValueError(f"{algorithm.name} is a non-private baseline: pass budget=None, or use its private form.")
    schedule = algorithm.schedule(n)
    schedule = replace(schedule, slots=tuple(slot.lengthened(spare) for slot in schedule.slots))
    if any(slot.mechanism.one_curator for slot in schedule.slots):
        raise ValueError(
            f"{algorithm.name}: its noisy search needs one curator of all held-out records; use minimize."
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
        trust=trust,
        names=names,
        sizes=sizes,
        factors=factors(weights, sizes),
        secure=secure,
        quorum=(cohort or len(names)) if quorum is None else quorum,
        cohort=cohort or 0,
        colluders=colluders if secure == "masks" else 1,
        servers=_server_names(secure, servers),
        spare=spare,
        shape=shape,
        unit=whom,
        parties_per_person=1 if parties_per_person is None else parties_per_person,
        matched=matched,
        records_public=records_public,
        combine=combine,
        records_per_person=records_per_person,
    )
    check_people(algorithm, plan.asks(objective))
    door = rehearse(algorithm, objective, plan)
    settings = {**_settings(plan), "templates": door.templates, "dims": door.dims}
    if budget is None:
        return FederatedPlan(**settings)
    printed = algorithm.paper_noise(n, budget)
    if printed is not None:
        return FederatedPlan(**{**settings, "noise_multiplier": printed, "paper_noise": algorithm.name})
    if noise_multiplier is None:
        return price(lambda z: FederatedPlan(**{**settings, "noise_multiplier": z}), budget)
    return FederatedPlan(**{**settings, "noise_multiplier": noise_multiplier})


class Rehearsal:
    """A door that answers made-up numbers and writes down what it is asked."""

    def __init__(self, objective: Any, plan: Plan, shape: Shape, before: Rehearsal | None = None) -> None:
        self.plan, self.objective, self.regularizer = plan, objective, objective.regularizer
        self.rho_left = plan.event_rho if plan.schedule.composition == "filter" and plan.budget else math.inf
        self.used: dict[str, int] = {slot.name: 0 for slot in plan.schedule.slots}
        self.templates: dict[str, tuple[Template, ...]] = {} if before is None else before.templates
        self.dims: dict[str, int] = {} if before is None else before.dims
        self._shape = shape
        self._zero = zeros_like(objective.initial(shape))
        self._random = np.random.default_rng(0 if before is None else 1)

    def initial(self) -> Vector:
        """As in a run."""
        return self.objective.initial(self._shape)

    def expected_batch(self, slot: str) -> float:
        """As in a run."""
        return self.plan.schedule[slot].sampling.expected_batch(self.plan.n_public)

    def uniform(self, label: str) -> float:
        """As late as possible, so that all kinds of releases are met."""
        return 0.999999

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Vector:
        """Write the query down and make an answer up."""
        dim = query.dim(self._shape)
        self._note(slot, query, dim)
        length = min(float(query.bound), 1.0) * self.expected_batch(slot)
        answer = self._random.standard_normal(dim) * (length / math.sqrt(dim))
        return (
            answer
            if isinstance(self._zero, np.ndarray) or dim != len(self._zero)
            else self._zero.new_tensor(answer)
        )

    def choose(
        self, slot: str, queries: Sequence[Query], *, rho: float, offsets: Sequence[float] | None = None
    ) -> int:
        """Write the candidates down and choose in turn."""
        relation = Relation.ADD_REMOVE if self.plan.budget is None else self.plan.budget.relation
        self._note(slot, Scores(tuple(queries), relation), len(queries))
        return self.used[slot] % len(queries)

    def first_below(self, slot: str, queries: Sequence[Query], threshold: float) -> int | None:
        """Not in federations."""
        raise ValueError("a noisy search needs one curator of all held-out records.")

    def close(self, reason: str, *, data_dependent: bool = False) -> Any:
        """Nothing was opened."""

    def _note(self, slot: str, query: Query, dim: int) -> None:
        if math.isinf(query.bound) and getattr(self.plan, "trust", None) == "secure":
            raise ValueError("a secure sum needs a finite bound on every record: clip, or use trust='curator'.")
        self.used[slot] += 1
        if self.used[slot] > self.plan.schedule[slot].count:
            raise ExhaustedError(f"the plan allows {self.plan.schedule[slot].count} releases of {slot!r}.")
        packed = json.loads(json.dumps(flat(*pack(query))))
        # A slot may have several kinds of query (the first step of a recursion, and the others).
        others = [old for old in self.templates.get(slot, ()) if old["query.kind"] != packed["query.kind"]]
        same = [old for old in self.templates.get(slot, ()) if old["query.kind"] == packed["query.kind"]]
        self.templates[slot] = (*others, merged(same[0] if same else None, packed))
        self.dims[slot] = dim


def rehearse(algorithm: Any, objective: Any, plan: FederatedPlan) -> Rehearsal:
    """Step ``algorithm`` until every slot was asked, as long as that is cheap; see the module's docstring.

    Twice, with different answers: a number that differs follows from the answers.
    """
    door = _rehearsed(algorithm, Rehearsal(objective, plan, plan.shape))
    door = _rehearsed(algorithm, Rehearsal(objective, plan, plan.shape, door))
    # A slot that was not reached (a late stage) asks what the others ask.
    seen = tuple(template for templates in door.templates.values() for template in templates)
    for slot in plan.schedule.slots:
        if slot.name not in door.templates:
            door.templates[slot.name] = seen
            door.dims[slot.name] = max(door.dims.values())
    return door


def _rehearsed(algorithm: Any, door: Rehearsal) -> Rehearsal:
    schedule, initial = door.plan.schedule, door.initial()
    state = algorithm.init(initial)
    steps = int(min(_REHEARSED_STEPS, max(8.0, _REHEARSED_NUMBERS / len(initial))))
    try:
        while not state.done and steps > 0:
            state = algorithm.step(state, door)
            steps -= 1
            if all(used >= min(4, schedule[slot].count) for slot, used in door.used.items()):
                break
    except ExhaustedError:
        pass  # made-up answers may use a slot up sooner than real ones
    door.used = dict.fromkeys(door.used, 0)
    for slot, query in algorithm.examples(initial, door):
        door._note(slot, query, query.dim(door._shape))
    return door


def _settings(plan: FederatedPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def _server_names(secure: Mode | None, servers: int | None) -> tuple[str, ...]:
    if secure in (None, "masks"):
        if servers is not None:
            raise ValueError(f"servers={servers}: only secure='servers' and 'mpc' use servers.")
        return ()
    count = servers if servers is not None else 3 if secure == "mpc" else 2
    return tuple(f"server-{k + 1}" for k in range(count))
