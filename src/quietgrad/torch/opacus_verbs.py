"""``make_private`` and ``make_private_with_epsilon``: the verbs that Opacus users know, for an own loop.

What differs is what is promised: batches are true Poisson samples at rate batch_size / n, a sampler whose law is
unknown is refused instead of replaced, noise and batch sizes that change over epochs are declared beforehand and
accounted for, noise is always cryptographic, and a loop that would exceed its budget stops with an error.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence, Sized
from itertools import groupby
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from quietgrad import training
from quietgrad.curators.central import CentralCurator
from quietgrad.errors import DataError
from quietgrad.objectives.networks.engine import PerExampleEngine
from quietgrad.objectives.networks.examples import (
    refuse_mixing_collate,
    refuse_own_generators,
    refuse_repeated_records,
)
from quietgrad.objectives.people import Combine, OfPeople, OfRecords, People, of_people
from quietgrad.objectives.person_ids import asked_ids
from quietgrad.privacy.budget import Budget, Relation, Unit
from quietgrad.torch.affording import affordable
from quietgrad.torch.clip_rules import clip_rule
from quietgrad.torch.history import History
from quietgrad.torch.loop_processes import leads, same_for_all, unwrapped
from quietgrad.torch.loop_sums import OutputGradients, pairing
from quietgrad.torch.own_loop import NO_PROMISE, OwnLoop, PrivateLoop
from quietgrad.torch.poisson_loader import PoissonLoader
from quietgrad.torch.private_module import PrivateModule
from quietgrad.torch.private_optimizer import check_optimizer, made_private, refuse_stepped
from quietgrad.torch.provenance import Provenance, earlier
from quietgrad.torch.shards import Shards

__all__ = ["Private", "make_private", "make_private_with_epsilon"]

Private = tuple[PrivateModule, Optimizer, PoissonLoader]
_Shape = tuple[tuple[tuple[int, int, float], ...], tuple[int, ...]]  # stretches, and batches of each epoch

_OPEN_END = 10**9  # steps of a loop that nobody limited


def make_private_with_epsilon(
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    target_epsilon: float,
    target_delta: float,
    epochs: int,
    max_grad_norm: float | Sequence[float],
    clipping: str = "flat",
    person: Any = None,
    combine: Combine = "mean",
    records_per_person: int | None = None,
    relation: str | Relation = Relation.ADD_REMOVE,
    noise_schedule: Callable[[int], float] | None = None,
    batch_schedule: Callable[[int], int] | None = None,
    loss_reduction: str | None = None,
    poisson_sampling: bool = True,
    micro_batch: int | None = None,
    memory_budget: float = 256e6,
    ledger: Any = None,
    account: str = "default",
    cap: Budget | None = None,
    seed: int | None = None,
    history: History | None = None,
    **settings: float,
) -> Private:
    """Model, optimizer and loader of a loop of ``epochs`` epochs that costs (``target_epsilon``, ``target_delta``).

    Args:
        module: its examples must not mix; BatchNorm is refused.
        optimizer: any torch optimizer of the module's parameters; the same object is returned.
        data_loader: of a map-style data set; its batch_size is the expected size of a sample. Shuffled or not, an
            epoch becomes ⌈n / batch_size⌉ Poisson samples (⌊…⌋ with drop_last); any other sampler is refused.
        max_grad_norm: C, the L2 bound on one record's gradient, or on a person's; one for each parameter if
            ``"per_layer"``.
        clipping: ``"flat"``; ``"per_layer"``: each parameter's gradient for itself; ``"adaptive"``: C follows a
            quantile of the norms, told by a noisy count that is part of every release and of its price. It needs
            ``target_unclipped_quantile``, ``clipbound_learning_rate``, ``min_clipbound``, ``max_clipbound`` and
            ``unclipped_num_std``.
        person, combine, records_per_person: as in :func:`quietgrad.torch.fit`: the loader then draws people and
            hands out all their records, each person's one after the other; its batch_size counts people. With
            ``clipping="flat"`` and in one process only.
        noise_schedule: noise of epoch e relative to the calibrated one, such as ``lambda e: 0.95**e``.
        batch_schedule: expected sample size of epoch e, instead of the loader's.
        loss_reduction: ``"mean"`` if the loss averages over the batch (undone here), ``"sum"`` if it adds up. It
            is tried in every step on records alone, and a loss that is the other one is refused: the size of a
            sample is secret. Not given, it is a mean, and a loss that cannot be tried is refused too.
        poisson_sampling: ``False`` puts every record into exactly one batch of each epoch, as shuffling does. That
            has no amplification that is proved: it is accounted without, and costs much more.
        micro_batch: examples per backward pass.
        ledger, account, cap, seed: as in :func:`quietgrad.minimize`.
        history: other loops on the same people, such as those of a :class:`PrivacyEngine`.

    Call the returned model once per batch, ``loss.backward()``, ``optimizer.step()``. A loss must treat examples
    apart: a mean with class weights divides by the weights of the whole batch, and is refused.

    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.randint(0, 2, (100,)))
    >>> model = nn.Linear(3, 2)
    >>> model, optimizer, loader = make_private_with_epsilon(
    ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), target_epsilon=2.0, epochs=2,
    ...     data_loader=DataLoader(data, batch_size=20, shuffle=True), target_delta=1e-5, max_grad_norm=1.0)
    >>> for epoch in range(2):
    ...     for x, y in loader:
    ...         optimizer.zero_grad()
    ...         nn.functional.cross_entropy(model(x), y).backward()
    ...         _ = optimizer.step()
    >>> round(loader.privacy.epsilon(), 2)
    2.0
    """
    people = _people(data_loader, person, combine, records_per_person)
    loop = _epochs(data_loader, people, epochs, noise_schedule, batch_schedule)
    budget = Budget(target_epsilon, target_delta, Relation.parse(relation))
    return _private(
        module, optimizer, data_loader, people, loop, budget, None, (max_grad_norm, clipping, settings),
        loss_reduction, poisson_sampling, micro_batch, memory_budget, ledger, account, cap, seed, history,
    )  # fmt: skip


def make_private(
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    noise_multiplier: float,
    max_grad_norm: float | Sequence[float],
    clipping: str = "flat",
    epochs: int | None = None,
    target_epsilon: float | None = None,
    target_delta: float = 1e-5,
    person: Any = None,
    combine: Combine = "mean",
    records_per_person: int | None = None,
    relation: str | Relation = Relation.ADD_REMOVE,
    noise_schedule: Callable[[int], float] | None = None,
    batch_schedule: Callable[[int], int] | None = None,
    loss_reduction: str | None = None,
    poisson_sampling: bool = True,
    micro_batch: int | None = None,
    memory_budget: float = 256e6,
    ledger: Any = None,
    account: str = "default",
    cap: Budget | None = None,
    seed: int | None = None,
    history: History | None = None,
    **settings: float,
) -> Private:
    """As :func:`make_private_with_epsilon`, with a noise multiplier of your own.

    ``loader.privacy.epsilon(delta)`` says what the steps so far cost. With ``target_epsilon`` the loop stops with a
    :class:`~quietgrad.errors.BudgetError` before the step that would exceed it. A ledger or a schedule needs
    ``epochs``, because what is spent is reserved beforehand.
    """
    if epochs is None and (noise_schedule is not None or batch_schedule is not None or ledger is not None):
        raise ValueError("epochs=None: a schedule or a ledger needs the number of epochs beforehand; give epochs.")
    people = _people(data_loader, person, combine, records_per_person)
    if epochs is None:
        n, size = _checked(data_loader, people)
        steps = _OPEN_END
        if target_epsilon is not None and not poisson_sampling:
            raise ValueError(
                "epochs=None: without Poisson samples a target ε needs the number of epochs; give epochs."
            )
        if target_epsilon is not None:
            from quietgrad.privacy.calibrate import calibrate_steps

            steps = calibrate_steps(
                epsilon=target_epsilon, delta=target_delta, noise_multiplier=noise_multiplier, n=n, batch_size=size,
                relation=relation,
            )  # fmt: skip
        loop: _Shape = ((steps, size, 1.0),), (_batches(data_loader, n, size),)
    else:
        loop = _epochs(data_loader, people, epochs, noise_schedule, batch_schedule)
    promise = NO_PROMISE if target_epsilon is None else target_epsilon
    budget = Budget(promise, target_delta, Relation.parse(relation))
    return _private(
        module, optimizer, data_loader, people, loop, budget, noise_multiplier, (max_grad_norm, clipping, settings),
        loss_reduction, poisson_sampling, micro_batch, memory_budget, ledger, account, cap, seed, history,
    )  # fmt: skip


def _private(
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    people: People | None,
    shape: _Shape,
    budget: Budget,
    noise_multiplier: float | None,
    clipping: tuple[float | Sequence[float], str, dict[str, float]],
    loss_reduction: str | None,
    poisson_sampling: bool,
    micro_batch: int | None,
    memory_budget: float,
    ledger: Any,
    account: str,
    cap: Budget | None,
    seed: int | None,
    history: History | None,
) -> Private:
    if loss_reduction not in ("mean", "sum", None):
        raise ValueError(f"loss_reduction={loss_reduction!r}: must be 'mean' or 'sum'.")
    if isinstance(module, PrivateModule):
        module = module.module
    module = unwrapped(module)
    given, params = module, list(module.parameters())
    shards = Shards.of(module)
    if shards is not None:
        module = shards.twin
    data_loader = _given(data_loader)
    trained = sum(param.requires_grad for param in module.parameters())
    rule = clip_rule(clipping[1], clipping[0], trained, **clipping[2])
    stretches, lengths = shape
    n, _ = _checked(data_loader, people)
    refuse_repeated_records(data_loader.dataset)
    refuse_own_generators(data_loader.dataset)
    refuse_mixing_collate(data_loader.dataset, data_loader.collate_fn)
    engine = PerExampleEngine(module, pairing, micro_batch=micro_batch, memory_budget=memory_budget)
    check_optimizer(optimizer, params)
    refuse_stepped(optimizer)
    if people is not None and clipping[1] != "flat":
        raise ValueError(
            "person: a person's records are clipped together over all parameters: use clipping='flat'."
        )
    method: Any = OwnLoop(stretches, rule.config(), poisson_sampling)
    unit = Unit.RECORD if people is None else Unit.PERSON
    before = earlier(given, budget.relation, unit)
    plan = training.plan(method, n=n, budget=budget, noise_multiplier=noise_multiplier, unit=unit)
    if noise_multiplier is not None and budget.epsilon < NO_PROMISE:
        plan = affordable(plan)
    for slot in plan.schedule.slots:
        rule.bound(
            slot.multiplier(plan.noise_multiplier)
        )  # refuses a count whose noise leaves none for the gradient
    if seed is not None:
        warnings.warn(f"seed={seed}: seeded noise is not private; use it for tests only.", stacklevel=4)
    objective: Any = OutputGradients(engine)
    data: Any = data_loader.dataset
    if people is not None:
        objective = OfPeople(objective, people.combine, people.records_per_person)
        data = OfRecords(data, people)
    key, name = same_for_all()
    if not leads():
        ledger = cap = None  # one process pays
    curator = CentralCurator(objective, data, ledger=ledger, account=account, cap=cap, seed=seed, key=key)
    loop = PrivateLoop(plan, curator, engine, rule, loss_reduction, history, shards, name)
    for record in before:
        loop.load_history(record)
    provenance = Provenance(loop)
    provenance.put(given, module)
    private = PrivateModule(module, loop, provenance)
    return private, made_private(optimizer, loop), PoissonLoader(data_loader, loop, lengths)


def _epochs(
    loader: DataLoader[Any],
    people: People | None,
    epochs: int,
    noise_schedule: Callable[[int], float] | None,
    batch_schedule: Callable[[int], int] | None,
) -> _Shape:
    """Stretches of equal settings, and the batches of each epoch."""
    n, size = _checked(loader, people)
    if isinstance(epochs, bool) or int(epochs) != epochs or epochs < 1:
        raise ValueError(f"epochs={epochs!r}: must be a whole number ≥ 1.")
    sizes = [size if batch_schedule is None else int(batch_schedule(epoch)) for epoch in range(epochs)]
    if not all(1 <= each <= n for each in sizes):
        raise ValueError(f"batch_schedule: gives sizes {min(sizes)} … {max(sizes)}; must be between 1 and n={n}.")
    noises = [1.0 if noise_schedule is None else float(noise_schedule(epoch)) for epoch in range(epochs)]
    lengths = [_batches(loader, n, each) for each in sizes]
    stretches = [
        (lengths[run[0]] * len(run), each, noise)
        for (each, noise), group in groupby(range(epochs), key=lambda epoch: (sizes[epoch], noises[epoch]))
        for run in [list(group)]
    ]
    return tuple(stretches), tuple(lengths)


def _batches(loader: DataLoader[Any], n: int, size: int) -> int:
    """Batches of an epoch: as many as the loader would make, with ``drop_last`` without the short one."""
    return n // size if _given(loader).drop_last else math.ceil(n / size)


def _given(loader: Any) -> DataLoader[Any]:
    """The loader, or the one that an earlier loop's was made of."""
    return loader.original if isinstance(loader, PoissonLoader) else loader


