"""Dask clusters: partitions of a table are summed where they lie, and only sums come back.

Nothing here knows losses, noise or budgets. The session that asked adds the noise, once, to the sum it is given.

Consecutive pieces go to one worker, their sums are merged in the tree of
:func:`quietgrad.tables.scanned.merged`, and the merged ones again, eight at a time, on the workers: the
numbers that are added, and their order, do not depend on how many workers there are or on which of them died. A
lost worker's pieces are computed again by Dask; a sum is asked for once, and no noise is added here.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar

from joblib import cpu_count

from quietgrad.core.errors import ClusterError, QuietgradError
from quietgrad.core.sanitize import sanitize
from quietgrad.tables.row_cache import RowCache, WorkerRowCache
from quietgrad.tables.scanned import BoxedSum, Merge, Task, merged, one_thread_each

if TYPE_CHECKING:
    import distributed

Value = TypeVar("Value")

_FAN = 8  # sums merged at a time; a power of two, so that groups are whole branches of the tree
_MOST_TOGETHER = 64
_UNEVEN = 1.15  # times the fewest pieces that the busiest slot can have
_PATIENCE = 20.0  # seconds for a scheduler to answer and a first worker to appear
_AGAIN = 3  # times that a piece may take its worker down before the release is given up


def connected(cluster: str | DaskRunner | distributed.Client) -> DaskRunner:
    """The runner of ``"local"``, of a scheduler's address, or of a Dask client.

    Raises:
        ClusterError: Dask is not installed, no scheduler answers, or the workers hold another version of quietgrad.
    """
    try:
        import distributed
    except ImportError:
        raise ClusterError("cluster: needs Dask; pip install 'quietgrad[cluster]'.") from None
    if isinstance(cluster, DaskRunner):
        return cluster
    if isinstance(cluster, distributed.Client):
        return DaskRunner(cluster)
    if cluster == "local":
        return DaskRunner(_local())
    if not isinstance(cluster, str) or "://" not in cluster:
        raise ValueError(f"cluster={cluster!r}: must be 'local', an address such as tcp://HOST:8786, or a client.")
    try:
        client = distributed.Client(cluster, timeout=_PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError):
        raise ClusterError(
            f"{sanitize(cluster)}: no Dask scheduler answers there. Start one, or check the address; nothing was "
            "spent."
        ) from None
    atexit.register(client.close)
    return DaskRunner(client)


_LOCAL: list[Any] = []


def _local() -> distributed.Client:
    """One cluster of processes on this machine, for as long as this process lives.

    Its sockets speak TLS under certificates that are made for it, kept in memory and known to its processes alone.
    Every user of the machine can reach a socket of the loopback interface, and a worker obeys its callers: on plain
    TCP another user's code would run as the holder of the data.
    """
    if not _LOCAL or _LOCAL[0].status not in ("running", "connecting"):
        import dask
        import distributed

        security = distributed.Security.temporary()
        pages = ("distributed.scheduler.http.routes", "distributed.worker.http.routes")  # pages that are not served
        quiet: dict[str, list[str]] = {page: [] for page in pages}
        with dask.config.set({"distributed.worker.daemon": True, **quiet}):
            cluster = distributed.LocalCluster(
                host="127.0.0.1",
                protocol="tls://",
                security=security,
                n_workers=cpu_count(),
                threads_per_worker=1,
                processes=True,
                dashboard_address="127.0.0.1:0",
                silence_logs=logging.CRITICAL,  # what goes wrong is said once, by the error
            )
        client = distributed.Client(cluster, security=security, set_as_default=False)
        _LOCAL[:] = [client, cluster]
        atexit.register(_close_local, client, cluster)
    return _LOCAL[0]


def _close_local(client: distributed.Client, cluster: distributed.LocalCluster) -> None:
    with suppress(Exception):
        client.close()
        cluster.close()


class DaskRunner:
    """Does the work on the workers of a Dask client's cluster."""

    def __init__(self, client: distributed.Client) -> None:
        """Refuse workers that would sum by other code than this."""
        self.client = client
        try:
            self.client.wait_for_workers(1, timeout=_PATIENCE)
            found = set(self.client.run(_version).values())
        except TimeoutError:
            raise ClusterError("cluster: the scheduler has no workers. Start some; nothing was spent.") from None
        except Exception as error:
            raise ClusterError(
                f"cluster: its workers cannot be asked ({type(error).__name__}); do they have quietgrad installed? "
                "Nothing was spent."
            ) from None
        mine = _version()
        if found != {mine}:
            raise ClusterError(
                f"cluster: its workers have quietgrad {', '.join(sorted(map(str, found)))}, this process {mine}. "
                "Install the same everywhere; nothing was spent."
            )

    def __repr__(self) -> str:
        return "DaskRunner()"

    @property
    def count(self) -> int:
        """How many pieces a worker sums at a time."""
        return max(map(int, self.client.nthreads().values()), default=1)

    def row_cache(self, memory: int) -> WorkerRowCaches:
        """Room for rows on every worker."""
        return WorkerRowCaches(memory, self.client)

    def total(
        self, parts: object, work: Callable[[Any, Task], Value], tasks: Sequence[Task], merge: Merge
    ) -> Value | None:
        """``work`` of all tasks, merged on the workers; what comes back is one value."""
        from distributed.comm.core import CommClosedError
        from distributed.scheduler import KilledWorker, NoValidWorkerError

        if not tasks:
            return None
        # Not pure: a sum that was asked for twice is made twice, never remembered for another release.
        submit = partial(self.client.submit, pure=False)
        try:
            workers = self.client.nthreads()
            caching = isinstance(work, BoxedSum) and isinstance(work.cache, WorkerRowCaches)
            sized = _even_group_size if caching else _group_size
            together = sized(len(tasks), sum(workers.values()))
            rows = [_RowSelection(task) for task in tasks]
            groups = [rows[start : start + together] for start in range(0, len(tasks), together)]
            summand: Callable[[Any, Task], Any] = work
            caches: Sequence[Any] = [None] * len(groups)
            if isinstance(work, BoxedSum) and isinstance(work.cache, WorkerRowCaches):
                # The caches travel as futures, so that Dask sends a group's work to where its rows are kept.
                caches, summand = work.cache.of_groups(len(groups), len(workers)), replace(work, cache=None)
            level = [
                submit(_work_on, partial(summand, parts), merge, group, cache)
                for group, cache in zip(groups, caches, strict=True)
            ]
            while len(level) > _FAN:
                level = [
                    submit(_merge_all, merge, level[start : start + _FAN]) for start in range(0, len(level), _FAN)
                ]
            # The last few are merged here: a task more takes longer than that.
            return _merge_all(merge, [future.result() for future in level])
        except QuietgradError:
            raise
        except KilledWorker:
            raise ClusterError(
                f"cluster: a piece of the table ended its worker {_AGAIN + 1} times; it may need more memory "
                "than a worker has. Give workers more, or write smaller row groups; the release was not made."
            ) from None
        except (CancelledError, CommClosedError, TimeoutError, OSError, NoValidWorkerError):
            raise ClusterError(
                "cluster: the connection to it was lost; the release was not made. Resume when it is back."
            ) from None
        except Exception as error:  # whatever else a worker says may quote what it read
            raise ClusterError(
                f"cluster: a worker failed ({type(error).__name__}); the release was not made."
            ) from None


