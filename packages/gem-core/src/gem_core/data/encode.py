"""The one preprocessing of training and serving: Arrow tables or records to encoded rows and batches.

* Requests are adjacent rows with an equal `request` column or, where the schema names none, of equal user, time and
  `history_before`; they share the request-level features.
* Ids become `MISSING`, `UNSEEN` or the place in the table's vocabulary (hash bucket) from `FIRST_KNOWN` on. A feature
  of several ids keeps its first `max_length`.
* Numbers are transformed, then standardised by the fitted statistics. One without a value is NaN as a feature and 0,
  the mean, in an event; a missing vector is all zeros.
* A request sees a user's newest `max_length` events with a time strictly before `history_before` (without it, before
  the request). From a stored log they are looked up; from list columns of a request's first row, oldest event first,
  one at or after that time is a leak and refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gem_core.data.batch import Batch
from gem_core.data.columns import Column, Ints, Source, column
from gem_core.data.ids import column_keys
from gem_core.data.lookup import Lookup
from gem_core.data.rows import (
    Array,
    Dense,
    EncodedRows,
    EventLog,
    IdColumn,
    IdCounts,
    Ids,
    UserEvents,
    by_column,
    by_row,
    joined,
)
from gem_core.data.tables import records_table
from gem_core.data.targets import Targets
from gem_core.data.values import (
    ROWS_OF_A_REQUEST,
    SHARED,
    Unlabelled,
    dense_values,
    inline_column,
    inline_columns,
    label_columns,
    request_features,
    row_columns,
    surface_index,
    surface_texts,
    vector_values,
)
from gem_core.errors import DataError, nearest
from gem_core.schema import Level, Schema

__all__ = ["EncodedRows", "Encoder", "EventLog", "Tables", "encode", "encoder_of"]

_LEVELS: tuple[Level, Level] = ("row", "request")

Tables = Iterable[tuple[pa.Table, Source]]
"""A log, piece by piece, each with where it is from."""


class Encoder:
    """A fitted schema made ready to encode: vocabularies indexed, statistics as arrays. Built once (`encoder_of`)."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        lookups = {table: Lookup(schema, table) for table in schema.tables()}
        self._lookups = {key: lookups[schema.table_of(key)] for key in schema.sparse_keys()}

    def ids(
        self, key: str, values: Column, counts: dict[str, IdCounts], out: npt.NDArray[np.int32] | None = None
    ) -> npt.NDArray[np.int32]:
        """(n,) ids of a lookup key's values, written to `out`, if given; `counts` is added to."""
        out = np.empty(len(values), np.int32) if out is None else out
        counts[key] = counts.get(key, IdCounts()) + self._lookups[key].encode(values, out)
        return out

    def standardised(self, key: str, values: npt.NDArray[np.floating[Any]], out: Dense | None = None) -> Dense:
        """(n,) numbers in units of the training split's standard deviation from its mean; written to `out`, if given."""
        stats = self.schema.require_fitted().dense[key]
        out = np.empty(len(values), np.float32) if out is None else out
        np.divide(values - stats.mean, stats.std or 1.0, out=out, casting="same_kind")
        return out

    # ---- rows --------------------------------------------------------------------------------------------------

    def rows(self, tables: Tables, log: EventLog | None, unlabelled: Unlabelled = "error") -> EncodedRows:
        """Encode a log's rows; histories come from `log` or, without one, from list columns.

        With `unlabelled` "keep", label columns may also be absent (prediction).
        """
        builder = _RowsBuilder(self, log, unlabelled)
        for table, source in tables:
            builder.add(table, source)
        return builder.finish()

    def dense(self, table: pa.Table, source: Source, level: Level) -> Dense:
        """(features of the level, n) standardised numbers."""
        names = self.schema.names("dense", level)
        out = by_column(len(names), len(table), np.float32)
        for i, name in enumerate(names):
            feature = self.schema.dense[name]
            values = column(table, feature.column or name, f"dense feature {name}", source)
            self.standardised(name, dense_values(values, feature), out[i])
        return out

    def sparse(
        self, table: pa.Table, source: Source, level: Level, counts: dict[str, IdCounts]
    ) -> tuple[npt.NDArray[np.int32], dict[str, IdColumn]]:
        """(features with one id a row, n) ids of the level's sparse features, and those of the others by name."""
        names = self.schema.names("sparse", level)
        single = by_column(sum(not self.schema.sparse[n].multi for n in names), len(table), np.int32)
        several: dict[str, IdColumn] = {}
        rows = iter(single)
        for name in names:
            feature = self.schema.sparse[name]
            values = column(table, feature.column or name, f"sparse feature {name}", source, encoded=True)
            if not feature.multi:
                self.ids(name, values, counts, next(rows))
                continue
            inner, offsets = values.lists(encoded=True)
            ids = self.ids(name, inner, counts)
            lengths = np.minimum(np.diff(offsets), feature.max_length)
            position = np.arange(len(ids)) - np.repeat(offsets[:-1], np.diff(offsets))
            kept = np.concatenate([[0], np.cumsum(lengths)])
            several[name] = IdColumn(ids[position < feature.max_length], kept, feature.max_length)
        return single, several

    def vectors(self, table: pa.Table, source: Source, level: Level) -> dict[str, Dense]:
        """Vectors of the level's vector features, each (n, width)."""
        out = {}
        for name in self.schema.names("vectors", level):
            feature = self.schema.vectors[name]
            values = column(table, feature.column or name, f"vector feature {name}", source)
            out[name] = vector_values(values, feature.width)
        return out

    # ---- events ------------------------------------------------------------------------------------------------

    def events(self, tables: Mapping[str, Tables]) -> EventLog:
        """Encode the stored events of every type: sorted by user and time; events of one time keep the file's order."""
        absent = [event for event in self.schema.events if event not in tables]
        if absent:
            raise DataError(f'no events of type "{absent[0]}" are given: the schema has events.{absent[0]}')
        unknown = [event for event in tables if event not in self.schema.events]
        if unknown:
            raise DataError(
                f'events of type "{unknown[0]}" are not in the schema{nearest(unknown[0], self.schema.events)}'
            )
        counts: dict[str, IdCounts] = {}
        return EventLog({event: self._stored(event, tables[event], counts) for event in self.schema.events}, counts)

    def _stored(self, event: str, tables: Tables, counts: dict[str, IdCounts]) -> UserEvents:
        kind = self.schema.events[event]
        users: list[Ints] = []
        times: list[Ints] = []
        fields: dict[str, list[Array]] = {name: [] for name in kind.fields}
        for table, source in tables:
            user = column(table, kind.user or self.schema.user, f"user of {event} events", source)
            user.check(user.nulls(), "a user")
            users.append(column_keys(user.ids()))
            times.append(column(table, kind.time or self.schema.time, f"time of {event} events", source).times())
            for name, options in kind.fields.items():
                values = column(table, options.column or name, f"field {event}.{name}", source, encoded=True)
                fields[name].append(self.field(event, name, values, counts))
        encoded = {n: joined(v, self.field_type(event, n)) for n, v in fields.items()}
        return UserEvents.of(joined(users, np.int64), joined(times, np.int64), encoded)

    def field(self, event: str, name: str, values: Column, counts: dict[str, IdCounts]) -> Array:
        """(n,) encoded values of an event field: int32 ids or float32 numbers."""
        options, key = self.schema.events[event].fields[name], f"{event}.{name}"
        if options.kind == "sparse":
            return self.ids(key, values, counts)
        out = self.standardised(key, dense_values(values, options))
        if len(out) and not (out.min() > -np.inf and out.max() < np.inf):  # or there is a NaN, which both give then
            np.nan_to_num(out, copy=False)
        return out

    def field_type(self, event: str, name: str) -> type[np.generic]:
        """Type of what `field` gives."""
        return np.int32 if self.schema.events[event].fields[name].kind == "sparse" else np.float32


