"""Text to values: numbers, labels and times as CSV files write them, by the role of their column."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.data.columns import WHOLE_SECONDS, Bools, Column
from gem_core.data.values import Role
from gem_core.errors import DataError

MISSING_NUMBERS = ["", "NA", "N/A", "nan", "NaN", "null", "NULL", "None"]
"""What stands for no number."""
SECONDS = re.compile(r"-?\d+(\.\d*)?(e\+?\d+)?", re.IGNORECASE)
FORMS = (pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("ns", "UTC"))
"""Times without, and with fractions of seconds, and with a zone."""

OnFault = Callable[[str, int, DataError], None]
"""Told of values that cannot be read: their kind, how many they are, and the error of the first."""


class Texts:
    """Converts columns of text; what `on_fault` does not raise for becomes null."""

    def __init__(self, on_fault: OnFault) -> None:
        self.on_fault = on_fault

    def convert(self, values: Column, role: Role) -> pa.Array:
        """Values of a role; ids stay text."""
        if role in ("dense", "vector", "weight"):
            return self._numbers(values, values.values, "a number")
        if role in ("label", "mask"):
            lower = pc.utf8_lower(values.values)
            words = pc.if_else(pc.equal(lower, "true"), "1", pc.if_else(pc.equal(lower, "false"), "0", values.values))
            return self._numbers(values, words, "0 or 1")
        if role == "time":
            return self._times(values)
        return values.values

    def _numbers(self, values: Column, texts: pa.Array, expected: str) -> pa.Array:
        missing = pc.is_in(texts, value_set=pa.array(MISSING_NUMBERS))
        known = pc.utf8_trim_whitespace(pc.if_else(missing, pa.scalar(None, pa.string()), texts))
        return self._cast(values, known, pa.float64(), expected)

    def _times(self, values: Column) -> pa.Array:
        texts = pc.utf8_trim_whitespace(values.values)
        known = texts.drop_null()
        first = known[0].as_py() if len(known) else "0"
        if not SECONDS.fullmatch(first):
            return self._dates(values, texts, first)
        try:
            return texts.cast(pa.int64())
        except pa.ArrowInvalid:  # pandas writes 1740000000.0
            numbers = self._cast(values, texts, pa.float64(), "seconds since 1970 (as in the rows before)")
        seconds = pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False)
        bad = ~((seconds == np.trunc(seconds)) & (np.abs(seconds) < 2**62))
        self._report(values, bad, WHOLE_SECONDS)
        return pa.array(np.where(bad, 0, seconds).astype(np.int64), mask=bad | np.asarray(numbers.is_null()))

    def _dates(self, values: Column, texts: pa.Array, first: str) -> pa.Array:
        for form in FORMS:
            try:
                return texts.cast(form)
            except pa.ArrowInvalid:
                continue
        form = next((form for form in FORMS if _fits(first, form)), None)
        expected = "a time like 2026-01-31 12:00:00"
        expected = (
            f"seconds since 1970 or {expected}" if form is None else f"{expected} (in the form of the rows before)"
        )
        return self._cast(values, texts, FORMS[0] if form is None else form, expected)

    def _cast(self, values: Column, texts: pa.Array, kind: pa.DataType, expected: str) -> pa.Array:
        """Texts as values of a kind; those that are none are reported, and null where that does not raise."""
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            wrong = [text for text in texts.drop_null().unique().to_pylist() if not _fits(text, kind)]
        bad = pc.is_in(texts, value_set=pa.array(wrong, pa.string()))
        self._report(values, bad.to_numpy(zero_copy_only=False), expected)
        return pc.if_else(bad, pa.scalar(None, pa.string()), texts).cast(kind)

    def _report(self, values: Column, bad: Bools, expected: str) -> None:
        try:
            values.check(bad, expected)
        except DataError as error:
            self.on_fault(f"{values.source.name}: {values.name}: {expected}", int(bad.sum()), error)


def _fits(text: str, kind: pa.DataType) -> bool:
    try:
        pa.scalar(text).cast(kind)
    except pa.ArrowInvalid:
        return False
    return True
