"""CSV and TSV files as a log.

Every value is read as text and converted by what the schema says of its column, so that the type of a column never
depends on the values that happen to come first. Empty fields are missing values. Ids stay text (an id is the same as an
integer and as its decimal text); times are seconds or ISO 8601.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
from pydantic import Field

from gem_core.data.columns import Column, Source
from gem_core.data.readers.base import Paths, TableConfig, TableReader, expand
from gem_core.data.values import Role
from gem_core.errors import DataError
from gem_core.schema import Schema

PIECE = 1 << 17
MISSING_NUMBERS = ["", "NA", "N/A", "nan", "NaN", "null", "NULL", "None"]
"""What stands for no number."""


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
        table = read_text(path, self.config.delimiter)
        names = tuple(table.column_names)
        for first in range(0, max(len(table), 1), PIECE):
            piece, source = table.slice(first, PIECE), Source(str(path), first, columns=names)
            converted = {}
            for name in piece.column_names:
                if name not in columns:
                    continue
                chunks = piece.column(name).chunks
                values = pa.concat_arrays(chunks) if chunks else pa.array([], pa.string())
                if name in lists:
                    converted[name] = _list(values, name, lists[name], self.config.list_separator, source)
                else:
                    converted[name] = _convert(Column(values, name, columns[name], source), columns[name])
            yield pa.table(converted), source


def read_text(path: Path, delimiter: str) -> pa.Table:
    """All fields of a CSV file as text; an empty field is null."""
    try:
        with pc_csv.open_csv(path, parse_options=pc_csv.ParseOptions(delimiter=delimiter)) as stream:
            names = stream.schema.names
        return pc_csv.read_csv(
            path,
            parse_options=pc_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pc_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=[""]
            ),
        )
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as CSV: {str(error).splitlines()[0]}") from error


def _list_columns(schema: Schema) -> dict[str, Role]:
    """Columns of lists and the role of their values."""
    out: dict[str, Role] = {f.column or n: "id" for n, f in schema.sparse.items() if f.multi}
    out |= {f.column or n: "vector" for n, f in schema.vectors.items()}
    for event, kind in schema.events.items():
        out[f"{event}.time"] = "time"
        out |= {f"{event}.{n}": "id" if f.kind == "sparse" else "dense" for n, f in kind.fields.items()}
    return out


def _list(values: pa.Array, name: str, role: Role, separator: str, source: Source) -> pa.Array:
    """Text split into lists of converted values; an empty field is no list."""
    split = pc.split_pattern(values, separator)
    inner, offsets = Column(split, name, role, source).lists()
    given = pc.if_else(pc.equal(inner.values, ""), pa.scalar(None, pa.string()), inner.values)
    flat = _convert(replace(inner, values=given), role)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, mask=values.is_null())


def _convert(values: Column, role: Role) -> pa.Array:
    if role in ("dense", "vector", "weight"):
        return _numbers(values, "a number")
    if role in ("label", "mask"):
        lower = pc.utf8_lower(values.values)
        words = pc.if_else(pc.equal(lower, "true"), "1", pc.if_else(pc.equal(lower, "false"), "0", values.values))
        return _numbers(replace(values, values=words), "0 or 1")
    if role == "time":
        return _times(values)
    return values.values


def _numbers(values: Column, expected: str) -> pa.Array:
    missing = pc.is_in(values.values, value_set=pa.array(MISSING_NUMBERS))
    texts = pc.utf8_trim_whitespace(pc.if_else(missing, pa.scalar(None, pa.string()), values.values))
    try:
        return texts.cast(pa.float64())
    except pa.ArrowInvalid:
        _first_fault(values, texts, pa.float64(), expected)


def _times(values: Column) -> pa.Array:
    texts = pc.utf8_trim_whitespace(values.values)
    known = texts.drop_null()
    seconds = len(known) == 0 or known[0].as_py().lstrip("-").isdigit()
    # The last form is of times with fractions of seconds or a zone.
    kinds = [pa.int64()] if seconds else [pa.timestamp("s"), pa.timestamp("us", "UTC")]
    for kind in kinds:
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            continue
    form = "seconds since 1970" if seconds else "a time like 2026-01-31 12:00:00"
    _first_fault(values, texts, kinds[-1], f"{form} (as in the rows before)")


def _first_fault(values: Column, texts: pa.Array, kind: pa.DataType, expected: str) -> NoReturn:
    for i, text in enumerate(texts):
        try:
            text.cast(kind)
        except pa.ArrowInvalid:
            values.fail(i, expected)
    raise AssertionError("a cast failed but none of its values did")