def _join_ids(parts: Sequence[pa.Array]) -> pa.ChunkedArray:
    """Integers, or text where any part is text."""
    kinds = {part.type for part in parts}
    return pa.chunked_array([part.cast(pa.string()) for part in parts] if len(kinds) > 1 else parts)


class _RowsBuilder:
    """Encodes the pieces of a log's rows one by one; a request may run over the border of two pieces."""

    def __init__(self, encoder: Encoder, log: EventLog | None, unlabelled: Unlabelled) -> None:
        self.encoder, self.schema, self.log, self.unlabelled = encoder, encoder.schema, log, unlabelled
        self.counts: dict[str, IdCounts] = dict(log.counts) if log is not None else {}
        self.flat: dict[str, list[Array]] = {}
        self.groups: dict[str, list[dict[str, Any]]] = {}
        self.identity: dict[str, list[pa.Array]] = {}
        self.inline: dict[str, list[dict[str, Array]]] = {event: [] for event in self.schema.events}
        self.last: list[Ints] | None = None
        self.last_features: dict[str, pa.Array] = {}
        self.rows_seen = 0
        self.rows_kept = 0

    def _flat(self, **arrays: Array) -> None:
        for name, values in arrays.items():
            self.flat.setdefault(name, []).append(values)

    def _group(self, **groups: dict[str, Any]) -> None:
        for name, values in groups.items():
            self.groups.setdefault(name, []).append(values)

    def add(self, table: pa.Table, source: Source) -> None:
        """Encode one piece."""
        schema, encoder = self.schema, self.encoder
        row_id = self._row_id(table, source)
        surfaces = surface_texts(schema, table, source)
        targets = Targets(schema, table, source, surfaces, required=self.unlabelled != "keep")
        surface = np.zeros(len(table), np.int32) if surfaces is None else surface_index(schema, surfaces)
        if self.unlabelled == "error":
            targets.check_labelled(source)
        elif self.unlabelled == "drop" and not targets.any.all():
            keep = np.flatnonzero(targets.any)
            source = source.take(keep, len(table))
            table, row_id, surface = table.take(pa.array(keep)), row_id[keep], surface[keep]
            targets.select(targets.any)
        starts, user, time, before = self._requests(table, source)
        self._check_shared(table, source, starts)
        self._identify(table, source, row_id)
        heads, heads_source = self._heads(table, source, starts)
        self._flat(
            starts=starts + self.rows_kept,
            user=user[starts],
            time=time[starts],
            before=before[starts],
            surface=surface,
            row_id=row_id,
            dense=encoder.dense(table, source, "row"),
            request_dense=encoder.dense(heads, heads_source, "request"),
        )
        self._group(
            vectors=encoder.vectors(table, source, "row"),
            request_vectors=encoder.vectors(heads, heads_source, "request"),
            labels=targets.labels,
            masks=targets.masks,
            weights=targets.weights,
            rates=targets.rates,
        )
        for level, of_level, whence in zip(_LEVELS, (table, heads), (source, heads_source), strict=True):
            single, several = encoder.sparse(of_level, whence, level, self.counts)
            self._flat(**{f"{level}_single": single})
            self._group(**{f"{level}_several": several})
        if self.log is None:
            for event, parts in self.inline.items():
                parts.append(self._inline(event, heads, heads_source, before[starts]))
        self.rows_kept += len(table)

    def _heads(self, table: pa.Table, source: Source, starts: Ints) -> tuple[pa.Table, Source]:
        """The first row of each request: what is of the request."""
        if len(starts) == len(table):
            return table, source
        schema = self.schema
        wanted = {schema.user, *request_features(schema)}  # a table of no columns would have no rows
        if self.log is None:
            wanted.update(p for e in schema.events for places in inline_columns(schema, e).values() for p in places)
        # All names stay those of messages.
        source = replace(source.take(starts, len(table)), columns=source.columns or tuple(table.column_names))
        return table.select([n for n in table.column_names if n in wanted]).take(pa.array(starts)), source

    def _row_id(self, table: pa.Table, source: Source) -> Ints:
        first, self.rows_seen = self.rows_seen, self.rows_seen + len(table)
        if self.schema.row_id is None:
            numbers = source.numbers(len(table))
            return np.arange(first, self.rows_seen) if source.before is None else source.before + numbers
        values = column(table, self.schema.row_id, "row id", source)
        values.check(values.nulls(), "a row id")
        return column_keys(values.ids())

    def _requests(self, table: pa.Table, source: Source) -> tuple[Ints, Ints, Ints, Ints]:
        """First row of each request that starts here, and user, time and end of history of every row."""
        schema = self.schema
        users = column(table, schema.user, "user", source)
        users.check(users.nulls(), "a user")
        user = column_keys(users.ids())
        times = column(table, schema.time, "request time", source)
        time = before = times.times()
        if schema.history_before is not None:
            limits = column(table, schema.history_before, "end of the history", source)
            before = limits.times()
            limits.check(before > time, "a time not after the request (later events would leak)")
        own = [user, time, before]
        if schema.request is not None:
            request = column(table, schema.request, "request", source)
            request.check(request.nulls(), "a request")
            own.append(column_keys(request.ids()))
        if not len(table):
            return np.zeros(0, np.int64), user, time, before
        changed = []
        for i, values in enumerate(own):
            differs = np.empty(len(values), np.bool_)
            differs[1:] = values[1:] != values[:-1]
            differs[0] = self.last is None or values[0] != self.last[i]
            changed.append(differs)
        self.last = [values[-1:] for values in own]
        if schema.request is not None:
            new = changed[3]
            users.check(~new & changed[0], ROWS_OF_A_REQUEST)
            times.check(~new & (changed[1] | changed[2]), ROWS_OF_A_REQUEST)
        else:
            new = changed[0] | changed[1] | changed[2]
        return np.flatnonzero(new), user, time, before

    def _identify(self, table: pa.Table, source: Source, row_id: Ints) -> None:
        """Keep what names the rows."""
        for role, name in {
            "row_id": self.schema.row_id,
            "request": self.schema.request,
            "user": self.schema.user,
        }.items():
            if name is not None:
                self.identity.setdefault(role, []).append(column(table, name, role, source).ids())
            elif role == "row_id":
                self.identity.setdefault(role, []).append(pa.array(row_id))

    def _check_shared(self, table: pa.Table, source: Source, starts: Ints) -> None:
        """Raise for a request-level feature that is not the same in all rows of a request."""
        if not len(table):
            return
        goes_on = np.ones(len(table), np.bool_)
        goes_on[starts] = False
        shared = len(starts) < len(table)
        for name, role in request_features(self.schema).items():
            values = column(table, name, role, source, encoded=not shared)  # of the others only the last is needed
            last, self.last_features[name] = self.last_features.get(name), values.values[-1:]
            if not shared:
                continue
            changed = values.changed(goes_on)
            if goes_on[0] and last is not None:
                # As texts too: files may write one id as an integer and as text, and NaN is not equal to itself.
                first, before = values.values[0].as_py(), last[0].as_py()
                changed[0] = first != before and str(first) != str(before)
            values.check(changed, SHARED)

    def _inline(self, event: str, heads: pa.Table, source: Source, before: Ints) -> dict[str, Array]:
        """Events of one type from the list columns of requests' first rows."""
        times, offsets = inline_column(self.schema, heads, event, "time", source).lists()
        time = times.times()
        back = np.zeros(len(time) + 1, np.bool_)
        np.less(time[1:], time[:-1], out=back[1:-1])
        back[offsets] = False  # the first of a request comes after no other
        times.check(back[:-1], "times in order, oldest event first")
        filled = offsets[1:] > offsets[:-1]
        if (time[offsets[1:][filled] - 1] >= before[filled]).any():  # the newest of each
            late = time >= np.repeat(before, np.diff(offsets))
            times.check(late, f"a time before {event} history ends (a later event is a leak)")
        out: dict[str, Array] = {"time": time, "lengths": np.diff(offsets)}
        for name in self.schema.events[event].fields:
            whole = inline_column(self.schema, heads, event, name, source)
            values, own = whole.lists(encoded=True)
            wrong = np.diff(own) != np.diff(offsets)
            if wrong.any():
                i = int(wrong.argmax())
                lengths = f'{np.diff(offsets)[i]} values, as many as "{event}.time", found {np.diff(own)[i]}'
                raise DataError(f"{whole.place(i)}: expected {lengths}")
            out[f"field.{name}"] = self.encoder.field(event, name, values, self.counts)
        return out

    def _inline_log(self) -> tuple[EventLog, dict[str, tuple[Ints, Ints]]]:
        types, spans = {}, {}
        for event, parts in self.inline.items():
            lengths = joined([p["lengths"] for p in parts], np.int64)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            types[event] = UserEvents(
                users=np.arange(len(lengths)),
                offsets=offsets,
                time=joined([p["time"] for p in parts], np.int64),
                fields={
                    n: joined([p[f"field.{n}"] for p in parts], self.encoder.field_type(event, n))
                    for n in self.schema.events[event].fields
                },
            )
            start = np.maximum(offsets[:-1], offsets[1:] - self.schema.events[event].max_length)
            spans[event] = (start, offsets[1:])
        return EventLog(types), spans

    def finish(self) -> EncodedRows:
        """All pieces as one."""
        flat: dict[str, Any] = {}
        for name in list(self.flat):
            join: Any = by_row if name.endswith(("dense", "single")) else joined
            flat[name] = join(self.flat.pop(name))
        groups: dict[str, Any] = {}
        for name in list(self.groups):
            parts = self.groups.pop(name)
            join = IdColumn.concat if name.endswith("several") else joined
            groups[name] = {key: join([part.pop(key) for part in parts]) for key in list(parts[0])}
        row_ids, request_ids = (
            Ids(tuple(self.schema.names("sparse", level)), flat.pop(f"{level}_single"), groups.pop(f"{level}_several"))
            for level in _LEVELS
        )
        starts, before = flat.pop("starts"), flat.pop("before")
        log, limits = self.log, {event: kind.max_length for event, kind in self.schema.events.items()}
        if log is None:
            log, spans = self._inline_log()
        else:
            spans = {e: log.types[e].spans(flat["user"], before, limit) for e, limit in limits.items()}
        return EncodedRows(
            offsets=np.append(starts, self.rows_kept),
            spans=spans,
            log=log,
            max_lengths=limits,
            ids=row_ids,
            request_ids=request_ids,
            identity=pa.table({role: _join_ids(parts) for role, parts in self.identity.items()}),
            counts=self.counts,
            **flat,
            **groups,
        )


# Encoders of living schemas by identity; an encoder holds a copy, so that it does not keep the schema alive.
_ENCODERS: dict[int, Encoder] = {}


def encoder_of(schema: Schema) -> Encoder:
    """The encoder of a fitted schema, built once for as long as the schema lives."""
    known = _ENCODERS.get(id(schema))
    if known is None:
        known = _ENCODERS[id(schema)] = Encoder(schema.model_copy())
        weakref.finalize(schema, _ENCODERS.pop, id(schema), None)
    return known


def encode(schema: Schema, records: pa.Table | Sequence[Mapping[str, Any]], events: EventLog | None = None) -> Batch:
    """See `Schema.encode`. Label columns may be absent; then no label counts."""
    table = records
    if not isinstance(table, pa.Table):
        inline = events is None
        labels = label_columns(schema)
        wanted = [name for name in row_columns(schema, inline) if name not in labels or any(name in r for r in records)]
        table = records_table(records, wanted)
    rows = encoder_of(schema).rows([(table, Source("records"))], events, unlabelled="keep")
    return rows.batch(np.arange(rows.requests))
