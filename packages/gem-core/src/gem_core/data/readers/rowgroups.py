"""Row groups of many Parquet files as one log, read one at a time in any order.

A request's rows are adjacent in the log, but may run over the end of a row group (or of a file): they then belong to the
row group that they begin in. `RowGroups.read` therefore leaves out the rows that go on from the row group before, and
adds those with which the last request goes on. That costs the columns which tell requests apart of the neighbours,
and the other columns only where a request really goes on.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem_core.data.columns import Bools, Ints, Source, column, select
from gem_core.data.readers.files import file_system
from gem_core.data.values import Role
from gem_core.errors import DataError

PIECE = 1 << 17
"""Rows that are decoded at a time."""

HEAD = 1024
"""Rows that are decoded at a time to find where a request ends in the next row group."""

HEADS_BYTES = 16 << 20
"""Of such rows, what is remembered: finding them costs half as much as reading the whole row group."""

READ_AT_ONCE = 8
"""Footers that are read at the same time."""

Pieces = Iterator[tuple[pa.Table, Source]]
Keep = Callable[[pa.Table, Source], Bools]


def open_parquet(name: str, encoded: Sequence[str] = ()) -> pq.ParquetFile:
    """A path or URL opened; errors are Arrow's. `encoded`: paths of the columns to be read as dictionaries."""
    if "://" not in name:
        return pq.ParquetFile(name, page_checksum_verification=True, read_dictionary=encoded)
    fs, path = file_system(name, name)
    return pq.ParquetFile(
        path, filesystem=fs, pre_buffer=True, page_checksum_verification=True, read_dictionary=encoded
    )


