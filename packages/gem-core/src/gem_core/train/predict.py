"""Predictions of a trained model, streamed to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch

from gem_core.data.batch import Batch
from gem_core.errors import ConfigError
from gem_core.plugins import Registry
from gem_core.train.build import Parts, restore

ROW_GROUP = 65_536
"""Rows gathered before they are written."""


@torch.no_grad()
def predict(
    path: str | Path,
    output: str | Path,
    split: str = "test",
    overrides: Sequence[str] = (),
    registry: Registry | None = None,
    reader: Mapping[str, Any] | None = None,
) -> int:
    """Write `row_id`, `user` (the key of `Batch.user`) and one probability per task for every row of a split.

    The file (.parquet or .csv by its name) appears when it is complete; rows are in the split's order.

    Args:
        path: a checkpoint's folder, or a run's (its best checkpoint, else its newest).
        overrides: `key.path=value` changes to the checkpoint's recipe, as in "data.reader.test=new.csv".
        reader: in place of the recipe's `data.reader`, as in {"name": "memory", "test": table}.

    Returns:
        The number of rows written.

    Raises:
        ConfigError: no checkpoint there, a wrong override, a split that the reader does not have, another file type.
    """
    output = Path(output)
    if output.suffix not in (".parquet", ".csv"):
        raise ConfigError(f"predictions go to a .parquet or .csv file, not {output.name}")
    parts = restore(path, registry, overrides, reader)
    parts.check_split(split)
    tasks = list(parts.schema.objectives)
    fields = [("row_id", pa.int64()), ("user", pa.int64()), *((task, pa.float32()) for task in tasks)]
    rows, waiting = 0, 0
    tables: list[pa.Table] = []
    with _writer(output, pa.schema(fields)) as write, closing(parts.batches(split)) as batches:
        for batch, _ in batches:
            tables.append(_table(parts, batch, pa.schema(fields)))
            rows, waiting = rows + batch.rows, waiting + batch.rows
            if waiting >= ROW_GROUP:
                write(pa.concat_tables(tables))
                tables, waiting = [], 0
        if tables:
            write(pa.concat_tables(tables))
    return rows


def _table(parts: Parts, batch: Batch, schema: pa.Schema) -> pa.Table:
    with parts.precision.autocast(parts.strategy.device):
        logits = parts.module(batch).logits
    columns = [batch.row_id, batch.user[batch.request], *(logits[t].float().sigmoid() for t in parts.schema.objectives)]
    return pa.table([pa.array(c.cpu().numpy()) for c in columns], schema=schema)


@contextmanager
def _writer(output: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], None]]:
    """Writes tables under a hidden name, renamed to `output` when all went well."""
    output.parent.mkdir(parents=True, exist_ok=True)
    hidden = output.with_name(f".{output.name}")
    make = pyarrow.parquet.ParquetWriter if output.suffix == ".parquet" else pyarrow.csv.CSVWriter
    try:
        with make(str(hidden), schema) as writer:
            yield writer.write_table
        hidden.replace(output)
    finally:
        hidden.unlink(missing_ok=True)
