"""The demo's stages, in order."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import click

from gem_core.data.completejourney import CompleteJourneyReader
from gem_core.demo.console import DemoPlugin, define, heading, progress, say
from gem_core.demo.log import describe, explain_log, prepare_log
from gem_core.demo.runs import train_model, train_trees
from gem_core.demo.trees import WIDE_IDS, TreeFeatures, TreeOptions
from gem_core.plugins import discover
from gem_core.recipe import Recipe, load
from gem_core.report import Facts, Run, build, write
from gem_core.report.tables import quality, speed, summary, verdicts

MODELS = {
    "kunlun": """
        GEM's model, Kunlun: each history is summarised by seed pooling and attention, once per request and shared by
        its rows; Wukong layers mix the summaries with all other features; one head per objective reads the result.
        Histories are ragged: a household with 3 purchases costs 3 positions, not the longest one's number. "fill" is
        the share of the computed positions that are real events.""",
    "din": """
        DIN, the usual attention model: every row attends anew to the newest 64 events of each history.""",
    "dcnv2": """
        DCNv2: explicit crosses of features beside a deep network; of a history, the mean of its newest 64 events.""",
}
TREES = """
    LightGBM on the same rows: no histories, but everything that was counted from them: how often, how recently and at
    what rate the household, and everybody, bought the product, its type, its category. This is what a practitioner
    would try first."""
SIMULATED = "Complete Journey: a grocery log that its authors call simulated from real shopping patterns"


@dataclass(frozen=True)
class Size:
    """How much the demo does: overrides of the recipes, and the trees' options. `households`: None for the recipe's."""

    households: int | None
    overrides: tuple[str, ...]
    trees: TreeOptions


FULL = Size(None, (), TreeOptions(learning_rate=0.05, leaves=63, trees=500, patience=30, threads=1))
QUICK = Size(
    100,
    ("trainer.epochs=1", "trainer.log_every=5", "trainer.evaluate_every=10", "optimizer.warmup_steps=5"),
    TreeOptions(learning_rate=0.1, leaves=31, trees=100, patience=15, threads=1),
)


def run(size: Size, out: Path) -> list[Run]:
    """Everything, into `out`: the runs, report.html and report.md. Returns the runs."""
    start = time.monotonic()
    recipes = recipes_for(size, out)
    data = recipes["kunlun"].data
    heading("1. The log")
    explain_log()
    manifest = prepare_log(data.reader.options.get("households"))
    forget_other_log(out, manifest["options"]["hash"])
    facts = describe(manifest)
    for name, fact in facts.items():
        define(name, fact)
    runs = []
    registry = discover()
    registry.register_plugin(DemoPlugin, "gem-core-demo")
    for number, (name, recipe) in enumerate(recipes.items(), 2):
        heading(f"{number}. Train {recipe.name}")
        say(MODELS[name])
        runs.append(train_model(recipe, registry))
    heading(f"{len(runs) + 2}. Train LightGBM")
    say(TREES)
    runs.append(_trees(recipes["kunlun"], size, out / "lightgbm"))
    heading(f"{len(runs) + 2}. Results on the test weeks")
    show_results(runs)
    document = build("GEM demo", SIMULATED, runs, {"The log": [Facts({"source": SIMULATED, **facts})]})
    page, text = write(document, out)
    heading("Report")
    progress(f"{page}  (open it in a browser; it loads nothing from elsewhere)")
    progress(f"{text}")
    progress(
        f"{time.monotonic() - start:.0f} s in all; run the command again and what is finished is not trained again"
    )
    return runs


def forget_other_log(out: Path, content: str) -> None:
    """Delete the runs of a folder that were on other rows: another sample, or a log prepared by another release."""
    stamp = out / "log"
    if stamp.exists() and stamp.read_text() != content:
        progress("the log is not that of the runs in this folder: they start over")
        for name in (*MODELS, "lightgbm"):
            shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    stamp.write_text(content)


def recipes_for(size: Size, out: Path) -> dict[str, Recipe]:
    """The recipes of the neural models, by name, at a size and into a folder."""
    found = {}
    with as_file(files("gem_core.demo") / "recipes") as folder:
        for name in MODELS:
            overrides = [*size.overrides, f"output={out / name}", "trackers=[jsonl, demo]"]
            if size.households is not None:
                overrides.append(f"data.reader.households={size.households}")
            found[name] = load(folder / f"{name}.yaml", overrides)
    return found


def _trees(recipe: Recipe, size: Size, folder: Path) -> Run:
    """LightGBM on the rows of a recipe's reader; free ids only overfit, here as in the others."""
    reader = CompleteJourneyReader(CompleteJourneyReader.Config(**recipe.data.reader.options), seed=recipe.seed)
    features = TreeFeatures(reader.schema, WIDE_IDS)
    return train_trees(reader, recipe.dump()["data"], folder, features, size.trees)


def show_results(runs: Sequence[Run]) -> None:
    """The tables of the report, for a terminal, and what their columns mean."""
    define(
        "NE",
        "normalised entropy: log-loss over that of predicting the base rate. 1 = learned nothing; lower is better.",
    )
    define(
        "AUC", "the chance that a positive row is ranked above a negative one. GAUC: the same within each household."
    )
    define("calibration", "sum of predictions over sum of labels: 1 is right.")
    click.echo(f"\n{summary(runs).text()}\n* best of the column")
    tasks = [t for t in ("purchase", "repurchase", "redeem") if any(f"{t}/ne" in run.test for run in runs)]
    for task in tasks:
        click.echo(f"\n{task}, by surface\n{quality(runs, task).text()}")
    click.echo(f"\nwhat training cost\n{speed(runs).text()}\n")
    for sentence in verdicts(runs):
        say(sentence)


def size_of(quick: bool, households: int | None) -> Size:
    """The size that the command line asks for."""
    size = QUICK if quick else FULL
    return size if households is None else Size(households, size.overrides, size.trees)
