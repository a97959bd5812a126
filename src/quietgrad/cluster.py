"""Dask clusters: partitions of a table are summed where they lie, and only sums come back.

Nothing here knows losses, noise or budgets. The session that asked adds the noise, once, to the sum it is given.

A Dask frame may compute a partition anew at each reading. So each partition is hashed when it is first read, and a
later reading that differs is refused.

Consecutive pieces go to one worker, their sums are merged in the tree of
:func:`quietgrad.objectives.tables.scanned.merged`, and the merged ones again, eight at a time, on the workers: the
numbers that are added, and their order, do not depend on how many workers there are or on which of them died. A
lost worker's pieces are computed again by Dask; a sum is asked for once, and noise is added by nobody here.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quietgrad.errors import ClusterError, DataError, QuietgradError
from quietgrad.sanitize import sanitize

_FAN = 8  # sums merged at a time; a power of two, so that groups are whole branches of the tree
_MOST_TOGETHER = 64
_PATIENCE = 20.0  # seconds for a scheduler to answer and a first worker to appear
_AGAIN = 3  # times that a piece may take its worker down before the release is given up

Merging = Callable[[Any, Any], Any]


def connected(cluster: Any) -> DaskRunner:
    """The runner of ``"local"``, of a scheduler's address, or of a Dask client.

    Raises:
        ClusterError: Dask is not installed, nobody answers, or the workers hold another version of quietgrad.
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
        return DaskRunner(_local(distributed))
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


def _local(distributed: Any) -> Any:
    """One cluster of processes on this machine, for as long as this process lives.

    Its sockets speak TLS under certificates that are made for it, kept in memory and known to its processes alone.
    Whoever else has an account on the machine can reach a socket of the loopback interface, and whom a worker
    listens to it obeys: on plain TCP anybody's code would run as the holder of the data.
    """
    if not _LOCAL or _LOCAL[0].status not in ("running", "connecting"):
        import dask

        security = distributed.Security.temporary()
        pages = ("distributed.scheduler.http.routes", "distributed.worker.http.routes")  # for nobody
        quiet: dict[str, list[str]] = {page: [] for page in pages}
        with dask.config.set({"distributed.worker.daemon": True, **quiet}):
            cluster = distributed.LocalCluster(
                host="127.0.0.1",
                protocol="tls://",
                security=security,
                n_workers=_cores(),
                threads_per_worker=1,
                processes=True,
                dashboard_address="127.0.0.1:0",
                silence_logs=logging.CRITICAL,  # what goes wrong is said once, by the error
            )
        client = distributed.Client(cluster, security=security, set_as_default=False)
        _LOCAL[:] = [client, cluster]
        atexit.register(_close_local, client, cluster)
    return _LOCAL[0]


def _close_local(client: Any, cluster: Any) -> None:
    with suppress(Exception):
        client.close()
        cluster.close()


def _cores() -> int:
    import os

    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1))


class DaskRunner:
    """Does the work on the workers of a Dask client's cluster."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._check()

    def __repr__(self) -> str:
        return "DaskRunner()"

    def _check(self) -> None:
        """Refuse workers that would sum by other code than this."""
        from importlib.metadata import PackageNotFoundError, version

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
        try:
            mine: str | None = version("quietgrad")
        except PackageNotFoundError:
            mine = None
        if found != {mine}:
            raise ClusterError(
                f"cluster: its workers have quietgrad {', '.join(sorted(map(str, found)))}, this process {mine}. "
                "Install the same everywhere; nothing was spent."
            )

    @property
    def slots(self) -> int:
        """Pieces that can be worked on at a time."""
        return max(1, int(sum(self.client.nthreads().values())))

    def total(self, parts: Any, work: Any, tasks: Sequence[Any], merge: Merging) -> Any:
        """``work`` of all tasks, merged on the workers; what comes back is one value."""
        from concurrent.futures import CancelledError

        from distributed import Future
        from distributed.comm.core import CommClosedError
        from distributed.scheduler import KilledWorker, NoValidWorkerError

        if not tasks:
            return None
        try:
            together = _group_size(len(tasks), self.slots)
            # Partitions of a frame are computed anew for every release: nothing is held between them.
            held = iter(self.client.compute([task.unit.held for task in tasks if hasattr(task.unit, "held")]))
            units = [next(held) if hasattr(task.unit, "held") else task.unit for task in tasks]
            rows = [_Rows(task) for task in tasks]
            level: list[Future] = [
                self._submit(_work_on, partial(work, parts), merge, units[start:stop], rows[start:stop])
                for start in range(0, len(tasks), together)
                for stop in (start + together,)
            ]
            while len(level) > 1:
                level = [
                    self._submit(_merge_all, merge, level[start : start + _FAN])
                    for start in range(0, len(level), _FAN)
                ]
            return level[0].result()
        except QuietgradError:
            raise
        except KilledWorker:
            raise ClusterError(
                f"cluster: a piece of the table took its worker down {_AGAIN + 1} times; it may need more memory "
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

    def _submit(self, function: Any, *given: Any) -> Any:
        # Not pure: a sum that was asked for twice is made twice, never remembered for another release.
        return self.client.submit(function, *given, pure=False)


def _group_size(tasks: int, slots: int) -> int:
    """Pieces that one worker takes together: a power of two that leaves every slot several groups.

    >>> _group_size(1000, 16), _group_size(10, 16), _group_size(100_000, 2)
    (8, 1, 64)
    """
    size = 1
    while 2 * size <= _MOST_TOGETHER and tasks >= 8 * size * slots:
        size *= 2
    return size


def _version() -> str | None:
    """A worker's version of quietgrad."""
    from importlib.metadata import PackageNotFoundError, version

    import quietgrad  # noqa: F401

    try:
        return version("quietgrad")
    except PackageNotFoundError:
        return None


