"""The named parts of a step, and, while somebody measures, the time that each takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Phases:
    """`with phases("forward"):` marks a part; `start` and `stop` bound what is measured.

    Time within a part that is nested in another counts for the inner one alone, and what is in no part is "other", so the
    times add up to what passed. A GPU is waited for at each border: its work counts where it was asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[str] | None = None
        self._seconds: dict[str, float] = {}
        self._last = 0.0

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """A part; costs nothing while nobody measures."""
        return nullcontext() if self._open is None else self._part(self._open, name)

    @contextmanager
    def _part(self, parts: list[str], name: str) -> Iterator[None]:
        self._pass()
        parts.append(name)
        try:
            yield
        finally:
            self._pass()
            parts.pop()

    def _pass(self) -> None:
        """Give the time since the last border to the innermost part."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._last
        self._last = now

    def start(self) -> None:
        """Measure from here on."""
        self._open, self._seconds = ["other"], {}
        self._last = time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Seconds per part since `start`, in the order in which the parts first ended."""
        self._pass()
        self._open = None
        return self._seconds
