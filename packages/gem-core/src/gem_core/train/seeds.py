"""What makes a run repeatable: random generators seeded, captured, restored; torch's deterministic algorithms."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed torch (every device), numpy's global generator and Python's."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def capture() -> dict[str, Any]:
    """States of all of them, as tensors and plain values."""
    numpy: Any = np.random.get_state()
    name, keys, position, has_gauss, gauss = numpy
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (str(name), keys.tolist(), int(position), int(has_gauss), float(gauss)),
        "python": random.getstate(),
    }


def restore(state: dict[str, Any]) -> None:
    """Inverse of `capture`; states of devices that are not here are left out."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    random.setstate(state["python"])


@contextmanager
def deterministic() -> Iterator[None]:
    """torch's deterministic algorithms for the length of a run."""
    # What cuBLAS needs for it, read when the first matrix product is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
