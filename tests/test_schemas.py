"""The schema files of public layouts: each reads tiny files of its layout, as CSV and as Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest

from gem_core.data.profile import profile
from gem_core.data.readers import CsvReader, ParquetReader
from gem_core.data.values import event_columns, row_columns
from gem_core.schema import Schema

FOLDER = Path(__file__).parent.parent / "recipes/schemas"
NAMES = ["amazon-electronics", "avazu", "criteo", "kuairand", "kuaivideo", "movielens", "taobao-ad"]
ROWS = 8


def test_every_layout_is_here() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == NAMES


def columns(roles: dict[str, Any], schema: Schema) -> dict[str, list[Any]]:
    """Plausible text of each column; each row a user of its own."""
    lists = {f.column or name for name, f in schema.sparse.items() if f.multi}
    made: dict[str, list[Any]] = {}
    for name, role in roles.items():
        if name in lists:
            made[name] = ["1|2"] * ROWS
        elif role == "label":
            made[name] = [i % 2 for i in range(ROWS)]
        elif role == "time":
            made[name] = [1_400_000_000 + i for i in range(ROWS)]
        else:
            made[name] = list(range(ROWS))
    return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_layout_is_read(name: str, kind: str, tmp_path: Path) -> None:
    schema = Schema.load(FOLDER / f"{name}.yaml")
    tables = {"rows": pa.table(columns(row_columns(schema, False), schema))}
    tables |= {event: pa.table(columns(event_columns(schema, event), schema)) for event in schema.events}
    for part, table in tables.items():
        if kind == "csv":
            pc.write_csv(table, tmp_path / f"{part}.csv")
            continue
        for i, column in enumerate(table.column_names):
            if pa.types.is_string(table.column(column).type):
                table = table.set_column(i, column, pa.array([["1", "2"]] * ROWS))
        pq.write_table(table, tmp_path / f"{part}.parquet")
    options = {
        "rows": str(tmp_path / f"rows.{kind}"),
        "events": {event: str(tmp_path / f"{event}.{kind}") for event in schema.events},
    }
    reader: Any = CsvReader if kind == "csv" else ParquetReader
    assert profile(reader(reader.Config(**options), schema)).faults == []
    rows = reader(reader.Config(**options), schema).load("train")
    assert rows.rows == ROWS and set(rows.labels) == set(schema.objectives)
    assert np.isfinite(rows.batch(np.arange(rows.requests)).dense.numpy()).all()
