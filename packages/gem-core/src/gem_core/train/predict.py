"""Predictions of a trained model, streamed to a file."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch

from gem_core.data.batch import Batch
from gem_core.data.readers.base import TableReader
from gem_core.errors import ConfigError, DataError, GemError
from gem_core.plugins import Registry
from gem_core.train.build import Parts, restore
from gem_core.train.folder import unwritable
from gem_core.train.memory import enough_memory
from gem_core.train.strategy import world_size

_Named = tuple[Batch, pa.Table]

ROW_GROUP = 65_536
"""Rows gathered before they are written."""


@enough_memory()
@torch.no_grad()
def predict(
    path: str | Path,
    output: str | Path,
    split: str = "test",
    overrides: Sequence[str] = (),
    registry: Registry | None = None,
    reader: Mapping[str, Any] | None = None,
) -> int:
    """Write one probability per task for every row of a split, in the log's order, beside what the log calls the row.

    These columns are `row_id` (where the schema names none, the row's place in the log, from 0), `request` (where the
    schema names it) and `user`, as the log has them. Of a reader that is no `TableReader`: its order, and `row_id` and
    `user` as in `Batch`. The file (.parquet or .csv by its name) appears when it is complete.

    Args:
        path: a checkpoint's folder, or a run's (its best checkpoint, else its newest).
        overrides: `key.path=value` changes to the checkpoint's recipe, as in "data.reader.test=new.csv".
        reader: in place of the recipe's `data.reader`, as in {"name": "memory", "test": table}.

    Returns:
        The number of rows written.

    Raises:
        ConfigError: no checkpoint there, a wrong override, a split that the reader does not have, another file type, a
            place that cannot be written.
        GemError: the disk or memory is full.
    """
    output = Path(output)
    if output.suffix not in (".parquet", ".csv"):
        raise ConfigError(f"predictions go to a .parquet or .csv file, not {output.name}")
    if output.is_dir():
        raise ConfigError(f"{output}: expected a file to write, found a folder there")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(unwritable(str(output.parent), error)) from error
    if world_size() > 1:
        raise ConfigError("gem predict runs in one process: start it without torchrun")
    parts = restore(path, registry, overrides, reader)
    parts.check_split(split)
    source: object = parts.reader
    in_order = source.in_order(split, parts.recipe.data.batch_rows) if isinstance(source, TableReader) else None
    first = None if in_order is None else next(in_order)
    names = pa.schema([("row_id", pa.int64()), ("user", pa.int64())]) if first is None else first[1].schema
    schema = pa.schema([*names, *(pa.field(task, pa.float32()) for task in parts.schema.objectives)])
    written, waiting = 0, 0
    tables: list[pa.Table] = []
    with _writer(output, schema) as write, closing(_batches(parts, split, first, in_order)) as batches:
        for batch, named in batches:
            logits = parts.predict(batch)
            scores = (logits[task].float().sigmoid().cpu().numpy() for task in parts.schema.objectives)
            tables.append(pa.table([*named, *map(pa.array, scores)], schema=schema))
            written, waiting = written + batch.rows, waiting + batch.rows
            if waiting >= ROW_GROUP:
                write(pa.concat_tables(tables))
                tables, waiting = [], 0
        if tables:
            write(pa.concat_tables(tables))
    return written


def _batches(
    parts: Parts, split: str, first: _Named | None, in_order: Iterator[_Named] | None
) -> Generator[tuple[Batch, list[pa.ChunkedArray | pa.Array]], None, None]:
    """Batches in order, and the columns that name their rows."""
    if first is None or in_order is None:
        with closing(parts.batches(split)) as batches:
            for batch, _ in batches:
                yield batch, [pa.array(x.cpu().numpy()) for x in (batch.row_id, batch.user[batch.request])]
        return
    for batch, identity in chain([first], in_order):
        if not batch.rows:
            continue
        try:
            named = identity.cast(first[1].schema)
        except pa.ArrowInvalid as error:
            raise DataError(f"split {split}: ids are integers in one file and text in another: {error}") from error
        yield batch.to(parts.strategy.device), named.columns


@contextmanager
def _writer(output: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], None]]:
    """Writes tables under a hidden name, renamed to `output` when all went well."""
    hidden = output.with_name(f".{output.name}")
    make = pyarrow.parquet.ParquetWriter if output.suffix == ".parquet" else pyarrow.csv.CSVWriter
    try:
        with make(str(hidden), schema) as writer:
            yield writer.write_table
        hidden.replace(output)
    except OSError as error:
        raise GemError(unwritable(str(output), error)) from error
    finally:
        hidden.unlink(missing_ok=True)
