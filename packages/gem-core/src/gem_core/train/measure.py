"""One evaluation pass over a split."""

from __future__ import annotations

from contextlib import closing

import torch

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
    out: dict[str, float] = {}
    for metric in metrics:
        states = parts.strategy.gather(metric.state())
        metric.merge([s for rank, s in enumerate(states) if rank != parts.strategy.rank])
        out |= metric.compute()
    return out if any(out.values()) else {}
