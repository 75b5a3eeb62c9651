"""In-memory data as Arrow tables: records (mappings), Arrow tables, frames of any library with the Arrow interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from gem_core.errors import DataError


def records_table(records: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> pa.Table:
    """Records to a table of `columns` (default: all that occur); what a record lacks is null.

    With `columns`, one that no record has is left out, so that its absence is an error and not a column of nulls; of no
    records at all, every column is made.
    """
    for i, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise DataError(f"record {i + 1}: expected a mapping of columns to values, found {type(record).__name__}")
    present = dict.fromkeys(key for record in records for key in record)
    names = list(present) if columns is None else [c for c in columns if c in present or not records]
    if columns is not None and records and len(names) < len(columns):
        names += [n for n in present if n not in names]  # for the nearest name in the message
    return pa.table({name: _array(name, [record.get(name) for record in records]) for name in names})


def _array(name: str, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        # Integers and texts in one column: ids, which are the same in either form.
        if all(v is None or (isinstance(v, str | int) and not isinstance(v, bool)) for v in values):
            return pa.array([None if v is None else str(v) for v in values], pa.string())
        kinds = sorted({type(v).__name__ for v in values if v is not None})
        raise DataError(f'records, column "{name}": expected values of one kind, found {" and ".join(kinds)}') from None


def any_table(data: Any, name: str) -> pa.Table:
    """An Arrow table of one, of a frame (pandas, polars: the Arrow PyCapsule interface), of records, or of columns."""
    try:
        if isinstance(data, pa.Table):
            return data
        if hasattr(data, "__arrow_c_stream__"):
            return pa.table(data)
        if isinstance(data, Mapping):
            return pa.table(dict(data))
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(f"{name}: not a table: {error}") from error
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return records_table(data)
    raise DataError(
        f"{name}: expected an Arrow table, a pandas or polars frame, records or a mapping of columns, "
        f"found {type(data).__name__}"
    )
