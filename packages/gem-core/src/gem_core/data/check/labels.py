"""The label where it must not be: in a feature, or in the user's history as the row's own event."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from gem_core.data.check.findings import Finding
from gem_core.data.check.log import Events, Log, attempt, filled_keys, mixed
from gem_core.data.check.tells import Values, sample, tells
from gem_core.data.columns import Bools, Column, Floats, Ints
from gem_core.data.ids import factorize
from gem_core.data.rows import UserEvents
from gem_core.data.values import inline_column
from gem_core.schema import EventType

ROWS = 100_000
"""Rows that a column is judged by, drawn where there are more."""


def find(log: Log, threshold: float) -> Iterator[Finding]:
    """Findings about single columns, and about the newest events that a row sees."""
    yield from _declared(log)
    rows = sample(len(log.table), ROWS)
    expected = "what is known at the request"
    for place, values in [*_features(log, rows), *_vectors(log, rows)]:
        yield from judged(log, rows, values, threshold, "label-in-feature", f"{place}: expected {expected}")
    expected = "events from before the request alone"
    for event, kind in log.schema.events.items():
        for place, values in _newest(log, event, kind, rows):
            yield from judged(log, rows, values, threshold, "label-in-history", f"{place}: expected {expected}")


def judged(log: Log, rows: Ints, values: Values, threshold: float, kind: str, said: str) -> Iterator[Finding]:
    """A finding for each task that `values`, of `rows`, tell."""
    for task, labels in log.labels.items():
        label = labels[rows]
        known = ~np.isnan(label)
        sign = tells(values.take(known), label[known] > 0, threshold)
        if sign is not None:
            yield Finding(kind, None, f"{said}, found what tells {task} almost surely: {sign}")


def _declared(log: Log) -> Iterator[Finding]:
    schema = log.schema
    labels = {objective.label or task: task for task, objective in schema.objectives.items()}
    features = [(n, f.column or n) for of in (schema.dense, schema.sparse, schema.vectors) for n, f in of.items()]
    for name, place in features:
        if place in labels:
            said = f'{log.source.name}, column "{place}" (feature {name})'
            yield Finding(
                "label-as-feature", None, f"{said}: expected no label, found that of objective {labels[place]}"
            )


# ---- features ---------------------------------------------------------------------------------------------------


def _features(log: Log, rows: Ints) -> Iterator[tuple[str, Values]]:
    """Each dense and sparse feature and the surface, with its place."""
    schema, drawn = log.schema, pa.array(rows)
    for name, dense in schema.dense.items():
        values = log.column(dense.column or name, f"dense feature {name}")
        numbers = None if values is None else attempt(values.numbers)
        if values is not None and numbers is not None:
            yield _place(log, values), Values.of_numbers(numbers[rows])
    for name, sparse in schema.sparse.items():
        values = log.column(sparse.column or name, f"sparse feature {name}")
        if values is None:
            continue
        if not sparse.multi:
            ids = attempt(values.ids)
            if ids is not None:
                yield _place(log, values), Values.of_ids(factorize(ids.take(drawn))[0])
            continue
        lists = attempt(values.lists)
        if lists is None:
            continue
        lengths = np.diff(lists[1])
        yield f"{_place(log, values)}, number of ids", Values.of_numbers(lengths[rows].astype(np.float64))
        inner = attempt(lists[0].ids)
        if inner is not None and len(inner):
            some = pa.array(np.where(lengths > 0, lists[1][:-1], 0), mask=lengths == 0)
            yield f"{_place(log, values)}, first id", Values.of_ids(factorize(inner.take(some).take(drawn))[0])
    if schema.surface is not None:
        values = log.column(schema.surface, "surface")
        ids = None if values is None else attempt(values.ids)
        if values is not None and ids is not None:
            yield _place(log, values), Values.of_ids(factorize(ids.take(drawn))[0])


def _vectors(log: Log, rows: Ints) -> Iterator[tuple[str, Values]]:
    for name, vector in log.schema.vectors.items():
        values = log.column(vector.column or name, f"vector feature {name}")
        lists = None if values is None else attempt(values.lists)
        numbers = None if lists is None else attempt(lists[0].numbers)
        if values is None or lists is None or numbers is None:
            continue
        lengths = np.diff(lists[1])
        for i in range(vector.width):
            part = np.full(len(lengths), np.nan)
            part[lengths > i] = numbers[lists[1][:-1][lengths > i] + i]
            yield f"{_place(log, values)}, number {i + 1}", Values.of_numbers(part[rows])


def _place(log: Log, values: Column) -> str:
    return f'{log.source.name}, column "{values.name}" ({values.role})'


# ---- events -----------------------------------------------------------------------------------------------------


def _newest(log: Log, event: str, kind: EventType, rows: Ints) -> Iterator[tuple[str, Values]]:
    """The newest event that a row sees, and the newest with the row's own id: its age, its numbers, its ids."""
    stored, owner = log.events.get(event), log.user
    if stored is None:
        stored, owner = _inline(log, event, kind), np.arange(len(log.table))
    if stored is None:
        return
    matches = [(f"newest {event} event", owner, stored.user)]
    for field in stored.ids:
        for category in log.categories:
            if log.schema.table_of(f"{event}.{field}") == log.schema.table_of(category.name):
                mine = mixed(owner, category.keys)
                matches.append(
                    (f"newest {event} event of the row's {category.name}", mine, mixed(stored.user, stored.ids[field]))
                )
    for words, wanted, key in matches:
        place = np.arange(len(key))
        ordered = UserEvents.of(key, stored.time, {"place": place})
        start, end = ordered.spans(wanted[rows], log.before[rows], 1)
        seen = start < end
        at = np.zeros(len(rows), np.int64)
        at[seen] = ordered.fields["place"][end[seen] - 1]

        def of(values: Floats, at: Ints = at, seen: Bools = seen) -> Floats:
            out: Floats = np.where(seen, values[at], np.nan) if len(values) else np.full(len(seen), np.nan)
            return out

        age = log.before[rows] - of(stored.time.astype(np.float64))
        yield f"{words}: seconds since", Values.of_numbers(age)
        for name, numbers in stored.numbers.items():
            yield f"{words}: {name}", Values.of_numbers(of(numbers))
        for name, ids in stored.ids.items():
            codes = np.unique(ids, return_inverse=True)[1].astype(np.float64)
            yield f"{words}: {name}", Values.of_ids(np.nan_to_num(of(codes), nan=-1).astype(np.int64))


def _inline(log: Log, event: str, kind: EventType) -> Events | None:
    """Events that stand in list columns, each row its own user."""

    def of(name: str) -> tuple[Column, Ints]:
        return inline_column(log.schema, log.table, event, name, log.source).lists()

    found = attempt(lambda: of("time"))
    time = None if found is None else attempt(found[0].times)
    if found is None or time is None:
        return None
    ids, numbers = {}, {}
    for name, field in kind.fields.items():
        other = attempt(lambda name=name: of(name))  # type: ignore[misc]
        if other is None or len(other[0]) != len(time):
            continue
        values = other[0]
        if field.kind == "sparse":
            known = attempt(values.ids)
            if known is not None:
                ids[name] = filled_keys(known)
        else:
            floats = attempt(values.numbers)
            if floats is not None:
                numbers[name] = floats
    return Events(np.repeat(np.arange(len(log.table)), np.diff(found[1])), time, ids, numbers)
