"""Built-in callbacks."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch.profiler import ProfilerActivity, profile

from gem_core.protocols import Callback, ComponentConfig

PHASES = ("data", "forward", "backward", "dense update", "table update", "metrics")
"""Ranges that the trainer marks in each step."""


class Profiler(Callback):
    """Where a step's time goes: `<run>/profile.txt` gets the share of each phase and the costliest operations."""

    class Config(ComponentConfig):
        """Profiles `steps` steps after the first `skip` of the run; lists `rows` operations."""

        skip: int = Field(10, ge=0)
        steps: int = Field(5, ge=1)
        rows: int = Field(30, ge=1)

    def __init__(self, config: Config) -> None:
        self.config = config
        self._done = 0
        self._profile: Any = None

    def on_start(self, trainer: Any) -> None:
        """Start at once where no steps are skipped."""
        if self.config.skip == 0:
            self._begin()

    def on_step(self, trainer: Any, step: int) -> None:
        """Start or finish by the number of steps seen."""
        self._done += 1
        if self._done == self.config.skip:
            self._begin()
        elif self._profile is not None and self._done == self.config.skip + self.config.steps:
            self._finish(trainer, self.config.steps)

    def on_end(self, trainer: Any) -> None:
        """A run shorter than asked for is reported as far as it went."""
        if self._profile is not None:
            self._finish(trainer, self._done - self.config.skip)

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self._profile = profile(activities=activities)
        self._profile.__enter__()

    def _finish(self, trainer: Any, steps: int) -> None:
        running, self._profile = self._profile, None
        running.__exit__(None, None, None)
        averages = running.key_averages()
        phases = {a.key: a.cpu_time_total / 1000 / max(1, steps) for a in averages if a.key in PHASES}
        total = sum(phases.values()) or 1.0
        lines = [f"{'phase':<14} {'ms/step':>9} {'share':>7}"]
        lines += [f"{p:<14} {phases[p]:>9.2f} {phases[p] / total:>7.1%}" for p in PHASES if p in phases]
        sort = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = averages.table(sort_by=sort, row_limit=self.config.rows, max_name_column_width=50)
        path = trainer.folder / "profile.txt"
        path.write_text("\n".join(lines) + f"\n\n{steps} steps, operations by their own time:\n{table}\n")
        trainer.note("profile", f"{path}\n" + "\n".join(lines))
