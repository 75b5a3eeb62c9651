"""Share of a training run's processor time that metrics and logging take.

    python benchmarks/metrics_overhead.py RECIPE [key=value ...] [--steps 100] [--out FILE.json]

Trains the recipe for some steps (in a temporary folder, no evaluation) and times what the trainer does beside the step
itself: the metrics' updates and the meter after each step, and everything of each log line (metrics, trackers). Times
are processor time of the main thread, so that reader processes and whatever else runs on the machine count little.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gem_core.plugins import default_registry
from gem_core.recipe import load
from gem_core.report.environment import environment
from gem_core.train import Trainer


class Timed(Trainer):
    """A trainer that times its metrics and its logging."""

    spent: dict[str, float]

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.spent[name] = self.spent.get(name, 0.0) + time.thread_time() - start

    def _count(self, *args: Any) -> None:
        with self._timing("metrics"):
            super()._count(*args)

    def log(self) -> None:
        with self._timing("logging"):
            super().log()

    def evaluate(self) -> dict[str, float]:
        return {}

    def _step(self, *args: Any) -> None:
        with self._timing("step"):
            super()._step(*args)


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"output={folder}", f"trainer.max_steps={options.steps}", "trainer.epochs=1000000"]
        trainer = Timed(load(options.recipe, [*options.overrides, *fixed]), default_registry())
        trainer.spent = {}
        trainer.run("never")
    spent = trainer.spent
    total = spent["step"] + spent["logging"]  # a step includes its metrics
    result = {
        "environment": environment(),
        "threads": torch.get_num_threads(),
        "recipe": Path(options.recipe).name,
        "overrides": options.overrides,
        "steps": trainer.state.step,
        "step_ms": spent["step"] / trainer.state.step * 1e3,
        "metrics_ms_per_step": spent["metrics"] / trainer.state.step * 1e3,
        "logging_ms_per_step": spent["logging"] / trainer.state.step * 1e3,
        "share": (spent["metrics"] + spent["logging"]) / total,
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
