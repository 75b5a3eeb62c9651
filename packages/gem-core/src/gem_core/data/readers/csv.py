"""CSV and TSV files as a log.

Every value is read as text and converted by what the schema says of its column, so that the type of a column never
depends on the values that happen to come first. Empty fields are missing values. Ids stay text (an id is the same as an
integer and as its decimal text); times are whole seconds or ISO 8601.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
from pydantic import Field

from gem_core.data.columns import WHOLE_SECONDS, Bools, Column, Source
from gem_core.data.readers.base import TableConfig, TableReader
from gem_core.data.readers.files import Paths, expand
from gem_core.data.values import Role, inline_columns
from gem_core.errors import DataError
from gem_core.schema import Schema

PIECE = 1 << 17
MISSING_NUMBERS = ["", "NA", "N/A", "nan", "NaN", "null", "NULL", "None"]
"""What stands for no number."""
SECONDS = re.compile(r"-?\d+(\.\d*)?(e\+?\d+)?", re.IGNORECASE)
FORMS = (pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("ns", "UTC"))
"""Times without, and with fractions of seconds, and with a zone."""


class CsvConfig(TableConfig):
    """As the Parquet reader's, with `delimiter` between fields and `list_separator` between the values of a list."""

    rows: Paths | None = None
    validation: Paths | None = None
    test: Paths | None = None
    events: dict[str, Paths] = Field(default_factory=dict)
    delimiter: str = Field(",", min_length=1, max_length=1)
    list_separator: str = Field("|", min_length=1, max_length=1)


class CsvReader(TableReader):
    """Reads CSV files with a header line once and holds them encoded."""

    Config: ClassVar[type[CsvConfig]] = CsvConfig

    def row_tables(self, part: str, columns: Mapping[str, Role]) -> Iterator[tuple[pa.Table, Source]]:
        """Pieces of the files."""
        lists = _list_columns(self._given)
        for path in expand(getattr(self.config, part), part, (".csv", ".tsv", ".csv.gz", ".tsv.gz")):
            yield from self._file(path, columns, lists)

    def event_tables(self, event: str, columns: Mapping[str, Role]) -> Iterator[tuple[pa.Table, Source]]:
        """Pieces of the files."""
        for path in expand(self.config.events[event], f"events.{event}", (".csv", ".tsv", ".csv.gz", ".tsv.gz")):
            yield from self._file(path, columns, {})

    def _file(
        self, path: Path, columns: Mapping[str, Role], lists: Mapping[str, Role]
    ) -> Iterator[tuple[pa.Table, Source]]:
        table = self._text(path)
        names = tuple(table.column_names)
        line = partial(line_of, path, self.config.delimiter)
        twice = [name for name in columns if names.count(name) > 1]
        if twice:
            raise DataError(f'{path}, line 1: two columns are called "{twice[0]}" ({columns[twice[0]]}); rename one')
        for first in range(0, max(len(table), 1), PIECE):
            piece, source = table.slice(first, PIECE), Source(str(path), first, columns=names, line=line)
            converted = {}
            for name in names:
                if name not in columns:
                    continue
                chunks = piece.column(name).chunks
                values = Column(pa.concat_arrays(chunks) if chunks else pa.array([], pa.string()), name, "", source)
                convert = self._list if name in lists else self._convert
                role = lists.get(name, columns[name])
                converted[name] = convert(replace(values, role=role), role)
            yield pa.table(converted), source

    def _text(self, path: Path) -> pa.Table:
        """All fields of a file as text; an empty field is null."""
        table, wrong = read_text(path, self.config.delimiter)
        if wrong:
            begin, width, found = first_misfit(path, self.config.delimiter)
            error = DataError(f"{path}, line {begin}: expected {width} fields, as in the header, found {found}")
            self.on_fault(f"{path}: fields", wrong, error)
        return table

    # ---- text to values ----------------------------------------------------------------------------------------

    def _list(self, values: Column, role: Role) -> pa.Array:
        """Text split into lists of converted values; an empty field is no list."""
        split = pc.split_pattern(values.values, self.config.list_separator)
        inner, offsets = replace(values, values=split).lists()
        given = pc.if_else(pc.equal(inner.values, ""), pa.scalar(None, pa.string()), inner.values)
        flat = self._convert(replace(inner, values=given), role)
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, mask=values.values.is_null())

    def _convert(self, values: Column, role: Role) -> pa.Array:
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


