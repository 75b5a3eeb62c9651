"""Losses per task, as sums and counts: binary cross-entropy, focal, pairwise."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from gem_core.data.batch import Batch
from gem_core.protocols import ComponentConfig, Output
from gem_core.schema import Schema
from gem_core.train.supervision import Supervision, Target


class BinaryCrossEntropy:
    """Sum over the rows of weight * BCE(logit, label); the count is the sum of the weights."""

    class Config(ComponentConfig):
        """No options."""

    def __init__(self, config: ComponentConfig, schema: Schema) -> None:
        self.supervision = Supervision(schema)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """Per task the scalar sum of the weights."""
        return {task: target.weight.sum() for task, target in self.supervision.targets(batch).items()}

    def __call__(self, output: Output, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Per task (sum, count).

        Raises:
            ConfigError: the model gives no logit for a head of the schema.
        """
        logits, targets = self.supervision.logits(output, batch), self.supervision.targets(batch)
        return {
            task: ((self.each(logits[task], target.label) * target.weight).sum(), target.weight.sum())
            for task, target in targets.items()
        }

    def each(self, logit: Tensor, label: Tensor) -> Tensor:
        """(B,) losses of rows."""
        return binary_cross_entropy_with_logits(logit, label, reduction="none")


class FocalLoss(BinaryCrossEntropy):
    """Focal loss (1708.02002): BCE times (1 - p_t)^gamma, p_t being the probability of what happened.

    It gives up calibration for the rows that are hard to tell: fit a `calibration` after it.
    """

    class Config(ComponentConfig):
        """`gamma` 0 is BCE. `alpha`: weight of positives, 1 - alpha being that of negatives; null: 1 for both."""

        gamma: float = Field(2.0, ge=0)
        alpha: float | None = Field(None, gt=0, lt=1)

    def __init__(self, config: Config, schema: Schema) -> None:
        super().__init__(config, schema)
        self.gamma, self.alpha = config.gamma, config.alpha

    def each(self, logit: Tensor, label: Tensor) -> Tensor:
        """(B,) losses of rows."""
        # 1 - p_t is the probability of the other label; by its logarithm no power of 0 is ever derived.
        other = binary_cross_entropy_with_logits(logit, 1 - label, reduction="none")
        loss = super().each(logit, label) * (-self.gamma * other).exp()
        return loss if self.alpha is None else loss * (self.alpha * label + (1 - self.alpha) * (1 - label))


class PairwiseLoss:
    """RankNet within a request: softplus(s_negative - s_positive) over its pairs, weighted by the product of both weights; the
    count is the sum of these.

    Only differences of logits are learned, so predictions are no probabilities: fit a `calibration` after it.
    """

    class Config(ComponentConfig):
        """No options."""

    def __init__(self, config: Config, schema: Schema) -> None:
        self.supervision = Supervision(schema)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """Per task the scalar sum of the pairs' weights."""
        return {task: _Pairs(target, batch).weight.sum() for task, target in self.supervision.targets(batch).items()}

    def __call__(self, output: Output, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Per task (sum, count).

        Raises:
            ConfigError: the model gives no logit for a head of the schema.
        """
        logits, out = self.supervision.logits(output, batch), {}
        for task, target in self.supervision.targets(batch).items():
            pairs = _Pairs(target, batch)
            loss = softplus(logits[task][pairs.negative] - logits[task][pairs.positive])
            out[task] = (loss * pairs.weight).sum(), pairs.weight.sum()
        return out


class _Pairs:
    """Rows (P,) of a positive and of a negative that share the request (and the window that they train), and weights."""

    def __init__(self, target: Target, batch: Batch) -> None:
        group = batch.request * (target.group.max() + 1 if batch.rows else 1) + target.group
        counted = target.weight > 0
        positive = (counted & (target.label > 0)).nonzero().squeeze(1)
        negative = (counted & (target.label == 0)).nonzero().squeeze(1)
        negative = negative[group[negative].argsort(stable=True)]
        first = torch.searchsorted(group[negative], group[positive])
        count = torch.searchsorted(group[negative], group[positive], right=True) - first
        self.positive = positive.repeat_interleave(count)
        place = torch.arange(len(self.positive), device=count.device)
        self.negative = negative[place + (first - (count.cumsum(0) - count)).repeat_interleave(count)]
        self.weight = target.weight[self.positive] * target.weight[self.negative]
