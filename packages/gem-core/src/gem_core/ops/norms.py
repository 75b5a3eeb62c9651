"""Row norms without running state. Plain PyTorch: a compiler fuses them into their neighbours."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the last axis, then weight and bias (D) where given. x (..., D)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, then weight (D) where given. x (..., D)."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)
