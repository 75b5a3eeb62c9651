"""From a recipe to the parts of a run. Training, evaluation and prediction all build through here."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.data.batch import Batch
from gem_core.data.loader import Loader
from gem_core.errors import ConfigError, nearest
from gem_core.plugins import Registry, default_registry
from gem_core.protocols import Batcher, Embedding, Loss, Metric, Precision, Reader, Strategy
from gem_core.recipe import Recipe, _Component, check_overridden, parse
from gem_core.schema import Schema
from gem_core.train.calibration import Calibrator
from gem_core.train.checkpoint import Checkpoint, find
from gem_core.train.precision import apply

Stream = Generator[tuple[Batch, dict[str, Any]], None, None]
"""Batches, each with the state to go on from after it."""


@dataclass(frozen=True)
class Parts:
    """What a run is made of. `module` is what to call: the model as the strategy placed it."""

    recipe: Recipe
    registry: Registry
    reader: Reader
    batcher: Batcher
    schema: Schema
    embedding: Embedding
    precision: Precision
    strategy: Strategy
    model: nn.Module
    module: nn.Module
    loss: Loss
    calibrator: Calibrator | None
    task_weights: dict[str, float]

    def batches(self, split: str, state: Mapping[str, Any] | None = None) -> Stream:
        """One pass over a split from `state` on, read ahead by worker processes: batches on the strategy's device."""
        loader = Loader(
            self.reader,
            split,
            batch_rows=self.recipe.data.batch_rows,
            workers=self.recipe.data.workers,
            batcher=self.batcher if split == "train" else None,
            rank=self.strategy.rank,
            world=self.strategy.world,
            state=state,
        )
        device = self.strategy.device
        for batch, position in loader:
            yield batch if device.type == "cpu" else batch.to(device), position

    def metrics(self, exact: bool) -> list[Metric]:
        """New metrics; `exact` for an evaluation, else for a window of training."""
        recipes = enumerate(self.recipe.metrics)
        return [create(self.registry, "metric", m, f"metrics.{i}", schema=self.schema, exact=exact) for i, m in recipes]

    def check_split(self, split: str) -> None:
        """Raises ConfigError for a split that the reader does not have."""
        if split not in self.reader.splits():
            raise ConfigError(f'the reader has no split "{split}"{nearest(split, self.reader.splits())}')

    def load(self, checkpoint: Checkpoint) -> None:
        """Copy the dense parameters and the tables of a checkpoint in."""
        self.strategy.load(checkpoint.part("model"))
        self.embedding.load(checkpoint.part("embedding"))
        if self.calibrator is not None:
            self.calibrator.load(checkpoint.part("calibration"))

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Logits per head as evaluations and predictions use them: calibrated, where the recipe asks for it."""
        with self.precision.autocast(self.strategy.device):
            logits: dict[str, Tensor] = self.module(batch).logits
        return logits if self.calibrator is None else self.calibrator(logits, batch.surface)


def create(registry: Registry, kind: str, component: _Component, where: str, **context: Any) -> Any:
    """The component that a recipe names at `where`."""
    return registry.create(kind, component.name, component.options, where, **context)


def build(recipe: Recipe, registry: Registry, schema: Schema | None = None) -> Parts:
    """Build every part; dense parameters and tables are determined by the recipe's seed.

    Args:
        schema: a checkpoint's fitted schema, in place of fitting the recipe's.
    """
    registry.install_ops()
    if schema is None and recipe.data.schema_ is not None:
        given = recipe.data.schema_
        schema = Schema.load(given) if isinstance(given, str) else Schema.parse(given, "recipe: data.schema")
    reader: Reader = create(registry, "reader", recipe.data.reader, "data.reader", schema=schema, seed=recipe.seed)
    strategy: Strategy = create(registry, "strategy", recipe.parallel.strategy, "parallel.strategy")
    precision: Precision = create(registry, "precision", recipe.precision, "precision")
    variants = {op: variant for op in ops.registered() if (variant := precision.op_variant(op)) is not None}
    ops.set_backends(recipe.ops if "all" in recipe.ops else {**variants, **recipe.ops})
    embedding: Embedding = create(registry, "embedding", recipe.embedding, "embedding", seed=recipe.seed)
    fitted = reader.schema
    torch.manual_seed(recipe.seed)
    with strategy.device:
        model: nn.Module = create(registry, "model", recipe.model, "model", schema=fitted, embedding=embedding)
    module = strategy.setup(apply(precision, model), embedding)
    loss: Loss = create(registry, "loss", recipe.loss, "loss", schema=fitted)
    return Parts(
        recipe=recipe,
        registry=registry,
        reader=reader,
        batcher=create(registry, "batcher", recipe.data.batcher, "data.batcher"),
        schema=fitted,
        embedding=embedding,
        precision=precision,
        strategy=strategy,
        model=model,
        module=module,
        loss=loss,
        calibrator=None if recipe.calibration is None else Calibrator(recipe.calibration, fitted),
        task_weights=_task_weights(recipe, fitted),
    )


def restore(
    path: str | Path,
    registry: Registry | None = None,
    overrides: Sequence[str] = (),
    reader: Mapping[str, Any] | None = None,
) -> Parts:
    """The parts of a checkpoint with its weights, ready to predict.

    Args:
        path: a checkpoint's folder, or a run's (its best checkpoint, else its newest).
        overrides: `key.path=value` changes to its recipe.
        reader: in place of the recipe's `data.reader`, as in {"name": "memory", "test": table}.
    """
    checkpoint = find(path)
    registry = default_registry() if registry is None else registry
    recipe = checkpoint.recipe(overrides)
    check_overridden(recipe, registry, f"recipe of {checkpoint.path}", overrides)
    if reader is not None:
        value = recipe.dump()
        recipe = parse({**value, "data": {**value["data"], "reader": dict(reader)}}, f"recipe of {checkpoint.path}")
    parts = build(recipe, registry, checkpoint.schema())
    parts.load(checkpoint)
    parts.module.eval()
    return parts


def _task_weights(recipe: Recipe, schema: Schema) -> dict[str, float]:
    for task in recipe.task_weights:
        if task not in schema.objectives:
            raise ConfigError(f'task_weights: the schema has no task "{task}"{nearest(task, schema.objectives)}')
    return {task: recipe.task_weights.get(task, 1.0) for task in schema.objectives}
