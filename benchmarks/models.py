"""All models in one table on two logs: test NE and AUC, forward FLOPs a row, training rows/s.

    python benchmarks/models.py [--seeds 0 1 2] [--only kunlun ...] [--jobs 2] [--out runs/models]

The logs: the demo's sample of Complete Journey (recipes demo*.yaml), and the generated ads log (recipes/generated.yaml, with
the model exchanged). On a log, every model has the same rows, features, objectives, batches, optimiser and number of passes; a
run's checkpoint is chosen on the validation split. Sizes are those of the recipes, not tuned one against the other. `--jobs` runs
of one thread each go side by side; finished runs are not repeated. Results: benchmarks/results/models.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any

from completejourney_full import ROOT, speed_of, spread

from gem_core.demo.runs import train_model
from gem_core.plugins import default_registry
from gem_core.recipe import Recipe, load
from gem_core.report.environment import environment
from gem_core.train import build

GENERATED = {
    "kunlun": "",
    "interformer": "{name: interformer, dim: 16, layers: 1, interaction: dhen, hidden: [64], tokens: 8, "
    "features: {id_dropout: {ad: 0.2}}, sequence: {max_events: 64, width: 16, heads: 2}, "
    "sequences: {impression: null, conversion: null}}",
    "wukong": "{name: wukong, dim: 16, layers: 2, max_events: 64, features: {id_dropout: {ad: 0.2}}, "
    "block: {fm_tokens: 8, linear_tokens: 8, rank: 8, hidden: [64]}}",
    "hstu": "{name: hstu, width: 16, heads: 2, layers: 2, max_events: 64, features: {id_dropout: {ad: 0.2}}}",
    "din": "{name: din, max_events: 64, features: {id_dropout: {ad: 0.2}}}",
    "dcnv2": "{name: dcnv2, max_events: 64, features: {id_dropout: {ad: 0.2}}}",
}
"""The model of recipes/generated.yaml, or what takes its place."""
LOGS = ("completejourney", "generated")
TASKS = {
    "completejourney": ("purchase", "repurchase"),
    "generated": ("click", "add_to_cart", "purchase", "app_install"),
}


def recipe_of(log: str, model: str, seed: int, folder: Path) -> Recipe:
    """What a model is trained by on a log."""
    given = [f"seed={seed}", f"output={folder}", "trackers=[jsonl]", "trainer.threads=1", "data.workers=0"]
    if log == "generated":
        exchanged = GENERATED[model]
        return load(ROOT / "recipes" / "generated.yaml", [*given, *([f"model={exchanged}"] if exchanged else [])])
    name = "demo.yaml" if model == "kunlun" else f"demo-{model}.yaml"
    return load(ROOT / "recipes" / name, given)


def run(log: str, model: str, seed: int, out: Path) -> dict[str, float]:
    """Train one run, or take the finished one; its test metrics, speed and FLOPs."""
    folder = out / f"{log}-{model}-{seed}"
    recipe = recipe_of(log, model, seed, folder)
    found = train_model(recipe, default_registry())
    parts = build(recipe, default_registry())
    trained: Any = parts.model
    batches = [batch for batch, _ in islice(parts.batches("train"), 8)]
    flops = sum(sum(trained.flops(batch).values()) for batch in batches)
    return {**found.test, **speed_of(folder), "mflop_per_row": flops / 1e6 / sum(batch.rows for batch in batches)}


def table(summary: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> str:
    """Markdown: a table for each log, a line for each model."""
    lines = []
    for log, models in summary.items():
        columns = [f"{task}/{metric}" for task in TASKS[log] for metric in ("ne", "auc")] + ["joint/ne"]
        lines += [f"| {log} | seeds | {' | '.join(columns)} | MFLOP/row | rows/s |", "|---" * (len(columns) + 4) + "|"]
        for model, found in models.items():
            cells = [f"{found[c]['mean']:.4f} ± {found[c]['std']:.4f}" for c in columns]
            cells += [f"{found['mflop_per_row']['mean']:.2f}", f"{found['samples_per_s']['mean']:,.0f}"]
            lines.append(f"| {model} | {found['joint/ne']['seeds']} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run what was asked for; the file is written after each run."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    cli.add_argument("--only", nargs="+", choices=list(GENERATED), default=list(GENERATED))
    cli.add_argument("--jobs", type=int, default=2)
    cli.add_argument("--out", type=Path, default=ROOT / "runs" / "models")
    given = cli.parse_args()
    path = ROOT / "benchmarks" / "results" / "models.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    wanted = [(log, model, seed) for seed in given.seeds for log in LOGS for model in given.only]
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(run, *job, given.out): job for job in wanted}
        for job in as_completed(jobs):
            log, model, seed = jobs[job]
            found = job.result()
            stored["runs"].setdefault(log, {}).setdefault(model, {})[str(seed)] = found
            stored["environment"] = environment()
            stored["summary"] = {
                log: {
                    model: {m: spread([r[m] for r in by.values()]) for m in next(iter(by.values()))}
                    for model, by in models.items()
                }
                for log, models in stored["runs"].items()
            }
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(stored, indent=1) + "\n")
            print(log, model, seed, {m: round(found[m], 4) for m in ("joint/ne", "samples_per_s")}, flush=True)
    print(table(stored["summary"]))


if __name__ == "__main__":
    main()
