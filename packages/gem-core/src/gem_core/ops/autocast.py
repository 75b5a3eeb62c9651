"""Under autocast the matrix ops run in its lower precision, as SDPA does."""

from __future__ import annotations

import torch
from torch import Tensor


def lower(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's type where it is on (float64 is left alone, as everywhere in autocast)."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
