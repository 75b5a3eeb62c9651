"""A log that arrives in files: ten requests of two rows each, a click that follows the price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from synthetic import recipe

from gem_core.recipe import Recipe

SCHEMA = {
    "user": "user",
    "time": "time",
    "dense": ["price"],
    "sparse": {"ad": {}},
    "objectives": {"click": {"label": "clicked"}},
}


def window(day: int, requests: int = 10) -> pa.Table:
    rng = np.random.default_rng(day)
    time = np.repeat(np.arange(requests), 2) + 1000 * day
    price = rng.normal(size=2 * requests)
    clicked = (rng.random(2 * requests) < 1 / (1 + np.exp(-2 * price))).astype(int)
    ads = [f"ad{i}" for i in rng.integers(0, 3 + day, 2 * requests)]
    return pa.table({"user": time % 7, "time": time, "price": price, "ad": ads, "clicked": clicked})


def arrive(folder: Path, day: int) -> None:
    """As a producer does it: written under a hidden name, then renamed."""
    folder.mkdir(exist_ok=True)
    hidden = folder / f".day-{day}.parquet"
    pq.write_table(window(day), hidden)
    hidden.rename(folder / f"day-{day}.parquet")


def following(folder: Path, inbox: Path, **sections: Any) -> Recipe:
    """An epoch on day 0, then what is in `inbox`, until it is idle."""
    inbox.mkdir(exist_ok=True)
    base = folder.parent / "base.parquet"
    if not base.exists():
        pq.write_table(window(0, 40), base)
    trainer = {"epochs": 1, "log_every": 2, **sections.pop("trainer", {})}
    return recipe(
        folder,
        data={
            "reader": {"name": "parquet", "rows": str(base), "split": {"test_from": 30}},
            "schema": SCHEMA,
            "batch_rows": 8,
        },
        model={"name": "dcnv2", "hidden": [8], "dropout": 0.1},
        trainer=trainer,
        follow={"folder": str(inbox), "idle_s": 0, "poll_s": 1e-3, **sections.pop("follow", {})},
        **sections,
    )
