"""The precision that references compute in."""

from __future__ import annotations

from torch import Tensor


def accumulate(*tensors: Tensor) -> tuple[Tensor, ...]:
    """float32 for the 16-bit types; float32 and float64 as they are."""
    return tuple(t.float() if t.itemsize == 2 else t for t in tensors)
