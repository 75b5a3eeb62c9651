"""Parquet files as a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from gem_core.data.columns import Source
from gem_core.data.readers.base import Paths, TableConfig, TableReader, expand
from gem_core.data.values import Role
from gem_core.errors import DataError

PIECE = 1 << 17
"""Rows that are decoded and encoded at a time."""


class ParquetConfig(TableConfig):
    """`rows`, `validation`, `test`: a file, folder, glob, or a list of them; `events`: the same per event type.

    Without `events`, histories stand in list columns "<type>.<field>" and "<type>.time" of the rows.
    """

    rows: Paths | None = None
    validation: Paths | None = None
    test: Paths | None = None
    events: dict[str, Paths] = Field(default_factory=dict)


class ParquetReader(TableReader):
    """Reads Parquet files once, column by column as the schema needs, and holds them encoded."""

    Config: ClassVar[type[ParquetConfig]] = ParquetConfig

    def row_tables(self, part: str, columns: Mapping[str, Role]) -> Iterator[tuple[pa.Table, Source]]:
        """Pieces of the files."""
        for path in expand(getattr(self.config, part), part, (".parquet", ".pq")):
            yield from parquet_tables(path, columns)

    def event_tables(self, event: str, columns: Mapping[str, Role]) -> Iterator[tuple[pa.Table, Source]]:
        """Pieces of the files."""
        for path in expand(self.config.events[event], f"events.{event}", (".parquet", ".pq")):
            yield from parquet_tables(path, columns)


def parquet_tables(path: Path, columns: Mapping[str, Role]) -> Iterator[tuple[pa.Table, Source]]:
    """The columns that the file has of these, a piece of rows at a time; a file without rows gives one empty piece."""
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            wanted = [name for name in schema.names if name in columns]
            first, names = 0, tuple(schema.names)
            twice = [name for name in wanted if names.count(name) > 1]
            if twice:
                raise DataError(f'{path}: two columns are called "{twice[0]}" ({columns[twice[0]]}); rename one')
            for batch in file.iter_batches(PIECE, columns=wanted, use_threads=True):
                yield pa.Table.from_batches([batch]), Source(str(path), first, columns=names)
                first += len(batch)
            if not first:
                yield schema.empty_table().select(wanted), Source(str(path), columns=names)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {str(error).splitlines()[0]}") from error
