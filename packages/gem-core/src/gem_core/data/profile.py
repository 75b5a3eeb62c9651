"""A profile of a log: what is in it and what is wrong with it, counted, before anything is trained on it.

Unlike reading, which stops at the first fault, profiling goes on: each kind of fault is counted, with the place of the
first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.data.columns import Bools, Column, Floats, Ints, Joined, Source, column
from gem_core.data.encode import Tables
from gem_core.data.ids import column_keys, factorize, keys, splitmix64
from gem_core.data.readers.base import TableReader
from gem_core.data.rows import UserEvents
from gem_core.data.targets import Targets
from gem_core.data.values import SHARED, inline_column, request_features, surface_texts, vector_values
from gem_core.errors import DataError
from gem_core.schema import DenseFeature

P = ParamSpec("P")
T = TypeVar("T")

QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass
class Fault:
    """A kind of fault: how many values (None: the whole column) and the message of the first."""

    count: int | None
    first: str


@dataclass
class LabelProfile:
    """Labels of a task, of all rows or of one surface: rows that count, positives among them, their share."""

    rows: int
    positives: int

    @property
    def rate(self) -> float | None:
        """Share of positives; None of no rows."""
        return self.positives / self.rows if self.rows else None


@dataclass
class IdProfile:
    """Ids of a lookup key: all, distinct ones, share without a value, share that the training split does not have."""

    values: int
    distinct: int
    missing: float
    unseen: float | None = None


@dataclass
class NumberProfile:
    """A dense feature: share without a value, and of the rest least, mean and greatest, before the transform."""

    missing: float
    least: float | None
    mean: float | None
    greatest: float | None


@dataclass
class SplitProfile:
    """One split. `history`: events per request that it can see, by type, before truncation to `max_length`;
    `truncated`: share of requests with more than that."""

    rows: int = 0
    requests: int = 0
    users: int = 0
    first: str | None = None
    last: str | None = None
    rows_per_request: dict[str, float] = field(default_factory=dict)
    surfaces: dict[str, int] = field(default_factory=dict)
    labels: dict[str, dict[str, LabelProfile]] = field(default_factory=dict)
    unlabelled: int = 0
    history: dict[str, dict[str, float]] = field(default_factory=dict)
    truncated: dict[str, float] = field(default_factory=dict)
    ids: dict[str, IdProfile] = field(default_factory=dict)
    numbers: dict[str, NumberProfile] = field(default_factory=dict)
    repeated_row_ids: int = 0
    identical_rows: int = 0


@dataclass
class EventProfile:
    """A type of stored events."""

    events: int
    users: int
    first: str | None
    last: str | None
    per_user: dict[str, float]
    ids: dict[str, IdProfile]


@dataclass
class Profile:
    """Of a whole log. `tables`: distinct ids of each learned table in the training split and the events."""

    splits: dict[str, SplitProfile] = field(default_factory=dict)
    events: dict[str, EventProfile] = field(default_factory=dict)
    tables: dict[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        out = asdict(self)
        for name, split in self.splits.items():
            for task, groups in split.labels.items():
                for group, labels in groups.items():
                    out["splits"][name]["labels"][task][group]["rate"] = labels.rate
        return out


def profile(reader: TableReader) -> Profile:
    """Profile all splits and events of a reader of tables; its schema need not be fitted."""
    return _Profiler(reader).run()


def _quantiles(values: Ints) -> dict[str, float]:
    return {n: float(np.quantile(values, q)) for n, q in QUANTILES.items()} if len(values) else {}


def _date(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat().removesuffix("+00:00")


def _range(time: Ints) -> tuple[str | None, str | None]:
    return (_date(int(time.min())), _date(int(time.max()))) if len(time) else (None, None)


def whole(tables: Tables) -> tuple[pa.Table, Source]:
    """All pieces as one table, and the place of each row."""
    pieces = list(tables)
    names = list(dict.fromkeys(source.name for _, source in pieces))
    table = pa.concat_tables([t for t, _ in pieces], promote_options="permissive")
    first = np.cumsum([0, *(len(t) for t, _ in pieces)]).tolist()
    parts = tuple((start, source) for start, (t, source) in zip(first, pieces, strict=False) if len(t))
    return table, Joined(", ".join(names), columns=pieces[0][1].columns, parts=parts)


def _file_and_column(error: DataError) -> tuple[str, ...]:
    """Of a fault of a value; empty for another."""
    found = re.match(r'(.+), (?:line|row) \d+, column "([^"]*)"', str(error))
    return () if found is None else found.groups()


class _Profiler:
    def __init__(self, reader: TableReader) -> None:
        self.reader, self.schema = reader, reader.given_schema
        self.out = Profile()
        self.trained: dict[str, list[Ints]] = {}
        """Per table, keys of the ids of the stored events and of the training split."""
        self.stored: dict[str, UserEvents] = {}
        self.unread: dict[str, Fault] = {}
        """Kinds of values that the reader cannot read."""
        self.unread_columns: set[tuple[str, ...]] = set()
        """Files and columns of these: values that are missing there may be these."""
        self.said: set[str] = set()
        """Messages: a file may be read for each split."""

    def run(self) -> Profile:
        self.reader.on_fault = self._unread
        for event, tables in self.reader.events().items():
            found = self._try(whole, tables)
            if found is not None:
                self._event(event, *found)
        for split in self.reader.splits():
            found = self._try(whole, self.reader.tables(split))
            if found is not None:
                self.out.splits[split] = self._split(split, *found)
        for table, parts in self.trained.items():
            if self.schema.sparse_options(table).hash is None:
                self.out.tables[table] = len(np.unique(np.concatenate(parts)))
        return self.out

    def _unread(self, kind: str, count: int, error: DataError) -> None:
        """Count values that the reader then gives as missing."""
        if not self._news(error):
            return
        self.unread_columns.add(_file_and_column(error))
        if kind in self.unread:
            self.unread[kind].count = (self.unread[kind].count or 0) + count
            return
        self.unread[kind] = Fault(count, str(error))
        self.out.faults.append(self.unread[kind])

    def _news(self, error: DataError) -> bool:
        """Whether this was not said before, nor is of a value that may be missing because it could not be read."""
        text = str(error)
        mended = text.endswith("found no value") and _file_and_column(error) in self.unread_columns
        known = text in self.said or mended
        self.said.add(text)
        return not known

    def _count(self, values: Column, bad: Bools, expected: str) -> None:
        """Count the values that `bad` marks as one kind of fault."""
        try:
            values.check(bad, expected)
        except DataError as error:
            if self._news(error):
                self.out.faults.append(Fault(int(bad.sum()), str(error)))

    def _try(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """What `work` gives; None, and the fault kept, where it finds one."""
        try:
            return work(*args, **options)
        except DataError as error:
            if self._news(error):
                self.out.faults.append(Fault(None, str(error)))
            return None

    # ---- columns -----------------------------------------------------------------------------------------------

    def _column(self, table: pa.Table, name: str, role: str, source: Source) -> Column | None:
        return self._try(column, table, name, role, source)

    def _keys(self, values: Column | None, expected: str) -> Ints | None:
        """Keys of a column that must have a value in each row."""
        if values is None:
            return None
        nulls = values.nulls()
        self._count(values, nulls, expected)
        ids = self._try(values.ids)
        return None if ids is None else column_keys(pc.fill_null(ids, -1 if pa.types.is_integer(ids.type) else ""))

    def _ids(self, key: str, values: Column | None, train: bool) -> IdProfile | None:
        ids = None if values is None else self._try(values.ids)
        if values is None or ids is None:
            return None
        codes, distinct = factorize(ids)
        own, table = keys(distinct), self.schema.table_of(key)
        options = self.schema.sparse_options(table)
        n = max(len(codes), 1)
        unseen: float | None = None
        if options.vocabulary is not None:
            strange = np.append(~np.isin(own, keys(pa.array([str(v) for v in options.vocabulary]))), False)[codes]
            unseen = float(strange.sum()) / n
            if options.unseen == "error":
                self._count(values, strange, f"one of the {len(options.vocabulary)} ids of its vocabulary")
        elif not train and table in self.trained:
            strange = np.append(~np.isin(own, np.concatenate(self.trained[table])), False)[codes]
            unseen = float(strange.sum()) / n
        if train:
            self.trained.setdefault(table, []).append(own)
        return IdProfile(len(codes), len(own), float((codes < 0).sum()) / n, unseen)

    def _numbers(self, values: Column | None, feature: DenseFeature) -> NumberProfile | None:
        numbers = None if values is None else self._try(values.numbers)
        if values is None or numbers is None:
            return None
        self._count(values, np.isinf(numbers), "a finite number")
        if feature.missing == "error":
            self._count(values, np.isnan(numbers), "a number (missing: error)")
        if feature.transform == "log1p":
            self._count(values, numbers <= -1, "a number above -1 (transform: log1p)")
        known: Floats = numbers[np.isfinite(numbers)]
        share = float(np.isnan(numbers).sum()) / max(len(numbers), 1)
        if not len(known):
            return NumberProfile(share, None, None, None)
        return NumberProfile(share, float(known.min()), float(known.mean()), float(known.max()))

    # ---- events ------------------------------------------------------------------------------------------------

    def _event(self, event: str, table: pa.Table, source: Source) -> None:
        kind, schema = self.schema.events[event], self.schema
        user = self._keys(self._column(table, kind.user or schema.user, f"user of {event} events", source), "a user")
        times = self._column(table, kind.time or schema.time, f"time of {event} events", source)
        time = None if times is None else self._try(times.times)
        ids: dict[str, IdProfile] = {}
        for name, options in kind.fields.items():
            values = self._column(table, options.column or name, f"field {event}.{name}", source)
            if options.kind == "sparse":
                found = self._ids(f"{event}.{name}", values, train=True)
                ids |= {} if found is None else {name: found}
            elif values is not None:
                self._numbers(values, DenseFeature(transform=options.transform))
        if user is None or time is None:
            return
        self.stored[event] = stored = UserEvents.of(user, time, {})
        lengths = np.diff(stored.offsets)
        self.out.events[event] = EventProfile(
            len(time), len(lengths), *_range(time), per_user=_quantiles(lengths), ids=ids
        )

    # ---- rows --------------------------------------------------------------------------------------------------

    def _split(self, split: str, table: pa.Table, source: Source) -> SplitProfile:
        schema, out = self.schema, SplitProfile(rows=len(table))
        for name, sparse in schema.sparse.items():
            values = self._column(table, sparse.column or name, f"sparse feature {name}", source)
            if sparse.multi and values is not None:
                values = self._inner(values)
            found = self._ids(name, values, train=split == "train")
            out.ids |= {} if found is None else {name: found}
        for name, dense in schema.dense.items():
            values = self._column(table, dense.column or name, f"dense feature {name}", source)
            number = self._numbers(values, dense)
            out.numbers |= {} if number is None else {name: number}
        for name, vector in schema.vectors.items():
            values = self._column(table, vector.column or name, f"vector feature {name}", source)
            if values is not None:
                self._try(vector_values, values, vector.width)
        surfaces = self._try(surface_texts, schema, table, source)
        if surfaces is not None:
            counts = surfaces.values.value_counts().to_pylist()
            out.surfaces = {c["values"]: c["counts"] for c in sorted(counts, key=lambda c: -int(c["counts"]))}
            if schema.surfaces is not None:
                known = pc.is_in(surfaces.values, value_set=pa.array(schema.surfaces, pa.string()))
                self._count(surfaces, ~known.to_numpy(zero_copy_only=False), f"one of {', '.join(schema.surfaces)}")
        self._labels(out, table, source, surfaces)
        self._requests(out, table, source)
        self._repeats(out, table, source)
        return out

    def _inner(self, values: Column) -> Column | None:
        found = self._try(values.lists)
        return None if found is None else found[0]

    def _labels(self, out: SplitProfile, table: pa.Table, source: Source, surfaces: Column | None) -> None:
        labelled = np.zeros(len(table), np.bool_)
        for task, objective in self.schema.objectives.items():
            labels = self._column(table, objective.label or task, f"label of {task}", source)
            label = None if labels is None else self._try(labels.numbers)
            if labels is None or label is None:
                continue
            fair = np.isnan(label) | (label == 0) | (label == 1)
            self._count(labels, ~fair, "a label of 0 or 1, or none")
            # The rest is read as training reads it, with the faulty labels out of the way.
            name, mended = objective.label or task, np.where(fair, label, np.nan)
            place = table.column_names.index(name)
            mend = table.set_column(place, name, pa.array(mended, from_pandas=True))
            alone = self.schema.model_copy(update={"objectives": {task: objective}})
            targets = self._try(Targets, alone, mend, source, surfaces, required=True)
            if targets is None:
                continue
            labelled |= targets.any
            groups = {"all": targets.any}
            for surface in out.surfaces:
                here = (
                    pc.equal(surfaces.values, surface).to_numpy(zero_copy_only=False) if surfaces is not None else False
                )
                groups[surface] = targets.any & here
            out.labels[task] = {
                group: LabelProfile(int(rows.sum()), int(targets.labels[task][rows].sum()))
                for group, rows in groups.items()
                if rows.any() or group == "all"
            }
        out.unlabelled = int((~labelled).sum())

    def _requests(self, out: SplitProfile, table: pa.Table, source: Source) -> None:
        schema = self.schema
        user = self._keys(self._column(table, schema.user, "user", source), "a user")
        times = self._column(table, schema.time, "request time", source)
        time = None if times is None else self._try(times.times)
        if user is None or time is None:
            return
        before = time
        if schema.history_before is not None:
            limits = self._column(table, schema.history_before, "end of the history", source)
            found = None if limits is None else self._try(limits.times)
            if limits is not None and found is not None:
                before = found
                self._count(limits, before > time, "a time not after the request (later events would leak)")
        own = [user, time, before]
        if schema.request is not None:
            request = self._keys(self._column(table, schema.request, "request", source), "a request")
            own = own if request is None else [request]
        starts = np.flatnonzero(np.logical_or.reduce([np.diff(k, prepend=k[:1] - 1) != 0 for k in own]))
        self._shared(table, source, starts)
        out.requests, out.users = len(starts), len(np.unique(user))
        out.first, out.last = _range(time)
        out.rows_per_request = _quantiles(np.diff(starts, append=len(table)))
        heads, heads_source = table.take(pa.array(starts)), source.take(starts, len(table))
        for event, kind in schema.events.items():
            if event in self.stored:
                first, end = self.stored[event].spans(user[starts], before[starts], len(self.stored[event].time))
                lengths: Ints | None = end - first
            else:
                lengths = self._inline(event, heads, heads_source, before[starts])
            if lengths is not None:
                out.history[event] = _quantiles(lengths)
                out.truncated[event] = float((lengths > kind.max_length).mean()) if len(lengths) else 0.0

    def _shared(self, table: pa.Table, source: Source, starts: Ints) -> None:
        """Count the values of request-level features that are not those of the rows before in their request."""
        goes_on = np.ones(len(table), np.bool_)
        goes_on[starts] = False
        for name, role in request_features(self.schema).items():
            values = self._column(table, name, role, source)
            changed = None if values is None else self._try(values.changed, goes_on)
            if values is not None and changed is not None:
                self._count(values, changed, SHARED)

    def _inline(self, event: str, heads: pa.Table, source: Source, before: Ints) -> Ints | None:
        """Lengths of the histories in list columns; events at or after the request and out of order are counted."""
        if not self.reader.inline:
            return None
        whole = self._try(inline_column, self.schema, heads, event, "time", source)
        found = None if whole is None else self._try(whole.lists)
        if found is None:
            return None
        times, offsets = found
        time = self._try(times.times)
        if time is not None:
            owner = np.repeat(np.arange(len(heads)), np.diff(offsets))
            self._count(times, time >= before[owner], f"a time before {event} history ends (a later event is a leak)")
            back = np.append(False, (owner[1:] == owner[:-1]) & (time[1:] < time[:-1])) if len(time) else owner > 0
            self._count(times, back, "times in order, oldest event first")
        return np.diff(offsets)

    def _repeats(self, out: SplitProfile, table: pa.Table, source: Source) -> None:
        if self.schema.row_id is not None:
            ids = self._keys(self._column(table, self.schema.row_id, "row id", source), "a row id")
            out.repeated_row_ids = 0 if ids is None else len(ids) - len(np.unique(ids))
        mixed = np.zeros(len(table), np.uint64)
        for name in table.column_names:
            values = column(table, name, "", source).values
            if name == self.schema.row_id or pa.types.is_nested(values.type) or pa.types.is_null(values.type):
                continue
            codes, _ = factorize(values)
            mixed = splitmix64(mixed ^ codes.view(np.uint64))
        out.identical_rows = len(table) - len(np.unique(mixed))
