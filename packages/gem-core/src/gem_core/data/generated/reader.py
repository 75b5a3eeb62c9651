"""The generated log as a reader: made in memory, without files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import ClassVar

import pyarrow as pa

from gem_core.data.columns import Source
from gem_core.data.generated.config import GeneratedConfig
from gem_core.data.generated.log import Block, Log, describe
from gem_core.data.generated.oracle import Oracle
from gem_core.data.readers.base import Split, TableReader
from gem_core.data.values import Role, Unlabelled
from gem_core.schema import Schema


class GeneratedReader(TableReader):
    """Brings its own schema; one that is given goes before it. Holds the whole log, some 500 bytes a row: for more rows
    than memory has room for, write it once (`gem data generate`) and read the files."""

    Config: ClassVar[type[GeneratedConfig]] = GeneratedConfig

    def __init__(self, config: GeneratedConfig, schema: Schema | None = None, seed: int = 0) -> None:
        super().__init__(config, self.schema_of(config, schema), seed)

    @staticmethod
    def schema_of(config: GeneratedConfig, schema: Schema | None = None) -> Schema:
        """The schema that a reader of this configuration reads by: `schema`, or the log's own."""
        return Schema.parse(describe(config)) if schema is None else schema

    @property
    def split(self) -> Split:
        """By time: the last days."""
        validation, test = self.config.edges()
        return Split(validation_from=validation, test_from=test)

    @property
    def unlabelled(self) -> Unlabelled:
        """Each row has a label for some objective of the log, but perhaps for none of a given schema's."""
        return "drop"

    def given(self, part: str) -> bool:
        """All splits are in one log."""
        return part == "rows"

    def event_types(self) -> list[str]:
        """Those of the schema in use."""
        return list(self._given.events)

    @cached_property
    def _blocks(self) -> list[Block]:
        return list(Log(self.config).blocks())

    def row_tables(self, part: str, columns: Mapping[str, Role]) -> Iterator[tuple[pa.Table, Source]]:
        """The rows of each block of users."""
        for index, block in enumerate(self._blocks):
            yield block.rows, Source(f"generated log, block {index}")

    def event_tables(self, event: str, columns: Mapping[str, Role]) -> Iterator[tuple[pa.Table, Source]]:
        """The events of each block of users."""
        for index, block in enumerate(self._blocks):
            yield block.events[event], Source(f"generated log, {event} events of block {index}")

    def oracle(self, split: str) -> dict[str, float]:
        """Rates and the best possible NE of a split; see `Oracle`."""
        return Oracle.of((table for table, _ in self.tables(split)), self.config.tasks)
