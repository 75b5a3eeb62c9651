"""Checkpoints written in the background: training goes on while a copy of its state goes to the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils import _pytree as pytree


def snapshot(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """A copy on the processor that training does not change any more."""
    out: dict[str, dict[str, Any]] = pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().to("cpu", copy=True), dict(parts)
    )
    return out


class Writer:
    """Runs one job at a time in a thread of its own; what goes wrong there is raised by `wait` or `check`.

    As a context it waits for the last job; if an error is on its way out already, that one is the one to see.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def start(self, job: Callable[[], object]) -> None:
        """Begin a job, after the last one has ended."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint")
        self._thread.start()

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            self._fault = error

    def wait(self) -> None:
        """Return when nothing is being written; raises what the last job raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def check(self) -> None:
        """Raise what a job that has ended raised."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception:
            if error is None:
                raise
