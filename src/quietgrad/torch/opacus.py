"""The verbs that Opacus users know: ``make_private``, ``make_private_with_epsilon`` and ``PrivacyEngine``.

What differs: batches are true Poisson samples, a sampler whose law is unknown is refused, the cost of a loop with a
planned end is charged beforehand, and ε says what it rests on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.errors import SettingError
from quietgrad.core.session.clipping import Clipping, PerLayer, read_clipping
from quietgrad.methods.custom_loop import LoopSampling
from quietgrad.methods.epoch_schedules import ClipSchedule, NoiseSchedule
from quietgrad.tables.privacy_units import Combine, PersonRule, with_privacy_unit
from quietgrad.torch.layers import ModuleValidator
from quietgrad.torch.loops.base import LoopTerms, finite_clip
from quietgrad.torch.loops.distributed import unwrapped
from quietgrad.torch.loops.handle_loop import HandleLoop, PrivateCriterion
from quietgrad.torch.loops.whole_module import WholeModule
from quietgrad.torch.loops.wrappers import (
    PrivateInPlace,
    PrivateLoader,
    PrivateModule,
    check_optimizer,
    made_private,
    private_in_place,
    read_loader,
)
from quietgrad.torch.networks.module import ModuleObjective
from quietgrad.torch.networks.records import Multiple, Padding
from quietgrad.torch.networks.trees import Called, Kwargs, PyTree
from quietgrad.torch.networks.usable import LossFunction, warn_of_divided_weights
from quietgrad.torch.opacus_accounting import check_mechanism
from quietgrad.torch.opacus_arguments import Accountant, read_opacus_arguments

if TYPE_CHECKING:
    from quietgrad.core.ledger.ledger import Ledger


def make_private_with_epsilon(
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[object],
    target_epsilon: float,
    target_delta: float,
    epochs: int,
    max_grad_norm: float,
    **settings: Any,
) -> Any:
    """Make a module, optimizer and loader private at ``target_epsilon``.

    The noise is calibrated for ``epochs`` epochs.

    What differs from Opacus: the whole cost is charged to a ledger before the first batch; batches are secret
    Poisson samples; with ``criterion=`` a fourth value comes back and ε holds without a condition. Without
    ``criterion=`` three values come back, and ``loader.privacy.condition`` states what ε assumes about the loop.

    All other arguments are those of :func:`make_private`.

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
    data_loader: DataLoader[object],
    noise_multiplier: float | None,
    max_grad_norm: float | Sequence[float],
    criterion: LossFunction | None = None,
    transform: Callable[[PyTree], PyTree] | None = None,
    pad: int | Multiple | Padding | None = None,
    clipping: str | Clipping = "flat",
    noise_schedule: NoiseSchedule | None = None,
    clip_schedule: ClipSchedule | None = None,
    epochs: int | None = None,
    target_epsilon: float | None = None,
    target_delta: float = 1e-5,
    relation: str | Relation = Relation.ADD_REMOVE,
    sampling: LoopSampling = "poisson",
    poisson_sampling: bool = True,
    loss_reduction: str | None = None,
    person: object = None,
    combine: Combine = "mean",
    records_per_person: int | None = None,
    n_public: int | None = None,
    wrap_model: bool = True,
    memory_budget: float = 512e6,
    ledger: Ledger | str | Path | None = None,
    account: str = "default",
    cap: Budget | None = None,
    seed: int | None = None,
    **opacus: object,
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
        noise_multiplier: noise ÷ C; ``None`` if ``target_epsilon`` is given. 0 is for debugging: nothing is
            private then, and ε is infinite.
        max_grad_norm: C, the L2 bound on one record's gradient, or on a person's, over all parameters. With
            ``clipping="per_layer"`` it may be a list as Opacus takes it, a bound for each trained parameter.
        criterion: criterion(output, target), called with batches of one; returns one number.
        transform: what is done to each record before it is handed out: written as for a batch of the loader, called
            with batches of one.
        clipping: ``"flat"`` over all parameters, ``"automatic"``, ``"per_layer"``, or a rule, as in
            :class:`quietgrad.DPSGD`.
        noise_schedule: what the noise multiplier is multiplied by in each epoch, such as
            ``qt.ExponentialNoise(gamma=0.97)``: part of the plan, and priced with it before the first step.
        clip_schedule: likewise of C, such as ``qt.StepGradClip(step_size=5, gamma=0.5)``. It changes no ε.
        wrap_model: ``False`` makes the module itself private: it stays the same object, an instance of its class,
            and comes back in the model's place; its ``cleanup()`` makes it plain again.
        epochs: needed for a ledger, because what is spent is reserved beforehand.
        loss_reduction: whether the released sum of clipped gradients is divided by the public size of a sample
            (``"mean"``) or not (``"sum"``). Without it the criterion's own reduction decides. Of a loss that the
            loop makes of plain tensors, a mean over records is undone before clipping, unless it is ``"sum"``.
        sampling: as in :class:`quietgrad.torch.PrivateLoop`; Opacus' ``poisson_sampling=False`` is ``"turns"``.
        person, combine, records_per_person, pad: as in :func:`quietgrad.torch.fit`; batch_size counts people.
        n_public, ledger, account, cap, seed: as in :func:`quietgrad.minimize`.
        opacus: Opacus' other arguments, which are honoured or refused by name. With ``grad_sample_mode="ghost"`` or
            ``"ghost_fsdp"`` model, optimizer, criterion and loader come back, in Opacus' order.
    """
    is_ghost = read_opacus_arguments(opacus)
    if is_ghost and criterion is None:
        criterion = nn.CrossEntropyLoss()
    warn_of_divided_weights(criterion)
    if loss_reduction not in ("mean", "sum", None):
        raise ValueError(f"loss_reduction={loss_reduction!r}: must be 'mean' or 'sum'.")
    if not poisson_sampling and sampling != "poisson":
        raise SettingError("poisson_sampling=False, {sampling}: give one of them.", sampling=sampling)
    if isinstance(module, PrivateInPlace):
        module.cleanup()
    wrapped, module = module, unwrapped(module.module if isinstance(module, PrivateModule) else module)
    if not wrap_model and module is not wrapped:
        raise ValueError(
            f"wrap_model=False: the module is in {type(wrapped).__name__}, whose calls do not reach the private "
            "loop. Give the module inside it: nothing needs to be wrapped, on several processes neither."
        )
    shards = WholeModule(module)
    clip, rule = _clipping(max_grad_norm, clipping, module)
    check_optimizer(optimizer, shards.parameters().values())
    given = read_loader(data_loader, n_public, relation)
    own = given.loader.collate_fn
    collate = own if transform is None else lambda samples: transform(own(samples))
    if person is not None and given.data is not given.loader.dataset:
        raise ValueError(
            "person: says whose each record of the loader's data set is, and the loader takes a part of it, or "
            "reads a stream. Give the loader a torch Subset, or a list of the records, and person for these."
        )
    objective = ModuleObjective(module, None, memory_budget=memory_budget, collate_fn=collate, pad=pad)
    objective.keeps_frozen = not shards.in_shards
    objective.engine.parameter_groups(rule)
    terms = LoopTerms(
        clipping=rule, noise_schedule=noise_schedule, clip_schedule=clip_schedule,
        batch_size=given.batch_size, epsilon=target_epsilon, delta=target_delta, relation=relation,
        noise_multiplier=noise_multiplier, epochs=epochs, sampling=sampling if poisson_sampling else "turns",
        drop_last=given.drop_last, unit=PrivacyUnit.RECORD if person is None else PrivacyUnit.PERSON,
        n_public=n_public, ledger=ledger, account=account, cap=cap, seed=seed,
    )  # fmt: skip
    asked = with_privacy_unit(objective, given.data, person, PersonRule(combine, records_per_person))
    with shards.whole():
        active = terms.open(*asked, clip)
    loop = HandleLoop(
        active, terms, objective.engine, clip, objective=objective, warns=criterion is not None,
        n_is_declared=terms.n_is_declared, model=shards, reduction=loss_reduction,
    )  # fmt: skip
    private = PrivateModule(module, loop) if wrap_model else private_in_place(module, loop)
    made = private, made_private(optimizer, loop), PrivateLoader(given.loader, loop)
    if criterion is None:
        return made
    reduction = getattr(criterion, "reduction", loss_reduction or "mean")
    private_criterion = PrivateCriterion(criterion, loop, reduction)
    return (*made[:2], private_criterion, made[2]) if is_ghost else (*made, private_criterion)


def _clipping(bound: object, clipping: str | Clipping, module: nn.Module) -> tuple[float, Clipping]:
    """C and the clipping rule; bounds of single parameters make groups of one, whose squares add up to C²."""
    rule = read_clipping(clipping)
    if not isinstance(bound, list | tuple):
        return finite_clip(bound), rule
    names = [name for name, param in module.named_parameters() if param.requires_grad]
    if rule != PerLayer() or len(bound) != len(names):
        raise ValueError(
            f"max_grad_norm: a list of {len(bound)} bounds. A list goes with clipping='per_layer' and has a bound "
            f"for each of the {len(names)} trained parameters; else give one number."
        )
    bounds = [finite_clip(each) for each in bound]
    return finite_clip(math.hypot(*bounds)), PerLayer(tuple(zip(names, bounds, strict=True)))


class PrivacyEngine:
    """Opacus's entry point by name, so that a script is ported by changing its import.

    ``secure_mode`` changes nothing: noise and samples are cryptographic in any case. Nor does ``accountant="prv"``
    or ``"rdp"``: ε is the smallest that is proved. :meth:`get_epsilon` is what all loops of the engine cost.

    >>> PrivacyEngine(accountant="gdp")
    Traceback (most recent call last):
    quietgrad.core.errors.SettingError: accountant='gdp': a central limit, which is no upper bound ...
    """

    def __init__(self, accountant: str = "prv", secure_mode: bool = True) -> None:
        self.accountant = Accountant(check_mechanism(accountant))
        self.secure_mode = True
        """Noise is always cryptographic."""
        self.secure_rng = None
        self.dataset: object = None
        """The data set of the loop that was made last."""

    def make_private(self, **settings: Any) -> Any:
        """See :func:`quietgrad.torch.make_private`.

        Opacus's modes for whole parameters give the same clipped sums here, at the same cost.
        ``batch_first`` must be true and ``noise_generator`` ``None``.
        """
        return self._keep(make_private, settings)

    def make_private_with_epsilon(self, **settings: Any) -> Any:
        """See :func:`quietgrad.torch.make_private_with_epsilon` and :meth:`make_private`."""
        return self._keep(make_private_with_epsilon, settings)

    def save_checkpoint(self, *_: object, **__: object) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(
            "save_checkpoint: save model.state_dict() and optimizer.state_dict() by torch.save, as in plain torch; "
            "the ledger keeps what was spent. For a loop that goes on after a crash use qt.PrivateLoop(folder=)."
        )

    def load_checkpoint(self, *_: object, **__: object) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(
            "load_checkpoint: load the states by load_state_dict, as in plain torch; what was spent is in the "
            "ledger, and a new loop is charged anew. For a loop that goes on after a crash use "
            "qt.PrivateLoop(folder=)."
        )

    def get_epsilon(self, delta: float) -> float:
        """ε of all samples of this engine's loops, as if of the same people.

        A ledger also counts what other programs spent.
        """
        if not self.accountant.loops:
            raise RuntimeError("get_epsilon: nothing was made private yet; call make_private first.")
        return self.accountant.get_epsilon(delta)

    @property
    def condition(self) -> str | None:
        """The condition under which :meth:`get_epsilon` holds, or ``None``."""
        found = (loop.condition for loop in self.accountant.loops)
        return next((condition for condition in found if condition is not None), None)

    @staticmethod
    def is_compatible(
        *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[object] | None = None
    ) -> bool:
        """Whether the module could be made private."""
        return ModuleValidator.is_valid(module)

    @staticmethod
    def validate(
        *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[object] | None = None
    ) -> None:
        """Raise if the module could not be made private."""
        ModuleValidator.validate(module, strict=True)

    @staticmethod
    def get_compatible_module(module: nn.Module) -> nn.Module:
        """A copy with layers that can be made private; make the optimizer of its parameters."""
        return ModuleValidator.fix_and_validate(module)

    def _keep(self, make: Called, settings: Kwargs) -> Any:
        made = make(**settings)
        loader = next(each for each in made if isinstance(each, PrivateLoader))
        self.accountant.loops.append(loader.loop)
        self.dataset = loader.dataset
        return made
