"""Reading a Parquet log takes as much memory however long it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_core.schema import Schema

GROUP = 1 << 13
SPEC = {
    "user": "user",
    "time": "time",
    "request": "request",
    "dense": {f"x{i}": {} for i in range(20)},
    "sparse": {f"text{i}": {"hash": 1000} for i in range(10)},
    "events": {"click": {"max_length": 20, "fields": {"item": {"hash": 1000}}}},
    "objectives": {"y": {}},
    "fitted": {
        "rows": 1,
        "dense": {f"x{i}": {"mean": 0.0, "std": 1.0} for i in range(20)},
        "vocabularies": {},
        "surfaces": [],
        "base_rates": {"y": 0.5},
    },
}
READ = """
import sys
import pyarrow as pa
import torch
from gem_core.data.readers import ParquetReader
from gem_core.schema import Schema
torch.set_num_threads(1)
pa.set_cpu_count(1)
config = ParquetReader.Config(rows=sys.argv[1], hold_mib=0, pool_rows=1 << 14)
rows = sum(batch.rows for batch in ParquetReader(config, Schema.load(sys.argv[2])).iterate("train"))
high = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(rows, high.split()[1])
"""


def piece(first: int) -> pa.Table:
    """A row group; requests have 3 rows and run over its ends."""
    random = np.random.default_rng(first)
    request = np.arange(first, first + GROUP) // 3
    names = pa.array([f"campaign {i}" for i in range(2000)])
    histories = pa.ListArray.from_arrays(
        pa.array(np.arange(GROUP + 1) * 20, pa.int32()), pa.array(np.tile(np.arange(20), GROUP))
    )
    return pa.table(
        {"user": request % 100, "time": request + 1000, "request": request, "y": random.integers(0, 2, GROUP)}
        | {f"x{i}": random.normal(size=GROUP).astype(np.float32) for i in range(20)}
        | {f"text{i}": names.take(pa.array(random.integers(0, 2000, GROUP))) for i in range(10)}
        | {"click.time": histories, "click.item": histories}
    )


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """10 times the rows within 10 % of the peak, taken of a process that does nothing else."""
    Schema.parse(SPEC).save(tmp_path / "schema.json")
    peaks = []
    for groups in (4, 40):
        path = tmp_path / f"{groups}.parquet"
        with pq.ParquetWriter(path, piece(0).schema) as file:
            for group in range(groups):
                file.write_table(piece(group * GROUP), row_group_size=GROUP)
        command = [sys.executable, "-c", READ, str(path), str(tmp_path / "schema.json")]
        rows, peak = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
        assert rows == groups * GROUP
        peaks.append(peak)
        path.unlink()
    assert peaks[1] < 1.1 * peaks[0]
