"""Dask data frames, partition by partition: each is summed by the worker that holds it.

What a partition is made of is the frame's own affair and may come out otherwise the next time. So its numbers are
summed up when it is first read, and a later reading that differs is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quietgrad.cluster.dask_runner import DaskRunner, connected
from quietgrad.errors import DataError


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
