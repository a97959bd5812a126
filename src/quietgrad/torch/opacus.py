"""The verbs that Opacus users know: ``make_private``, ``make_private_with_epsilon`` and ``PrivacyEngine``.

What differs: batches are true Poisson samples, a sampler whose law is unknown is refused, schedules are declared
beforehand and accounted for, a loop stops before it exceeds its budget, and ε says what it rests on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from quietgrad.algorithms.custom_loop import LoopSampling
from quietgrad.errors import DataError, UnprovableError
from quietgrad.objectives.networks.module import ModuleObjective
from quietgrad.objectives.networks.records import Multiple, Padding
from quietgrad.objectives.privacy_units import Combine, with_privacy_unit
from quietgrad.privacy.budget import Budget, PrivacyUnit, Relation
from quietgrad.torch import checkpoints
from quietgrad.torch.checkpoints import LoopCost, epsilon_of
from quietgrad.torch.clip_rules import clip_rule
from quietgrad.torch.distributed import Shards, unwrapped
from quietgrad.torch.layers import ModuleValidator
from quietgrad.torch.loop_wrappers import (
    PrivateLoader,
    PrivateModule,
    PrivateOptimizer,
    check_optimizer,
    checked_loader,
    made_private,
)
from quietgrad.torch.loops import LoopTerms, largest, loop_sampling
from quietgrad.torch.recorded_loop import CustomLoop, PrivateCriterion

if TYPE_CHECKING:
    from quietgrad.privacy.ledger import Ledger

_MODES = ("hooks", "functorch", "ew", "ghost", "ghost_fsdp")


def make_private_with_epsilon(
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    target_epsilon: float,
    target_delta: float,
    epochs: int,
    max_grad_norm: float | Sequence[float],
    **settings: Any,
) -> Any:
    """Make a module, optimizer and loader private for ``epochs`` epochs at ``target_epsilon``.

    What differs from Opacus: the whole cost is charged to a ledger before the first batch; batches are secret
    Poisson samples; with ``criterion=`` a fourth value comes back and ε holds without a condition. Without
    ``criterion=`` three values come back, and ``loader.privacy.condition`` states what ε assumes about the loop.

    ``noise_schedule`` is relative to the calibrated noise, such as ``lambda epoch: 0.95**epoch``. All other
    arguments are those of :func:`make_private`.

    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.randint(0, 2, (100,)))
    >>> model = nn.Linear(3, 2)
    >>> model, optimizer, loader, criterion = make_private_with_epsilon(
    ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
    ...     data_loader=DataLoader(data, batch_size=20, shuffle=True), target_epsilon=2.0, target_delta=1e-5,
    ...     epochs=2, max_grad_norm=1.0)
    >>> for epoch in range(2):
    ...     for x, y in loader:
    ...         optimizer.zero_grad()
    ...         criterion(model(x), y).backward()
    ...         _ = optimizer.step()
    >>> round(loader.privacy.epsilon, 2), loader.privacy.condition
    (2.0, None)
    """
    return make_private(
        module=module, optimizer=optimizer, data_loader=data_loader, noise_multiplier=None,
        max_grad_norm=max_grad_norm, epochs=epochs, target_epsilon=target_epsilon, target_delta=target_delta,
        **settings,
    )  # fmt: skip


def make_private(
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    noise_multiplier: float | None,
    max_grad_norm: float | Sequence[float],
    criterion: Callable[..., Any] | None = None,
    transform: Callable[[Any], Any] | None = None,
    pad: int | Multiple | Padding | None = None,
    clipping: str = "flat",
    epochs: int | None = None,
    target_epsilon: float | None = None,
    target_delta: float = 1e-5,
    relation: str | Relation = Relation.ADD_REMOVE,
    noise_schedule: Callable[[int], float] | None = None,
    batch_schedule: Callable[[int], int] | None = None,
    sampling: LoopSampling = "poisson",
    poisson_sampling: bool = True,
    loss_reduction: str | None = None,
    person: Any = None,
    combine: Combine = "mean",
    records_per_person: int | None = None,
    n_public: int | None = None,
    memory_budget: float = 512e6,
    ledger: Ledger | str | Path | None = None,
    account: str = "default",
    cap: Budget | None = None,
    seed: int | None = None,
    **settings: float,
) -> Any:
    """Make a module, optimizer and loader private, and the criterion if one is given.

    The loop calls the model on a batch of the loader, ``backward()`` on the loss and ``optimizer.step()``, as
    ever. Batches, outputs and losses are handles: given to the private model and the private criterion as they
    are, they are run record by record, and ε holds without a condition. Whatever else the loop's own code does
    with one is done to the plain tensor, and ε is conditional from then on, as ``loader.privacy.condition`` says.

    Args:
        module: any torch module.
        optimizer: any torch optimizer of the module's parameters; the same object is returned.
        data_loader: of a map-style data set; its batch_size is the expected size of a sample. Shuffled or not, an
            epoch becomes ⌈n / batch_size⌉ secret samples (⌊…⌋ with drop_last); any other sampler is refused. Its
            ``collate_fn`` is called with one record.
        noise_multiplier: noise ÷ C. With ``target_epsilon`` the loop stops with a
            :class:`~quietgrad.errors.BudgetError` before the step that would exceed it.
        max_grad_norm: C, the L2 bound on one record's gradient, or on a person's; one for each parameter if
            ``"per_layer"``.
        criterion: criterion(output, target), called with batches of one; returns one number.
        transform: what is done to each record before it is handed out: written as for a batch of the loader, called
            with batches of one.
        clipping: ``"flat"``; ``"per_layer"``: each parameter's gradient for itself; ``"adaptive"``: C follows a
            quantile of the norms, told by a noisy count that is part of every release and of its price. It needs
            ``target_unclipped_quantile``, ``clipbound_learning_rate``, ``min_clipbound``, ``max_clipbound`` and
            ``unclipped_num_std``.
        epochs: needed for a schedule or a ledger, because what is spent is reserved beforehand.
        loss_reduction: of a loss that the loop makes of plain tensors: ``"mean"`` over the records of the calls it
            is made of, which is undone here, or ``"sum"``.
        noise_schedule, batch_schedule, sampling, poisson_sampling: as in :class:`quietgrad.torch.PrivateLoop`.
        person, combine, records_per_person, pad: as in :func:`quietgrad.torch.fit`; batch_size counts people.
        n_public, ledger, account, cap, seed: as in :func:`quietgrad.minimize`.
    """
    if loss_reduction not in ("mean", "sum", None):
        raise ValueError(f"loss_reduction={loss_reduction!r}: must be 'mean' or 'sum'.")
    module = unwrapped(module.module if isinstance(module, PrivateModule) else module)
    check_optimizer(optimizer, module.parameters())
    shards = Shards.of(module)
    module = module if shards is None else shards.twin
    given = checked_loader(data_loader)
    collate = given.collate_fn if transform is None else lambda samples: transform(given.collate_fn(samples))
    objective = ModuleObjective(module, None, memory_budget=memory_budget, collate_fn=collate, pad=pad)
    engine = objective.engine
    rule = clip_rule(clipping, max_grad_norm, len(engine.names), None if person is None else "person", **settings)
    size, unit = given.batch_size or 0, PrivacyUnit.RECORD if person is None else PrivacyUnit.PERSON
    terms = LoopTerms(
        batch_size=size, epsilon=target_epsilon, delta=target_delta, relation=relation, epochs=epochs,
        noise_multiplier=noise_multiplier, noise_schedule=noise_schedule, batch_schedule=batch_schedule,
        sampling=loop_sampling(sampling, poisson_sampling), drop_last=bool(given.drop_last), unit=unit,
        n_public=n_public, ledger=ledger, account=account, cap=cap, seed=seed,
    )  # fmt: skip
    asked = with_privacy_unit(objective, given.dataset, person, combine, records_per_person)
    curator = terms.holder(*asked)
    plan = terms.plan(curator, rule)
    loop = CustomLoop(
        plan, terms.stretches(plan.n_public)[1], curator, engine, rule, shards, warns=criterion is not None,
        n_is_declared=terms.n_is_declared,
    )  # fmt: skip
    loop.mean = loss_reduction != "sum"
    made = PrivateModule(module, loop), made_private(optimizer, loop), PrivateLoader(given, loop)
    if criterion is None:
        return made
    reduction = getattr(criterion, "reduction", loss_reduction or "mean")
    return *made, PrivateCriterion(criterion, loop, reduction)


class Accountant:
    """What the loops of an engine have cost, as far as they have come, and what was loaded into them."""

    def __init__(self) -> None:
        self.loops: list[CustomLoop] = []
        self._loaded: dict[str, LoopCost] = {}

    @property
    def costs(self) -> list[LoopCost]:
        """Each loop once, with the most samples it is known to have handed out."""
        own = {loop.name: LoopCost.of(loop) for loop in self.loops}
        return [*own.values(), *(cost for name, cost in self._loaded.items() if name not in own)]

    def add(self, costs: Iterable[LoopCost]) -> None:
        """Count what states that were loaded had cost, each loop once, and keep the promises of the loops here."""
        for cost in costs:
            if cost.name not in self._loaded or cost.used >= self._loaded[cost.name].used:
                self._loaded[cost.name] = cost
        for loop in self.loops:
            self.keep_promise(loop)

    def keep_promise(self, loop: CustomLoop) -> None:
        """Let a loop with a target ε have no more samples than that affords after what was loaded."""
        budget = loop.plan.budget
        assert budget is not None
        others = [cost for cost in self._loaded.values() if cost.name != loop.name]
        if not others or not loop.is_private or loop.open_ended:
            return

        def fits(samples: int) -> bool:
            try:
                mine = replace(LoopCost.of(loop), used=samples)
                return epsilon_of([mine, *others], budget.delta) <= budget.epsilon
            except UnprovableError:
                return False

        loop.total = largest(fits, loop.handed_out, loop.total)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sample rate, steps) of all loops; batches that are no secret samples have rate 1."""
        return [row for cost in self.costs for row in cost.history]

    def __len__(self) -> int:
        return sum(cost.used for cost in self.costs)

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """ε of all samples so far, as if all were of the same people: the smallest that is proved."""
        return epsilon_of(self.costs, delta)

    @staticmethod
    def mechanism() -> str:
        """The name of the accountant: privacy loss distributions, as ``"prv"`` uses."""
        return "prv"

    def state_dict(self) -> dict[str, Any]:
        """What was spent, sealed."""
        return {"quietgrad": checkpoints.seal(self.costs).hex()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Add what another engine spent; nothing that is known here is forgotten."""
        if "quietgrad" not in state_dict:
            raise ValueError(
                "load_state_dict: not the state of an accountant of quietgrad. What another program says was spent "
                "cannot be checked; keep it in a ledger beside this run."
            )
        self.add(checkpoints.unseal(bytes.fromhex(state_dict["quietgrad"]))[1])


class PrivacyEngine:
    """Opacus's entry point by name, so that a script is ported by changing its import.

    ``secure_mode`` changes nothing: noise and samples are cryptographic in any case. Nor does ``accountant="prv"``
    or ``"rdp"``: ε is the smallest that is proved. :meth:`get_epsilon` is what all loops of the engine cost.

    >>> PrivacyEngine(accountant="gdp")
    Traceback (most recent call last):
    ValueError: accountant='gdp': a central limit, which is no upper bound on what is spent; use 'prv' or 'rdp'.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = True) -> None:
        if accountant not in ("prv", "rdp"):
            why = (
                "a central limit, which is no upper bound on what is spent" if accountant == "gdp" else "not known"
            )
            raise ValueError(f"accountant={accountant!r}: {why}; use 'prv' or 'rdp'.")
        self.accountant = Accountant()

    def make_private(self, **settings: Any) -> Any:
        """See :func:`quietgrad.torch.make_private`.

        All of Opacus's modes give the same clipped sums here, at the same price. ``grad_sample_mode="ghost"``
        returns model, optimizer, criterion and loader in Opacus's order. ``batch_first`` must be true and
        ``noise_generator`` ``None``.
        """
        return self._keep(make_private, settings)

    def make_private_with_epsilon(self, **settings: Any) -> Any:
        """See :func:`quietgrad.torch.make_private_with_epsilon` and :meth:`make_private`."""
        return self._keep(make_private_with_epsilon, settings)

    def get_epsilon(self, delta: float) -> float:
        """ε of all samples of this engine's loops, and of states that were loaded, as if of the same people."""
        if not self.accountant.costs:
            raise RuntimeError("get_epsilon: nothing was made private yet; call make_private first.")
        return self.accountant.get_epsilon(delta)

    @property
    def condition(self) -> str | None:
        """The clause under which :meth:`get_epsilon` holds; ``None``: it holds without one."""
        found = (cost.plan.condition for cost in self.accountant.costs)
        return next((condition for condition in found if condition is not None), None)

    @staticmethod
    def is_compatible(
        *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> bool:
        """Whether the module could be made private."""
        return ModuleValidator.is_valid(module)

    @staticmethod
    def validate(
        *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> None:
        """Raise if the module could not be made private."""
        ModuleValidator.validate(module, strict=True)

    @staticmethod
    def get_compatible_module(module: nn.Module) -> nn.Module:
        """A copy with layers that can be made private; make the optimizer of its parameters."""
        return ModuleValidator.fix_and_validate(module)

    def save_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: None = None,
    ) -> None:
        """Write module, optimizer, ``checkpoint_dict`` and, sealed, what they cost to a safetensors file.

        ``checkpoint_dict`` may hold tensors, numbers, texts, lists and dictionaries: nothing is pickled.
        """
        _refuse(noise_scheduler=noise_scheduler, grad_clip_scheduler=grad_clip_scheduler, pickle=torch_save_kwargs)
        content: dict[str, Any] = {
            **(checkpoint_dict or {}),
            "module_state_dict": dict(module.state_dict(**(module_state_dict_kwargs or {}))),
        }
        if optimizer is not None:
            content["optimizer_state_dict"] = optimizer.state_dict()
        if isinstance(optimizer, PrivateOptimizer):
            content["clip_rule"] = optimizer._loop.rule.state()
        checkpoints.save(path, content, self.accountant.costs)

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: None = None,
    ) -> dict[str, Any]:
        """Load module and optimizer, and what they cost: it counts here from now on, however often it is loaded.

        Returns what else was in the file. A loop with a target ε stops earlier by what was loaded.
        """
        _refuse(noise_scheduler=noise_scheduler, grad_clip_scheduler=grad_clip_scheduler, pickle=torch_load_kwargs)
        content, costs = checkpoints.load(path)
        if "module_state_dict" not in content:
            raise DataError(f"{path}: holds no state of a module; save one with save_checkpoint.")
        state, rule = content.pop("optimizer_state_dict", None), content.pop("clip_rule", {})
        self.accountant.add(costs)  # first: if something fails below, the state may be in the model already
        module.load_state_dict(content["module_state_dict"], **(module_load_dict_kwargs or {}))
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)
        if isinstance(optimizer, PrivateOptimizer):
            optimizer._loop.rule.load_state(rule)
        return content

    def _keep(self, make: Callable[..., Any], settings: dict[str, Any]) -> Any:
        mode = settings.pop("grad_sample_mode", "hooks")
        if mode not in _MODES:
            why = (
                "gradients that the loop sets itself may be of several records, and nothing could bound them"
                if mode == "no_op"
                else "not known"
            )
            raise ValueError(f"grad_sample_mode={mode!r}: {why}; use one of {', '.join(map(repr, _MODES))}.")
        if not settings.pop("batch_first", True):
            raise ValueError(
                "batch_first=False: records are told apart along the first axis; move the batch to the front and "
                "transpose inside the module."
            )
        if settings.pop("noise_generator", None) is not None:
            raise ValueError(
                "noise_generator: numbers of torch's generators can be predicted and subtracted; noise is AES-256 "
                "here. For tests that repeat use seed=, which says that nothing is private."
            )
        if "ghost" in mode and settings.get("criterion") is None:
            settings["criterion"] = nn.CrossEntropyLoss()
        made = make(**settings)
        loop = made[2].loop
        self.accountant.loops.append(loop)
        self.accountant.keep_promise(loop)
        return (made[0], made[1], made[3], made[2]) if "ghost" in mode else made


def _refuse(*, noise_scheduler: Any, grad_clip_scheduler: Any, pickle: Any) -> None:
    if noise_scheduler is not None or grad_clip_scheduler is not None:
        raise ValueError(
            "noise and clipping bounds have no schedulers here: noise_schedule= is declared and accounted for "
            "beforehand, and clipping='adaptive' follows the gradients."
        )
    if pickle:
        raise ValueError("checkpoints are safetensors files: nothing is pickled, so there is nothing to set.")
