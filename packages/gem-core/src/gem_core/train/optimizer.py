"""AdamW for the dense parameters, and the learning-rate schedule that dense and sparse side share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

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

    Calls torch's functional, fused AdamW (the fastest of its forms, see benchmarks/optimizer.py): `torch.optim.AdamW`
    imports the compiler, seconds at every start. Its state is by parameter name, independent of order and grouping.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], options: Dense) -> None:
        self.options = options
        self._named = {name: p for name, p in parameters if p.requires_grad}
        self._state: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update at `factor` times the base learning rate; gradients are dropped."""
        for decay, wanted in ((self.options.weight_decay, True), (0.0, False)):
            names = [n for n, p in self._named.items() if p.grad is not None and (p.ndim > 1) == wanted]
            states = [self._state_of(name) for name in names]
            adamw(
                [self._named[n] for n in names],
                [g for n in names if (g := self._named[n].grad) is not None],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [],
                [s["step"] for s in states],
                fused=True,
                amsgrad=False,
                beta1=self.options.betas[0],
                beta2=self.options.betas[1],
                lr=self.options.lr * factor,
                weight_decay=decay,
                eps=self.options.eps,
                maximize=False,
            )
        self.zero_grad()

    def _state_of(self, name: str) -> dict[str, Tensor]:
        if name not in self._state:
            parameter = self._named[name]
            zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            self._state[name] = {**zeros, "step": torch.zeros((), device=parameter.device)}
        return self._state[name]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._named.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """`<parameter>.<exp_avg | exp_avg_sq | step>`; parameters that never had a gradient have none."""
        return {f"{name}.{key}": value for name, state in self._state.items() for key, value in state.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of `state`.

        Raises:
            DataError: an entry of a parameter that the model does not have.
        """
        self._state = {}
        for key, value in state.items():
            name, _, moment = key.rpartition(".")
            if name not in self._named:
                raise DataError(f'optimizer state holds "{name}", which is no trainable parameter of the model')
            self._state.setdefault(name, {})[moment] = value.to(self._named[name].device, copy=True)
