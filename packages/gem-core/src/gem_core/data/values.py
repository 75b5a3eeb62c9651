"""What each column of a log means: roles of columns, dense values, vectors, surfaces, labels and weights.

Used alike by fitting (gem_core.data.fit) and encoding (gem_core.data.encode), so that both read a log in one way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gem_core.data.columns import Column, Source, column
from gem_core.data.rows import Dense
from gem_core.errors import DataError, nearest
from gem_core.schema import DenseFeature, EventField, Schema, SparseFeature, VectorFeature

Role = Literal[
    "user", "time", "request", "row id", "surface", "dense", "id", "vector", "label", "mask", "weight", "event"
]
Unlabelled = Literal["error", "keep", "drop"]
"""What to do with a row that has a label for no task."""

ROWS_OF_A_REQUEST = "what its request has: the rows of a request are adjacent and share user and time"
SHARED = "what the row before it has, which is of the same request (a feature that may differ has level: row)"


def row_columns(schema: Schema, inline_events: bool) -> dict[str, Role]:
    """Every column of the rows that the schema reads. Histories stand in list columns if `inline_events`."""
    out: dict[str, Role] = {schema.user: "user", schema.time: "time"}
    optional: list[tuple[str | None, Role]] = [
        (schema.request, "request"),
        (schema.row_id, "row id"),
        (schema.history_before, "time"),
        (schema.surface, "surface"),
        *((f.column or n, "dense") for n, f in schema.dense.items()),
        *((f.column or n, "id") for n, f in schema.sparse.items()),
        *((f.column or n, "vector") for n, f in schema.vectors.items()),
        *((o.label or n, "label") for n, o in schema.objectives.items()),
        *((o.mask, "mask") for o in schema.objectives.values()),
        *((o.weight, "weight") for o in schema.objectives.values()),
        *((o.rate, "weight") for o in schema.objectives.values()),
        *((o.converted_at, "time") for o in schema.objectives.values()),
        *((o.observed_until, "time") for o in schema.objectives.values()),
    ]
    if inline_events:
        optional += [
            (place, "event") for e in schema.events for places in inline_columns(schema, e).values() for place in places
        ]
    for name, role in optional:
        if name is not None:
            out.setdefault(name, role)
    return out


def request_features(schema: Schema) -> dict[str, str]:
    """The columns of the request-level features, and what each is for."""
    kinds: dict[str, Mapping[str, DenseFeature | SparseFeature | VectorFeature]] = {
        "dense": schema.dense,
        "sparse": schema.sparse,
        "vector": schema.vectors,
    }
    return {
        feature.column or name: f"{kind} feature {name}"
        for kind, features in kinds.items()
        for name, feature in features.items()
        if feature.level == "request"
    }


def label_columns(schema: Schema) -> set[str]:
    """The columns that only training and evaluation need."""
    used = {
        c
        for n, o in schema.objectives.items()
        for c in (o.label or n, o.mask, o.weight, o.rate, o.converted_at, o.observed_until)
        if c is not None
    }
    other = schema.model_copy(update={"objectives": {}})
    return used - set(row_columns(other, inline_events=True))


def event_columns(schema: Schema, event: str) -> dict[str, Role]:
    """Every column of a file of events of a type."""
    kind = schema.events[event]
    out: dict[str, Role] = {kind.user or schema.user: "user", kind.time or schema.time: "time"}
    for name, options in kind.fields.items():
        out.setdefault(options.column or name, "id" if options.kind == "sparse" else "dense")
    return out


def inline_columns(schema: Schema, event: str) -> dict[str, list[str]]:
    """Where the list columns of events that stand in the rows may be, by "time" or field: "<type>.<name>", or the
    column that the schema names, if it does."""
    kind = schema.events[event]
    named = {"time": kind.time, **{name: field.column for name, field in kind.fields.items()}}
    return {name: [f"{event}.{name}", *([own] if own is not None else [])] for name, own in named.items()}


def inline_column(schema: Schema, table: pa.Table, event: str, name: str, source: Source) -> Column:
    """The list column of a field (or "time") of events that stand in the rows."""
    places = inline_columns(schema, event)
    found = next((p for p in places["time"] if p in table.column_names), None)
    if found is None:
        raise DataError(
            f'{source.name}: no column "{event}.time": without stored {event} events (reader option events.{event}, or '
            f"argument of encode) the rows must have them in list columns{nearest(places['time'][0], source.columns)}"
        )
    place = next((p for p in places[name] if p in table.column_names), places[name][-1])
    return column(table, place, f"times of {event} events" if name == "time" else f"field {event}.{name}", source)


def dense_values(values: Column, feature: DenseFeature | EventField) -> npt.NDArray[np.floating[Any]]:
    """(n,) numbers after the transform, NaN where there is none: float32 of a float32 column, else float64."""
    out = values.floats()
    least = -1.0 if feature.transform == "log1p" else -np.inf
    if len(out) and not (out.min() > least and out.max() < np.inf):  # or there is a NaN, which both give then
        values.check(np.isinf(out), "a finite number")
        if isinstance(feature, DenseFeature) and feature.missing == "error":
            values.check(np.isnan(out), "a number (missing: error)")
        if feature.transform == "log1p":
            values.check(out <= -1, "a number above -1 (transform: log1p)")
    if feature.transform == "log1p":
        out = out.copy()  # Arrow's are not to be written to
        torch.from_numpy(out).log1p_()  # several times as fast as numpy's
    return out


def vector_values(values: Column, width: int) -> Dense:
    """(n, width) vectors; one without a value is all zeros."""
    inner, offsets = values.lists()
    lengths = np.diff(offsets)
    wrong = (lengths != width) & ~values.nulls()
    if wrong.any():
        i = int(wrong.argmax())
        raise DataError(f"{values.place(i)}: expected {width} numbers, found {lengths[i]}")
    numbers = inner.numbers()
    inner.check(~np.isfinite(numbers), "a finite number")
    out = np.zeros((len(lengths), width), np.float32)
    out[lengths > 0] = numbers.reshape(-1, width)
    return out


def surface_texts(schema: Schema, table: pa.Table, source: Source) -> Column | None:
    """The surface of each row as text; None where the schema has no surface column."""
    if schema.surface is None:
        return None
    found = column(table, schema.surface, "surface", source)
    return Column(found.texts(), found.name, found.role, source)


def surface_index(schema: Schema, surfaces: Column) -> npt.NDArray[np.int32]:
    """(n,) index of each surface in the schema's."""
    names = schema.surface_names()
    found = pc.fill_null(pc.index_in(surfaces.values, value_set=pa.array(names, pa.string())), -1)
    out: npt.NDArray[np.int32] = found.to_numpy(zero_copy_only=False).astype(np.int32)
    if (out < 0).any():
        i = int((out < 0).argmax())
        hint = nearest(surfaces.values[i].as_py(), names).split("; valid")[0]
        if schema.surfaces is None and not hint:
            hint = "; the training rows have no other: declare one that comes later in the schema's `surfaces:`"
        surfaces.fail(i, f"one of {', '.join(names)}", hint)
    return out
