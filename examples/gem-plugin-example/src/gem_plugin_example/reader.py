"""A reader of JSON lines: one object per row; a user's history stands in the rows, as lists under "<type>.<field>"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
from pyarrow import json as pa_json

from gem_core.data.columns import Source
from gem_core.data.readers.base import TableConfig, TableReader
from gem_core.data.values import Role
from gem_core.errors import DataError


class JsonLinesConfig(TableConfig):
    """A file each for `rows` (training), `validation` and `test`; or one in `rows` and how it is split in `split`."""

    rows: str | None = None
    validation: str | None = None
    test: str | None = None


class JsonLinesReader(TableReader):
    """Only how a table is had from a file is ours; splits, encoding, order and resuming are the base's."""

    Config: ClassVar[type[JsonLinesConfig]] = JsonLinesConfig

    def row_tables(self, part: str, columns: Mapping[str, Role]) -> Iterator[tuple[pa.Table, Source]]:
        """The table of one of the options. `Source` is what messages about a value name: file, first row, columns."""
        path = Path(getattr(self.config, part))
        try:
            table = pa_json.read_json(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: cannot be read as JSON lines: {str(error).splitlines()[0]}") from error
        yield table, Source(str(path), columns=tuple(table.column_names))

    def event_types(self) -> list[str]:
        """No events apart from the rows."""
        return []
