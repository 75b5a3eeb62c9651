"""The rows of all splits as one table, and the stored events, as the checks look at them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.data.columns import Bools, Column, Floats, Ints, Source, column
from gem_core.data.ids import column_keys, factorize, splitmix64
from gem_core.data.profile import whole
from gem_core.data.readers.base import TableReader
from gem_core.data.targets import Targets
from gem_core.data.values import surface_texts
from gem_core.errors import DataError
from gem_core.schema import Schema

T = TypeVar("T")


def attempt(work: Callable[[], T]) -> T | None:
    """What `work` gives; None where the data is at fault, which the profile then says."""
    try:
        return work()
    except DataError:
        return None


def filled_keys(values: pa.Array) -> Ints:
    """(n,) keys of ids; no value is an id of its own."""
    return column_keys(pc.fill_null(values, -1 if pa.types.is_integer(values.type) else ""))


def mixed(*keys: Ints) -> Ints:
    """(n,) one key of several."""
    out = np.zeros(len(keys[0]), np.uint64)
    for key in keys:
        out = splitmix64(out ^ key.view(np.uint64))
    return out.view(np.int64)


@dataclass(frozen=True)
class Category:
    """A row-level feature of one id: `keys` (n,) and where there is `none`."""

    name: str
    keys: Ints
    none: Bools


@dataclass(frozen=True)
class Events:
    """Stored events of a type, in the file's order: keys of the user and of the fields that are ids, numbers."""

    user: Ints
    time: Ints
    ids: dict[str, Ints]
    numbers: dict[str, Floats]


@dataclass(frozen=True)
class Log:
    """Attributes:
    part: (n,) index of each row's split in `splits`.
    user, time, before: (n,) user key, request time and end of the history.
    labels: per task (n,) 0 or 1, NaN where the row does not count.
    """

    schema: Schema
    table: pa.Table
    source: Source
    splits: list[str]
    part: npt.NDArray[np.int64]
    user: Ints
    time: Ints
    before: Ints
    labels: dict[str, Floats]
    categories: list[Category]
    events: dict[str, Events]

    def column(self, name: str, role: str) -> Column | None:
        """A column of the rows; None where there is none."""
        return attempt(lambda: column(self.table, name, role, self.source))


def read(reader: TableReader) -> Log | None:
    """The log of a reader; None where users or times cannot be read."""
    schema, splits = reader.given_schema, reader.splits()
    pieces, part = [], []
    for i, split in enumerate(splits):
        tables = attempt(lambda split=split: list(reader.tables(split)))  # type: ignore[misc]
        for table, source in tables or []:
            pieces.append((table, source))
            part.append(np.full(len(table), i))
    joined = attempt(lambda: whole(pieces)) if pieces else None
    if joined is None:
        return None
    table, source = joined
    found = attempt(lambda: _moments(schema, table, source))
    if found is None:
        return None
    user, time, before = found
    events = {
        event: read_events
        for event, tables in (attempt(reader.events) or {}).items()
        if (read_events := attempt(lambda e=event, t=tables: _events(schema, e, *whole(t)))) is not None  # type: ignore[misc]
    }
    labels = {}
    for task in schema.objectives:
        label = attempt(lambda task=task: _labels(schema, task, table, source))  # type: ignore[misc]
        if label is not None:
            labels[task] = label
    categories = []
    for name, feature in schema.sparse.items():
        ids = attempt(lambda c=feature.column or name: column(table, c, "", source).ids())  # type: ignore[misc]
        if not feature.multi and feature.level == "row" and ids is not None:
            categories.append(Category(name, filled_keys(ids), ids.is_null().to_numpy(zero_copy_only=False)))
    where = np.concatenate(part)
    return Log(schema, table, source, splits, where, user, time, before, labels, categories, events)


def _moments(schema: Schema, table: pa.Table, source: Source) -> tuple[Ints, Ints, Ints]:
    user = filled_keys(column(table, schema.user, "user", source).ids())
    time = before = column(table, schema.time, "request time", source).times()
    if schema.history_before is not None:
        before = column(table, schema.history_before, "end of the history", source).times()
    return user, time, before


def _labels(schema: Schema, task: str, table: pa.Table, source: Source) -> Floats:
    alone = schema.model_copy(update={"objectives": {task: schema.objectives[task]}})
    targets = Targets(alone, table, source, surface_texts(schema, table, source), required=True)
    return np.where(targets.masks[task] > 0, targets.labels[task], np.nan)


def _events(schema: Schema, event: str, table: pa.Table, source: Source) -> Events:
    kind = schema.events[event]
    user = filled_keys(column(table, kind.user or schema.user, "user", source).ids())
    time = column(table, kind.time or schema.time, "time", source).times()
    ids, numbers = {}, {}
    for name, field in kind.fields.items():
        values = column(table, field.column or name, f"field {event}.{name}", source)
        if field.kind == "sparse":
            ids[name] = filled_keys(values.ids())
        else:
            numbers[name] = values.numbers()
    return Events(user, time, ids, numbers)


def row_hashes(table: pa.Table, source: Source, without: set[str]) -> npt.NDArray[np.uint64]:
    """(n,) a hash of all columns, lists too, but those of `without`."""
    out = np.zeros(len(table), np.uint64)
    for name in table.column_names:
        if name in without:
            continue
        values = column(table, name, "", source)
        if not pa.types.is_nested(values.values.type):
            out = splitmix64(out ^ factorize(values.values)[0].view(np.uint64))
            continue
        inner, offsets = values.lists()
        lengths = np.diff(offsets)
        out = splitmix64(out ^ lengths.view(np.uint64))
        if len(inner):
            position = np.arange(len(inner)) - np.repeat(offsets[:-1], lengths)
            each = splitmix64(splitmix64(position.view(np.uint64)) ^ factorize(inner.values)[0].view(np.uint64))
            some = lengths > 0
            out[some] = splitmix64(out[some] ^ np.add.reduceat(each, offsets[:-1][some]))
    return out