class _Rows:
    """Which rows of a piece are asked for, without showing them: who is in a sample is a secret, and logs print."""

    def __init__(self, task: Any) -> None:
        self.task = task._replace(unit=task.unit.filled(None) if hasattr(task.unit, "held") else None)

    def __repr__(self) -> str:
        return "rows"


def _work_on(work: Any, merge: Merging, units: list[Any], rows: list[_Rows]) -> Any:
    from quietgrad.objectives.tables.scanned import merged, one_thread_each

    with one_thread_each():
        tasks = [
            asked.task._replace(unit=unit if asked.task.unit is None else asked.task.unit.filled(unit))
            for unit, asked in zip(units, rows, strict=True)
        ]
        return merged((work(task) for task in tasks), merge)


def _merge_all(merge: Merging, values: list[Any]) -> Any:
    from quietgrad.objectives.tables.scanned import merged

    return merged(iter(values), merge)


@dataclass(frozen=True)
class PartitionUnit:
    """One partition; ``held`` is what computes it, until a worker fills in the frame itself."""

    held: Any
    checksum: int | None = None
    frame: Any = None

    def filled(self, frame: Any) -> PartitionUnit:
        """The unit on a worker, with the partition computed."""
        return replace(self, held=None, frame=frame)

    def expecting(self, checksum: int) -> PartitionUnit:
        """The unit that refuses other numbers than those of ``checksum``."""
        return replace(self, checksum=checksum)

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """Record batches of at most ``rows`` rows."""
        import pyarrow as pa

        frame = _computed(self.held) if self.frame is None else self.frame
        try:
            table = pa.Table.from_pandas(frame[list(columns)], preserve_index=False)
        except (pa.ArrowException, TypeError, ValueError, KeyError):
            # Its own message may quote a cell.
            raise DataError(
                "frame: a partition has columns of mixed types, or others than the frame says."
            ) from None
        yield from table.to_batches(max_chunksize=rows)


def cut_partitions(
    frame: Any, layout: Any, cluster: Any
) -> tuple[list[tuple[PartitionUnit, int | None]], DaskRunner | None]:
    """The partitions of a Dask frame, and the runner of its cluster; without one, this process's threads."""
    import pyarrow as pa

    layout.check_types(pa.Schema.from_pandas(frame._meta, preserve_index=False), "frame")
    runner = connected(cluster) if cluster is not None else _current()
    pieces = frame[layout.read].to_delayed(optimize_graph=True)
    return [(PartitionUnit(piece), None) for piece in pieces], runner


def _computed(held: Any) -> Any:
    try:
        return held.compute()
    except Exception as error:  # the user's own graph: whatever it raises may quote a cell
        raise DataError(
            f"frame: a partition could not be computed ({type(error).__name__}); its message may quote a cell and "
            "is not shown. Compute it alone to see."
        ) from None


def _current() -> DaskRunner | None:
    try:
        from distributed import default_client

        return DaskRunner(default_client())
    except (ImportError, ValueError):
        return None
