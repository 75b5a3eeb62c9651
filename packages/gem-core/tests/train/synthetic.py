"""A small ads log with a planted rule, and a plugin with a reader of it and a model for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from gem_core.data.batch import Batch, Jagged
from gem_core.plugins import Registry, builtin, hookimpl
from gem_core.protocols import ComponentConfig, Output, Table
from gem_core.recipe import Recipe, parse
from gem_core.schema import DenseStats, Fitted, Schema

USERS, ADS, PER_REQUEST = 50, 40, 4
ROWS = {"train": 960, "validation": 320, "test": 320}
SCHEMA = Schema.parse(
    {
        "user": "user",
        "time": "time",
        "surface": "surface",
        "surfaces": ["feed", "reels"],
        "dense": {"price": {}},
        "sparse": {"ad": {"hash": ADS}, "tags": {"hash": 10, "multi": True}},
        "events": {"click": {"max_length": 8, "fields": ["ad"]}},
        "objectives": {"click": {"label": "clicked"}, "buy": {"label": "bought"}},
    }
)


def fitted_schema(rows: int = ROWS["train"]) -> Schema:
    stats = {"price": DenseStats(mean=0.0, std=1.0)}
    fit = Fitted(
        rows=rows, dense=stats, vocabularies={}, surfaces=["feed", "reels"], base_rates={"click": 0.4, "buy": 0.2}
    )
    return SCHEMA.model_copy(update={"fitted": fit})


def jagged(lengths: np.ndarray[Any, Any], high: int, limit: int, rng: np.random.Generator) -> Jagged:
    values = torch.from_numpy(rng.integers(0, high, int(lengths.sum())))
    return Jagged(values, torch.from_numpy(np.concatenate([[0], lengths.cumsum()])), limit)


def make_batch(requests: int, seed: int, rows_each: int = PER_REQUEST) -> Batch:
    """Clicks follow the ad and the price; half of the rows have no label for `buy`."""
    rng = np.random.default_rng(seed)
    n = requests * rows_each
    price = rng.normal(size=(n, 1)).astype(np.float32)
    ad = rng.integers(0, ADS, n) + 2
    logit = 1.5 * price[:, 0] + (ad % 5 - 2)
    click = (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    buy = (rng.random(n) < 1 / (1 + np.exp(-logit + 1.5))).astype(np.float32)
    mask = (rng.random(n) < 0.5).astype(np.float32)
    buy[mask == 0] = np.nan
    lengths = rng.integers(0, 8, requests)
    click_ad = jagged(lengths, ADS + 2, 8, rng)
    time = Jagged(torch.zeros(len(click_ad.values), dtype=torch.int64), click_ad.offsets, 8)
    tensor = torch.from_numpy
    return Batch(
        dense=tensor(price),
        ids={
            "ad": Jagged(tensor(ad), torch.arange(n + 1), 1),
            "tags": jagged(rng.integers(0, 4, n), 12, 4, rng),
        },
        vectors={},
        request_dense=torch.zeros(requests, 0),
        request_ids={},
        request_vectors={},
        events={"click": {"ad": click_ad, "time": time}},
        request=torch.arange(requests).repeat_interleave(rows_each),
        request_time=torch.arange(requests) + 1000,
        user=tensor(rng.integers(0, USERS, requests)),
        surface=tensor(rng.integers(0, 2, n)),
        row_id=torch.arange(n) + seed * 1_000_000,
        labels={"click": tensor(click), "buy": tensor(buy)},
        masks={"click": torch.ones(n), "buy": tensor(mask)},
        weights={"click": torch.ones(n), "buy": torch.ones(n)},
    )


class SyntheticReader:
    """Batches made from a seed, epoch, split and index; `nan_at` puts a NaN into the prices of one training batch."""

    class Config(ComponentConfig):
        rows: dict[str, int] = ROWS
        nan_at: tuple[int, ...] = ()

    def __init__(self, config: Config, schema: Schema | None = None, seed: int = 0) -> None:
        self.config, self.seed = config, seed
        self.schema = schema if schema is not None and schema.fitted else fitted_schema(config.rows["train"])
        self._state: dict[str, Any] = {"epoch": 0, "batch": 0}

    def splits(self) -> list[str]:
        return list(self.config.rows)

    def rows(self, split: str = "train") -> int:
        return self.config.rows[split]

    def iterate(
        self,
        split: str = "train",
        *,
        rank: int = 0,
        world: int = 1,
        worker: int = 0,
        workers: int = 1,
        state: Mapping[str, Any] | None = None,
        batch_rows: int = 64,
    ) -> Iterator[Batch]:
        state = {} if state is None else state
        epoch, first = state.get("epoch", 0), state.get("batch", 0)
        self._state = {"epoch": epoch, "batch": first}
        per_batch = max(1, batch_rows // PER_REQUEST)
        for i in range(first, self.config.rows[split] // (per_batch * PER_REQUEST)):
            self._state = {"epoch": epoch, "batch": i + 1}
            if i % (world * workers) != rank * workers + worker:
                continue
            place = list(ROWS).index(split) * 10_000 + epoch * 1_000 + i
            batch = make_batch(per_batch, self.seed * 100_000 + place)
            if split == "train" and i in self.config.nan_at:
                batch.dense[0, 0] = float("nan")
            yield batch

    def state(self) -> dict[str, Any]:
        return dict(self._state)


class TinyModel(nn.Module):
    """Price, ad, pooled tags and pooled clicked ads through one hidden layer with dropout."""

    hidden_names: tuple[str, ...] = ()

    class Config(ComponentConfig):
        dim: int = Field(8, ge=1)
        dropout: float = 0.1

    def __init__(self, config: Config, schema: Schema, embedding: Any) -> None:
        super().__init__()
        object.__setattr__(self, "embedding", embedding)
        keys = {"ad": ("ad", "click.ad"), "tags": ("tags",)}
        embedding.setup([Table(name, schema.table_rows(name), config.dim, features) for name, features in keys.items()])
        self.hidden = nn.Linear(3 * config.dim + 1, 16)
        self.dropout = nn.Dropout(config.dropout)
        self.heads = nn.Linear(16, len(schema.objectives))
        self.tasks = list(schema.objectives)

    def forward(self, batch: Batch, hidden: Sequence[str] = ()) -> Output:
        got: dict[str, Tensor] = self.embedding.lookup(
            {"ad": batch.ids["ad"].values, "tags": batch.ids["tags"], "click.ad": batch.events["click"]["ad"]}
        )
        inputs = torch.cat([batch.dense, got["ad"], got["tags"], got["click.ad"][batch.request]], 1)
        logits = self.heads(self.dropout(self.hidden(inputs).relu()))
        return Output({task: logits[:, i] for i, task in enumerate(self.tasks)})

    def flops(self, batch: Batch) -> dict[str, int]:
        return {n: 2 * batch.rows * m.weight.numel() for n, m in self.named_children() if isinstance(m, nn.Linear)}

    def positions(self, batch: Batch) -> tuple[int, int]:
        events = batch.events["click"]["ad"].values.numel()
        return events, events


class SyntheticPlugin:
    @staticmethod
    @hookimpl
    def gem_register_reader(register: Any) -> None:
        register("synthetic", SyntheticReader)

    @staticmethod
    @hookimpl
    def gem_register_model(register: Any) -> None:
        register("tiny", TinyModel)


def registry(*plugins: object) -> Registry:
    out = Registry()
    out.register_plugin(builtin, "core")
    out.register_plugin(SyntheticPlugin, "synthetic")
    for i, plugin in enumerate(plugins):
        out.register_plugin(plugin, f"test-{i}")
    return out


def recipe(folder: Any, **sections: Any) -> Recipe:
    """Two epochs of 15 steps, logged every 4."""
    value: dict[str, Any] = {
        "seed": 3,
        "output": str(folder),
        "data": {"reader": "synthetic", "batch_rows": 64, "workers": 0},
        "model": "tiny",
        "optimizer": {"warmup_steps": 3, "dense": {"lr": 0.01}, "sparse_lr": 0.05},
        "trainer": {"epochs": 2, "log_every": 4},
        "trackers": ["jsonl"],
    }
    for section, options in sections.items():
        old = value.get(section)
        value[section] = {**old, **options} if isinstance(old, dict) and isinstance(options, dict) else options
    return parse(value)
