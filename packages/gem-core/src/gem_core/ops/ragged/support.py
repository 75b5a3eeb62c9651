"""What the ragged backend runs on, and the form in which it wants its values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gem_core.ops.dispatch import OpSpec
from gem_core.ops.reference.precision import accumulate


def on_processor(spec: OpSpec) -> str | None:
    """The reason why not, for anything but a processor."""
    return None if spec.device.type == "cpu" else f"it runs on processors only, found device {spec.device}"


def ready(*tensors: Tensor) -> Any:  # as many as were given: a tuple's length would be lost to the type checker
    """Contiguous, and float32 for the 16-bit types (their matrix products are slower and coarser on most processors)."""
    return tuple(t.contiguous() for t in accumulate(*tensors))
