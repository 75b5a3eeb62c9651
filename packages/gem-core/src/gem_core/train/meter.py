"""What the machine did between two log lines: samples/s, events/s, fill, FLOPs, MFU, memory, waits."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gem_core.data.batch import Batch
from gem_core.train.flops import mfu


def peak_memory_gib() -> float:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


class Meter:
    """Adds up batches from their shapes alone and the model's own counts.

    Args:
        peak: the machine's operations per second, for MFU.
        device: where the model is; a GPU's peak memory counts from here on.
    """

    def __init__(self, model: nn.Module, peak: float, device: torch.device) -> None:
        self._model: Any = model
        self._peak = peak
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._has_positions = hasattr(model, "positions")
        self.reset()

    def reset(self) -> None:
        """Begin a new window."""
        self._start = time.perf_counter()
        self._steps = self._rows = self._events = self._flops = self._real = self._computed = 0
        self._wait = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time within is waiting for data."""
        start = time.perf_counter()
        yield
        self._wait += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time within (an evaluation, a checkpoint) is not the window's."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    def add(self, micro_batches: Sequence[Batch]) -> None:
        """Count one step."""
        self._steps += 1
        for batch in micro_batches:
            self._rows += batch.rows
            self._events += sum(fields["time"].values.numel() for fields in batch.events.values())
            self._flops += sum(self._model.flops(batch).values())
            if self._has_positions:
                real, computed = self._model.positions(batch)
                self._real += real
                self._computed += computed

    def read(self) -> dict[str, float]:
        """The window's figures; `fill` only for a model that says which positions it computed, and computed some."""
        seconds = time.perf_counter() - self._start
        out = {"samples_per_s": self._rows / seconds, "events_per_s": self._events / seconds}
        if self._computed:
            out["fill"] = self._real / self._computed
        if self._device.type == "cuda":
            out["gpu_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return out | {
            "gflops_per_step": self._flops / max(1, self._steps) / 1e9,
            "mfu": mfu(self._flops, seconds, self._peak),
            "rss_gib": peak_memory_gib(),
            "seconds": seconds,
            "wait_share": self._wait / seconds,
        }


SUMMED = ("samples_per_s", "events_per_s", "gflops_per_step")
AVERAGED = ("fill", "mfu")


def over_ranks(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One window's figures of all ranks: rates add up, shares of a machine average, of waits and memory the largest."""
    out = {}
    for name in dict.fromkeys(name for each in figures for name in each):
        values = [each[name] for each in figures if name in each]
        out[name] = sum(values) if name in SUMMED else sum(values) / len(values) if name in AVERAGED else max(values)
    return out
