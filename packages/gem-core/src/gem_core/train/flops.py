"""The machine's peak of floating-point operations, and the share of it that training uses (MFU).

A multiply-add is 2 operations. Forward and backward of trainable parts are 3 times the forward; recomputation is not
counted.
"""

from __future__ import annotations

import time

import torch

TRAINING_FACTOR = 3


def measure_peak(device: torch.device, size: int = 1024, seconds: float = 0.2) -> float:
    """Best operations per second of a (size, size) matrix product over about `seconds`, with the current threads and
    under the current autocast."""
    left = right = torch.full((size, size), 1 / size, device=device)  # not random: the run's generator stays untouched
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def mfu(forward_flops: float, seconds: float, peak: float) -> float:
    """Share of the machine's peak that training on batches of `forward_flops` in all used over `seconds`."""
    return TRAINING_FACTOR * forward_flops / (seconds * peak)
