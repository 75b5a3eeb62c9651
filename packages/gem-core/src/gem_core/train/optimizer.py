"""AdamW for the dense parameters, and the learning-rate schedule that dense and sparse side share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from gem_core.errors import DataError
from gem_core.recipe import Dense, Optimizer


def lr_factor(options: Optimizer, step: int, total: int) -> float:
    """Multiple of the base learning rate at `step` (0 is the first) of `total`.

    Linear warm-up over `warmup_steps`, then constant, or a cosine or line down to `final_lr` at the last step.
    """
    if step < options.warmup_steps:
        return (step + 1) / (options.warmup_steps + 1)
    if options.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - options.warmup_steps) / max(1, total - 1 - options.warmup_steps))
    fall = (1 - math.cos(math.pi * progress)) / 2 if options.schedule == "cosine" else progress
    return 1 - (1 - options.final_lr) * fall


class DenseOptimizer:
    """AdamW over named parameters; biases, norms and other parameters of one dimension are not decayed.

    Its state is by parameter name, so it does not depend on the order or grouping of the parameters.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], options: Dense) -> None:
        self._named = {name: p for name, p in parameters if p.requires_grad}
        self._lr = options.lr
        matrices = [p for p in self._named.values() if p.ndim > 1]
        vectors = [p for p in self._named.values() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
        # A model without dense parameters (only biases in tables) still trains.
        self._adam = (
            torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True) if groups else None
        )

    def step(self, factor: float) -> None:
        """One update at `factor` times the base learning rate; gradients are dropped."""
        if self._adam is None:
            return
        for group in self._adam.param_groups:
            group["lr"] = self._lr * factor
        self._adam.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._named.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """`<parameter>.<exp_avg | exp_avg_sq | step>`; parameters that never had a gradient have none."""
        if self._adam is None:
            return {}
        kept = self._adam.state
        return {f"{n}.{key}": value for n, p in self._named.items() for key, value in kept.get(p, {}).items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of `state`.

        Raises:
            DataError: an entry of a parameter that the model does not have.
        """
        if self._adam is None:
            return
        found: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, moment = key.rpartition(".")
            found.setdefault(name, {})[moment] = value
        unknown = sorted(found.keys() - self._named.keys())
        if unknown:
            raise DataError(f"optimizer state holds parameters that the model does not have: {', '.join(unknown)}")
        for name, moments in found.items():
            parameter = self._named[name]
            self._adam.state[parameter] = {
                k: v.clone() if k == "step" else v.to(parameter.device, copy=True) for k, v in moments.items()
            }
