"""A loss that is not finite, or explodes: found, described, and dumped for whoever looks into it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gem_core.data.batch import Batch, Jagged

MEMORY = 0.98
"""Share that the running mean of the loss keeps of itself at each step."""


def find_fault(loss: float, norm: float, running: float | None, explode_factor: float | None) -> str | None:
    """What is wrong with a step of this loss and gradient norm, or None.

    Args:
        running: mean loss so far, None before the first good step.
    """
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the gradient norm is {norm} (loss {loss:.6g})"
    if explode_factor is not None and running is not None and loss > explode_factor * running:
        return f"the loss is {loss:.6g}, above explode_factor {explode_factor:g} times its running mean {running:.6g}"
    return None


def running_mean(loss: float, running: float | None) -> float:
    """The running mean with one more loss."""
    return loss if running is None else MEMORY * running + (1 - MEMORY) * loss


def dump(
    folder: Path, step: int, batches: Sequence[Batch], position: Mapping[str, Any], reason: str, rank: int | None = None
) -> Path:
    """Write a step's batches as nested dictionaries of tensors; `torch.load(path, weights_only=True)` reads them.

    Args:
        rank: of several, whose batches these are.
    """
    path = folder / (f"fault-step-{step:08d}" + ("" if rank is None else f"-rank-{rank}") + ".pt")
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "reason": reason,
        "step": step,
        "reader_state": json.dumps(position),
        # What came from a reader process is views of one buffer, of which torch.save writes one type alone.
        "batches": [plain(b.map(torch.clone)) for b in batches],
    }
    torch.save(content, path)
    return path


def plain(value: Any) -> Any:
    """A batch as dictionaries of tensors."""
    if isinstance(value, Batch | Jagged):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return value
