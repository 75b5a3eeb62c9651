"""Data in memory as a log: Arrow tables, pandas and polars frames, records, mappings of columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from gem_core.data.columns import Source
from gem_core.data.readers.base import TableConfig, TableReader
from gem_core.data.tables import any_table
from gem_core.data.values import Role


class MemoryConfig(TableConfig):
    """`rows`, `validation`, `test` and per type `events`: anything that `gem_core.data.tables.any_table` takes."""

    rows: Any = None
    validation: Any = None
    test: Any = None
    events: dict[str, Any] = Field(default_factory=dict)


class MemoryReader(TableReader):
    """Holds tables of this process encoded."""

    Config: ClassVar[type[MemoryConfig]] = MemoryConfig

    def row_tables(self, part: str, columns: Mapping[str, Role]) -> Iterator[tuple[pa.Table, Source]]:
        """The table."""
        yield any_table(getattr(self.config, part), part), Source(part)

    def event_tables(self, event: str, columns: Mapping[str, Role]) -> Iterator[tuple[pa.Table, Source]]:
        """The table."""
        yield any_table(self.config.events[event], f"events.{event}"), Source(f"events.{event}")
