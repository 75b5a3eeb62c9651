"""Where a run stands, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["finished", "stopped", "interrupted"]


@dataclass
class State:
    """Everything that a resumed run needs beside weights and generators. `window` is [sum, count] per task since the
    last log line; `norm` and `lr_factor` are the last step's; `best`, `best_step`, `stale` follow the watched
    metric. `windows` counts the files of `follow` trained on; `file` is the one at hand, or, if
    `file_ended`, the last, and `file_metrics` what was measured before it."""

    step: int = 0
    epoch: int = 0
    evaluated: int = 0
    best: float | None = None
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    stale: int = 0
    skipped: int = 0
    running_loss: float | None = None
    window: dict[str, list[float]] = field(default_factory=dict)
    norm: float = 0.0
    lr_factor: float = 0.0
    windows: int = 0
    file: str = ""
    file_ended: bool = True
    file_metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """How a run ended: all steps done, stopped early (by patience or a callback), or interrupted by a signal.

    `validation` are the metrics of the best evaluation; `checkpoint` is that one's (the newest where none was the best,
    and of an interrupted run), and `test` its metrics on the test split.
    """

    status: Status
    step: int
    folder: Path
    checkpoint: Path
    best_step: int | None
    validation: dict[str, float]
    test: dict[str, float]

    @property
    def exit_code(self) -> int:
        """0, or 1 for an interrupted run."""
        return 1 if self.status == "interrupted" else 0
