"""Ranking metrics per task, surface and joint: NE, log-loss, AUC, GAUC, calibration (spec: model.md 6).

Every update adds into float64 tensors on the predictions' device, without waiting for it. AUC and the deciles come from
a histogram of logits in constant memory, or, where exactness is asked for, from all rows.
"""

from __future__ import annotations

import math
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
    """Names: "purchase/ne", "purchase/display/auc", "joint/ne"; undefined ones (no rows, one class) are left out.

    * Per task, and per task and surface: `ne`, `logloss`, `auc`, `calibration` (predictions over labels), `rows`,
      `positives` (by weight).
    * Per task also `base_rate`; "purchase/decile_0/rate", "/predicted": observed rate and mean prediction of ten equal
      shares of the rows by prediction, lowest first; where exact, `gauc` (AUC per user, impression-weighted), else
      `auc_error`, the most by which the histogram's AUC can be wrong.
    * Joint: `ne` (total log-loss over total entropy), `logloss`, `rows`.
    """

    class Config(ComponentConfig):
        """`bins` of the histogram. `exact`: evaluations keep all rows for exact AUC, GAUC and deciles (16 bytes a row
        and 12 a row and task); without it their memory is constant too. Training windows always use the histogram."""

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
        logit = torch.stack([logits[task].detach() for task in self.tasks]).float()
        weight = torch.stack([batch.masks[task] * batch.weights[task] for task in self.tasks])
        # A masked label may be NaN, which times 0 would still be NaN.
        label = torch.stack([batch.labels[task] for task in self.tasks]).masked_fill_(weight <= 0, 0.0)
        loss = binary_cross_entropy_with_logits(logit, label, weight, reduction="none")
        counted, prediction = (weight > 0).float(), logit.sigmoid() * weight
        terms = torch.stack([counted, weight, label * weight, prediction, loss], -1).double()
        offset = torch.arange(len(self.tasks), device=sums.device).unsqueeze(1) * len(self.surfaces)
        place = batch.surface + offset
        sums.view(-1, len(SUMS)).index_add_(0, place.view(-1), terms.view(-1, len(SUMS)))
        if self.exact:
            user = batch.user[batch.request]
            self._rows.append(
                {"logit": logit, "label": label, "weight": weight, "surface": batch.surface, "user": user}
            )
            return
        scaled = (logit.clamp(-RANGE, RANGE) + RANGE) * (self.bins / (2 * RANGE))
        place = place * self.bins + scaled.long().clamp_(max=self.bins - 1)
        histogram.view(-1, 3).index_add_(0, place.view(-1), terms[..., 1:4].reshape(-1, 3))

    def state(self) -> dict[str, Any]:
        """Tensors only; what `merge` takes, here or on another rank."""
        if self._sums is None or self._histogram is None:
            return {}
        return {"sums": self._sums, "histogram": self._histogram, "rows": self._gathered()}

    def _gathered(self) -> dict[str, Tensor]:
        if len(self._rows) > 1:
            self._rows = [{key: torch.cat([part[key] for part in self._rows], -1) for key in self._rows[0]}]
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
        rows = {key: value.cpu() for key, value in self._gathered().items()}
        out: dict[str, float] = {}
        for index, task in enumerate(self.tasks):
            out |= _summary(task, sums[index].sum(0), base_rate=True)
            for place, surface in enumerate(self.surfaces):
                out |= _summary(f"{task}/{surface}", sums[index, place])
            if f"{task}/logloss" in out:
                out |= self._exact(index, rows) if self.exact else self._from_histogram(task, histogram[index])
        return out | _joint(sums.sum(1))

    def _exact(self, index: int, rows: Mapping[str, Tensor]) -> dict[str, float]:
        task, counted = self.tasks[index], rows["weight"][index] > 0
        weight, label, logit = (rows[key][index, counted] for key in ("weight", "label", "logit"))
        surface, user = rows["surface"][counted], rows["user"][counted]
        out = {}
        for place, name in enumerate(["", *(f"{s}/" for s in self.surfaces)]):
            here = slice(None) if place == 0 else surface == place - 1
            auc, _ = grouped_auc(logit[here], label[here], weight[here], torch.zeros_like(surface[here]))
            if len(auc):
                out[f"{task}/{name}auc"] = float(auc)
        auc, impressions = grouped_auc(logit, label, weight, user)
        if len(auc):
            out[f"{task}/gauc"] = float((auc * impressions).sum() / impressions.sum())
        order = logit.argsort(stable=True)
        weight, label, probability = weight[order].double(), label[order], logit[order].double().sigmoid()
        return out | _deciles(task, weight, label * weight, probability * weight)

    def _from_histogram(self, task: str, histogram: Tensor) -> dict[str, float]:
        out: dict[str, float] = {}
        whole = histogram.sum(0)
        for name, bins in [("", whole), *((f"{s}/", histogram[i]) for i, s in enumerate(self.surfaces))]:
            found = histogram_auc(bins[:, 1], bins[:, 0] - bins[:, 1])
            if found is not None:
                out[f"{task}/{name}auc"], out[f"{task}/{name}auc_error"] = found
        return out | _deciles(task, *whole[whole[:, 0] > 0].unbind(1))


def _deciles(task: str, weight: Tensor, label: Tensor, prediction: Tensor) -> dict[str, float]:
    out: dict[str, float] = {}
    for share, (rate, predicted) in enumerate(deciles(weight, label, prediction)):
        if not math.isnan(rate):
            out |= {f"{task}/decile_{share}/rate": rate, f"{task}/decile_{share}/predicted": predicted}
    return out


def _entropy(weight: float, label: float) -> float:
    """Total log-loss of predicting the base rate for every row."""
    if not 0 < label < weight:
        return 0.0
    rate = label / weight
    return -weight * (rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def _summary(name: str, sums: Tensor, base_rate: bool = False) -> dict[str, float]:
    """What follows from the (5,) sums of a task, or of one of its surfaces."""
    rows, weight, label, prediction, loss = sums.tolist()
    out = {f"{name}/rows": rows, f"{name}/positives": label}
    if weight > 0:
        out[f"{name}/logloss"] = loss / weight
        if base_rate:
            out[f"{name}/base_rate"] = label / weight
    if label > 0:
        out[f"{name}/calibration"] = prediction / label
    entropy = _entropy(weight, label)
    if entropy > 0:
        out[f"{name}/ne"] = loss / entropy
    return out


def _joint(sums: Tensor) -> dict[str, float]:
    """From (tasks, 5) sums: total log-loss over total entropy of the tasks, and over total weight."""
    weight, loss = float(sums[:, 1].sum()), float(sums[:, 4].sum())
    entropy = math.fsum(_entropy(w, y) for _, w, y, _, _ in sums.tolist())
    out = {"joint/rows": float(sums[:, 0].sum())}
    if weight > 0:
        out["joint/logloss"] = loss / weight
    if entropy > 0:
        out["joint/ne"] = loss / entropy
    return out
