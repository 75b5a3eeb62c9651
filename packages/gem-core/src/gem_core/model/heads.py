"""One head per objective on the shared trunk, with a bias per surface."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gem_core.errors import ConfigError, nearest
from gem_core.model.layers import MLP, ByName, linear_macs
from gem_core.schema import Schema


class Heads(nn.Module):
    """logit_task = MLP_task(x) + bias[task, surface] + skip[task].

    The biases start at the training split's base rates, so that an untrained model is calibrated.

    Args:
        schema: a fitted schema.
        width: of x. hidden: hidden sizes of each task's MLP.
    """

    def __init__(self, schema: Schema, width: int, hidden: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.tasks = list(schema.objectives)
        self.heads = ByName({task: MLP([width, *hidden, 1], dropout) for task in self.tasks})
        rates = schema.require_fitted().base_rates
        start = [_logit(rates.get(task, 0.5)) for task in self.tasks]
        surfaces = len(schema.surface_names())
        self.surface_bias = nn.Parameter(torch.tensor(start).unsqueeze(1).repeat(1, surfaces))
        for head in self.heads.values():
            last = [m for m in head.modules() if isinstance(m, nn.Linear)][-1]
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor, surface: Tensor, skip: Tensor | None = None) -> dict[str, Tensor]:
        """x (B, width), surface (B,), skip (B, tasks) -> per task (B,) logits in float32."""
        out = {}
        for i, task in enumerate(self.tasks):
            logit = self.heads[task](x).squeeze(1).float() + self.surface_bias[i][surface]
            out[task] = logit if skip is None else logit + skip[:, i].float()
        return out

    def macs(self) -> int:
        """Multiply-adds per row."""
        return linear_macs(self)


def check_hidden(model: str, asked: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError for a hidden layer that a model does not have."""
    for name in asked:
        if name not in known:
            raise ConfigError(f'model {model} has no hidden layer "{name}"{nearest(name, known)}')


def _logit(p: float) -> float:
    p = min(max(p, 1e-6), 1 - 1e-6)
    return math.log(p / (1 - p))
