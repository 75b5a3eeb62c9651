"""Parquet files as a log: held in memory where it is small, else streamed by row groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from gem_core.data.batch import Batch
from gem_core.data.encode import encoder_of
from gem_core.data.readers.base import TableConfig, TableReader, named_batches
from gem_core.data.readers.files import Paths, expand_urls
from gem_core.data.readers.rowgroups import Pieces, RowGroups, parquet_tables
from gem_core.data.readers.stream import Stream
from gem_core.data.values import Role

BYTES_PER_VALUE = 8
SUFFIXES = (".parquet", ".pq")


class ParquetConfig(TableConfig):
    """`rows`, `validation`, `test`: a file, folder, glob or URL (extra `fsspec`), or a list of them; `events`: the same
    per event type. Without `events`, histories stand in list columns "<type>.<field>" and "<type>.time" of the rows.

    `hold_mib`: a split is encoded once and held in memory if what is read of its files, at 8 bytes a value, is no more;
    a larger one is streamed (0: always). `pool_rows`: rows of whole row groups that are read, and in training shuffled,
    together when streaming; a process holds one such pool.
    """

    rows: Paths | None = None
    validation: Paths | None = None
    test: Paths | None = None
    events: dict[str, Paths] = Field(default_factory=dict)
    hold_mib: int = Field(1024, ge=0)
    pool_rows: int = Field(1 << 17, ge=1)


class ParquetReader(TableReader):
    """Reads the columns that the schema needs; see `ParquetConfig` for how.

    `load` and `rows` hold a split in memory whatever its size.
    """

    Config: ClassVar[type[ParquetConfig]] = ParquetConfig

    def __init__(self, config: ParquetConfig, schema: Any = None, seed: int = 0) -> None:
        super().__init__(config, schema, seed)
        self._groups: dict[str, RowGroups] = {}

    def row_tables(self, part: str, columns: Mapping[str, Role]) -> Pieces:
        """Pieces of the files."""
        for name in expand_urls(getattr(self.config, part), part, SUFFIXES):
            yield from parquet_tables(name, columns)

    def event_tables(self, event: str, columns: Mapping[str, Role]) -> Pieces:
        """Pieces of the files."""
        for name in expand_urls(self.config.events[event], f"events.{event}", SUFFIXES):
            yield from parquet_tables(name, columns)

    def groups(self, split: str) -> RowGroups:
        """The row groups of the files that hold a split."""
        part, columns = self.part_of(split)
        if part not in self._groups:
            schema, by = self._given, self.split
            own = [schema.user, schema.time, schema.history_before] if schema.request is None else [schema.request]
            keys = [key for key in (*own, None if by is None else by.column) if key is not None]
            files = expand_urls(getattr(self.config, part), part, SUFFIXES)
            self._groups[part] = RowGroups(files, keys, columns)
        return self._groups[part]

    def streams(self, split: str) -> bool:
        """Whether a split is streamed, being too large to be held."""
        return self.groups(split).values * BYTES_PER_VALUE > int(self.config.hold_mib) << 20

    def prepare(self, split: str) -> None:
        """Read what workers share: a split that is held, else the footers, the fit and the events that stand apart."""
        if self.streams(split):
            _ = self.schema
            self.log()
        else:
            self.load(split)

    def _stream(self, split: str) -> Stream:
        encoder, log = encoder_of(self.schema), self.log()
        groups, probe = self.groups(split), self.split_columns()

        def keep(table: pa.Table, source: Any) -> Any:
            return self.in_split(split, table, source)

        return Stream(
            groups,
            lambda group: groups.read(group, keep if probe else None, probe),
            lambda tables: encoder.rows(tables, log, self.unlabelled),
            split,
            self.seed,
            self.config.pool_rows,
        )

    def iterate(
        self,
        split: str = "train",
        *,
        rank: int = 0,
        world: int = 1,
        worker: int = 0,
        workers: int = 1,
        state: Mapping[str, Any] | None = None,
        batch_rows: int = 2048,
    ) -> Iterator[Batch]:
        """See `Reader.iterate`.

        Of a split that is held, as `TableReader.iterate`. One that is streamed is dealt to ranks and workers by pools
        (see `gem_core.data.readers.stream`), so the ranks' numbers of batches may differ.
        """
        if not self.streams(split):
            options: dict[str, Any] = {"rank": rank, "world": world, "worker": worker, "workers": workers}
            yield from super().iterate(split, **options, state=state, batch_rows=batch_rows)
            return
        stream = self._stream(split)
        self._state = (begin := stream.position(state, rank, world)).state()
        for batch, turn, position in stream.batches(begin, worker, workers, batch_rows):
            self._state, self._turn = position.state(), turn
            yield batch

    def in_order(self, split: str, batch_rows: int) -> Iterator[tuple[Batch, pa.Table]]:
        """See `TableReader.in_order`."""
        if not self.streams(split):
            yield from super().in_order(split, batch_rows)
            return
        some, rows = False, None
        for rows in self._stream(split).whole():
            if rows.rows:
                some = True
                yield from named_batches(rows, batch_rows)
        if rows is not None and not some:
            yield from named_batches(rows, batch_rows)
