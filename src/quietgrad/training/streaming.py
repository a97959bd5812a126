"""Training on people who arrive once: one release per batch of arrivals, and no record is kept.

The number of releases is fixed in the plan before the first person arrives. What ε needs of the caller is that
*when* somebody is given to the stream does not depend on other people: batches are cut by a public clock (the
arrivals of a day), never "when there are enough", and a person comes in one batch only. Sizes may vary and are
never told; sums are divided by the public ``batch_size``.

Who has come to a stream that is kept in a folder: remembered through crashes, as keyed hashes.

The key is derived from the run's own, so the file beside it tells nobody anything without that, and goes with it
when the stream is closed. A batch's people are written down, durably, before anything of them is released. After a
crash, those of a batch that is given again may come in that batch, where the transcript knows whether it is the
same; everybody else who was ever written down is refused.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quietgrad.algorithms.base import Algorithm, State
from quietgrad.curators.account import Account
from quietgrad.curators.central import CentralCurator, CentralSession
from quietgrad.curators.session import PendingRelease
from quietgrad.errors import BudgetError, DataError, ExhaustedError
from quietgrad.files import append_privately, os_error_text, read_bytes, sync_folder
from quietgrad.objectives.base import RecordAdapter
from quietgrad.objectives.person_ids import SeenIds
from quietgrad.objectives.privacy_units import Combine, RecordsWithIds, UnitGrouping, UserLevelObjective
from quietgrad.plans.schedule import Plan, plan
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.keys import KeyFile
from quietgrad.privacy.ledger_state import DEFAULT
from quietgrad.training.minimizing import check_people, counting, how_people_count, run
from quietgrad.training.result import Result
from quietgrad.training.runs import Run, begin, is_kept, open_run, over, people_file
from quietgrad.vectors import Vector

__all__ = ["PersistentSeenIds"]


_MOST = 1 << 32  # bytes of a file: a hash is 65 of them


class PersistentSeenIds(SeenIds):
    """Those whom a stream has met, in a file with one line per batch: its number, the kind of ids, hashes, a MAC.

    Args:
        path: the file.
        key: the key of the run.
        step: how many batches a stream that goes on has learned from; each must be in the file.
    """

    def __init__(self, path: Path, key: bytes, step: int | None = None) -> None:
        super().__init__(hmac.digest(key, b"people of a stream", "sha256"))
        self._path, self._seal = path, hmac.digest(key, b"people of a stream: lines", "sha256")
        self._step = step or 0
        self._again: dict[int, set[bytes]] = {}  # of batches that will be given again, by number
        if step is not None:
            self._read(step)

    def newcomers(self, ids: Any) -> set[bytes]:
        """The people of the next batch, if nobody of them was in another one."""
        found = super().newcomers(ids)
        if any(found & people for number, people in self._again.items() if number != self._step):
            raise DataError(self.TWICE)
        return found

    def add(self, newcomers: set[bytes], step: int = 0) -> None:
        """They are about to be learned from; once this returns no crash makes anybody forget them."""
        said = " ".join([str(step), self._kind or "-", *sorted(one.hex() for one in newcomers)])
        try:
            first = not self._path.exists()
            # The line before it may have been torn by a crash.
            append_privately(self._path, f"\n{said} {self._mac(said)}\n".encode())
            if first:
                sync_folder(self._path.parent)
        except OSError as error:
            raise DataError(
                f"{self._path}: cannot be written ({os_error_text(error)}), so returning people would not be "
                "recognised. Free disk space. Nothing was released."
            ) from None
        super().add(newcomers | self._again.pop(step, set()))
        self._step = step + 1

    def _read(self, step: int) -> None:
        seen: set[int] = set()
        try:
            lines = read_bytes(self._path, most=_MOST).decode("ascii", "replace").split("\n")
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read ({os_error_text(error)}).") from None
        for line in filter(None, lines):
            said, _, mac = line.rpartition(" ")
            if not hmac.compare_digest(mac.encode(), self._mac(said).encode()):
                continue  # torn: nothing was released of it. If a batch was, it is missing below.
            number, kind, *people = said.split(" ")
            seen.add(int(number))
            self._kind = self._kind or kind.strip("-")
            known = self._known if int(number) < step else self._again.setdefault(int(number), set())
            known.update(bytes.fromhex(one) for one in people)
        if not set(range(step)) <= seen:
            raise DataError(
                f"{self._path}: does not say who was in every batch so far, so a person could be used twice. "
                "Restore the file that belongs to the stream's key, or begin a new stream; it is charged in full."
            )

    def _mac(self, said: str) -> str:
        return hmac.new(self._seal, said.encode(), "sha256").hexdigest()


ENDED = "the stream ended early"
STREAM = "stream"  # the kind of these runs
_NOBODY: npt.NDArray[np.int64] = np.empty(0, np.int64)


def stream(
    objective: RecordAdapter,
    algorithm: Algorithm,
    *,
    budget: Budget,
    ledger: Any = None,
    account: str = "default",
    cap: Budget | None = None,
    folder: str | Path | None = None,
    seed: int | None = None,
    by_person: bool = False,
    combine: Combine = "mean",
    records_per_person: int | None = None,
) -> Stream:
    """Open a model that learns from people as they arrive, each of them once.

    Args:
        objective: a loss of :mod:`quietgrad.objectives`, or a module of torch wrapped as one.
        algorithm: a first-order method with ``sampling="single-pass"``; with ``noise="correlated"`` sums of
            releases have several times less noise. ``steps`` is how many batches there will be, ``batch_size`` a
            public guess at how many people are in one.
        budget: the budget of the whole stream; it holds for every person who arrives.
        ledger, account, cap, seed: as in :func:`~quietgrad.training.minimizing.minimize`.
        folder: keep the stream here, so that the same call goes on with it after a crash. :attr:`Stream.step` says
            which batch is next; the one that was under way is given again, and is free if it is the same.
        by_person: people have several records each: every batch comes with ``person=``, one id per record, and
            ``batch_size`` counts people. A person who comes in two batches is refused.
        combine, records_per_person: as in :func:`~quietgrad.training.minimizing.minimize`.

    >>> import numpy as np, quietgrad as qg
    >>> rng = np.random.default_rng(0)
    >>> method = qg.DPSGD(steps=5, batch_size=100, sampling="single-pass", noise="correlated")
    >>> with qg.stream(qg.objectives.Logistic(), method, budget=qg.Budget(1.0, 1e-5)) as model:
    ...     for day in range(5):
    ...         X = rng.normal(size=(rng.poisson(100), 2))
    ...         _ = model.fit((X, X[:, 0] > 0))
    >>> model.result.privacy.releases, model.result.privacy.is_private
    ({'gradient': 5}, True)
    """
    steps, size = int(getattr(algorithm, "steps", 0)), int(getattr(algorithm, "batch_size", 0))
    if steps < 1 or size < 1:
        raise ValueError(f"{algorithm.name}: a stream needs a method of so many steps on batches of a public size.")
    if by_person:
        objective = UserLevelObjective(objective, combine, records_per_person)
        check_people(algorithm, objective)
    the_plan = plan(algorithm, n=steps * size, budget=budget, unit="person" if by_person else "record")
    if not all(slot.sampling.fresh for slot in the_plan.schedule.slots):
        raise ValueError("sampling: people who arrive once are a single pass; give sampling='single-pass'.")
    return Stream(objective, algorithm, the_plan, ledger, account, cap, folder, seed)


class Stream:
    """An open stream; see :func:`stream`. Leaving its ``with`` block closes it."""

    def __init__(
        self,
        objective: RecordAdapter,
        algorithm: Algorithm,
        the_plan: Plan,
        ledger: Any,
        account: str,
        cap: Budget | None,
        folder: str | Path | None,
        seed: int | None,
    ) -> None:
        self.plan, self._objective, self._algorithm = the_plan, objective, algorithm
        self._account, self._seed = account, seed
        self._folder = None if folder is None else Path(folder)
        self._result: Result | None = None if folder is None else over(folder)
        self._kept: Run | None = None
        self._opened = False  # whether what is kept was found here
        if self._folder is not None and is_kept(self._folder):
            self._kept, self._opened = self._found(self._folder, ledger, account, cap), True
        else:
            self._payer = Account.of(account, ledger, cap, seeded=seed is not None)
        self._state: State | None = None if self._kept is None else self._kept.state
        self._session: _StreamSession | None = None
        self._met = SeenIds() if folder is None else None  # what is kept has a key that is not known yet
        self._start: Vector | None = None

    def _found(self, folder: Path, ledger: Any, account: str, cap: Budget | None) -> Run:
        """The stream that is kept here, if it is the one that was asked for."""
        kept = open_run(folder, kind=STREAM, ledger=ledger, every=0.0)
        try:
            kept.agree_on_account(None if account == DEFAULT else account, cap)
            asked, said = self.plan.to_json(), kept.plan.to_json()
            for what in ("algorithm", "config", "budget", "unit"):
                kept.agree(what, asked[what], said[what])
            kept.agree("way of counting people", counting(self._objective), kept.header.settings["people"])
            self.plan = kept.plan
        except BaseException:
            kept.close()
            raise
        return kept

    @property
    def step(self) -> int:
        """How many batches were learned from: the number of the next one."""
        return 0 if self._state is None else self._state.step

    @property
    def done(self) -> bool:
        """Whether all planned batches were given."""
        return self._state is not None and self._state.done

    @property
    def params(self) -> Vector:
        """The model so far; every one of them is in the price."""
        if self._state is None:
            raise ValueError("no record has arrived yet, so there is no model. Give the stream its first batch.")
        return self._algorithm.output(self._state)

    @property
    def result(self) -> Result:
        """What was learned and proved, once the stream is closed."""
        if self._result is None:
            raise ValueError("the stream is open: close it, or leave its with block, to have a result.")
        return self._result

    def fit(self, data: Any = None, *, person: Any = None) -> Self:
        """Learn from the people of one batch, and forget them; without data the batch is empty: noise is released.

        A stream ``by_person`` takes one id per record. What it remembers of them until it is closed is a keyed
        hash, by which it recognises a person who comes again, after a restart too if it is kept in a folder.
        """
        if self._result is not None:
            raise ExhaustedError(f"the {self.step} batches of this stream were given; plan a new one.")
        data = self._of_people(data, person)
        if self._met is None:
            self._met = self._met_before()
        met = self._newcomers(person)  # before anything is opened, if there is somebody to meet again
        session = self._open(data)
        if self._state is None:
            assert self._start is not None
            self._state = self._algorithm.init(self._start)
        if not self.done:  # else it was interrupted after its last release
            session.arrive(data)
            if self._met is not None:
                self._met.add(met or self._newcomers(person), self.step)
            self._state = self._algorithm.step(self._state, session)
        if self._kept is not None:
            self._kept.save(self._state, session, now=True)
        if self.done:
            self.close()
        return self

    def _newcomers(self, person: Any) -> set[bytes]:
        """Who is in a batch, as keyed hashes."""
        return set() if person is None or self._met is None else self._met.newcomers(person)

    def _met_before(self) -> SeenIds | None:
        """Who came before the stream was interrupted."""
        if self._kept is None or not isinstance(self._objective, UserLevelObjective) or self.done:
            return None
        return PersistentSeenIds(people_file(self._kept.name), KeyFile.load(self._kept.name), self.step)

    def _of_people(self, data: Any, person: Any) -> Any:
        """The batch as the session takes it."""
        if data is None or not isinstance(self._objective, UserLevelObjective):
            if person is not None:
                raise ValueError("person: comes with data, in a stream that was opened with by_person=True.")
            return data
        if person is None:
            raise ValueError("person: a stream by person needs one id per record with every batch.")
        asked = self._objective
        people = UnitGrouping.of(person, combine=asked.combine, records_per_person=asked.records_per_person)
        return RecordsWithIds(data, people)

    def close(self) -> Result:
        """End the stream. Before the last planned batch this costs the whole plan all the same."""
        if self._result is None:
            if self._session is None or self._state is None:
                raise ValueError("no record has arrived since the stream was opened. Give it the next batch first.")
            if not self._state.done:
                self._state.done, self._state.stopped_by = True, ENDED
            once = "every person arrived once, in a batch that did not depend on others: the caller's promise"
            notes = (once, *how_people_count(self._objective))
            result = run(
                self._algorithm, self._session, self._start, state=self._state, kept=self._kept,
                account=self._account, notes=notes,
            )  # fmt: skip
            if self._kept is not None:
                self._kept.finish(result)
            elif self._folder is not None:
                result.save(self._folder)
            self._result = result
        return self._result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._session is not None:
            self.close()
        elif self._kept is not None:
            self._kept.close()

    def _open(self, data: Any) -> _StreamSession:
        """The session, opened with the first batch, which tells the number of features."""
        if self._session is not None:
            return self._session
        if data is None:
            raise ValueError("the first batch must not be empty, because it declares the features.")
        kept = self._kept
        curator = _ArrivalsCurator(
            self._objective, data, account=self._payer if kept is None else kept.account,
            run=None if kept is None else kept.name, seed=self._seed,
        )  # fmt: skip
        self._start = curator.initial()
        try:
            if kept is None and self._folder is not None:
                kept = begin(
                    self._folder, self.plan, curator, kind=STREAM, every=0.0,
                    state=self._algorithm.init(self._start), settings={"people": counting(self._objective)},
                )  # fmt: skip
                if isinstance(self._objective, UserLevelObjective):
                    self._met = (
                        SeenIds()
                        if kept is None
                        else PersistentSeenIds(people_file(kept.name), KeyFile.load(kept.name))
                    )
            session = curator.open(self.plan) if kept is None else kept.open(curator)
        except Exception:
            if kept is not None and not self._opened:
                self._met = None
                kept.discard()
            raise
        assert isinstance(session, _StreamSession)
        self._kept, self._session = kept, session
        return session


class _StreamSession(CentralSession):
    """A session whose fresh records are those that have just arrived, each batch of them for one release."""

    _waiting = False
    _by_place = False  # everybody who has just arrived takes part, wherever they stand

    def arrive(self, data: Any) -> None:
        """The people of the next release take the place of those before."""
        if data is not None:
            records = self._reading.prepare(data)
            if len(self._reading.initial(records)) != self._dim:
                raise DataError("the batch has other features than those before; give the same columns.")
            self._see(self._reading, records)
        self._nobody, self._waiting = data is None, True

    def _sample_from(self, key: bytes) -> None:
        self._fresh, self._samplers = None, {}

    def _begin(self, slot: str, verb: str) -> PendingRelease:
        if not self._waiting:
            raise BudgetError("people who arrived are used once: a release without new arrivals is refused.")
        begun = super()._begin(slot, verb)
        self._waiting = False
        return begun

    def _take_fresh(self, drawn: PendingRelease) -> npt.NDArray[np.int64]:
        return _NOBODY if self._nobody else np.arange(len(self._records), dtype=np.int64)


class _ArrivalsCurator(CentralCurator):
    """Pays for the plan before the first batch is looked at; how many people come is not its business."""

    session = _StreamSession

    def settle(self) -> Account:
        """The account: where nobody named the people, one for this stream alone, since no table is known yet."""
        if self.account.by_default and not self.account.asked:
            self.account = self.account.settled(lambda: (self.run.encode(),), self.unit)
        return self.account

    def _check(self, plan: Plan) -> None:
        self._check_unit(plan)
