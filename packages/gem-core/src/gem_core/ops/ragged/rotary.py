"""ROTE as one complex product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_core.ops.dispatch import OpSpec, Saved
from gem_core.ops.ragged.support import on_processor, ready
from gem_core.ops.reference.rotary import angles


class RaggedRote:
    """`rote` on a processor: a pair is a complex number, and its rotation one multiplication."""

    def supports(self, spec: OpSpec) -> str | None:
        return on_processor(spec)

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        x, positions, gaps, phi = tensors
        (xc,) = ready(x)
        turn, _ = angles(xc, positions, gaps, phi, **o)
        return (_real(_complex(xc) * _unit(turn)).to(x.dtype),)

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        x, positions, gaps, phi = saved.inputs
        g, y = ready(grad, saved.outputs[0])
        turn, log_gap = angles(g, positions, gaps, phi, **o)
        dx = _complex(g) * _unit(turn).conj()
        # d y / d angle = i y, so an angle's gradient is the imaginary part of conj(y) g, summed over the heads
        d_turn = (g[..., 1::2] * y[..., 0::2]).sub_(g[..., 0::2] * y[..., 1::2]).sum(1)
        return _real(dx).to(x.dtype), (log_gap @ d_turn).to(phi.dtype)


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).flatten(-2)


def _unit(turn: Tensor) -> Tensor:
    return torch.complex(turn.cos(), turn.sin())[:, None]
