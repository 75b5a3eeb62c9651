"""One evaluation pass over a split."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch

from gem_core.protocols import Metric
from gem_core.train.build import Parts


@torch.no_grad()
def measure(parts: Parts, split: str) -> dict[str, float]:
    """Every metric of the model on a split, merged over ranks; empty where no row of it has a label.

    Raises:
        ConfigError: the reader does not have the split.
    """
    parts.check_split(split)
    metrics = parts.metrics(exact=True)
    training = parts.module.training
    parts.module.eval()
    with closing(parts.batches(split)) as batches:
        for batch, _ in batches:
            with parts.precision.autocast(parts.strategy.device):
                output = parts.module(batch)
            for metric in metrics:
                metric.update(output.logits, batch)
    parts.module.train(training)
    out = merged(parts, metrics, exact=True)
    return out if any(out.values()) else {}


def merged(parts: Parts, metrics: Sequence[Metric], exact: bool) -> dict[str, float]:
    """The metrics of all ranks together: added up in rank order, so that each rank computes the same bits."""
    out: dict[str, float] = {}
    for metric, whole in zip(metrics, parts.metrics(exact), strict=True):
        whole.merge(parts.strategy.gather(metric.state()))
        out |= whole.compute()
    return out
