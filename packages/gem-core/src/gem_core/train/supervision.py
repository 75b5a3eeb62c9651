"""What a loss compares per task: logits, labels and weights of the rows, with attribution windows and sampling resolved.

Zipper: of a task with several windows each row trains the head of one, chosen by a hash of its row id, so no row counts twice.
Sampled negatives: their weight of 1 / rate stays ("weight"), or is taken back and the logit is shifted by log(rate) ("shift"): rows of
which negatives were kept at a rate r have odds of 1 / r times the log's, so sigmoid(logit - log r) is their rate of positives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gem_core.data.batch import Batch
from gem_core.errors import ConfigError
from gem_core.protocols import Output
from gem_core.schema import Schema


@dataclass(frozen=True)
class Target:
    """Of one task, each (B,): label, 0 where there is none; weight, 0 where the row does not count; and the rows that may
    be compared with each other, `group` (those that train one head)."""

    label: Tensor
    weight: Tensor
    group: Tensor


class Supervision:
    """`targets(batch)` needs no forward pass; `logits(output, batch)` are those that the targets are of."""

    def __init__(self, schema: Schema) -> None:
        self.heads = {task: schema.heads_of(task) for task in schema.objectives}

    def targets(self, batch: Batch) -> dict[str, Target]:
        """Per task what its logits are compared with."""
        out = {}
        for task, heads in self.heads.items():
            window = assigned_window(batch.row_id, len(heads))
            label, mask, weight = (
                _chosen([part[head] for head in heads], window) for part in (batch.labels, batch.masks, batch.weights)
            )
            weight = mask * weight
            # A masked label may be NaN, which times 0 would still be NaN.
            label = torch.where(weight > 0, label, 0.0)
            if task in batch.rates:
                weight = torch.where(label > 0, weight, weight * batch.rates[task])
            out[task] = Target(label, weight, window)
        return out

    def logits(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        """Per task (B,) float32.

        Raises:
            ConfigError: the model gives no logit for a head of the schema.
        """
        out = {}
        for task, heads in self.heads.items():
            for head in heads:
                if head not in output.logits:
                    raise ConfigError(f'the model gives no logit for task "{head}": it gives {sorted(output.logits)}')
            window = assigned_window(batch.row_id, len(heads))
            logit = _chosen([output.logits[head] for head in heads], window).float()
            out[task] = logit - batch.rates[task].log() if task in batch.rates else logit
        return out


def assigned_window(row_id: Tensor, windows: int) -> Tensor:
    """(B,) the window that each row trains, by a hash of its id (the finaliser of SplitMix64)."""
    x = row_id
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shifted(x, shift)) * factor
    return (x ^ _shifted(x, 31)).remainder(windows)


def _shifted(x: Tensor, by: int) -> Tensor:
    """The logical shift to the right; that of signed integers brings in ones."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _chosen(parts: list[Tensor], window: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).gather(0, window.unsqueeze(0)).squeeze(0)
