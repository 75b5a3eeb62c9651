"""Joint training against a separate model per objective, and the gap to the best possible NE, on the generated ads log.

    python benchmarks/joint.py [--rows 262144] [--epochs 1] [--seeds 0 1 2] [--out runs/joint] [--quick]
        [--set KEY=VALUE ...]

Arms, all by recipes/generated.yaml; test NE per objective, mean and standard deviation over seeds of the training:

* joint: one model for all objectives, `--epochs` passes;
* separate, equal in all: a model per objective (its schema has no other), each trained with 1/T of the joint model's
  FLOPs, so that together they cost as much as the joint model;
* separate, equal each: each trained with as many FLOPs as the joint model, so that together they cost T times as much.

FLOPs are counted from the true lengths of training batches (forward; training is three times that in every arm); they
set each arm's number of steps, over which its learning rate decays. A separate model sees the rows that have its label,
as often as its FLOPs allow. Checkpoints are chosen on the validation days, four looks in every arm. Then the gap to the
oracle: test NE over the oracle's NE less 1, joint models, by size of the log (every model on the test days of
the largest log) and by size of the model. The smaller logs are parts of the larger ones. Writes
benchmarks/results/joint.json and joint.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gem_core.data.generated import GeneratedReader
from gem_core.plugins import default_registry
from gem_core.recipe import Recipe, load, parse, resolve
from gem_core.report.environment import environment
from gem_core.train import build, evaluate, train

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RECIPE = ROOT / "recipes" / "generated.yaml"
FIXED = ("trackers=[jsonl]", "trainer.threads=1", "data.workers=0", "optimizer.warmup_steps=20")
EVERYWHERE: list[str] = []
"""Overrides of every recipe, from the command line."""

LOOKS = 4
"""Evaluations of every run."""

BLOCK_ROWS = 131_072
"""Rows of a whole block of users: logs of a multiple of it are parts of one another."""

MODELS: dict[str, tuple[str, ...]] = {
    "xs": ("model.dim=8", "model.wukong.hidden=[16]", "model.head_hidden=[8]", "model.compressed_tokens=8"),
    "s": (),
    "m": ("model.dim=32", "model.layers=2", "model.wukong.hidden=[128]", "model.head_hidden=[64]"),
}
"""Sizes of the model for the gap to the oracle; "s" is the recipe's own."""

ARMS = ("joint", "separate, equal in all", "separate, equal each")


def recipe_of(rows: int, seed: int, overrides: Sequence[str] = (), objective: str | None = None) -> Recipe:
    """The recipe on a log of so many rows; with an objective, its schema has no other."""
    recipe = load(RECIPE, [*FIXED, *overrides, *EVERYWHERE, f"data.reader.rows={rows}", f"seed={seed}"])
    recipe = resolve(recipe, default_registry())
    if objective is None:
        return recipe
    schema = GeneratedReader.schema_of(GeneratedReader.Config(**recipe.data.reader.options))
    value = schema.model_dump(mode="json", exclude_defaults=True) | {"objectives": {objective: {}}}
    plain = recipe.dump()
    return parse({**plain, "data": {**plain["data"], "schema": value}})


def flops_per_step(recipe: Recipe, batches: int = 8) -> float:
    """Forward FLOPs of a training batch, mean over the first ones."""
    parts = build(recipe, default_registry())
    model: Any = parts.model
    counts = [sum(model.flops(batch).values()) for batch, _ in islice(parts.batches("train"), batches)]
    return statistics.fmean(counts)


def steps_of(recipe: Recipe) -> int:
    """Optimiser steps of one pass over the training days."""
    parts = build(recipe, default_registry())
    return sum(1 for _ in parts.batches("train"))


