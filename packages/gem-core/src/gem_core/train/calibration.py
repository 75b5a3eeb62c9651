"""Calibration of trained logits: per task (and surface) a monotone map of the logit, fitted on the validation split.

temperature: a z; platt: a z + b, both by penalised maximum likelihood; isotonic: non-decreasing rates of positives by pooling
adjacent violators, linear between the centres of the pools. None reorders rows of one surface.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from gem_core.recipe import Calibration
from gem_core.schema import Schema

BINS = 1024
"""Equal shares of the rows, in order of their logits, that pools are made of."""


class Calibrator:
    """The maps of a run; until `fit` or `load` it leaves logits as they are.

    Args:
        options: the recipe's `calibration`.
        schema: a fitted schema.
    """

    def __init__(self, options: Calibration, schema: Schema) -> None:
        self.method = options.method
        self.tasks = tuple(schema.objectives)
        self.groups = len(schema.surface_names()) if options.per_surface else 1
        self._maps: dict[str, list[Tensor]] = {}

    def fit(self, task: str, logit: Tensor, label: Tensor, weight: Tensor, surface: Tensor) -> None:
        """Fit a task's maps to (n,) rows; those of weight 0 do not count, and without others a map changes nothing."""
        maps = []
        for group in range(self.groups):
            here = (weight > 0) & ((surface == group) | (self.groups == 1))
            z, y, w = (x[here].double() for x in (logit, label, weight))
            maps.append(_pools(z, y, w) if self.method == "isotonic" else _line(z, y, w, bias=self.method == "platt"))
        self._maps[task] = maps

    def __call__(self, logits: Mapping[str, Tensor], surface: Tensor) -> dict[str, Tensor]:
        """Calibrated (B,) float32 logits of each task; other heads' logits pass through."""
        out = dict(logits)
        for task, maps in self._maps.items():
            z = logits[task].float()
            out[task] = _mapped(z, maps[0])
            for group, made in enumerate(maps[1:], start=1):
                out[task] = torch.where(surface == group, _mapped(z, made), out[task])
        return out

    def state(self) -> dict[str, Any]:
        """Per task its maps: (2,) slope and bias, or (k, 2) logits before and after; what `load` takes."""
        return {task: list(maps) for task, maps in self._maps.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self._maps = {task: list(maps) for task, maps in state.items()}


def _line(logit: Tensor, label: Tensor, weight: Tensor, bias: bool) -> Tensor:
    """(2,) slope and bias. The penalty, as of one row, holds them where the rows say nothing (one class, no rows)."""
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    change = torch.zeros(2 if bias else 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([change], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        z = logit * (1 + change[0]) + (change[1] if bias else 0.0)
        fit = binary_cross_entropy_with_logits(z, label, weight, reduction="sum") + change.square().sum() / 2
        loss = fit / (1 + weight.sum())
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    start[: len(change)] += change.detach()
    start[0].clamp_(min=1e-3)  # a model worse than chance is not turned round
    return start.float()


def _pools(logit: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    """(k, 2) centres of the pools and the logits of their rates."""
    if not len(logit):
        return torch.tensor([1.0, 0.0])
    order = logit.argsort(stable=True)
    logit, label, weight = logit[order], label[order], weight[order]
    place = (weight.cumsum(0) - weight / 2) * (BINS / weight.sum())
    sums = torch.zeros(BINS, 3, dtype=torch.float64)
    sums.index_add_(0, place.long().clamp_(0, BINS - 1), torch.stack([weight, label * weight, logit * weight], 1))
    pools: list[list[float]] = []
    for new in sums[sums[:, 0] > 0].tolist():
        pools.append(new)
        while len(pools) > 1 and pools[-2][1] * pools[-1][0] >= pools[-1][1] * pools[-2][0]:
            last = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
    total, positive, centre = torch.tensor(pools, dtype=torch.float64).unbind(1)
    prior = (positive.sum() + 0.5) / (total.sum() + 1)
    rate = (positive + prior) / (total + 1)  # as if one more row had the rate of all: no rate is 0 or 1
    return torch.stack([centre / total, rate.logit().cummax(0).values], 1).float()


def _mapped(z: Tensor, made: Tensor) -> Tensor:
    made = made.to(z.device)
    if made.dim() == 1:
        return z * made[0] + made[1]
    x, y = made.unbind(1)
    if len(x) == 1:
        return y.expand_as(z)
    right = torch.searchsorted(x.contiguous(), z.contiguous()).clamp(1, len(x) - 1)
    left = right - 1
    share = ((z - x[left]) / (x[right] - x[left]).clamp(min=1e-12)).clamp(0, 1)
    return y[left] + share * (y[right] - y[left])
