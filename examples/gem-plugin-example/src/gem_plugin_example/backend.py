"""A backend of the op seed_attention: all sequences at once by segment sums, forward and backward written out.

Shape letters: B sequences, T events of all of them, S seeds, H heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.ops import OpSpec, Saved


def _segments(offsets: Tensor) -> Tensor:
    """(T,): the sequence of each event."""
    return torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())


class SegmentSeedAttention:
    """softmax(q k^T * scale) v per sequence, with shared queries. Materialises (T, S, H, d): for short histories."""

    def supports(self, spec: OpSpec) -> str | None:
        """From metadata alone: None, or why such a call is not for this backend (GEM then asks the next one)."""
        dtype = spec.dtypes["q"]
        return None if dtype in (torch.float32, torch.float64) else f"expects float32 or float64, found {dtype}"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, max_length: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """q (S, H, d), k and v (T, H, d) -> the result (B, S, H, d), and the log-sum-exp (B, S, H) for backward."""
        sequence = _segments(offsets)
        scores = torch.einsum("shd,thd->tsh", q, k) * scale
        index = sequence[:, None, None].expand_as(scores)
        top = scores.new_full((len(offsets) - 1, *scores.shape[1:]), float("-inf"))
        top = top.scatter_reduce(0, index, scores, "amax")
        total = torch.zeros_like(top).index_add(0, sequence, torch.exp(scores - top[sequence]))
        lse = top + total.log()  # -inf where a sequence has no events
        p = torch.exp(scores - lse[sequence])
        out = q.new_zeros(len(offsets) - 1, *q.shape).index_add(0, sequence, p.unsqueeze(3) * v.unsqueeze(1))
        return out, lse

    def backward(self, saved: Saved, grad: Tensor, *, max_length: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v. `saved` holds the forward's tensors and outputs, whichever backend made them."""
        q, k, v, offsets = (t for t in saved.inputs if t is not None)
        out, lse = saved.outputs
        sequence = _segments(offsets)
        p = torch.exp(torch.einsum("shd,thd->tsh", q, k) * scale - lse[sequence])
        grad_at = grad[sequence]
        dv = torch.einsum("tsh,tshd->thd", p, grad_at)
        dp = torch.einsum("tshd,thd->tsh", grad_at, v)
        ds = p * (dp - (grad * out).sum(3)[sequence]) * scale
        return torch.einsum("tsh,thd->shd", ds, k), torch.einsum("tsh,shd->thd", ds, q), dv
