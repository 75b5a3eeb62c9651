"""Where scalars and texts of a run go: the console, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gem_core.errors import ConfigError
from gem_core.protocols import ComponentConfig


class Console:
    """One line per logged step with what the machine did, a line per evaluation; a progress bar on a terminal."""

    class Config(ComponentConfig):
        """No options."""

    def __init__(self, config: Config, folder: Path, resume: int) -> None:
        self._console = RichConsole(file=sys.stdout, soft_wrap=True, highlight=False)
        self._train: Mapping[str, float] = {}
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._task = self._progress.add_task("training", total=1.0)
            self._progress.start()

    def scalars(self, step: int, values: Mapping[str, float], kind: str = "train") -> None:
        """Print a line. Kind "train" waits for the "speed" of the same step, to share its line."""
        if kind == "train":
            self._train = values
            return
        if kind == "speed":
            if self._progress is not None:
                self._progress.update(self._task, completed=values["progress"])
            losses = {n: v for n, v in self._train.items() if "/" not in n or n.endswith("/loss") or n == "joint/ne"}
            shown = losses | dict(values)
        else:
            shown = {n: v for n, v in values.items() if n.count("/") == 1 and n.rpartition("/")[2] in SHOWN}
        self._console.print(f"{kind if kind != 'speed' else 'train'} step {step}  {_line(shown)}", markup=False)

    def text(self, step: int, name: str, value: str) -> None:
        """Print a text under its name."""
        self._console.print(f"{name} step {step}  {value}", markup=False)

    def figure(self, step: int, name: str, figure: Any) -> None:
        """Figures are not for a console."""

    def close(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()


SHOWN = ("ne", "auc", "gauc", "calibration")
"""Metrics of an evaluation that the console shows; the rest is in metrics.jsonl."""
UNITS = {
    "samples_per_s": "samples/s",
    "events_per_s": "events/s",
    "gflops_per_step": "GFLOP/step",
    "rss_gib": "GiB",
    "gpu_gib": "GiB of the GPU",
}


def _line(values: Mapping[str, float]) -> str:
    """`loss/click 0.4312 | 12.6k samples/s | ...`: large numbers short, small ones with four digits."""
    parts = []
    for name, value in values.items():
        number = f"{value / 1000:.1f}k" if abs(value) >= 10_000 else f"{value:.4g}"
        parts.append(f"{number} {UNITS[name]}" if name in UNITS else f"{name} {number}")
    return " | ".join(parts)


class JsonLines:
    """`metrics.jsonl` holds what a seed fixes (kinds train, validation, progressive, test), `speed.jsonl` what the machine adds.

    One object a line: {"kind", "step", ...values}. A resumed run goes on behind the line of its checkpoint's step.
    """

    class Config(ComponentConfig):
        """No options."""

    def __init__(self, config: Config, folder: Path, resume: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: _reopen(folder / f"{name}.jsonl", resume) for name in ("metrics", "speed")}

    def scalars(self, step: int, values: Mapping[str, float], kind: str = "train") -> None:
        """Append a line."""
        self._write("speed" if kind == "speed" else "metrics", {"kind": kind, "step": step, **values})

    def text(self, step: int, name: str, value: str) -> None:
        """Append a text to speed.jsonl."""
        self._write("speed", {"kind": "text", "step": step, "name": name, "text": value})

    def figure(self, step: int, name: str, figure: Any) -> None:
        """Figures are not for JSON."""

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _write(self, file: str, row: dict[str, Any]) -> None:
        self._files[file].write(json.dumps(row) + "\n")
        self._files[file].flush()


def _reopen(path: Path, resume: int) -> Any:
    """The file opened for appending, without lines that the resumed run will write again."""
    kept = []
    if resume and path.is_file():
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                break  # half a line, written when the run was killed
            # The test split, and a window about to be trained on, are evaluated after the checkpoint of their step.
            last = resume - (row["kind"] == "progressive")
            if row["step"] <= last and row["kind"] != "test":
                kept.append(line + "\n")
    path.write_text("".join(kept))
    return path.open("a")


class TensorBoard:
    """Scalars, texts and figures as TensorBoard events in `<run>/tensorboard` (extra: gem-core[tensorboard])."""

    class Config(ComponentConfig):
        """No options."""

    def __init__(self, config: Config, folder: Path, resume: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError('tracker "tensorboard" is not installed: pip install gem-core[tensorboard]') from error
        if resume == 0:
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=resume + 1 if resume else None)

    def scalars(self, step: int, values: Mapping[str, float], kind: str = "train") -> None:
        """One curve per value, named "<kind>/<name>"."""
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def text(self, step: int, name: str, value: str) -> None:
        """A text under its name."""
        self._writer.add_text(name, value, step)

    def figure(self, step: int, name: str, figure: Any) -> None:
        """A matplotlib figure under its name."""
        self._writer.add_figure(name, figure, step)

    def close(self) -> None:
        """Write out and close."""
        self._writer.close()
