"""One optimiser step: what a step computes, without the run's bookkeeping.

The losses' denominators are added up over the step's batches (and over ranks) first, then it goes forward and backward
batch by batch with these: the gradient is the large batch's, whatever the sizes of the batches, and of a rank without any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_core.data.batch import Batch
from gem_core.train.build import Parts
from gem_core.train.optimizer import DenseOptimizer
from gem_core.train.phases import Phases


@dataclass(frozen=True)
class Gradients:
    """What a step's passes gave; over all ranks but for the logits.

    Attributes:
        values: per task the sum of the losses and the count.
        loss: sum over tasks of weight * sum / count.
        norm: of the dense gradients before clipping.
        logits: per batch of this rank, by task.
    """

    values: dict[str, tuple[float, float]]
    loss: float
    norm: float
    logits: list[dict[str, Tensor]]


class Stepper:
    """Computes a step's gradients, then applies or forgets them."""

    def __init__(self, parts: Parts, phase: Phases) -> None:
        self.parts, self.phase = parts, phase
        self.optimizer = DenseOptimizer(parts.module.named_parameters(), parts.recipe.optimizer.dense)

    def gradients(self, batches: Sequence[Batch]) -> Gradients:
        """Forward and backward of a step's batches; none on a rank that has no more."""
        parts, strategy = self.parts, self.parts.strategy
        counts = strategy.sum_counts(self._added([parts.loss.counts(batch) for batch in batches]))
        logits, losses = [], []
        for batch in batches:
            with parts.precision.autocast(strategy.device):
                with self.phase("forward"):
                    output = parts.module(batch)
                with self.phase("loss"):
                    sums = {task: total for task, (total, _) in parts.loss(output, batch).items()}
            with self.phase("backward"):
                strategy.backward(sums, counts, parts.task_weights)
            logits.append({task: x.detach() for task, x in output.logits.items()})
            losses.append({task: x.detach() for task, x in sums.items()})
        totals = strategy.sum_counts(self._added(losses))
        with self.phase("gradients of all ranks, clipping"):
            norm = float(strategy.clip(parts.recipe.optimizer.clip_norm or math.inf))
        values = {task: (float(totals[task]), float(counts[task])) for task in totals}
        loss = sum(parts.task_weights[task] * total / count for task, (total, count) in values.items() if count > 0)
        return Gradients(values, loss, norm, logits)

    def _added(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The sum per task of the schema."""
        zero = torch.zeros((), device=self.parts.strategy.device)
        return {
            task: torch.stack([part.get(task, zero) for part in parts]).sum(0) if parts else zero
            for task in self.parts.task_weights
        }

    def apply(self, factor: float) -> None:
        """Move the dense parameters and the tables, at `factor` times their learning rates."""
        with self.phase("dense update"):
            self.optimizer.step(factor)
        with self.phase("table update"):
            self.parts.embedding.step(self.parts.recipe.optimizer.sparse_lr * factor)

    def discard(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()
        self.parts.embedding.discard()
