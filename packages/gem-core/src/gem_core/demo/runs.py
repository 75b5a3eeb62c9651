"""Stages 2 and 3 of the demo: train each model once; a run that is already in the folder is not trained again."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from gem_core.demo.console import Pace, progress
from gem_core.demo.trees import Ensemble, TreeFeatures, TreeOptions, fit_trees
from gem_core.errors import GemError
from gem_core.plugins import Registry
from gem_core.recipe import Recipe, resolve
from gem_core.report import Run, load_run
from gem_core.train import RankingMetrics, train
from gem_core.train.meter import peak_memory_gib


class Interrupted(GemError):
    """A signal ended a run at a checkpoint."""


@dataclass(frozen=True)
class Folder:
    """A run's folder. Its run is done where recipe.yaml is `recipe` and result.json says that it ended by itself."""

    path: Path
    recipe: Mapping[str, Any]

    def done(self) -> bool:
        """Whether the very run is there, whole."""
        try:
            result = json.loads((self.path / "result.json").read_text())
        except (OSError, ValueError):
            return False
        return self.same() and result["status"] != "interrupted"

    def same(self) -> bool:
        """Whether what is there, done or not, is by this recipe."""
        try:
            return bool(yaml.safe_load((self.path / "recipe.yaml").read_text()) == self.recipe)
        except (OSError, yaml.YAMLError):
            return False

    def prepare(self) -> None:
        """Make room for this run: what another recipe left is deleted, and so is a result that is not yet ours."""
        if self.path.exists() and not self.same():
            shutil.rmtree(self.path)
        (self.path / "result.json").unlink(missing_ok=True)


def train_model(recipe: Recipe, registry: Registry) -> Run:
    """Train by a recipe, or go on, or take the finished run.

    Raises:
        Interrupted: by a signal, with a checkpoint saved.
    """
    recipe = resolve(recipe, registry)
    folder = Folder(recipe.folder, recipe.dump())
    if folder.done():
        progress(f"already trained: {folder.path}")
        return load_run(folder.path)
    folder.prepare()
    result = train(recipe, registry)
    if result.status == "interrupted":
        raise Interrupted(f"interrupted in {recipe.name}; its checkpoint is saved: the same command goes on from there")
    return load_run(folder.path)


def train_trees(reader: Any, data: Mapping[str, Any], path: Path, features: TreeFeatures, options: TreeOptions) -> Run:
    """Train LightGBM on a reader's splits, its folder written as the trainer writes others; or take the finished run.

    Args:
        reader: a `TableReader`. data: the section of the recipe that made it.
    """
    model = {"name": "lightgbm", **dataclasses.asdict(options), "free_ids": list(features.free_ids)}
    folder = Folder(path, {"name": "LightGBM", "seed": options.seed, "data": dict(data), "model": model})
    if folder.done():
        progress(f"already trained: {path}")
        return load_run(path)
    folder.prepare()
    pace = Pace(4)

    def show(task: str, trees: int, ne: float) -> None:
        if pace.due():
            progress(f"{task}: {trees} trees, validation NE {ne:.4f}")

    start = time.perf_counter()
    ensembles = fit_trees(features, reader.load("train"), reader.load("validation"), options, show)
    seconds = time.perf_counter() - start
    validation, test = (_measure(reader, features, ensembles, split) for split in ("validation", "test"))
    _write(folder, ensembles, seconds, validation, test)
    return load_run(path)


def _measure(reader: Any, features: TreeFeatures, ensembles: Mapping[str, Ensemble], split: str) -> dict[str, float]:
    """The metrics that every model is measured by, on the reader's batches."""
    matrix = features.matrix(reader.load(split))
    logits = {task: torch.from_numpy(ensemble.logits(matrix)) for task, ensemble in ensembles.items()}
    metrics = RankingMetrics(RankingMetrics.Config(), features.schema)
    start = 0
    for batch in reader.iterate(split):
        metrics.update({task: values[start : start + batch.rows] for task, values in logits.items()}, batch)
        start += batch.rows
    return metrics.compute()


def _write(
    folder: Folder,
    ensembles: Mapping[str, Ensemble],
    seconds: float,
    validation: Mapping[str, float],
    test: Mapping[str, float],
) -> None:
    steps = max(len(ensemble.curve) for ensemble in ensembles.values())
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        scores = {f"{t}/ne": e.curve[step - 1] for t, e in ensembles.items() if step <= len(e.curve)}
        lines.append({"kind": "validation", "step": step, **scores})
    lines.append({"kind": "test", "step": steps, **test})
    speed = {"kind": "speed", "step": steps, "seconds": seconds, "rss_gib": peak_memory_gib()}
    result = {
        "status": "finished",
        "step": steps,
        "best_step": None,
        "validation": dict(validation),
        "test": dict(test),
    }
    folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / "recipe.yaml").write_text(yaml.safe_dump(dict(folder.recipe), sort_keys=False))
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder.path / "speed.jsonl").write_text(json.dumps(speed) + "\n")
    (folder.path / "result.json").write_text(json.dumps(result, indent=1))  # last: with it the run is done
