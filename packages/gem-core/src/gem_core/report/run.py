"""A finished run as its folder tells it: recipe.yaml, result.json, metrics.jsonl, speed.jsonl. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem_core.errors import DataError
from gem_core.validation import read_yaml

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """One model trained with one seed.

    Attributes:
        recipe: what recipe.yaml says; the report shows it whole.
        status: "finished", "stopped" (by patience) or "interrupted".
        best_step: the step that validation chose.
        validation, test: metrics of that step, by names like "purchase/display/ne".
        training, evaluations, speed: lines of the log, in order of step; each has "step".
    """

    folder: Path
    recipe: Mapping[str, Any]
    status: str
    best_step: int | None
    validation: Metrics
    test: Metrics
    training: tuple[Metrics, ...]
    evaluations: tuple[Metrics, ...]
    speed: tuple[Metrics, ...]

    @property
    def name(self) -> str:
        """The recipe's name; runs of one name are seeds of one model."""
        return str(self.recipe["name"])

    @property
    def seed(self) -> int:
        """The recipe's seed."""
        return int(self.recipe["seed"])

    @property
    def seconds(self) -> float:
        """Time spent in training steps; evaluations and checkpoints not counted."""
        return sum(line["seconds"] for line in self.speed)

    def seconds_at(self, step: float) -> float:
        """Training time at a step, read between the lines of the log."""
        before = total = 0.0
        for line in self.speed:
            if step <= line["step"]:
                return total + line["seconds"] * (step - before) / (line["step"] - before)
            before, total = line["step"], total + line["seconds"]
        return total

    def rate(self, name: str) -> float | None:
        """The mean of a figure of speed.jsonl over training time; None where no line has it."""
        lines = [line for line in self.speed if name in line]
        total = sum(line["seconds"] for line in lines)
        return sum(line[name] * line["seconds"] for line in lines) / total if total else None

    def largest(self, name: str) -> float | None:
        """The largest of a figure of speed.jsonl; None where no line has it."""
        return max((line[name] for line in self.speed if name in line), default=None)

    def mflops_per_row(self) -> float | None:
        """Forward FLOPs of a row, in millions, averaged over training; None where no line has FLOPs."""
        flops = rows = before = 0.0
        for line in self.speed:
            if "gflops_per_step" in line:
                flops += line["gflops_per_step"] * 1e3 * (line["step"] - before)
                rows += line["samples_per_s"] * line["seconds"]
            before = line["step"]
        return flops / rows if rows else None


def load_run(folder: str | Path) -> Run:
    """Read a run's folder.

    Raises:
        DataError: a file is missing or not what a run writes.
    """
    folder = Path(folder)
    recipe = read_yaml(folder / "recipe.yaml", f"run {folder}: recipe.yaml")
    result = _json(folder / "result.json")
    lines = _lines(folder / "metrics.jsonl")
    try:
        return Run(
            folder,
            recipe,
            result["status"],
            result["best_step"],
            result["validation"],
            result["test"],
            tuple(line for line in lines if line["kind"] == "train"),
            tuple(line for line in lines if line["kind"] == "validation"),
            tuple(line for line in _lines(folder / "speed.jsonl") if line["kind"] == "speed"),
        )
    except KeyError as error:
        raise DataError(
            f"run {folder}: a line of its JSON files lacks {error}; was it written by another release?"
        ) from error


def by_name(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs grouped by name, in the order given."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    return groups


def objectives(runs: Iterable[Run]) -> list[str]:
    """Objectives that the runs were tested on, in the runs' order."""
    found = (key.split("/") for run in runs for key in run.test)
    return list(
        dict.fromkeys(parts[0] for parts in found if len(parts) == 2 and parts[1] == "ne" and parts[0] != "joint")
    )


def surfaces(runs: Iterable[Run], objective: str) -> list[str]:
    """Surfaces on which an objective was tested, in the runs' order."""
    found = (key.split("/") for run in runs for key in run.test)
    return list(dict.fromkeys(p[1] for p in found if len(p) == 3 and p[0] == objective and p[2] == "ne"))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; is {path.parent} the folder of a finished run?"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; is {path.parent} the folder of a finished run?"
        ) from error
    out = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            out.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not valid JSON: {error}") from error
    return out