def _list_columns(schema: Schema) -> dict[str, Role]:
    """Columns of lists and the role of their values."""
    out: dict[str, Role] = {f.column or n: "id" for n, f in schema.sparse.items() if f.multi}
    out |= {f.column or n: "vector" for n, f in schema.vectors.items()}
    for event, kind in schema.events.items():
        roles: dict[str, Role] = {n: "id" if f.kind == "sparse" else "dense" for n, f in kind.fields.items()}
        for name, places in inline_columns(schema, event).items():
            out |= dict.fromkeys(places, roles.get(name, "time"))
    return out


# ---- files ------------------------------------------------------------------------------------------------------


def read_text(path: Path, delimiter: str) -> tuple[pa.Table, int]:
    """All fields of a CSV file as text, an empty field as null; and the number of rows that were left out, having
    another number of fields than the header."""
    wrong = 0

    def leave_out(_: object) -> str:
        nonlocal wrong
        wrong += 1
        return "skip"

    try:
        _check_kind(path)
        parse = pc_csv.ParseOptions(delimiter=delimiter, invalid_row_handler=leave_out)
        with pc_csv.open_csv(path, parse_options=parse) as stream:
            names = stream.schema.names
        other = next((d for d in ";\t|," if len(names) == 1 and d in names[0]), None)
        if other is not None:
            raise DataError(
                f"{path}: the header has {other!r} and no {delimiter!r} between its names: set the delimiter "
                f"(reader option delimiter: {other!r}; gem data profile --delimiter)"
            )
        wrong, parse.newlines_in_values = 0, True
        types = dict.fromkeys(names, pa.string())
        convert = pc_csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""])
        return pc_csv.read_csv(path, parse_options=parse, convert_options=convert), wrong
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {NOT_UTF8}") from error
    except (pa.ArrowException, OSError) as error:
        said = str(error).splitlines()[0]
        raise DataError(f"{path}: {NOT_UTF8 if 'UTF8' in said else f'cannot be read as CSV: {said}'}") from error


NOT_UTF8 = "not in UTF-8: save it as UTF-8 (as with iconv -f LATIN1 -t UTF-8)"


def _check_kind(path: Path) -> None:
    """Raise for what is no text but often called CSV."""
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path}: in UTF-16: save it as UTF-8 (as with iconv -f UTF-16 -t UTF-8)")
    if start[:2] == b"\x1f\x8b" and path.suffix != ".gz":
        raise DataError(f"{path}: compressed with gzip: rename it to {path.name}.gz")
    if start == b"PAR1":
        raise DataError(f"{path}: a Parquet file: use the reader parquet, or name it .parquet")


def _records(path: Path, delimiter: str) -> Iterator[tuple[int, int]]:
    """The line where each record begins, and its number of fields; blank lines are no records."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        begin = 1
        for record in reader:
            if record:
                yield begin, len(record)
            begin = reader.line_num + 1


def line_of(path: Path, delimiter: str, row: int) -> int:
    """The line where a row that `read_text` gives begins; the header is line 1."""
    records = _records(path, delimiter)
    _, width = next(records)
    return next(islice((begin for begin, fields in records if fields == width), row, None))


def first_misfit(path: Path, delimiter: str) -> tuple[int, int, int]:
    """Line, fields expected and fields found of the first row that has not as many as the header."""
    records = _records(path, delimiter)
    _, width = next(records)
    return next((begin, width, fields) for begin, fields in records if fields != width)
