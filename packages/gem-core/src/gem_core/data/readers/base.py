"""What the readers of tables share: splits, fitting, encoding once, and the order of batches with its exact position.

The order of a split's requests (seeded and different in each epoch for training, as stored else) is cut into batches;
rank r takes every world-th batch from its r-th, and of these each of its workers every workers-th. The order of batches
therefore does not depend on the number of workers, and a position, being a place in the order of requests, can be taken
up by any number of ranks and workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, model_validator

from gem_core.data.batch import Batch
from gem_core.data.columns import Bools, Source, column, select
from gem_core.data.encode import EncodedRows, EventLog, Tables, encoder_of
from gem_core.data.fit import fit_sources
from gem_core.data.values import Role, Unlabelled, event_columns, row_columns
from gem_core.errors import ConfigError, DataError, nearest, warn
from gem_core.protocols import ComponentConfig
from gem_core.schema import Schema

SPLITS = ("train", "validation", "test")


class Split(BaseModel):
    """How one log is split: by a `column` that holds train, validation or test, or by request time.

    `validation_from`, `test_from`: seconds since 1970, or a date or time (UTC where it names no zone).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    column: str | None = None
    validation_from: int | datetime | date | None = None
    test_from: int | datetime | date | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        by_time = self.validation_from is not None or self.test_from is not None
        if by_time == (self.column is not None):
            raise ValueError("expected either `column`, or `validation_from` and/or `test_from`")
        if self.validation_from is not None and seconds(self.validation_from) > seconds(self.test_from):
            raise ValueError("validation_from is later than test_from")
        return self

    def edges(self) -> tuple[float, float]:
        """Seconds where validation and test begin."""
        test = seconds(self.test_from)
        return min(seconds(self.validation_from), test), test


def seconds(value: int | datetime | date | None) -> float:
    """Seconds since 1970 of a moment (UTC where it names no zone); of none, infinity."""
    if value is None:
        return float("inf")
    if isinstance(value, int):
        return value
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()


class TableConfig(ComponentConfig):
    """Options that every table reader has; see `Split`. `unlabelled`: rows that have a label for no task."""

    split: Split | None = None
    unlabelled: Unlabelled = "error"


def _raise(kind: str, count: int, error: DataError) -> None:
    raise error


