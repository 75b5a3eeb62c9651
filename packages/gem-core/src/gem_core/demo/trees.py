"""The practitioner's baseline: LightGBM, one model per objective, on the prepared log's past counts, recency and rates.

It sees the rows, features and time split that GEM sees; what it cannot use are the histories themselves, and ids of products
and coupons, which it overfits. `benchmarks/completejourney_trees.py` trains the same trees for longer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from numpy.typing import NDArray

from gem_core.errors import ConfigError

FREE_IDS = ("product", "coupon")
"""Sparse columns that are left out."""

Progress = Callable[[str, int, float], None]
"""Called as `progress(objective, trees, validation NE)`."""


@dataclass(frozen=True)
class TreeOptions:
    """`patience`: trees without a better validation loss before training stops; `trees` is the most."""

    learning_rate: float = 0.05
    leaves: int = 127
    trees: int = 600
    patience: int = 30
    seed: int = 0
    threads: int = 2

    def parameters(self) -> dict[str, Any]:
        """LightGBM's own options; a seed and a number of threads fix the model."""
        return {
            "objective": "binary",
            "metric": "binary_logloss",
            "learning_rate": self.learning_rate,
            "num_leaves": self.leaves,
            "min_data_in_leaf": 100,
            "lambda_l2": 1.0,
            "feature_fraction": 0.5,
            "bagging_fraction": 0.8,
            "bagging_freq": 1,
            "num_threads": self.threads,
            "seed": self.seed,
            "deterministic": True,
            "force_col_wise": True,
            "verbosity": -1,
        }


@dataclass(frozen=True)
class Rows:
    """A split: features (n, columns) float32, NaN where missing; per objective labels (NaN where masked) and weights."""

    features: NDArray[np.float32]
    labels: dict[str, NDArray[np.float32]]
    weights: dict[str, NDArray[np.float32]]
    surface: NDArray[np.int64]
    user: NDArray[np.int64]


@dataclass
class PreparedLog:
    """The folder that `gem_core.data.completejourney.prepare` makes, as trees read it."""

    folder: Path
    surfaces: tuple[str, ...]
    objectives: tuple[str, ...] = field(init=False)
    dense: tuple[str, ...] = field(init=False)
    categorical: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        columns = json.loads((self.folder / "manifest.json").read_text())["columns"]
        self.objectives = tuple(columns["objectives"])
        self.dense = (*columns["dense"]["request"], *columns["dense"]["row"])
        sparse = (*columns["sparse"]["request"], *columns["sparse"]["row"])
        self.categorical = ("surface", *(name for name in sparse if name not in FREE_IDS))
        self._codes: dict[str, pa.Array] = {}

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of `Rows.features`."""
        return (*self.dense, *self.categorical)

    def read(self, split: str) -> Rows:
        """The rows of a split. Categories are numbered as the training split, which must be read first, has them."""
        wanted = ["user", "rate", *self.objectives, *self.dense, *self.categorical]
        rows = ds.dataset(self.folder / "rows.parquet")
        table = rows.to_table(columns=wanted, filter=pc.field("split") == split)
        features = np.empty((len(table), len(self.columns)), np.float32)
        for place, name in enumerate(self.dense):
            features[:, place] = table[name].to_numpy()
        for place, name in enumerate(self.categorical, len(self.dense)):
            if split == "train":
                self._codes[name] = table[name].unique().drop_null()
            codes = pc.index_in(table[name], self._codes[name])
            features[:, place] = codes.cast(pa.float32()).to_numpy()
        labels = {task: table[task].to_numpy().astype(np.float32) for task in self.objectives}
        rate = table["rate"].to_numpy()
        surface = pc.index_in(table["surface"], pa.array(self.surfaces)).to_numpy()
        return Rows(
            features,
            labels,
            {task: np.where(label == 0, 1 / rate, 1).astype(np.float32) for task, label in labels.items()},
            surface.astype(np.int64),
            table["user"].to_numpy().astype(np.int64),
        )


@dataclass(frozen=True)
class Fitted:
    """A trained ensemble of one objective; `curve` is the validation NE after each tree."""

    booster: Any
    curve: list[float]

    def logits(self, rows: Rows) -> NDArray[np.float64]:
        """(n,) log-odds by the best number of trees."""
        scores: NDArray[np.float64] = self.booster.predict(
            rows.features, raw_score=True, num_iteration=self.booster.best_iteration
        )
        return scores


def entropy(labels: NDArray[np.float32], weights: NDArray[np.float32]) -> float:
    """Mean log-loss of predicting the base rate for every row; labels must have both classes."""
    rate = float(np.average(labels, weights=weights))
    return -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def fit(
    log: PreparedLog, train: Rows, validation: Rows, options: TreeOptions, progress: Progress
) -> Mapping[str, Fitted]:
    """One ensemble per objective, its size chosen on the validation split.

    Raises:
        ConfigError: LightGBM is not installed.
    """
    try:
        import lightgbm
    except ImportError as error:
        raise ConfigError("LightGBM is not installed: pip install gem-core[demo]") from error
    return {task: _fit(lightgbm, log, task, train, validation, options, progress) for task in log.objectives}


def _fit(
    lightgbm: Any, log: PreparedLog, task: str, train: Rows, validation: Rows, options: TreeOptions, progress: Progress
) -> Fitted:
    sets = []
    for rows in (train, validation):
        seen = ~np.isnan(rows.labels[task])
        sets.append(
            lightgbm.Dataset(
                rows.features[seen], rows.labels[task][seen], weight=rows.weights[task][seen],
                feature_name=list(log.columns), categorical_feature=list(log.categorical),
                reference=sets[0] if sets else None, free_raw_data=True,
            )
        )  # fmt: skip
    seen = ~np.isnan(validation.labels[task])
    floor = entropy(validation.labels[task][seen], validation.weights[task][seen])
    curve: list[float] = []

    def record(environment: Any) -> None:
        curve.append(environment.evaluation_result_list[0][2] / floor)
        progress(task, len(curve), curve[-1])

    record.order = 5  # type: ignore[attr-defined]  # before early stopping, so that the last tree is recorded too
    stop = lightgbm.early_stopping(options.patience, verbose=False)
    booster = lightgbm.train(options.parameters(), sets[0], options.trees, valid_sets=[sets[1]], callbacks=[record, stop])
    return Fitted(booster, curve)
