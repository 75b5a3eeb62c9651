"""Tables cut into partitions on disk by the hash of a key, each small enough to be sorted in memory."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

from gem_core.data.columns import Ints
from gem_core.data.ids import splitmix64


def partition_of(key: Ints, partitions: int) -> Ints:
    """(n,) partition 0 .. partitions - 1 of each key."""
    out: Ints = (splitmix64(key.view(np.uint64)) % np.uint64(partitions)).astype(np.int64)
    return out


class Spill:
    """Writes tables of one schema to files of partitions; `read` gives a whole partition back, and deletes its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
        folder.mkdir()

    def add(self, table: pa.Table, partition: Ints) -> None:
        """Append the rows of a table, in their order, to `partition` (n,)."""
        order = np.argsort(partition, kind="stable")
        table, partition = table.take(pa.array(order)), partition[order]
        starts = np.flatnonzero(np.diff(partition, prepend=-1))
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(table)], strict=True):
            number = int(partition[start])
            if number not in self._open:
                self._open[number] = pa.ipc.new_stream(str(self._folder / f"{number}.arrow"), table.schema)
            self._open[number].write_table(table.slice(start, end - start).combine_chunks())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for writer in self._open.values():
            writer.close()

    def read(self, partition: int) -> pa.Table | None:
        """All rows of a partition in the order in which they were added; None where it has none."""
        path = self._folder / f"{partition}.arrow"
        if not path.exists():
            return None
        with pa.OSFile(str(path), "rb") as file:
            table = pa.ipc.open_stream(file).read_all()
        path.unlink()
        return table.combine_chunks()