class TableReader(ABC):
    """Base of the readers that hold an encoded log in memory; a subclass gives the tables.

    The schema is fitted on the training split unless it comes fitted (from a checkpoint). Splits are read and encoded
    when first used, once.
    """

    Config: ClassVar[type[ComponentConfig]]

    def __init__(self, config: Any, schema: Schema | None = None, seed: int = 0) -> None:
        if schema is None:
            raise ConfigError("data.schema: missing; this reader needs the schema of the log")
        self.config, self.seed = config, seed
        self._check_splits()
        self._encoded: dict[str, EncodedRows] = {}
        self._log: EventLog | None = None
        self._given = schema
        self.on_fault: Callable[[str, int, DataError], None] = _raise
        """Told of values that cannot be read: their kind, how many they are, and the error of the first."""
        self._state: dict[str, Any] = {"epoch": 0, "request": 0, "seed": seed}
        self._turn = (0, True)

    @cached_property
    def schema(self) -> Schema:
        """The schema fitted on the training split; fits it at the first use."""
        given = self._given
        if given.fitted is not None:
            return given
        return fit_sources(given, self.tables("train"), self.events(), self.seed)

    # ---- what a subclass gives ---------------------------------------------------------------------------------

    @abstractmethod
    def row_tables(self, part: str, columns: Mapping[str, Role]) -> Tables:
        """The tables of option `part` ("rows", "validation", "test"), with at least these columns where they exist."""

    def event_tables(self, event: str, columns: Mapping[str, Role]) -> Tables:
        """The tables of a type of `event_types`; none where all events stand in the rows."""
        return iter(())

    @property
    def given_schema(self) -> Schema:
        """The schema that the reader was made with, fitted or not."""
        return self._given

    @property
    def split(self) -> Split | None:
        """How one log is split; None where each split has its own option."""
        out: Split | None = self.config.split
        return out

    @property
    def unlabelled(self) -> Unlabelled:
        """What becomes of rows without a label."""
        out: Unlabelled = self.config.unlabelled
        return out

    def given(self, part: str) -> bool:
        """Whether the option `part` is given."""
        return getattr(self.config, part, None) is not None

    def event_types(self) -> list[str]:
        """Types of events that are given apart from the rows."""
        return list(self.config.events)

    # ---- splits ------------------------------------------------------------------------------------------------

    def _check_splits(self) -> None:
        if self.split is not None and (self.given("validation") or self.given("test")):
            raise ConfigError("reader: give `split`, or files for `validation` and `test`, not both")
        if not any(self.given(part) for part in ("rows", "validation", "test")):
            raise ConfigError("reader: missing option rows (the training rows)")

    @property
    def inline(self) -> bool:
        """Whether histories stand in list columns of the rows."""
        return not self.event_types()

    def splits(self) -> list[str]:
        """The splits that there are rows for."""
        if self.split is None:
            return [s for s in SPLITS if self.given("rows" if s == "train" else s)]
        by = self.split
        return [s for s in SPLITS if s == "train" or by.column is not None or getattr(by, f"{s}_from") is not None]

    def tables(self, split: str) -> Tables:
        """The tables of a split as they are stored."""
        part, columns = self.part_of(split)
        seen = 0
        for table, source in self.row_tables(part, columns):
            source, seen = source.within(seen - source.first), seen + len(table)
            yield (table, source) if self.split is None else select(table, source, self.in_split(split, table, source))

    def part_of(self, split: str) -> tuple[str, dict[str, Role]]:
        """The option that a split's rows are in, and the columns that are read of them."""
        if split not in self.splits():
            hint = nearest(split, self.splits())
            raise ConfigError(f'there is no split "{split}"{hint}; reader options: rows, validation, test, split')
        columns = row_columns(self._given, self.inline)
        if self.split is None:
            return ("rows" if split == "train" else split), columns
        return "rows", self.split_columns() | columns

    def split_columns(self) -> dict[str, Role]:
        """The column that tells in which split a row is."""
        by = self.split
        if by is None:
            return {}
        return {self._given.time: "time"} if by.column is None else {by.column: "surface"}

    def in_split(self, split: str, table: pa.Table, source: Source) -> Bools:
        """(n,) which rows of a table are in a split; needs `split_columns`."""
        by, schema = self.split, self._given
        if by is None:
            return np.ones(len(table), np.bool_)
        if by.column is None:
            time = column(table, schema.time, "request time", source).times()
            edges = by.edges()
            out: Bools = np.array(SPLITS)[(time >= edges[0]).astype(int) + (time >= edges[1])] == split
            return out
        named = column(table, by.column, "split", source)
        texts = named.texts()
        known = pc.is_in(texts, value_set=pa.array(SPLITS)).to_numpy(zero_copy_only=False)
        named.check(~known, f"one of {', '.join(SPLITS)}")
        out = pc.equal(texts, split).to_numpy(zero_copy_only=False)
        return out

    def events(self) -> dict[str, Tables]:
        """The tables of the events of each type as they are stored; none where they stand in the rows."""
        schema, types = self._given, self.event_types()
        unknown = [e for e in types if e not in schema.events]
        if unknown:
            raise ConfigError(
                f'reader: events: the schema has no type "{unknown[0]}"{nearest(unknown[0], schema.events)}'
            )
        absent = [e for e in schema.events if e not in types]
        if types and absent:
            raise ConfigError(f'reader: events: missing "{absent[0]}", a type of the schema')
        return {e: self.event_tables(e, event_columns(schema, e)) for e in types}

    # ---- batches -----------------------------------------------------------------------------------------------

    def log(self) -> EventLog | None:
        """The encoded events that are given apart from the rows; read when first asked for."""
        if self._log is None and not self.inline:
            self._log = encoder_of(self.schema).events(self.events())
        return self._log

    def prepare(self, split: str) -> None:
        """Read what the workers that the loader forks are to share."""
        self.load(split)

    def load(self, split: str) -> EncodedRows:
        """The encoded rows of a split, in memory; read when first asked for."""
        if split not in self._encoded:
            rows = encoder_of(self.schema).rows(self.tables(split), self.log(), self.unlabelled)
            self._encoded[split] = rows
            self._warn(split, rows)
        return self._encoded[split]

    def _warn(self, split: str, rows: EncodedRows) -> None:
        """Say what is legal but hardly meant: no rows, and histories that are all empty."""
        if not rows.rows:
            by = "" if self.split is None else f" (reader option split: {self.split.model_dump(exclude_none=True)})"
            warn(f"split {split} has no rows{by}")
            return
        for event, (start, end) in rows.spans.items():
            if (start < end).any():
                continue
            known = np.isin(rows.user, rows.log.types[event].users).any()
            why = "all are later than the user's requests" if known else "it has no user in common with the rows"
            warn(f'no request of split {split} sees any event of type "{event}"' + ("" if self.inline else f": {why}"))

    def rows(self, split: str = "train") -> int:
        """Number of rows of a split."""
        return self.load(split).rows

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
        """See `Reader.iterate`. A batch has as many whole requests as fit in `batch_rows` rows, at least one."""
        rows = self.load(split)
        epoch, first = self._position(split, rows, state)
        order = np.arange(rows.requests)
        if split == "train":
            order = np.random.default_rng([self.seed, epoch]).permutation(rows.requests)
        ends = first + rows.batches(order[first:], batch_rows)
        starts = np.concatenate([[first], ends[:-1]])
        self._state = self._state_at(epoch, first, rows)
        for i in range(rank + world * worker, len(ends), world * workers):
            # After this batch every rank has had as many: the position is the end of the round of all ranks.
            last = min(i - rank + world, len(ends)) - 1
            self._state = self._state_at(epoch, int(ends[last]), rows)
            self._turn = (i // world, True)
            yield rows.batch(order[starts[i] : ends[i]])

    def in_order(self, split: str, batch_rows: int) -> Iterator[tuple[Batch, pa.Table]]:
        """The batches of a split in the order stored, each with its rows' `EncodedRows.identity`; at least one."""
        yield from named_batches(self.load(split), batch_rows)

    def _state_at(self, epoch: int, request: int, rows: EncodedRows) -> dict[str, Any]:
        return {"epoch": epoch, "request": request, "requests": rows.requests, "rows": rows.rows, "seed": self.seed}

    def _position(self, split: str, rows: EncodedRows, state: Mapping[str, Any] | None) -> tuple[int, int]:
        state = {"epoch": 0} if state is None else state
        now = self._state_at(0, 0, rows)
        for name in ("requests", "rows", "seed"):
            if state.get(name, now[name]) != now[name]:
                raise DataError(
                    f'cannot resume split "{split}" at a saved position: expected {name} {state[name]}, '
                    f"found {now[name]}; the data, the split or the seed is not that of the saved run"
                )
        epoch, first = int(state.get("epoch", 0)), int(state.get("request", 0))
        if epoch < 0 or not 0 <= first <= rows.requests:
            raise DataError(f'cannot resume split "{split}": no position {dict(state)} in {rows.requests} requests')
        return epoch, first

    def state(self) -> dict[str, Any]:
        """Position after the batch last given (before the first: where the iteration begins)."""
        return dict(self._state)

    def turn(self) -> tuple[int, bool]:
        """See `Reader.turn`: here a batch."""
        return self._turn


def named_batches(rows: EncodedRows, batch_rows: int) -> Iterator[tuple[Batch, pa.Table]]:
    """The batches of encoded rows in order, each with what its rows are called; one without rows if there are none."""
    start = 0
    for end in rows.batches(np.arange(rows.requests), batch_rows).tolist() or [0]:
        first, last = rows.offsets[start], rows.offsets[end]
        yield rows.batch(np.arange(start, end)), rows.identity.slice(first, last - first)
        start = end
