"""The raw log, piece by piece: CSV or Parquet files as tables of user, item, time, action and the columns asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.data.columns import Bools, Column, Source, column
from gem_core.data.prepare.options import Options
from gem_core.data.readers.csv import csv_pieces, first_misfit, line_of
from gem_core.data.readers.files import expand
from gem_core.data.readers.rowgroups import parquet_tables
from gem_core.data.readers.text import Texts
from gem_core.data.values import Role
from gem_core.errors import DataError

TEXT = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
BINARY = (".parquet", ".pq")


class RawLog:
    """`pieces` gives the log in bounded pieces; `skipped` then counts, by kind, the rows that were left out."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.files = expand(options.log, "log", TEXT + BINARY)
        self.skipped: Counter[str] = Counter()
        roles: dict[str, Role] = {options.user: "user", options.item: "id", options.action: "id"}
        self.roles: dict[str, Role] = {**options.columns(), **roles, options.time: "time"}

    def bytes(self) -> int:
        """Size of the files."""
        return sum(path.stat().st_size for path in self.files)

    def pieces(self) -> Iterator[pa.Table]:
        """Tables of the columns of `roles`, typed alike; times are int64 seconds."""
        first: pa.Schema | None = None
        for path in self.files:
            for table, source in self._tables(path):
                typed = self._typed(table, source)
                if first is None:
                    first = typed.schema
                try:
                    yield typed.cast(first)
                except pa.ArrowInvalid as error:
                    raise DataError(
                        f"{path}: expected columns of the types of {self.files[0]} ({first}): {error}"
                    ) from error

    def _tables(self, path: Path) -> Iterator[tuple[pa.Table, Source]]:
        if path.name.endswith(BINARY):
            yield from parquet_tables(str(path), self.roles)
            return
        line, texts = partial(line_of, path, self.options.delimiter), Texts(self._on_fault)
        first = 0
        for table, wrong in csv_pieces(path, self.options.delimiter):
            if wrong:
                begin, width, found = first_misfit(path, self.options.delimiter)
                said = f"{path}, line {begin}: expected {width} fields, as in the header, found {found}"
                self._on_fault("fields", wrong, DataError(said))
                self.skipped["fields"] += wrong
            source = Source(str(path), first, columns=tuple(table.column_names), line=line)
            known = [name for name in self.roles if name in table.column_names]
            values = {name: column(table, name, self.roles[name], source) for name in known}
            yield pa.table({name: texts.convert(v, self.roles[name]) for name, v in values.items()}), source
            first += len(table)

    def _on_fault(self, kind: str, count: int, error: DataError) -> None:
        if self.options.faults == "error":
            raise DataError(f"{error} (faults: skip leaves such rows out)") from error

    def _typed(self, table: pa.Table, source: Source) -> pa.Table:
        """Ids as integers or text, numbers as float64, times as seconds; rows that have not all they need left out."""
        o, drop = self.options, np.zeros(len(table), np.bool_)
        required = {o.user: "user", o.item: "item", o.time: "time", o.action: "action"}
        found = {name: column(table, name, required.get(name, role), source) for name, role in self.roles.items()}
        for name in required:
            drop |= self._missing(found[name], drop)
        if drop.any():
            keep = np.flatnonzero(~drop)
            taken = source.take(keep, len(table))
            found = {n: replace(v, values=v.values.take(pa.array(keep)), source=taken) for n, v in found.items()}
        out: dict[str, pa.Array] = {}
        for name, values in found.items():
            if name == o.time:
                out[name] = pa.array(values.times())
            elif self.roles[name] == "dense":
                out[name] = pa.array(values.numbers(), from_pandas=True)
            else:
                out[name] = values.ids()
        out[o.action] = out[o.action].cast(pa.string())
        return pa.table(out)

    def _missing(self, values: Column, drop: Bools) -> Bools:
        bad = values.nulls() & ~drop
        if bad.any():
            if self.options.faults == "error":
                values.check(bad, "a value", " (faults: skip leaves such rows out)")
            self.skipped[f'no {values.role} (column "{values.name}")'] += int(bad.sum())
        return bad


def actions_in(table: pa.Table, action: str, wanted: list[str]) -> Bools:
    """(n,) rows of one of these actions."""
    out: Bools = pc.is_in(table.column(action), value_set=pa.array(wanted, pa.string())).to_numpy()
    return out
