"""Rows per second of the reader: fitting, encoding, and the assembly of training batches.

    python benchmarks/reader.py [--rows 200000] [--seconds 5] [--out benchmarks/results/reader.json]

A made-up log of the demo's shape: 30 rows a request, 60 dense features, 10 ids, histories of up to 512 events with 6
fields (log-normal lengths). `cpu_*` counts processor time of the consumer's process (in which, without a worker, the
batches are assembled), so what else runs on the machine counts little; `wall_rows_s` and `waited_share` are of a
consumer that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from gem_core.data.loader import Loader
from gem_core.data.readers import MemoryReader
from gem_core.report.environment import environment
from gem_core.schema import Schema

ROWS_PER_REQUEST, LIMIT, DENSE, IDS, FIELDS = 30, 512, 60, 10, 5


def made_up(rows: int, seed: int = 0) -> MemoryReader:
    """The log, in memory, not yet encoded."""
    random = np.random.default_rng(seed)
    requests = rows // ROWS_PER_REQUEST
    users = max(1, requests // 20)
    per_user = np.minimum(random.lognormal(np.log(400), 0.9, users), 4000).astype(int)
    time_of = np.sort(random.integers(10_000, 1_000_000, requests))
    columns: dict[str, Any] = {
        "user": np.repeat(random.integers(0, users, requests), ROWS_PER_REQUEST),
        "time": np.repeat(time_of, ROWS_PER_REQUEST),
        "request": np.repeat(np.arange(requests), ROWS_PER_REQUEST),
        "label": random.integers(0, 2, requests * ROWS_PER_REQUEST),
    }
    n = requests * ROWS_PER_REQUEST
    columns |= {f"dense{i}": random.exponential(5, n).astype(np.float32) for i in range(DENSE)}
    columns |= {f"id{i}": (random.random(n) ** 3 * 10_000).astype(int) for i in range(IDS)}
    owner = np.repeat(np.arange(users), per_user)
    events: dict[str, Any] = {"user": owner, "time": random.integers(0, 1_000_000, len(owner))}
    events |= {f"id{i}": (random.random(len(owner)) ** 3 * 10_000).astype(int) for i in range(FIELDS)}
    events["value"] = random.exponential(5, len(owner))
    schema = {
        "user": "user",
        "time": "time",
        "request": "request",
        "dense": {f"dense{i}": {"transform": "log1p", "encoding": "piecewise"} for i in range(DENSE)},
        "sparse": {f"id{i}": {} for i in range(IDS)},
        "events": {
            "click": {
                "max_length": LIMIT,
                "fields": {f"id{i}": {} for i in range(FIELDS)} | {"value": {"kind": "dense", "transform": "log1p"}},
            }
        },
        "objectives": {"click": {"label": "label"}},
    }
    config = MemoryReader.Config(rows=pa.table(columns), events={"click": pa.table(events)})
    return MemoryReader(config, Schema.parse(schema), seed=seed)


def drawn(reader: Any, workers: int, seconds: float) -> dict[str, float]:
    """Take batches of 2,048 rows for so many seconds."""
    rows = batches = events = 0
    start, processor, waited = time.perf_counter(), 0.0, 0.0
    while time.perf_counter() - start < seconds:
        loader = Loader(reader, "train", workers=workers)
        began = time.process_time()
        for batch, _ in loader:
            rows, batches = rows + batch.rows, batches + 1
            events += batch.events["click"]["time"].values.numel()
        processor += time.process_time() - began
        waited += loader.waited_s
    wall = time.perf_counter() - start
    return {
        "wall_rows_s": rows / wall,
        "cpu_rows_s": rows / processor,
        "cpu_ms_per_batch": 1e3 * processor / batches,
        "events_per_batch": events / batches,
        "waited_share": waited / wall,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    result: dict[str, Any] = {"environment": environment(), "rows": options.rows}
    reader = made_up(options.rows)
    began = time.process_time()
    _ = reader.schema
    fitted = time.process_time()
    reader.load("train")
    encoded = time.process_time()
    result["fit_cpu_rows_s"] = options.rows / (fitted - began)
    result["encode_cpu_rows_s"] = options.rows / (encoded - fitted)
    result["in_process"] = drawn(reader, 0, options.seconds)
    result["one_worker"] = drawn(reader, 1, options.seconds)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
