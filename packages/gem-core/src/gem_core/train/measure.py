"""One evaluation pass over a split: its metrics, or what calibrates the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor

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
            logits = parts.predict(batch)
            for metric in metrics:
                metric.update(logits, batch)
    parts.module.train(training)
    out = merged(parts, metrics, exact=True)
    return out if any(out.values()) else {}


@torch.no_grad()
def calibrate(parts: Parts) -> None:
    """Fit the calibration, where the recipe has one, to the validation split as the model sees it now."""
    calibrator = parts.calibrator
    if calibrator is None:
        return
    calibrator.load({})  # the pass below is to give the model's own logits
    training = parts.module.training
    parts.module.eval()
    rows: dict[str, list[Tensor]] = {task: [] for task in calibrator.tasks}
    with closing(parts.batches("validation")) as batches:
        for batch, _ in batches:
            logits = parts.predict(batch)
            for task, found in rows.items():
                weight = batch.masks[task] * batch.weights[task]
                label = torch.where(weight > 0, batch.labels[task], 0.0)  # a masked label may be NaN
                found.append(torch.stack([x.double() for x in (logits[task], label, weight, batch.surface)]))
    parts.module.train(training)
    for task, found in rows.items():
        ranks = parts.strategy.gather(torch.cat(found, 1).cpu() if found else torch.zeros(4, 0))
        logit, label, weight, surface = torch.cat(ranks, 1)
        calibrator.fit(task, logit, label, weight, surface)


def merged(parts: Parts, metrics: Sequence[Metric], exact: bool) -> dict[str, float]:
    """The metrics of all ranks together: added up in rank order, so that each rank computes the same bits."""
    out: dict[str, float] = {}
    for metric, whole in zip(metrics, parts.metrics(exact), strict=True):
        whole.merge(parts.strategy.gather(metric.state()))
        out |= whole.compute()
    return out
