"""Local training as a query: what a unit's own SGD steps move the model by, clipped (FedAvg).

A unit is a party, a person or a single record. It makes ``steps`` ordinary SGD steps on its own records from the
public θ and contributes clip_C(θ_local − θ): no longer than C, whatever its records are and however its training
went. With a ``share`` it also says whether its update was within the clip, as one more coordinate of the same
vector (Andrew et al. 2021): ±C·√(s/(1−s)). The vector is then no longer than C/√(1−s), and one Gaussian release of
it pays for both, under one coin: there is no second release that could be forgotten, or priced as a second sample.
A unit that takes no part contributes zeros, in that coordinate too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from quietgrad.core.errors import DataError
from quietgrad.core.noise.rng import SecureStream
from quietgrad.core.session.contributions import check_clip, rounding_safe_clip
from quietgrad.core.session.objectives import Batch, Indices, NoRegularizer, Records, Regularizer, StreamedRecords
from quietgrad.core.vectors import Vector
from quietgrad.tables.privacy_units import GroupIndex, UserLevelRecords
from quietgrad.tables.regularizers import L2, Nonconvex
from quietgrad.tables.table import Floats


class LocalTraining(NamedTuple):
    """How a unit trains: SGD steps, their learning rate, records per step, and the public regulariser."""

    steps: int
    rate: float
    batch_size: int
    regularizer: Regularizer


class LocalBatches(NamedTuple):
    """The records of some clients, in the order in which they are trained on: client j has those of its start on.

    Make it with :meth:`of`. Every step takes the next ``batch_size`` records of each client and begins again where
    they end; a client with fewer takes all of them.
    """

    rows: Indices
    starts: Indices
    batch_size: int

    @classmethod
    def of(cls, clients: GroupIndex, key: bytes | None, batch_size: int) -> LocalBatches:
        """Each client's records in an order that it draws by the key; without one as they are.

        Clients that hold nothing are left out: they contribute nothing.

        >>> LocalBatches.of(GroupIndex(None, np.arange(5), np.array([0, 3, 3, 5]), True), None, 2).step(1)[0]
        array([[2, 0],
               [3, 4]])
        """
        rows, starts = clients.flat()
        sizes = np.diff(starts)
        if key is not None and len(rows):
            words = SecureStream(key, "local order").at(0, rows)
            rows = rows[np.lexsort((words, np.repeat(np.arange(len(sizes)), sizes)))]
        return cls(rows, np.concatenate([starts[:-1][sizes > 0], starts[-1:]]), batch_size)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def chosen(self, clients: Indices) -> LocalBatches:
        """Some of the clients, by their places."""
        rows, starts = GroupIndex(clients, self.rows, self.starts, True).flat()
        return LocalBatches(rows, starts, self.batch_size)

    def step(self, number: int) -> tuple[Indices, Floats]:
        """(places among :attr:`rows`, weights) of a step, (clients, most records): weights of a row sum to 1."""
        sizes = np.diff(self.starts)[:, None]
        most = min(self.batch_size, int(sizes.max()))
        slots = np.arange(most)[None]
        places = self.starts[:-1, None] + (number * self.batch_size + slots) % sizes
        return places, np.where(slots < sizes, 1.0 / np.minimum(sizes, most), 0.0)


@runtime_checkable
class SupportsLocalTraining(Protocol):
    """A loss whose units can train by themselves."""

    @property
    def regularizer(self) -> Regularizer:
        """The public term, which is part of local training."""
        ...

    def local_updates(
        self, batch: Batch, clients: GroupIndex, params: Vector, training: LocalTraining
    ) -> Iterator[Any]:
        """θ_local − θ of the clients, some at a time, as matrices of one row per client.

        ``batch`` holds the rows and the release's key, from which each client draws the order of its records. A row
        depends on that client's records, θ and the key alone. It need not be finite.
        """
        ...


def _is_known_to_train_apart(loss: SupportsLocalTraining) -> bool:
    """Whether loss and penalty are the library's own, of exactly these classes.

    A subclass may compute with all the rows that it is given, which are those of several clients; so may a penalty.
    """
    from quietgrad.tables.losses import LOSSES  # which need this module

    networks = sys.modules.get("quietgrad.torch.networks.module")  # who has a network has imported it
    own = [*LOSSES.values(), *([] if networks is None else [networks.ModuleObjective])]
    return type(loss) in own and type(loss.regularizer) in (NoRegularizer, L2, Nonconvex)


def _updates(loss: SupportsLocalTraining, batch: Batch, clients: GroupIndex, *how: Any) -> Iterator[Any]:
    """The rows of all clients, each a function of that client alone, to the last bit.

    Training may expand a rounding until it decides where an update points. So clients train together only in code
    whose rows are known to be the same beside any others. Every other loss is asked about one client at a time.
    """
    if _is_known_to_train_apart(loss):
        yield from loss.local_updates(batch, clients, *how)
        return
    places = np.arange(len(clients.starts) - 1) if clients.people is None else clients.people
    for place in places:
        yield from loss.local_updates(batch, clients._replace(people=np.array([place])), *how)


@dataclass(frozen=True, slots=True, eq=False)
class LocalUpdateQuery:
    """Σ over units of clip_C(θ_local − θ), and with ``share`` > 0 of whether it was within C.

    >>> query = LocalUpdateQuery(np.zeros(3), steps=5, rate=0.1, batch_size=20, clip=0.3, share=0.19)
    >>> round(query.bound, 4), round(query.bit, 4)
    (0.3333, 0.1453)
    """

    params: Vector
    steps: int
    rate: float
    batch_size: int
    clip: float
    share: float = 0.0

    def __post_init__(self) -> None:
        check_clip("clip", self.clip)
        if self.steps < 1 or self.batch_size < 1 or not 0.0 < self.rate < math.inf:
            raise ValueError("steps, batch_size, rate: local training needs steps and records ≥ 1 and a rate > 0.")
        if not 0.0 <= self.share < 1.0:
            raise ValueError(
                f"share={self.share!r}: must be in [0, 1), the part of the bound that tells of the clip."
            )

    @property
    def bit(self) -> float:
        """Number that a unit adds to the last coordinate if its update is within the clip, and subtracts if not."""
        return self.clip * math.sqrt(self.share / (1.0 - self.share))

    @property
    def bound(self) -> float:
        """√(C² + bit²)."""
        return math.hypot(self.clip, self.bit)

    def dim(self, records: Records) -> int:
        return int(records.dim) + (self.share > 0.0)

    def sum_into(self, objective: Any, batch: Batch, out: Vector) -> None:
        records, loss = batch.records, objective
        if isinstance(records, StreamedRecords):
            raise DataError(
                "local training reads a party's records many times: hold them in memory, not as a scan."
            )
        if isinstance(records, UserLevelRecords):
            clients = records.people.groups(batch.indices, batch.key)
            records, loss = records.rows, objective.loss
        else:  # every record is a client by itself
            count = len(records)
            clients = GroupIndex(batch.indices, np.arange(count), np.arange(count + 1), True)
        if not isinstance(loss, SupportsLocalTraining):
            raise ValueError(f"{type(loss).__name__}: knows no local training; use a loss of tables or a network.")
        training = LocalTraining(self.steps, self.rate, self.batch_size, loss.regularizer)
        for updates in _updates(loss, Batch(records, None, batch.key), clients, self.params, training):
            self._add(updates, out)

    def _add(self, updates: Any, out: Vector) -> None:
        """out += the clipped updates, one row each; a row that is not finite counts as zero, beyond the clip."""
        host = isinstance(updates, np.ndarray)
        wide = updates if host else updates.double()
        width = wide.shape[1]
        with np.errstate(all="ignore"):
            lengths = np.linalg.norm(wide, axis=1) if host else wide.norm(dim=1).cpu().numpy()
        # Its square may overflow although its entries are finite: then it counts as zero too.
        finite = np.isfinite(lengths)
        limit = _limit(self.clip, single=not host and updates.dtype != wide.dtype)
        weights = np.where(finite, np.minimum(1.0, limit / np.maximum(np.where(finite, lengths, 1.0), 1e-300)), 0.0)
        if host:
            out[:width] += weights @ np.where(finite[:, None], wide, 0.0)
        else:
            kept = wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            total: Any = kept.new_tensor(weights) @ kept
            out[:width] += total.cpu().numpy() if isinstance(out, np.ndarray) else total
        if self.share > 0.0:
            within = finite & (lengths <= self.clip)
            out[width] += rounding_safe_clip(self.bit) * float(np.where(within, 1.0, -1.0).sum())


def _limit(clip: float, *, single: bool) -> float:
    """Return the norm that updates are clipped to: C less a margin for rounding, which is wider in float32."""
    return clip / (1.0 + 2e-5) if single else rounding_safe_clip(clip)
