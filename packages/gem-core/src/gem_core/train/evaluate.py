"""Metrics of a trained model on a split of its own data or of another log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gem_core.errors import DataError
from gem_core.plugins import Registry
from gem_core.train.build import restore
from gem_core.train.measure import measure
from gem_core.train.memory import enough_memory


@enough_memory()
def evaluate(
    path: str | Path,
    split: str = "test",
    overrides: Sequence[str] = (),
    registry: Registry | None = None,
    reader: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Every metric of the checkpoint's recipe, exact: "purchase/ne", "purchase/display/auc", "joint/ne", ...

    Args:
        path: a checkpoint's folder, or a run's (its best checkpoint, else its newest).
        overrides: `key.path=value` changes to the checkpoint's recipe, as in "data.reader.test=other.parquet".
        reader: in place of the recipe's `data.reader`, as in {"name": "memory", "test": table}.

    Raises:
        ConfigError: no checkpoint there, a wrong override, a split that the reader does not have.
        DataError: the checkpoint is damaged, or no row of the split has a label.
    """
    parts = restore(path, registry, overrides, reader)
    try:
        metrics = measure(parts, split)
    finally:
        parts.strategy.close()
    if not metrics:
        raise DataError(f'no row of split "{split}" has a label: there is nothing to evaluate')
    return metrics
