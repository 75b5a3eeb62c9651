"""Binary cross-entropy per task, as sums and counts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from gem_core.data.batch import Batch
from gem_core.errors import ConfigError
from gem_core.protocols import ComponentConfig, Output
from gem_core.schema import Schema


class BinaryCrossEntropy:
    """Sum over the rows of mask * weight * BCE(logit, label); the count is the sum of mask * weight."""

    class Config(ComponentConfig):
        """No options."""

    def __init__(self, config: Config, schema: Schema) -> None:
        self.tasks = tuple(schema.objectives)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """Per task the scalar sum of mask * weight."""
        return {task: (batch.masks[task] * batch.weights[task]).sum() for task in self.tasks}

    def __call__(self, output: Output, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Per task (sum, count).

        Raises:
            ConfigError: the model gives no logit for a task of the schema.
        """
        out = {}
        for task in self.tasks:
            if task not in output.logits:
                raise ConfigError(f'the model gives no logit for task "{task}": it gives {sorted(output.logits)}')
            weight = batch.masks[task] * batch.weights[task]
            # A masked label may be NaN, which times 0 would still be NaN.
            label = torch.where(weight > 0, batch.labels[task], 0.0)
            loss = binary_cross_entropy_with_logits(output.logits[task].float(), label, reduction="none")
            out[task] = (loss * weight).sum(), weight.sum()
        return out