class WorkerRowCaches:
    """Caches on the workers, one for each group of pieces: Dask sends the work to where its group's cache lies.

    They go when this object does. A worker that is lost takes its caches along, and Dask makes them again, empty,
    where the work goes then. ``memory``: bytes on each worker.
    """

    def __init__(self, memory: int, client: distributed.Client) -> None:
        self.memory, self._client = memory, client
        self._caches: list[distributed.Future] = []

    def of_groups(self, count: int, workers: int) -> list[distributed.Future]:
        """The caches of ``count`` groups, the same as long as there are so many."""
        if len(self._caches) != count:
            share = self.memory * workers // count
            self._caches = [self._client.submit(WorkerRowCache, share, pure=False) for _ in range(count)]
        return self._caches


def _group_size(tasks: int, slots: int) -> int:
    """Pieces that one worker takes together: a power of two that leaves every slot several groups.

    >>> _group_size(1000, 16), _group_size(10, 16), _group_size(100_000, 2)
    (8, 1, 64)
    """
    size = 1
    while 2 * size <= _MOST_TOGETHER and tasks >= 8 * size * slots:
        size *= 2
    return size


def _even_group_size(tasks: int, slots: int) -> int:
    """Pieces that one worker takes together where their rows are kept: as many as leave the slots equally busy.

    What takes time then is Dask's own work for a task. A power of two, so that groups are branches of the tree.

    >>> _even_group_size(8, 2), _even_group_size(80, 2), _even_group_size(7, 4)
    (4, 8, 2)
    """
    sizes = [1 << power for power in range(max(1, tasks).bit_length())]
    busiest = {size: size * ceil(ceil(tasks / size) / slots) for size in sizes}
    return max(size for size in sizes if busiest[size] <= _UNEVEN * min(busiest.values()))


def _version() -> str | None:
    """A worker's version of quietgrad; ``None`` if it runs from its source."""
    try:
        return version("quietgrad")
    except PackageNotFoundError:
        return None


class _RowSelection:
    """A piece and which of its rows are asked for, not shown: who is in a sample is a secret, and logs print."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __repr__(self) -> str:
        return "rows"


def _work_on(work: partial[Value], merge: Merge, rows: list[_RowSelection], cache: RowCache | None) -> Value | None:
    if cache is not None:
        work = partial(replace(work.func, cache=cache), *work.args)  # type: ignore[type-var]
    with one_thread_each(), _FREED_MEMORY.kept():
        return merged((work(asked.task) for asked in rows), merge)


class _FreedMemory:
    """Freed memory of a worker, which stays with the process while pieces are summed.

    Dask's nannies start workers with ``MALLOC_TRIM_THRESHOLD_=65536``: glibc then returns every freed array to the
    operating system and is given zeroed pages for the next one, which took more time than the sums. After the last
    piece the worker's own setting holds again.
    """

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While this context lasts, up to 256 MB of freed memory stay."""
        usual = os.environ.get("MALLOC_TRIM_THRESHOLD_", "")
        if not usual.isdigit():  # glibc's own rule, which adapts to what is freed
            yield
            return
        with self._lock:
            self._users += 1
            if self._users == 1:
                _set_malloc(_TRIM_THRESHOLD, 256 << 20)
                _set_malloc(_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc takes for blocks of its heap
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    _set_malloc(_TRIM_THRESHOLD, min(int(usual), (1 << 31) - 1))
                    _set_malloc(_MMAP_THRESHOLD, 128 << 10)  # glibc's default


_FREED_MEMORY = _FreedMemory()
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's malloc.h


def _set_malloc(option: int, value: int) -> None:
    """Set an option of glibc's allocator; with another C library nothing happens."""
    with suppress(AttributeError, OSError, TypeError):
        if sys.platform == "linux":
            ctypes.CDLL(None).mallopt(option, value)


def _merge_all(merge: Merge, values: list[Value]) -> Value | None:
    return merged(values, merge)
