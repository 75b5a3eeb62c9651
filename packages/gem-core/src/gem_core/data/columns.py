"""Columns of an Arrow table as checked numpy arrays; every fault names file, row, column, what was expected and found.

Messages give the line of a text file (the header is line 1), else the row, counted from 1. All of it is vectorised: nothing here loops over rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.errors import DataError, nearest

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LATEST_SECOND = 100_000_000_000
"""Times beyond the year 5138 are taken for a wrong unit."""

WHOLE_SECONDS = "whole seconds since 1970 (cut or round the fractions)"


@dataclass(frozen=True)
class Source:
    """Where the rows of a table come from, for messages.

    Attributes:
        name: the file, or what the rows are called where there is no file.
        rows: 0-based number in the file of each row; None where they run on from `first`.
        columns: all columns of the file, where the table has only some of them.
        line: of a text file, the line where the row of a 0-based number begins.
        before: rows of the log in the files before this one; None where that is not known.
    """

    name: str
    first: int = 0
    rows: Ints | None = None
    columns: tuple[str, ...] = ()
    line: Callable[[int], int] | None = None
    before: int | None = None

    def numbers(self, n: int) -> Ints:
        """(n,) 0-based numbers of the rows in the file."""
        return np.arange(self.first, self.first + n, dtype=np.int64) if self.rows is None else self.rows

    def take(self, index: Ints, n: int) -> Source:
        """The source of rows `index` of a table of `n` rows."""
        return replace(self, first=0, rows=self.numbers(n)[index])

    def skip(self, n: int) -> Source:
        """The source of all rows but the first `n`."""
        return replace(self, first=self.first + n) if self.rows is None else replace(self, rows=self.rows[n:])

    def within(self, before: int) -> Source:
        """The same, in a log that has so many rows before this file."""
        return replace(self, before=before)

    def at(self, i: int) -> str:
        """The place of row `i`."""
        row = self.first + i if self.rows is None else int(self.rows[i])
        return f"{self.name}, row {row + 1}" if self.line is None else f"{self.name}, line {self.line(row)}"


@dataclass(frozen=True)
class Joined(Source):
    """Where the rows of several tables in a row come from; `parts`: their sources, each with its first row's number
    among all."""

    parts: tuple[tuple[int, Source], ...] = ()

    def at(self, i: int) -> str:
        """The place of row `i` in its own part."""
        row = self.first + i if self.rows is None else int(self.rows[i])
        first, source = self.parts[bisect_right(self.parts, row, key=lambda part: part[0]) - 1]
        return source.at(row - first)


@dataclass(frozen=True)
class Column:
    """One column: `values` (dictionaries decoded, see `column`), its name, what it is for, and where it is from.

    `offsets`: (rows + 1,) where the values are those of lists: those of row i are offsets[i] .. offsets[i + 1] - 1 (a
    message names the row of the list).
    """

    values: pa.Array
    name: str
    role: str
    source: Source
    offsets: Ints | None = None

    def __len__(self) -> int:
        return len(self.values)

    def place(self, i: int) -> str:
        """File, row and column of value `i`."""
        row = i if self.offsets is None else int(np.searchsorted(self.offsets, i, side="right")) - 1
        return f'{self.source.at(row)}, column "{self.name}" ({self.role})'

    def fail(self, i: int, expected: str, hint: str = "") -> NoReturn:
        """Raise a DataError for value `i`."""
        found = self.values[i].as_py()
        shown = "no value" if found is None else repr(found)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise DataError(f"{self.place(i)}: expected {expected}, found {shown}{hint}")

    def check(self, bad: Bools, expected: str, hint: str = "") -> None:
        """Raise for the first value that `bad` marks."""
        if bad.any():
            self.fail(int(bad.argmax()), expected, hint)

    def _wrong_type(self, expected: str) -> NoReturn:
        place = f'{self.source.name}, column "{self.name}" ({self.role})'
        raise DataError(f"{place}: expected {expected}, found type {self.values.type}")

    def nulls(self) -> Bools:
        """(n,) where there is no value."""
        if not self.values.null_count:
            return np.zeros(len(self), np.bool_)
        out: Bools = self.values.is_null().to_numpy(zero_copy_only=False)
        return out

    def numbers(self) -> Floats:
        """(n,) float64; no value becomes NaN."""
        kind = self.values.type
        if pa.types.is_null(kind):
            return np.full(len(self), np.nan)
        if pa.types.is_boolean(kind):
            values = self.values.cast(pa.uint8()).cast(pa.float64())
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            values = self.values.cast(pa.float64(), safe=False)
        else:
            self._wrong_type("numbers")
        out: Floats = values.to_numpy(zero_copy_only=False)
        return out

    def floats(self) -> npt.NDArray[np.floating[Any]]:
        """(n,) float32 of a float32 column, else `numbers`; no value becomes NaN. Not to be written to."""
        if not pa.types.is_float32(self.values.type):
            return self.numbers()
        out: npt.NDArray[np.floating[Any]] = self.values.to_numpy(zero_copy_only=False)
        return out

    def integers(self) -> pa.Array:
        """Integral floats (what pandas makes of integers with gaps) and booleans as int64, the rest as it is."""
        kind = self.values.type
        if pa.types.is_boolean(kind):
            return self.values.cast(pa.int64())
        if pa.types.is_floating(kind):
            numbers = self.numbers()
            self.check(~np.isnan(numbers) & (numbers != np.trunc(numbers)), "an integer or a text")
            return pa.array(numbers, from_pandas=True).cast(pa.int64())
        if pa.types.is_uint64(kind):
            try:
                return self.values.cast(pa.int64())
            except pa.ArrowInvalid:
                return self.values.cast(pa.string())
        return self.values.cast(pa.int64()) if pa.types.is_integer(kind) else self.values

    def ids(self) -> pa.Array:
        """Ids as an int64 or string array (nulls kept); of a column taken `encoded`, texts may be a dictionary."""
        kind = self.values.type
        if _is_text_dictionary(kind):
            return self.values
        if pa.types.is_null(kind):
            return self.values.cast(pa.int64())
        if pa.types.is_string(kind):
            return self.values
        if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            return self.values.cast(pa.string())
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            return self.integers()
        self._wrong_type("integers or text")

    def times(self) -> Ints:
        """(n,) int64 seconds since 1970, from integers or timestamps; no value is a fault."""
        kind, values = self.values.type, self.values
        self.check(self.nulls(), "a time")
        if pa.types.is_floating(kind):
            numbers = self.numbers()
            self.check(np.isnan(numbers), "a time")
            self.check(numbers != np.trunc(numbers), WHOLE_SECONDS)
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            values = values.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
        elif pa.types.is_floating(kind) or pa.types.is_integer(kind):
            values = self.integers()
        elif pa.types.is_null(kind):
            values = values.cast(pa.int64())
        else:
            self._wrong_type("seconds since 1970 (integers) or timestamps")
        out: Ints = values.to_numpy(zero_copy_only=False)
        if len(out) and (out.min() < -LATEST_SECOND or out.max() > LATEST_SECOND):
            self.check(np.abs(out) > LATEST_SECOND, "seconds since 1970", "; are these milliseconds?")
        return out

    def flags(self) -> Bools:
        """(n,) booleans from booleans or 0 and 1; no value is False."""
        numbers = self.numbers()
        known = ~np.isnan(numbers)
        self.check(known & (numbers != 0) & (numbers != 1), "true or false (1 or 0)")
        out: Bools = known & (numbers == 1)
        return out

    def texts(self) -> pa.Array:
        """Text of each value, from text or integers; no value is a fault."""
        self.check(self.nulls(), "a value")
        return self.ids().cast(pa.string())

    def changed(self, rows: Bools) -> Bools:
        """(n,) those of `rows` with another value than the row before them; the first row counts as unchanged.

        No value and NaN are equal to themselves, and no list is an empty one.
        """
        out = np.zeros(len(self), np.bool_)
        if not pa.types.is_nested(self.values.type):
            out[1:] = _unequal(self.values[1:], self.values[:-1], rows[1:])
            return out
        inner, offsets = self.lists()
        lengths = np.diff(offsets)
        out[1:] = (lengths[1:] != lengths[:-1]) & rows[1:]
        same = 1 + np.flatnonzero((lengths[1:] == lengths[:-1]) & (lengths[1:] > 0) & rows[1:])
        if len(same):
            length = np.repeat(lengths[same], lengths[same])
            first = np.cumsum(lengths[same]) - lengths[same]
            at = np.arange(len(length)) + np.repeat(offsets[same] - first, lengths[same])
            one, other = (inner.values.take(pa.array(index)) for index in (at, at - length))
            out[same] = np.logical_or.reduceat(_unequal(one, other, np.ones(len(at), np.bool_)), first)
        return out

    def lists(self, encoded: bool = False) -> tuple[Column, Ints]:
        """The values of all lists as a column (`encoded`: see `column`), and (n + 1,) offsets; no list is an empty one."""
        kind = self.values.type
        if pa.types.is_null(kind):
            return Column(pa.nulls(0), self.name, self.role, self.source), np.zeros(len(self) + 1, np.int64)
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            self._wrong_type("lists")
        lengths = pc.list_value_length(self.values)
        if lengths.null_count:
            lengths = pc.fill_null(lengths, 0)
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(lengths.to_numpy(zero_copy_only=False), out=offsets[1:])
        values = _decoded([self.values.flatten()], encoded)[0]
        return Column(values, self.name, self.role, self.source, offsets), offsets


def _unequal(one: pa.Array, other: pa.Array, rows: Bools) -> Bools:
    """(n,) those of `rows` where two arrays of one type differ."""
    if pa.types.is_null(one.type):
        return np.zeros(len(one), np.bool_)
    if pa.types.is_floating(one.type):
        a, b = (x.to_numpy(zero_copy_only=False) for x in (one, other))
        out: Bools = (a != b) & rows
        return out & ((a == a) | (b == b)) if out.any() else out
    found = pc.not_equal(one, other)
    if found.null_count:
        found = pc.coalesce(found, pc.xor(one.is_null(), other.is_null()))
    out = found.to_numpy(zero_copy_only=False) & rows
    return out


def _plain(values: pa.Array) -> pa.Array:
    """Dictionary-encoded values decoded."""
    kind = values.type
    return values.cast(kind.value_type) if pa.types.is_dictionary(kind) else values


def _is_text_dictionary(kind: pa.DataType) -> bool:
    return pa.types.is_dictionary(kind) and bool(pa.types.is_string(kind.value_type))


def _decoded(chunks: list[pa.Array], encoded: bool) -> list[pa.Array]:
    """The chunks with dictionaries decoded, but for those of texts if `encoded`."""
    if encoded and all(_is_text_dictionary(c.type) and not c.dictionary.null_count for c in chunks):
        return chunks
    return [_plain(c) for c in chunks]


def column(table: pa.Table, name: str, role: str, source: Source, encoded: bool = False) -> Column:
    """A column of the table by name. `encoded`: texts that are dictionary-encoded stay so (values may then be few).

    Raises:
        DataError: there is none (the nearest name is given).
    """
    try:
        found = table.column(name)
    except KeyError as error:  # none of this name, or several
        if name in table.column_names:
            raise DataError(f'{source.name}: two columns are called "{name}" ({role})') from error
        hint = nearest(name, source.columns or table.column_names)
        raise DataError(f'{source.name}: no column "{name}" ({role}){hint}') from error
    chunks = _decoded(found.chunks, encoded)
    if len(chunks) == 1:
        return Column(chunks[0], name, role, source)
    return Column(pa.concat_arrays(chunks) if chunks else _plain(pa.nulls(0, found.type)), name, role, source)


def select(table: pa.Table, source: Source, keep: Bools) -> tuple[pa.Table, Source]:
    """The rows that `keep` marks."""
    if keep.all():
        return table, source
    index = np.flatnonzero(keep)
    return table.take(pa.array(index)), source.take(index, len(table))
