"""A generated log as files: rows in order of time, events, schema and manifest. Streams: memory does not grow with rows.

Blocks of users come one after the other, each over all days. Their rows are spread over files of consecutive stretches
of time, which are then sorted one by one: rows stand as a production log has them, and each file holds about ROWS_PER_FILE.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from gem_core import __version__
from gem_core.data.generated.config import DAY, EVENTS, START, GeneratedConfig
from gem_core.data.generated.log import Log, describe
from gem_core.data.generated.oracle import Oracle, oracle_columns
from gem_core.data.readers.base import SPLITS
from gem_core.errors import ConfigError

ROWS_PER_FILE = 1_000_000
ROW_GROUP = 131_072

Progress = Callable[[str, int, int], None]


def measure(config: GeneratedConfig, progress: Progress) -> dict[str, Any]:
    """The manifest of a log that is not written."""
    return _pass(config, progress, None)


def write(config: GeneratedConfig, out: Path, progress: Progress) -> dict[str, Any]:
    """Make the folder `out`: train/, validation/, test/ with part-*.parquet, events/<type>.parquet, schema.yaml,
    manifest.json (what is returned). It appears when it is whole. `progress(stage, done, total)` is called meanwhile.

    Raises ConfigError if something is there.
    """
    if out.exists():
        raise ConfigError(f"{out}: already there; name a new folder, or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        manifest = _pass(config, progress, building)
        header = f"# A generated ads log (gem data generate, seed {config.seed}).\n"
        (building / "schema.yaml").write_text(header + yaml.safe_dump(describe(config), sort_keys=False))
        (building / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        building.chmod(0o755)  # a temporary folder is the owner's alone
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return manifest


def _pass(config: GeneratedConfig, progress: Progress, folder: Path | None) -> dict[str, Any]:
    log = Log(config)
    oracles = {split: Oracle(config.tasks) for split in SPLITS}
    counts = dict.fromkeys(EVENTS, 0)
    requests = dict.fromkeys(SPLITS, 0)
    edges = config.edges()
    with ExitStack() as stack:
        files = None if folder is None else stack.enter_context(_Files(config, folder))
        for done, block in enumerate(log.blocks()):
            split = np.searchsorted(edges, block.rows["time"].to_numpy(), side="right")
            measured = block.rows.select(oracle_columns(config.tasks))
            begins = block.rows["request"].to_numpy() == block.rows["row_id"].to_numpy()
            for place, name in enumerate(SPLITS):
                oracles[name].add(measured.filter(pa.array(split == place)))
                requests[name] += int((begins & (split == place)).sum())
            for event, table in block.events.items():
                counts[event] += len(table)
            if files is not None:
                files.add(block.rows, block.events)
            progress("users", done + 1, log.block_count)
        if files is not None:
            files.sort(progress)
    return {
        "log": "generated",
        "gem_core": __version__,
        "options": config.model_dump(mode="json"),
        "users": config.user_count,
        "requests": requests,
        "events": counts,
        "splits": {split: oracle.compute() for split, oracle in oracles.items()},
    }


class _Files:
    """The files of a log while it is made."""

    def __init__(self, config: GeneratedConfig, folder: Path) -> None:
        self.folder, self.spilled = folder, folder / ".rows"
        self.events: dict[str, pq.ParquetWriter] = {}
        (folder / "events").mkdir()
        self.spilled.mkdir()
        end = START + DAY * config.days
        self.first: list[int] = []  # second where each file's rows begin
        self.paths: list[Path] = []
        for split, low, high in zip(SPLITS, (START, *config.edges()), (*config.edges(), end), strict=True):
            (folder / split).mkdir()
            files = max(1, round(config.rows * (high - low) / (end - START) / ROWS_PER_FILE))
            self.first += [low + (high - low) * i // files for i in range(files)]
            self.paths += [folder / split / f"part-{i:05}.parquet" for i in range(files)]

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.events.values():
            writer.close()

    def add(self, rows: pa.Table, events: dict[str, pa.Table]) -> None:
        """A block: its events to their files, its rows to the stretches of time."""
        for event, table in events.items():
            if event not in self.events:
                path = self.folder / "events" / f"{event}.parquet"
                self.events[event] = pq.ParquetWriter(path, table.schema, use_dictionary=_repetitive(table))
            self.events[event].write_table(table, ROW_GROUP)
        place = np.searchsorted(self.first, rows["time"].to_numpy(), side="right") - 1
        order = np.argsort(place, kind="stable")
        ends = np.cumsum(np.bincount(place, minlength=len(self.first)))
        sorted_rows = rows.take(pa.array(order))
        for file, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            # Appended as an Arrow stream of its own, so that no file stays open.
            with (self.spilled / str(file)).open("ab") as sink, pa.ipc.new_stream(sink, rows.schema) as stream:
                stream.write_table(sorted_rows.slice(begin, end - begin))

    def sort(self, progress: Progress) -> None:
        """Write each stretch of time in order of request time, then of row id."""
        for file, path in enumerate(self.paths):
            rows = pa.concat_tables(_streams(self.spilled / str(file)))
            order = np.lexsort((rows["row_id"].to_numpy(), rows["time"].to_numpy()))
            pq.write_table(rows.take(pa.array(order)), path, ROW_GROUP, use_dictionary=_repetitive(rows))
            (self.spilled / str(file)).unlink()
            progress("files", file + 1, len(self.paths))
        self.spilled.rmdir()


def _repetitive(table: pa.Table) -> list[str]:
    """The columns of few distinct values, for which alone a dictionary is worth the time."""
    plain = ("row_id", "request", "time")
    return [n for n in table.column_names if n not in plain and not n.startswith(("oracle_", "static_"))]


def _streams(path: Path) -> Iterator[pa.Table]:
    with pa.memory_map(str(path)) as source:
        while source.tell() < source.size():
            yield pa.ipc.open_stream(source).read_all()
