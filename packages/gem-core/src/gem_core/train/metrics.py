"""Ranking metrics per task, surface and joint: NE, log-loss, AUC, GAUC, calibration (spec: model.md 6).

Every update adds into float64 tensors on the predictions' device, without waiting for it. AUC and the deciles come from a
histogram of logits in constant memory, or, where exactness is asked for, from all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from gem_core.data.batch import Batch
from gem_core.protocols import ComponentConfig
from gem_core.schema import Schema
from gem_core.train.ranking import deciles, grouped_auc, histogram_auc

RANGE = 12.0
"""The histogram spans logits -RANGE .. RANGE; what lies outside falls into the end bins."""
SUMS = ("rows", "weight", "label", "prediction", "loss")


class RankingMetrics:
    """Names: "purchase/ne", "purchase/display/auc", "joint/ne"; a metric that is not defined (no rows, one class) is left out.

    Per task and per task and surface: `ne`, `logloss`, `auc`, `calibration` (predictions over labels), `rows`. Per task
    also `base_rate`, the calibration of ten equal shares of the rows by prediction (`calibration_decile_0` lowest) and,
    where exact, `gauc` (AUC per user, impression-weighted); else `auc_error`, the bound on what the histogram hides.
    Joint: `ne` (total log-loss over total entropy), `logloss`.
    """

    class Config(ComponentConfig):
        """`bins` of the histogram. `exact`: evaluations keep all rows for exact AUC, GAUC and deciles (24 bytes a row
        and task); without it their memory is constant too. Training windows always use the histogram."""

        bins: int = Field(4096, ge=16)
        exact: bool = True

    def __init__(self, config: Config, schema: Schema, exact: bool = True) -> None:
        self.tasks = tuple(schema.objectives)
        self.surfaces = tuple(schema.surface_names())
        self.bins = config.bins
        self.exact = exact and config.exact
        self._sums: Tensor | None = None
        self._histogram: Tensor | None = None
        self._rows: list[dict[str, Tensor]] = []

    def _allocate(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Sums (tasks, surfaces, 5) and histogram (tasks, surfaces, bins, 3: weight, label, prediction)."""
        if self._sums is None or self._histogram is None:
            shape = (len(self.tasks), len(self.surfaces))
            bins = 0 if self.exact else self.bins
            self._sums = torch.zeros(*shape, len(SUMS), dtype=torch.float64, device=device)
            self._histogram = torch.zeros(*shape, bins, 3, dtype=torch.float64, device=device)
        return self._sums, self._histogram

    @torch.no_grad()
    def update(self, logits: Mapping[str, Tensor], batch: Batch) -> None:
        """Add a batch: (B,) logits per task."""
        sums, histogram = self._allocate(batch.surface.device)
        kept: dict[str, Tensor] = {}
        for index, task in enumerate(self.tasks):
            logit = logits[task].detach().float()
            weight = batch.masks[task] * batch.weights[task]
            # A masked label may be NaN, which times 0 would still be NaN.
            label = torch.where(weight > 0, batch.labels[task], 0.0)
            loss = binary_cross_entropy_with_logits(logit, label, reduction="none")
            probability = logit.sigmoid()
            weighted = torch.stack([weight, label * weight, probability * weight, loss * weight], 1).double()
            terms = torch.cat([(weight > 0).double().unsqueeze(1), weighted], 1)
            sums[index].index_add_(0, batch.surface, terms)
            if self.exact:
                kept |= {f"{task}.logit": logit, f"{task}.label": label, f"{task}.weight": weight}
            else:
                place = ((logit.clamp(-RANGE, RANGE) + RANGE) * (self.bins / (2 * RANGE))).long().clamp_(max=self.bins - 1)
                histogram[index].view(-1, 3).index_add_(0, batch.surface * self.bins + place, weighted[:, :3])
        if self.exact:
            self._rows.append(kept | {"surface": batch.surface, "user": batch.user[batch.request]})

    def state(self) -> dict[str, Any]:
        """Tensors only; what `merge` takes, here or on another rank."""
        if self._sums is None or self._histogram is None:
            return {}
        return {"sums": self._sums, "histogram": self._histogram, "rows": self._gathered()}

    def _gathered(self) -> dict[str, Tensor]:
        if len(self._rows) > 1:
            self._rows = [{key: torch.cat([part[key] for part in self._rows]) for key in self._rows[0]}]
        return self._rows[0] if self._rows else {}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Add the states of other ranks, or of an earlier part of the same pass."""
        for state in states:
            if not state:
                continue
            sums, histogram = self._allocate(state["sums"].device)
            sums += state["sums"].to(sums.device)
            histogram += state["histogram"].to(sums.device)
            if state["rows"]:
                self._rows.append({key: value.to(sums.device) for key, value in state["rows"].items()})

    def compute(self) -> dict[str, float]:
        """Every defined metric by name."""
        if self._sums is None or self._histogram is None:
            return {}
        sums, histogram = self._sums.cpu(), self._histogram.cpu()
        out: dict[str, float] = {}
        rows = {key: value.cpu() for key, value in self._gathered().items()}
        for index, task in enumerate(self.tasks):
            out |= _summary(f"{task}", sums[index].sum(0))
            if out.get(f"{task}/weight", 0) > 0:
                out |= self._ranking(task, rows, histogram[index])
            for place, surface in enumerate(self.surfaces):
                out |= _summary(f"{task}/{surface}", sums[index, place])
        out |= _joint(sums.sum(1))
        return {name: value for name, value in out.items() if not name.endswith("/weight")}

    def _ranking(self, task: str, rows: Mapping[str, Tensor], histogram: Tensor) -> dict[str, float]:
        return self._exact_ranking(task, rows) if self.exact else self._histogram_ranking(task, histogram)
