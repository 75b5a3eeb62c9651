"""Rows per second of the streaming Parquet reader against pyarrow's bare scan of the same columns, and its peak memory.

    python benchmarks/parquet.py [--rows 200000] [--repeats 5] [--out benchmarks/results/parquet.json]

Both read the same made-up files, in the page cache, in one process with one thread; scan and reader are measured in turn
and the ratio is taken pair by pair, by processor time (what else runs on the machine then counts little) and by wall
time. The reader does all that training needs: it decodes, checks, encodes, shuffles and gives batches of 2,048 rows.

Logs: `wide` has 60 numbers (log1p) and 10 integer ids; `text` 30 text ids and 10 numbers; `lists` one row a request with a
history of 50 events and two fields in lists; `requests` is `wide` with 30 rows a request, so that requests run over the
ends of row groups.

Memory: the peak resident size of a process that reads a `lists` log, and one that is 10 times as long, from end to end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gem_core.data.readers import ParquetReader
from gem_core.report.environment import environment
from gem_core.schema import Schema

GROUP, POOL = 1 << 15, 1 << 16
HISTORY = 50


def schema_of(kind: str) -> Schema:
    """The schema of a made-up log."""
    spec: dict[str, Any] = {"user": "user", "time": "time", "objectives": {"click": {"label": "label"}}}
    if kind in ("wide", "requests"):
        spec |= {
            "request": "request",
            "dense": {f"dense{i}": {"transform": "log1p", "encoding": "piecewise"} for i in range(60)},
            "sparse": {f"id{i}": {} for i in range(10)},
        }
    elif kind == "text":
        spec |= {"dense": {f"dense{i}": {} for i in range(10)}, "sparse": {f"text{i}": {} for i in range(30)}}
    else:
        spec |= {
            "sparse": {"item": {}},
            "events": {"click": {"max_length": HISTORY, "fields": {"item": {}, "value": {"kind": "dense"}}}},
        }
    return Schema.parse(spec)


def piece(kind: str, first: int, rows: int) -> pa.Table:
    """Rows `first` .. of a made-up log."""
    random = np.random.default_rng([first])
    request = np.arange(first, first + rows) // (30 if kind == "requests" else 1)
    columns: dict[str, Any] = {
        "user": request % 5_000,
        "time": 1_000_000 + request,
        "label": random.integers(0, 2, rows),
    }
    if kind in ("wide", "requests"):
        columns["request"] = request
        columns |= {f"dense{i}": random.exponential(5, rows).astype(np.float32) for i in range(60)}
        columns |= {f"id{i}": (random.random(rows) ** 3 * 10_000).astype(int) for i in range(10)}
    elif kind == "text":
        columns |= {f"dense{i}": random.normal(size=rows).astype(np.float32) for i in range(10)}
        names = pa.array([f"campaign-{i}" for i in range(10_000)])
        columns |= {
            f"text{i}": names.take(pa.array((random.random(rows) ** 3 * 10_000).astype(int))) for i in range(30)
        }
    else:
        n = rows * HISTORY
        offsets = pa.array(np.arange(0, n + 1, HISTORY), pa.int32())
        times = np.sort(random.integers(0, 1_000_000, (rows, HISTORY)), 1).reshape(-1)
        columns["item"] = (random.random(rows) ** 3 * 10_000).astype(int)
        inner = {
            "time": times,
            "item": (random.random(n) ** 3 * 10_000).astype(int),
            "value": random.normal(size=n).astype(np.float32),
        }
        columns |= {f"click.{k}": pa.ListArray.from_arrays(offsets, pa.array(v)) for k, v in inner.items()}
    return pa.table(columns)


def write(path: Path, kind: str, rows: int) -> None:
    """A log as a file of row groups of `GROUP` rows."""
    with pq.ParquetWriter(path, piece(kind, 0, 1).schema) as file:
        for first in range(0, rows, GROUP):
            file.write_table(piece(kind, first, min(GROUP, rows - first)), row_group_size=GROUP)


def streaming(path: Path, schema: Schema) -> ParquetReader:
    """The reader, streaming whatever the file's size."""
    return ParquetReader(ParquetReader.Config(rows=str(path), hold_mib=0, pool_rows=POOL), schema)


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds of the processor and of the clock."""
    began, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - began, time.perf_counter() - clock


def speed(folder: Path, kind: str, rows: int, repeats: int) -> dict[str, float]:
    """Rows per second of scan and reader, and their ratio: medians over pairs."""
    path = folder / f"{kind}.parquet"
    write(path, kind, rows)
    reader = streaming(path, schema_of(kind))
    columns = list(reader.groups("train").columns)
    present = [name for name in pq.read_schema(path).names if name in columns]
    fitting, _ = timed(lambda: reader.prepare("train"))  # fits the schema

    def scan() -> None:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                file.read_row_group(group, columns=present, use_threads=False)

    def read() -> None:
        # A reader of its own, which remembers nothing of an earlier pass.
        assert sum(batch.rows for batch in streaming(path, reader.schema).iterate("train")) == rows

    scan()
    read()
    pairs = [(timed(scan), timed(read)) for _ in range(repeats)]
    return {
        "scan_cpu_rows_s": rows / statistics.median(s[0] for s, _ in pairs),
        "reader_cpu_rows_s": rows / statistics.median(r[0] for _, r in pairs),
        "ratio_cpu": statistics.median(s[0] / r[0] for s, r in pairs),
        "ratio_wall": statistics.median(s[1] / r[1] for s, r in pairs),
        "fit_cpu_rows_s": rows / fitting,
    }


def peak(path: Path, schema: Path) -> float:
    """Peak resident MiB of a process that reads a log from end to end."""
    command = [sys.executable, __file__, "--read", str(path), str(schema)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def memory(folder: Path, rows: int) -> dict[str, float]:
    """Peak memory of reading a log and one 10 times as long."""
    out = {}
    small, large, schema = folder / "small.parquet", folder / "large.parquet", folder / "schema.json"
    write(small, "lists", rows)
    streaming(small, schema_of("lists")).schema.save(schema)
    write(large, "lists", 10 * rows)
    for name, path in (("small", small), ("large", large)):
        out[f"{name}_file_mib"] = path.stat().st_size / 2**20
        out[f"{name}_peak_mib"] = statistics.median(peak(path, schema) for _ in range(3))
    return {**out, "rows": rows, "ratio": out["large_peak_mib"] / out["small_peak_mib"]}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--read", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    if options.read:
        for _ in streaming(options.read[0], Schema.load(options.read[1])).iterate("train"):
            pass
        # Not resource.getrusage: a process starts there with the peak of the one that forked it.
        high = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        print(int(high.split()[1]) / 1024)
        return
    result: dict[str, Any] = {"environment": environment(), "rows": options.rows, "group": GROUP, "pool": POOL}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ("wide", "text", "lists", "requests"):
            result[kind] = speed(folder, kind, options.rows, options.repeats)
            print(kind, json.dumps(result[kind]), flush=True)
        result["memory"] = memory(folder, options.rows)
        print("memory", json.dumps(result["memory"]), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
