"""CSV and TSV files as a log.

Every value is read as text and converted by what the schema says of its column, so that the type of a column never
depends on the values that happen to come first. Empty fields are missing values. Ids stay text (an id is the same as an
integer and as its decimal text); times are whole seconds or ISO 8601.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
from pydantic import Field

from gem_core.data.columns import Column, Source
from gem_core.data.readers.base import TableConfig, TableReader
from gem_core.data.readers.files import Paths, expand
from gem_core.data.readers.text import Texts
from gem_core.data.values import Role, inline_columns
from gem_core.errors import DataError
from gem_core.schema import Schema

PIECE = 1 << 17
BLOCK = 1 << 23
"""Bytes of text that are read at a time where a file may be larger than memory."""


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

    @property
    def _texts(self) -> Texts:
        return Texts(self.on_fault)

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
                convert = self._list if name in lists else self._texts.convert
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
        flat = self._texts.convert(replace(inner, values=given), role)
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, mask=values.values.is_null())


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
    pieces, wrong = zip(*csv_pieces(path, delimiter, None), strict=True)
    return pa.concat_tables(pieces), sum(wrong)


def csv_pieces(path: Path, delimiter: str, block: int | None = BLOCK) -> Iterator[tuple[pa.Table, int]]:
    """`read_text` in pieces of about `block` bytes (None: whole), the last of which may be empty."""
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
        if block is None:
            yield pc_csv.read_csv(path, parse_options=parse, convert_options=convert), wrong
            return
        read = pc_csv.ReadOptions(block_size=block, use_threads=False)
        with pc_csv.open_csv(path, read_options=read, parse_options=parse, convert_options=convert) as stream:
            for batch in stream:
                yield pa.Table.from_batches([batch]), wrong
                wrong = 0
            yield stream.schema.empty_table(), wrong
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