@contextmanager
def named_errors(place: str) -> Iterator[None]:
    """Whatever Arrow or the file system cannot read is a DataError that begins with the place."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        said = str(error).splitlines() or [type(error).__name__]
        raise DataError(f"{place}: cannot be read as Parquet: {said[0]}") from error


def parquet_tables(name: str, columns: Mapping[str, Role]) -> Pieces:
    """The columns that the file has of these, a piece of rows at a time; a file without rows gives one empty piece."""
    with named_errors(name), open_parquet(name) as file:
        first = 0
        for group in range(file.num_row_groups):
            yield from _group_tables(file, name, group, first, columns)
            first += file.metadata.row_group(group).num_rows
        if not first:
            yield _empty(file, name, columns)


def _empty(file: pq.ParquetFile, name: str, columns: Mapping[str, Role]) -> tuple[pa.Table, Source]:
    schema = file.schema_arrow
    return schema.empty_table().select(_wanted(name, schema, columns)), Source(name, columns=tuple(schema.names))


def _wanted(name: str, schema: pa.Schema, columns: Mapping[str, Role]) -> list[str]:
    wanted = [n for n in schema.names if n in columns]
    twice = [n for n, count in Counter(wanted).items() if count > 1]
    if twice:
        raise DataError(f'{name}: two columns are called "{twice[0]}" ({columns[twice[0]]}); rename one')
    return wanted


def _group_tables(
    file: pq.ParquetFile, name: str, group: int, first: int, columns: Mapping[str, Role], rows: int = PIECE
) -> Pieces:
    """The columns of one row group, whose first row is number `first` of the file, so many rows at a time."""
    schema = file.schema_arrow
    wanted, names = _wanted(name, schema, columns), tuple(schema.names)
    with named_errors(f"{name}, row group {group}"):
        threads = pa.cpu_count() > 1  # a pool of one only costs
        for batch in file.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=threads):
            yield pa.Table.from_batches([batch]), Source(name, first, columns=names)
            first += len(batch)


class RowGroups:
    """All row groups of `files`, numbered through; `rows` (n,) has the number of rows of each.

    Args:
        files: paths and URLs.
        keys: columns whose values together tell a request from the one before it.
        columns: all that are read.

    Attributes:
        values: values of `columns` in all files.
        digest: text that differs where files or row groups do (by the names and numbers of rows).

    Raises:
        DataError: a file's footer cannot be read.
    """

    def __init__(self, files: Sequence[str], keys: Sequence[str], columns: Mapping[str, Role]) -> None:
        self.files, self.keys, self.columns = list(files), list(keys), dict(columns)
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            footers = list(pool.map(self._footer, self.files))
        counts = [rows for rows, _, _ in footers]
        self.values = sum(values for _, values, _ in footers)
        self._texts = [texts for _, _, texts in footers]
        self.rows: Ints = np.array([n for of_file in counts for n in of_file], np.int64)
        self._file = np.repeat(np.arange(len(self.files)), [len(of_file) for of_file in counts])
        self._group = np.array([i for of_file in counts for i in range(len(of_file))], np.int64)
        self._before = np.concatenate([[0], np.cumsum(self.rows)])  # rows of the log before each row group
        ends = np.cumsum([0, *(sum(of_file) for of_file in counts)])
        self._file_start = ends[:-1]
        text = "\n".join(f"{f.rsplit('/', 1)[-1]} {rows}" for f, rows in zip(self.files, counts, strict=True))
        self.digest = f"{zlib.crc32(text.encode()):08x}"
        self._open: tuple[int, pq.ParquetFile] | None = None
        self._last: dict[int, tuple[str, ...]] = {}
        self._heads: dict[int, tuple[pa.Table, Source]] = {}  # rows that a row group's first request has before it
        self._heads_bytes = 0

    def __len__(self) -> int:
        return len(self.rows)

    def _footer(self, name: str) -> tuple[list[int], int, list[str]]:
        """Rows of each row group, values of the columns that are read, and paths of those of them that are text ids."""
        with named_errors(name), open_parquet(name) as file:
            meta, schema = file.metadata, file.schema_arrow
            leaves = [leaf for field in schema for leaf in [field.name] * _leaves(field.type)]
            wanted = [i for i, leaf in enumerate(leaves) if leaf in self.columns]
            groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
            values = sum(g.column(i).num_values for g in groups for i in wanted)
            stored = [meta.schema.column(i) for i in wanted if self.columns[leaves[i]] in ("id", "event")]
            texts = [leaf.path for leaf in stored if leaf.logical_type.type == "STRING"]
            return [g.num_rows for g in groups], values, texts

    def close(self) -> None:
        """Close the file that was read last."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def empty(self) -> tuple[pa.Table, Source]:
        """A table without rows."""
        with named_errors(self.files[0]), open_parquet(self.files[0]) as file:
            return _empty(file, self.files[0], self.columns)

    def _tables(self, group: int, columns: Mapping[str, Role], rows: int = PIECE) -> Pieces:
        file = int(self._file[group])
        name = self.files[file]
        with named_errors(name):
            if self._open is None or self._open[0] != file:
                self.close()
                self._open = file, open_parquet(name, self._texts[file])
            before = int(self._file_start[file])
            first = int(self._before[group]) - before
            tables = _group_tables(self._open[1], name, int(self._group[group]), first, columns, rows)
            for table, source in tables:
                yield table, source.within(before)

    def read(self, group: int, keep: Keep | None = None, probe: Mapping[str, Role] | None = None) -> Pieces:
        """The rows of the requests that begin in a row group, of those that `keep` marks.

        Args:
            keep: of a table, the rows to give. It says the same of all rows of a request.
            probe: the columns that `keep` needs: read first, and the others only if there is a row to give.

        Raises:
            DataError: the row group, named by file and number, cannot be read.
        """
        if not self.rows[group]:
            return
        if keep is not None and not any(keep(*piece).any() for piece in self._tables(group, probe or {})):
            return
        last = self._last_key(group - 1)
        for table, source in self._tables(group, self.columns):
            going = 0 if last is None else self._going_on(table, source, last)
            if last is not None and source.first == self._first(group) and going < len(table):
                self._remember(group, table, source, going)
            last = last if going == len(table) else None
            self._last[group] = self._key(table, source, len(table) - 1)
            yield from _kept(*_cut(table, source, going, len(table)), keep)
        if last is not None:  # all rows are those of one request that began before
            return
        yield from self._rest(group, keep)

    def _rest(self, group: int, keep: Keep | None) -> Pieces:
        """The rows with which the last request of a row group goes on in the next ones."""
        own = self._last_key(group)
        for later in range(group + 1, len(self)):
            if not self.rows[later]:
                continue
            head = next(self._tables(later, dict.fromkeys(self.keys, "request"), 1))
            if own is None or not self._going_on(*head, own):
                return
            if later in self._heads:
                yield from _kept(*self._heads[later], keep)
                return
            for table, source in self._tables(later, self.columns, HEAD):
                going = self._going_on(table, source, own)
                if source.first == self._first(later) and going < len(table):
                    self._remember(later, table, source, going)
                yield from _kept(*_cut(table, source, 0, going), keep)
                if going < len(table):
                    return

    def _first(self, group: int) -> int:
        """Number in its file of a row group's first row."""
        return int(self._before[group] - self._file_start[self._file[group]])

    def _remember(self, group: int, table: pa.Table, source: Source, rows: int) -> None:
        """Keep the first rows of a row group, those of a request that began before; the oldest are forgotten."""
        if not 0 < rows <= HEAD or group in self._heads:
            return
        head = table.take(pa.array(range(rows), pa.int64()))  # a copy: a slice would hold the whole table
        self._heads[group] = head, source
        self._heads_bytes += _bytes(head)
        while self._heads_bytes > HEADS_BYTES:
            forgotten, _ = self._heads.pop(next(iter(self._heads)))
            self._heads_bytes -= _bytes(forgotten)

    def _last_key(self, group: int) -> tuple[str, ...] | None:
        """What tells the last request of a row group apart (of one without rows: that before it)."""
        while group >= 0 and not self.rows[group]:
            group -= 1
        if group < 0:
            return None
        if group not in self._last:
            for table, source in self._tables(group, dict.fromkeys(self.keys, "request")):
                self._last[group] = self._key(table, source, len(table) - 1)
        return self._last[group]

    def _key(self, table: pa.Table, source: Source, row: int) -> tuple[str, ...]:
        """What tells the request of a row apart, as text: files may write one id as an integer and as text."""
        return tuple(str(column(table, key, "request", source).values[row].as_py()) for key in self.keys)

    def _going_on(self, table: pa.Table, source: Source, last: tuple[str, ...]) -> int:
        """How many of the first rows are of the request that `last` tells apart."""
        same = np.ones(len(table), np.bool_)
        for key, value in zip(self.keys, last, strict=True):
            values = column(table, key, "request", source).values
            if not len(values) or str(values[0].as_py()) != value:
                return 0
            equal = pc.fill_null(pc.equal(values, values[0]), False)  # as the first: files may differ in types
            same &= equal.to_numpy(zero_copy_only=False)
        return len(same) if same.all() else int(same.argmin())


def _leaves(kind: pa.DataType) -> int:
    """Parquet columns that a type takes."""
    if pa.types.is_dictionary(kind):
        return 1
    return sum(_leaves(kind.field(i).type) for i in range(kind.num_fields)) if kind.num_fields else 1


def _bytes(table: pa.Table) -> int:
    """What a table of few rows takes: each column has objects of its own, too."""
    out: int = table.nbytes + 1024 * table.num_columns
    return out


def _cut(table: pa.Table, source: Source, start: int, end: int) -> tuple[pa.Table, Source]:
    return (table, source) if (start, end) == (0, len(table)) else (table.slice(start, end - start), source.skip(start))


def _kept(table: pa.Table, source: Source, keep: Keep | None) -> Pieces:
    """Those of the rows that `keep` marks, if there are any."""
    if keep is not None:
        table, source = select(table, source, keep(table, source))
    if len(table):
        yield table, source
