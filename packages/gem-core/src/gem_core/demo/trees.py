"""The practitioner's baseline: LightGBM, one ensemble per objective, on past counts, recency and per-week rates.

It is trained on the very rows, features and splits that a reader gives the other models. What it cannot use are the
histories themselves, multi-valued features, and ids with so many values that they only overfit (`free_ids`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_core.data.rows import EncodedRows
from gem_core.errors import ConfigError
from gem_core.schema import Schema

WIDE_IDS = ("product", "coupon", "manufacturer", "type", "category", "store")
"""Ids of the Complete Journey log on which trees only overfit (purchase, validation AUC .8341 with, .8359 without)."""

Progress = Callable[[str, int, float], None]
"""Called after each tree as `progress(objective, trees, validation NE)`."""


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
        """LightGBM's own options; seed and threads fix the model."""
        return {
            "objective": "binary",
            "metric": "binary_logloss",
            "learning_rate": self.learning_rate,
            "num_leaves": self.leaves,
            "min_data_in_leaf": 100,
            "max_bin": 127,
            "cat_smooth": 50,
            "feature_fraction": 0.4,
            "bagging_fraction": 0.8,
            "bagging_freq": 1,
            "num_threads": self.threads,
            "seed": self.seed,
            "deterministic": True,
            "force_col_wise": True,
            "verbosity": -1,
        }


@dataclass(frozen=True)
class TreeFeatures:
    """The columns that trees see: all dense features, then single-valued ids and the surface as categories."""

    schema: Schema
    free_ids: Collection[str] = ()

    @property
    def dense(self) -> list[str]:
        """Names of the numeric columns."""
        return [*self.schema.names("dense", "request"), *self.schema.names("dense", "row")]

    @property
    def categories(self) -> list[str]:
        """Names of the categorical columns."""
        single = [n for n, f in self.schema.sparse.items() if not f.multi and n not in self.free_ids]
        return [*single, "surface"]

    def matrix(self, rows: EncodedRows) -> NDArray[np.float32]:
        """(B, columns) float32, NaN where a number is missing; ids as the schema encodes them."""
        request = np.repeat(np.arange(rows.requests), np.diff(rows.offsets))
        out = np.empty((rows.rows, len(self.dense) + len(self.categories)), np.float32)
        at = rows.request_dense.shape[1]
        out[:, :at] = rows.request_dense[request]
        out[:, at : len(self.dense)] = rows.dense
        for place, name in enumerate(self.categories, len(self.dense)):
            if name == "surface":
                out[:, place] = rows.surface
            elif name in rows.ids.names:
                out[:, place] = rows.ids.of(name)
            else:
                out[:, place] = rows.request_ids.of(name)[request]
        return out


@dataclass(frozen=True)
class Ensemble:
    """The trees of one objective; `curve` is the validation NE after each, `best` the number that is used.

    Without a booster, which takes both classes in both splits, the base rate (as log-odds, `prior`) is predicted.
    """

    booster: Any
    curve: list[float]
    best: int
    prior: float

    def logits(self, matrix: NDArray[np.float32]) -> NDArray[np.float64]:
        """(B,) log-odds."""
        if self.booster is None:
            return np.full(len(matrix), self.prior)
        scores: NDArray[np.float64] = self.booster.predict(matrix, raw_score=True, num_iteration=self.best)
        return scores


def fit_trees(
    features: TreeFeatures, train: EncodedRows, validation: EncodedRows, options: TreeOptions, progress: Progress
) -> dict[str, Ensemble]:
    """One ensemble per objective, its size chosen on the validation split.

    Raises:
        ConfigError: LightGBM is not installed.
    """
    try:
        import lightgbm
    except ImportError as error:
        raise ConfigError('LightGBM is not installed: pip install "gem-core[demo]"') from error
    splits = [(rows, features.matrix(rows)) for rows in (train, validation)]
    out = {}
    for task in features.schema.objectives:
        parts = [_counted(rows, matrix, task) for rows, matrix in splits]
        weighted = [float((label * weight).sum()) for _, label, weight in parts]
        negative = [float(weight.sum()) - p for (_, _, weight), p in zip(parts, weighted, strict=True)]
        prior = math.log((weighted[0] + 0.5) / (negative[0] + 0.5))
        if not all([*weighted, *negative]):
            out[task] = Ensemble(None, [], 0, prior)
            continue
        names = [*features.dense, *features.categories]
        sets: list[Any] = []
        for matrix, label, weight in parts:
            reference = sets[0] if sets else None
            sets.append(
                lightgbm.Dataset(
                    matrix, label, reference, weight, feature_name=names, categorical_feature=features.categories
                )
            )
        curve: list[float] = []
        record = _recorder(task, entropy(*parts[1][1:]), curve, progress)
        stop = lightgbm.early_stopping(options.patience, verbose=False)
        parameters = options.parameters()
        booster = lightgbm.train(parameters, sets[0], options.trees, valid_sets=[sets[1]], callbacks=[record, stop])
        out[task] = Ensemble(booster, curve, booster.best_iteration, prior)
    return out


Part = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]


def _counted(rows: EncodedRows, matrix: NDArray[np.float32], task: str) -> Part:
    """Features, labels and weights of the rows that count for an objective."""
    counted = rows.masks[task] > 0
    return matrix[counted], rows.labels[task][counted], rows.weights[task][counted]


def _recorder(task: str, floor: float, curve: list[float], progress: Progress) -> Callable[[Any], None]:
    """A LightGBM callback that adds each validation NE to `curve`."""

    def record(environment: Any) -> None:
        curve.append(environment.evaluation_result_list[0][2] / floor)
        progress(task, len(curve), curve[-1])

    record.order = 0  # type: ignore[attr-defined]  # before early stopping, which ends training by an exception
    return record


def entropy(label: NDArray[np.float32], weight: NDArray[np.float32]) -> float:
    """Mean log-loss of predicting the base rate for every row; there must be both classes."""
    rate = float(np.average(label.astype(np.float64), weights=weight))
    return -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
