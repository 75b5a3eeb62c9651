"""Helpers on ragged values and offsets: vectorised, differentiable, free of padding, safe for empty sequences.

Values (sum T, ...), offsets (B + 1) int64. `total` is sum T, for callers that know it (no device sync, and compilers see a size).
"""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(offsets: Tensor) -> Tensor:
    """The length of each sequence, (B,)."""
    return offsets.diff()


def segment_ids(offsets: Tensor, total: int) -> Tensor:
    """The sequence that each row belongs to, (total,)."""
    batch = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return torch.repeat_interleave(batch, offsets.diff(), output_size=total)


def positions(offsets: Tensor, total: int) -> Tensor:
    """The position of each row within its sequence, from 0, (total,)."""
    return torch.arange(total, device=offsets.device) - offsets[segment_ids(offsets, total)]


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """The sum of each sequence's rows, (B, ...); 0 for an empty one."""
    out = values.new_zeros((offsets.shape[0] - 1, *values.shape[1:]))
    return out.index_add(0, segment_ids(offsets, values.shape[0]), values)


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """The mean of each sequence's rows, (B, ...); 0 for an empty one."""
    count = offsets.diff().clamp(min=1).to(values.dtype)
    return segment_sum(values, offsets) / count.view(-1, *[1] * (values.dim() - 1))


def gather_segments(values: Tensor, offsets: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Whole sequences by index, repeats allowed: the values and offsets of sequences index[0], index[1], ...

    index (R,) int64. Gradients of repeated sequences add up.
    """
    size = offsets.diff()[index]
    out = torch.cat((offsets.new_zeros(1), size.cumsum(0)))
    # Not int(), and with a check: torch.export would keep this batch's number, or not know that it is a size.
    total: int = out[-1].item()  # type: ignore[assignment]
    torch._check(total >= 0)
    start = torch.repeat_interleave(offsets[index] - out[:-1], size, output_size=total)
    rows = start + torch.arange(total, device=offsets.device)
    return values.index_select(0, rows), out
