"""The precision that references compute in."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def accumulate(*tensors: Tensor) -> Any:  # as many as were given: a tuple's length would be lost to the type checker
    """float32 for the 16-bit types; float32 and float64 as they are."""
    return tuple(t.float() if t.itemsize == 2 else t for t in tensors)
