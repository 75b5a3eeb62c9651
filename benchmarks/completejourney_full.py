"""The whole Complete Journey log: Kunlun against DIN, DCNv2 and LightGBM over seeds, and what each part of Kunlun adds.

    python benchmarks/completejourney_full.py [--seeds 0 1 2 3 4] [--only kunlun din ...] [--jobs 2] [--out runs/completejourney-full]

Every model has the same rows, features, objectives and time split; a run's checkpoint is chosen on the validation weeks.
`--jobs` runs of one thread each go side by side, the longest first. Runs that are finished in the folder are not repeated.
Results: benchmarks/results/completejourney_full.json. The log is simulated from real shopping patterns, as its authors say.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from gem_core.data.completejourney import CompleteJourneyReader
from gem_core.demo.runs import train_model, train_trees
from gem_core.demo.trees import WIDE_IDS, TreeFeatures, TreeOptions
from gem_core.plugins import default_registry
from gem_core.recipe import load
from gem_core.report.environment import environment

ROOT = Path(__file__).resolve().parent.parent
BASE = "completejourney-full.yaml"
SHOWN = ("purchase/auc", "purchase/ne", "repurchase/auc", "repurchase/ne", "joint/ne")

# name -> (recipe, overrides). The ablations change one thing each, with the first seed.
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "din": ("completejourney-full-din.yaml", ()),
    "kunlun": (BASE, ()),
    "dcnv2": ("completejourney-full-dcnv2.yaml", ()),
}
WIDE = "model.compressed_tokens=28"
"""The ablations take from a Kunlun that hardly compresses its tokens."""
ABLATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "28 compressed tokens": (BASE, (WIDE,)),
    "with a purchase tower": (BASE, (WIDE, "model.towers.purchase={}")),
    "without match counts": (BASE, (WIDE, "model.match_bins=0")),
    "without the gate": (BASE, (WIDE, "model.gate=1")),
    "6 compressed tokens": (BASE, ("model.compressed_tokens=6",)),
    "without history means": (BASE, (WIDE, "model.history={}")),
    "one layer": (BASE, (WIDE, "model.layers=1")),
    "two experts": (BASE, (WIDE, "model.experts=2")),
    "without the dense skip": (BASE, (WIDE, "model.features.dense_skip=false")),
    "purchase alone": (BASE, (WIDE, "task_weights={purchase: 1.0, repurchase: 0.0, redeem: 0.0}")),
    "with layer norms": (BASE, (WIDE, "model.wukong.norm=true")),
    "one epoch": (BASE, (WIDE, "trainer.epochs=1")),
}


def neural(name: str, seed: int, out: Path) -> dict[str, float]:
    """Train one run (or take the finished one); its test metrics and speed."""
    recipe, overrides = (MODELS | ABLATIONS)[name]
    folder = out / f"{name.replace(' ', '-')}-{seed}"
    given = (*overrides, f"seed={seed}", f"output={folder}", "trackers=[jsonl]", "trainer.threads=1", "data.workers=0")
    run = train_model(load(ROOT / "recipes" / recipe, given), default_registry())
    return {**run.test, "validation/joint/ne": run.validation["joint/ne"], **speed_of(folder)}


def speed_of(folder: Path) -> dict[str, float]:
    """Medians of what the log lines say of speed, and the minutes of training."""
    lines = [json.loads(line) for line in (folder / "speed.jsonl").read_text().splitlines()]
    speeds = {
        name: statistics.median(line[name] for line in lines if name in line)
        for name in ("samples_per_s", "events_per_s", "gflops_per_step", "mfu", "fill")
        if any(name in line for line in lines)
    }
    return {**speeds, "training_minutes": sum(line.get("seconds", 0.0) for line in lines) / 60}


def trees(out: Path) -> dict[str, float]:
    """LightGBM with all counts, recency and per-week rates (deterministic: one run)."""
    data: dict[str, Any] = load(ROOT / "recipes" / BASE).dump()["data"]
    options = {k: v for k, v in data["reader"].items() if k != "name"}
    reader = CompleteJourneyReader(CompleteJourneyReader.Config(**options), seed=0)
    features = TreeFeatures(reader.schema, WIDE_IDS)
    trees_options = TreeOptions(learning_rate=0.08, leaves=127, trees=1500, patience=30, threads=1)
    found = train_trees(reader, data, out / "lightgbm", features, trees_options).test
    return {**found, **speed_of(out / "lightgbm")}


def spread(values: list[float]) -> dict[str, float]:
    """Mean, standard deviation over seeds (0 of one) and count."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        "seeds": len(values),
    }


def table(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Markdown: a line per model."""
    lines = ["| model | seeds | " + " | ".join(SHOWN) + " |", "|---" * (len(SHOWN) + 2) + "|"]
    for name, found in results.items():
        cells = [f"{found[m]['mean']:.4f} ± {found[m]['std']:.4f}" if m in found else "-" for m in SHOWN]
        lines.append(f"| {name} | {found[SHOWN[0]]['seeds']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(name: str, seed: int, out: Path) -> dict[str, float]:
    """One run of a model, in a process of its own."""
    return trees(out) if name == "lightgbm" else neural(name, seed, out)


def write(path: Path, stored: dict[str, Any]) -> None:
    """The results so far, with mean and spread over the seeds."""
    stored["summary"] = {
        model: {m: spread([r[m] for r in by.values()]) for m in SHOWN if all(m in r for r in by.values())}
        for model, by in stored["runs"].items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stored, indent=1) + "\n")


def main() -> None:
    """Run what was asked for; the file is written after each run."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    cli.add_argument("--only", nargs="+", choices=[*MODELS, "lightgbm", *ABLATIONS], default=None)
    cli.add_argument("--jobs", type=int, default=2)
    cli.add_argument("--out", type=Path, default=ROOT / "runs" / "completejourney-full")
    given = cli.parse_args()
    path = ROOT / "benchmarks" / "results" / "completejourney_full.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    wanted = given.only or [*MODELS, "lightgbm", *ABLATIONS]
    several = [(name, seed) for name in wanted if name in MODELS for seed in given.seeds]
    once = [(name, given.seeds[0]) for name in wanted if name not in MODELS]
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(run, name, seed, given.out): (name, seed) for name, seed in [*several, *once]}
        for job in as_completed(jobs):
            name, seed = jobs[job]
            found = job.result()
            stored["runs"].setdefault(name, {})[str(seed)] = found
            stored["environment"] = environment()
            write(path, stored)
            print(name, seed, {m: round(found[m], 4) for m in (*SHOWN, "training_minutes") if m in found}, flush=True)
    print(table(stored["summary"]))


if __name__ == "__main__":
    main()