def run(recipe: Recipe, steps: int, folder: Path) -> tuple[Path, dict[str, float]]:
    """Train for so many steps with LOOKS evaluations, or take the finished run; its folder and test metrics."""
    plain = recipe.dump()
    plain |= {"output": str(folder)}
    plain["trainer"] |= {"epochs": 1_000_000, "max_steps": steps, "evaluate_every": max(1, steps // LOOKS)}
    recipe, done = parse(plain), folder / "result.json"
    same = folder / "asked.json"
    if not (done.exists() and same.exists() and json.loads(same.read_text()) == plain):
        if train(recipe, resume="never").status == "interrupted":
            raise SystemExit(f"interrupted in {folder}: the same command goes on from the runs that are finished")
        same.write_text(json.dumps(plain))
    found: dict[str, float] = json.loads(done.read_text())["test"]
    return folder, found


def compare(rows: int, epochs: int, seeds: Sequence[int], tasks: Sequence[str], out: Path) -> dict[str, Any]:
    """Test NE of each arm, seed and objective, with FLOPs and steps."""
    per_step = {"joint": flops_per_step(recipe_of(rows, 0))}
    per_step |= {task: flops_per_step(recipe_of(rows, 0, objective=task)) for task in tasks}
    joint_steps = epochs * steps_of(recipe_of(rows, 0))
    budget = joint_steps * per_step["joint"]
    share = {"separate, equal in all": 1 / len(tasks), "separate, equal each": 1.0}
    steps = {arm: {t: max(1, round(s * budget / per_step[t])) for t in tasks} for arm, s in share.items()}
    ne: dict[str, dict[str, dict[str, float]]] = {arm: {task: {} for task in tasks} for arm in ARMS}
    for seed in seeds:
        _, found = run(recipe_of(rows, seed), joint_steps, out / f"joint-{seed}")
        for task in tasks:
            ne["joint"][task][str(seed)] = found[f"{task}/ne"]
        for arm in share:
            for task in tasks:
                folder = out / f"{arm.replace(', ', '-').replace(' ', '-')}-{task}-{seed}"
                _, found = run(recipe_of(rows, seed, objective=task), steps[arm][task], folder)
                ne[arm][task][str(seed)] = found[f"{task}/ne"]
        print(
            f"seed {seed}:", {arm: {t: round(v[str(seed)], 4) for t, v in ne[arm].items()} for arm in ARMS}, flush=True
        )
    tflops = {"joint": budget / 1e12}
    tflops |= {arm: sum(n * per_step[t] for t, n in of.items()) / 1e12 for arm, of in steps.items()}
    return {
        "rows": rows,
        "forward_tflops": tflops,
        "steps": {"joint": joint_steps, **steps},
        "ne": ne,
        "summary": {arm: {task: spread(list(by.values())) for task, by in of.items()} for arm, of in ne.items()},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation (0 of one value)."""
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def gaps(sizes: Sequence[int], epochs: int, oracle: Mapping[str, float], out: Path) -> dict[str, Any]:
    """Gap to the oracle on the test days of the largest log, by size of the log and of the model."""
    largest = {**recipe_of(max(sizes), 0).data.reader.options, "name": "generated"}
    wanted = [(rows, "s") for rows in sizes] + [(max(sizes), model) for model in MODELS if model != "s"]
    found = []
    for rows, model in wanted:
        recipe = recipe_of(rows, 0, MODELS[model])
        folder, _ = run(recipe, epochs * steps_of(recipe), out / f"gap-{model}-{rows}")
        test = evaluate(folder, "test", reader=largest)
        gap = {key.partition("/")[0]: test[key.replace("oracle_ne", "ne")] / oracle[key] - 1 for key in oracle}
        found.append({"rows": rows, "model": model, "mflop_per_row": flops_per_step(recipe) / 1e6 / recipe.data.batch_rows,
                      "ne": {t: test[f"{t}/ne"] for t in gap}, "gap": gap})  # fmt: skip
        print(f"{rows:,} rows, model {model}:", {t: f"{100 * g:.1f} %" for t, g in gap.items()}, flush=True)
    return {"sizes": list(sizes), "oracle": dict(oracle), "runs": found}


def table(stored: Mapping[str, Any]) -> str:
    """Markdown: the arms, then the gaps."""
    joint, oracle = stored["joint"], stored["joint_oracle"]
    tasks = list(joint["ne"]["joint"])
    lines = ["| test NE | forward TFLOPs | " + " | ".join(tasks) + " |", "|---" * (2 + len(tasks)) + "|"]
    for arm in ARMS:
        cells = [f"{s['mean']:.4f} ± {s['std']:.4f}" for s in joint["summary"][arm].values()]
        lines.append(f"| {arm} | {joint['forward_tflops'][arm]:.2f} | " + " | ".join(cells) + " |")
    lines.append("| oracle | - | " + " | ".join(f"{oracle[f'{t}/oracle_ne']:.4f}" for t in tasks) + " |")
    lines += ["", "| rows | model | MFLOP/row | " + " | ".join(f"gap, {t}" for t in [*tasks, "joint"]) + " |"]
    lines.append("|---" * (4 + len(tasks)) + "|")
    for one in stored["gap"]["runs"]:
        cells = [f"{100 * one['gap'][t]:.1f} %" for t in [*tasks, "joint"]]
        lines.append(f"| {one['rows']:,} | {one['model']} | {one['mflop_per_row']:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(stored: Mapping[str, Any], path: Path) -> None:
    """NE of the arms beside the oracle's; the gap by rows, and by FLOPs of the model."""
    import matplotlib
    from matplotlib.figure import Figure

    joint, gap = stored["joint"], stored["gap"]["runs"]
    tasks = list(joint["ne"]["joint"])
    with matplotlib.rc_context({"font.size": 8, "svg.hashsalt": "gem", "axes.spines.top": False}):
        figure = Figure(figsize=(10, 3), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        for place, arm in enumerate(ARMS):
            found = [joint["summary"][arm][t] for t in tasks]
            at = [i + 0.2 * (place - 1) for i in range(len(tasks))]
            left.errorbar(at, [f["mean"] for f in found], [f["std"] for f in found], fmt="o", markersize=4, label=arm)
        best = [stored["joint_oracle"][f"{t}/oracle_ne"] for t in tasks]
        left.plot(range(len(tasks)), best, "k_", markersize=24, label="oracle")
        left.set_xticks(range(len(tasks)), tasks, rotation=15)
        left.set_ylabel("test NE")
        left.legend(fontsize=7)
        by_rows = sorted((r for r in gap if r["model"] == "s"), key=lambda r: r["rows"])
        by_size = sorted((r for r in gap if r["rows"] == max(g["rows"] for g in gap)), key=lambda r: r["mflop_per_row"])
        for axis, runs, key, title in (
            (middle, by_rows, "rows", "rows of the log"),
            (right, by_size, "mflop_per_row", "forward MFLOP per row"),
        ):
            for task in ("click", "joint"):
                axis.plot([r[key] for r in runs], [100 * r["gap"][task] for r in runs], "o-", label=task)
            axis.set_xscale("log")
            axis.set_xlabel(title)
            axis.set_ylabel("gap to the oracle's NE, %")
            axis.legend(fontsize=7)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    """Run all, write, print."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--rows", type=int, default=2 * BLOCK_ROWS, help="of the log of the arms")
    cli.add_argument("--epochs", type=int, default=1)
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    cli.add_argument("--sizes", type=int, nargs="+", default=[BLOCK_ROWS, 2 * BLOCK_ROWS, 4 * BLOCK_ROWS])
    cli.add_argument("--out", type=Path, default=ROOT / "runs" / "joint")
    cli.add_argument("--results", type=Path, default=RESULTS, help="folder of joint.json and joint.svg")
    cli.add_argument("--quick", action="store_true", help="a few thousand rows: shows that it works, and nothing else")
    cli.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every recipe")
    given = cli.parse_args()
    EVERYWHERE.extend(given.set)
    if given.quick:  # so many clicks that each objective has positives in the few test rows
        given.rows, given.seeds, given.sizes = 8_192, [0], [4_096, 8_192]
        EVERYWHERE.append("data.reader.ctr=0.3")
    config = GeneratedReader.Config(**recipe_of(given.rows, 0).data.reader.options)
    oracle = GeneratedReader(config).oracle("test")
    largest = GeneratedReader(config.model_copy(update={"rows": max(given.sizes)})).oracle("test")
    for task in config.tasks:
        if f"{task}/oracle_ne" not in oracle:
            raise SystemExit(f"{task}: all test labels are alike, so it has no NE: give more --rows")
    stored: dict[str, Any] = {"environment": environment(), "joint_oracle": oracle}
    stored["joint"] = compare(given.rows, given.epochs, given.seeds, config.tasks, given.out)
    known = {key: value for key, value in largest.items() if key.endswith("/oracle_ne")}
    stored["gap"] = gaps(given.sizes, given.epochs, known, given.out)
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "joint.json").write_text(json.dumps(stored, indent=1) + "\n")
    plot(stored, given.results / "joint.svg")
    print(table(stored))


if __name__ == "__main__":
    main()
