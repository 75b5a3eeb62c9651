"""ROTE by the definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_core.ops.dispatch import OpSpec, Saved
from gem_core.ops.reference.precision import accumulate


class RoteReference:
    """Rotation of interleaved pairs; the angle's gradient goes to phi, weighted by the log time gap."""

    def supports(self, spec: OpSpec) -> str | None:
        return None

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        x, positions, gaps, phi = tensors
        (xc,) = accumulate(x)
        turn, _ = angles(xc, positions, gaps, phi, **o)
        return (_rotate(xc, turn).to(x.dtype),)

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        x, positions, gaps, phi = saved.inputs
        gc, y = accumulate(grad, saved.outputs[0])
        turn, log_gap = angles(gc, positions, gaps, phi, **o)
        d_turn = (gc[..., 1::2] * y[..., 0::2] - gc[..., 0::2] * y[..., 1::2]).sum(
            1
        )  # d y / d angle: y turned by 90 degrees
        return _rotate(gc, -turn).to(x.dtype), (d_turn * log_gap[:, None]).sum(0).to(phi.dtype)


def angles(
    x: Tensor, positions: Tensor, gaps: Tensor, phi: Tensor, *, base: float, time_scale: float
) -> tuple[Tensor, Tensor]:
    """The angles (N, d / 2) of values x (N, H, d), and log1p(gap / time_scale) (N,)."""
    width = x.shape[-1]
    theta = base ** (torch.arange(0, width, 2, dtype=x.dtype, device=x.device) / -width)
    log_gap = torch.log1p(gaps.to(x.dtype) / time_scale)
    return positions.to(x.dtype)[:, None] * theta + log_gap[:, None] * phi.to(x.dtype), log_gap


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    cos, sin = turn.cos()[:, None], turn.sin()[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