def _people(
    loader: DataLoader[Any], person: Any, combine: Combine, records_per_person: int | None
) -> People | None:
    """Who the records of a loader's data set are about; ``None``: each is a person's own."""
    if person is None:
        of_people(None, None, None, combine, records_per_person)
        return None
    records = _length(loader)
    ids = asked_ids(person, records) if callable(person) else person
    return People.of(ids, combine=combine, records_per_person=records_per_person, records=records)


def _length(loader: DataLoader[Any]) -> int:
    dataset = _given(loader).dataset
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise DataError(
            f"a data set of type {type(dataset).__name__} has no length, so no sample of known probability can be "
            "drawn from it. Use a map-style data set."
        )
    return len(dataset)


def _checked(loader: DataLoader[Any], people: People | None) -> tuple[int, int]:
    """n and the batch size, in people, of a loader whose only wish is to go through its data set."""
    loader = _given(loader)
    n, sampler = _length(loader), loader.sampler
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise DataError(
            f"batches of {type(loader.batch_sampler).__name__} have no law that can be accounted for. Give the "
            "loader a batch_size instead."
        )
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == n
    )
    if not plain:
        raise DataError(
            f"{type(sampler).__name__}: samples drawn by it cannot be accounted for, and it is not replaced behind "
            "your back. Give the loader shuffle=True or nothing; its batches become Poisson samples."
        )
    unit = "records" if people is None else "people"
    n = n if people is None else len(people)
    if not 1 <= loader.batch_size <= n:
        raise DataError(f"batch_size={loader.batch_size}: must be between 1 and the {n} {unit} of the data set.")
    return n, loader.batch_size
