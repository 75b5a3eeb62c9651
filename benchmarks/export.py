"""An exported model against the run's own: time to the first prediction in a new process, and time of a prediction.

    python benchmarks/export.py RECIPE [key=value ...] [--steps 20] [--rounds 30] [--out FILE.json]

Trains the recipe for some steps in a temporary folder, exports it (with AOTInductor too where there is a C++ compiler), and times
* cold: a new process from its start to its first prediction, of the median of three; `load_s` and `first_s` are parts of it;
* warm: predictions of the first rows of a real batch, each form in turn, the median over the rounds. Ratios are to eager.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gem_core.data.batch import Batch
from gem_core.export import export, fresh, load
from gem_core.export.parity import expected, head
from gem_core.recipe import load as load_recipe
from gem_core.report.environment import environment
from gem_core.train import restore, train

EAGER = """
import sys, time, torch
from gem_core.export.parity import expected
from gem_core.train import restore
batch = torch.load(sys.argv[2], weights_only=False)
start = time.perf_counter()
parts = restore(sys.argv[1])
loaded = time.perf_counter()
expected(parts, batch)
torch.save({"load_s": loaded - start, "first_s": time.perf_counter() - loaded}, sys.argv[3])
"""


def cold(command: list[str], result: Path) -> dict[str, float]:
    """Seconds of a new process and of its parts: the run of the median of three."""
    runs = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-P", *command], check=True)
        wall = time.perf_counter() - start
        parts = torch.load(result)
        runs.append({"process_s": wall, "load_s": parts["load_s"], "first_s": parts["first_s"]})
    return sorted(runs, key=lambda run: run["process_s"])[1]


def warm(forms: dict[str, Callable[[Batch], Any]], batch: Batch, rounds: int) -> dict[str, float]:
    """Median milliseconds of a prediction by form; the forms take turns, so that the machine's load meets all."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(rounds + 3):
        for name, run in forms.items():
            start = time.perf_counter()
            run(batch)
            if turn >= 3:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def measure(recipe: str, overrides: list[str], steps: int, rounds: int) -> dict[str, Any]:
    """Train, export, time."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"output={folder}/run", f"trainer.max_steps={steps}", "trackers=[jsonl]"]
        run = train(load_recipe(recipe, [*overrides, *fixed])).folder
        formats = ["torch-export", *(["aoti"] if shutil.which("g++") else [])]
        written = export(run, Path(folder, "out"), formats)
        parts = restore(run)
        batch = next(parts.batches(next(s for s in ("test", "validation", "train") if s in parts.reader.splits())))[0]
        forms: dict[str, Callable[[Batch], Any]] = {"eager": lambda batch: expected(parts, batch)}
        forms |= {form: load(written.folder, form) for form in formats}
        given, tensors, out = (Path(folder, name) for name in ("batch.pt", "tensors.pt", "out.pt"))
        torch.save(batch, given)
        torch.save([load(written.folder, formats[0]).signature.tensors(batch)], tensors)
        start = {"eager": cold(["-c", EAGER, str(run), str(given), str(out)], out)}
        for form in formats:
            file = written.folder / fresh.FILES[form]
            start[form] = cold([fresh.__file__, form, str(file), str(tensors), str(out)], out)
        predictions = []
        for rows in sorted({1, min(32, batch.rows), batch.rows}):
            ms = warm(forms, head(batch, rows), rounds)
            ratio = {form: ms[form] / ms["eager"] for form in formats}
            predictions.append({"rows": rows, "ms": ms, "time_to_eager": ratio})
        return {
            "cold": start,
            "cold_time_to_eager": {f: start[f]["process_s"] / start["eager"]["process_s"] for f in formats},
            "warm": predictions,
            "bytes": written.files,
        }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {
        "environment": environment(),
        "threads": torch.get_num_threads(),
        "recipe": Path(options.recipe).name,
        "overrides": options.overrides,
        **measure(options.recipe, options.overrides, options.steps, options.rounds),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
