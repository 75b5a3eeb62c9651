"""From a recipe to the parts of a run. Training, evaluation and prediction all build through here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gem_core import ops
from gem_core.data.batch import Batch
from gem_core.errors import ConfigError, nearest
from gem_core.plugins import Registry
from gem_core.protocols import Embedding, Loss, Metric, Precision, Reader, Strategy
from gem_core.recipe import Recipe, _Component
from gem_core.schema import Schema
from gem_core.train.checkpoint import Checkpoint

PLUGIN_PRIORITY = 10
"""Backends of plugins are asked before gem-core's own."""


@dataclass(frozen=True)
class Parts:
    """What a run is made of. `module` is what to call: the model as the strategy placed it."""

    recipe: Recipe
    registry: Registry
    reader: Reader
    schema: Schema
    embedding: Embedding
    precision: Precision
    strategy: Strategy
    model: nn.Module
    module: nn.Module
    loss: Loss
    task_weights: dict[str, float]

    def batches(self, split: str, state: Mapping[str, Any] | None = None) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """One pass over a split, read ahead: each batch on the strategy's device, with the reader's state after it."""
        place = {"rank": self.strategy.rank, "world": self.strategy.world, "batch_rows": self.recipe.data.batch_rows}
        for batch in self.reader.iterate(split, state=state, **place):
            yield batch.to(self.strategy.device), self.reader.state()

    def metrics(self, exact: bool) -> list[Metric]:
        """New metrics; `exact` for an evaluation, else for a window of training."""
        recipes = enumerate(self.recipe.metrics)
        return [create(self.registry, "metric", m, f"metrics.{i}", schema=self.schema, exact=exact) for i, m in recipes]

    def load(self, checkpoint: Checkpoint) -> None:
        """Copy the dense parameters and the tables of a checkpoint in."""
        self.strategy.load(checkpoint.part("model"))
        self.embedding.load(checkpoint.part("embedding"))


def create(registry: Registry, kind: str, component: _Component, where: str, **context: Any) -> Any:
    """The component that a recipe names at `where`."""
    return registry.create(kind, component.name, component.options, where, **context)


def build(recipe: Recipe, registry: Registry, schema: Schema | None = None) -> Parts:
    """Build every part; dense parameters and tables are determined by the recipe's seed.

    Args:
        schema: a checkpoint's fitted schema, in place of fitting the recipe's.
    """
    install_ops(recipe, registry)
    if schema is None and recipe.data.schema_ is not None:
        given = recipe.data.schema_
        schema = Schema.load(given) if isinstance(given, str) else Schema.parse(given, "recipe: data.schema")
    reader: Reader = create(registry, "reader", recipe.data.reader, "data.reader", schema=schema, seed=recipe.seed)
    strategy: Strategy = create(registry, "strategy", recipe.parallel.strategy, "parallel.strategy")
    precision: Precision = create(registry, "precision", recipe.precision, "precision")
    embedding: Embedding = create(registry, "embedding", recipe.embedding, "embedding", seed=recipe.seed)
    fitted = reader.schema
    torch.manual_seed(recipe.seed)
    with strategy.device:
        model: nn.Module = create(registry, "model", recipe.model, "model", schema=fitted, embedding=embedding)
    module = strategy.setup(precision.convert(model), embedding)
    loss: Loss = create(registry, "loss", recipe.loss, "loss", schema=fitted)
    weights = _task_weights(recipe, fitted)
    return Parts(recipe, registry, reader, fitted, embedding, precision, strategy, model, module, loss, weights)


def install_ops(recipe: Recipe, registry: Registry) -> None:
    """Register the op backends of plugins, once per process, and choose those that the recipe asks for."""
    for name, entry in registry.entries["op"].items():
        op, colon, backend = name.partition(":")
        if not colon:
            raise ConfigError(f'op backend "{name}" of plugin {entry.plugin}: expected a name "<op>:<backend>"')
        if backend not in ops.registered().get(op, ()):
            target: Any = entry.target() if isinstance(entry.target, type) else entry.target
            ops.register_backend(op, backend, target, priority=PLUGIN_PRIORITY)
    ops.set_backends(recipe.ops)


def _task_weights(recipe: Recipe, schema: Schema) -> dict[str, float]:
    for task in recipe.task_weights:
        if task not in schema.objectives:
            raise ConfigError(f'task_weights: the schema has no task "{task}"{nearest(task, schema.objectives)}')
    return {task: recipe.task_weights.get(task, 1.0) for task in schema.objectives}
