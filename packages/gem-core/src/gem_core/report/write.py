"""A report over finished runs: report.html, report.md and the plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from gem_core.report import plots
from gem_core.report.document import Block, Code, Document, Facts, Items, Plot, Section, Tables, Text
from gem_core.report.environment import environment
from gem_core.report.run import Run, by_name, objectives
from gem_core.report.tables import quality, speed, summary, verdicts

TERMS = {
    "NE": "normalised entropy: log-loss over that of always predicting the test rows' base rate. 1 is no better than "
    "that; lower is better. Of all objectives together: total log-loss over total entropy.",
    "AUC": "the chance that a positive row is ranked above a negative one; 0.5 is chance, 1 is perfect.",
    "GAUC": "the AUC within each user, averaged by the users' rows: what ranking for one person is worth.",
    "calibration": "sum of predictions over sum of labels; 1 is right, above 1 promises too much.",
    "rows/s, events/s": "training rows, and events of their histories, per second; evaluations are not counted.",
    "MFLOP/row": "forward floating-point operations per row, in millions, from the histories' true lengths.",
    "MFU": "the share of the machine's matrix-product peak that forward and backward together use.",
    "fill": "the share of the computed event positions that hold a real event; what is missing to 1 is padding.",
    "peak GiB": "the most memory that the process had held by the end of the run: of models trained one after another "
    "in one process, a later one's is at least an earlier one's. GPU GiB: the most that the run itself held there.",
}


def build(title: str, subtitle: str, runs: Sequence[Run], about: Mapping[str, Sequence[Block]]) -> Document:
    """The document of a report.

    Args:
        runs: at least one; runs of one name are seeds of one model.
        about: further sections, set before the last, "How it was computed".
    """
    sections = [
        Section("Summary", [Items(verdicts(runs)), summary(runs)]),
        Section("Quality by objective and surface", _quality(runs)),
        Section("Learning", _learning(runs)),
        Section(
            "Speed",
            [
                speed(runs),
                Plot(
                    "costs",
                    plots.costs(runs),
                    "Training speed, forward FLOPs per row, and fill, of the models that have them.",
                ),
            ],
        ),
        Section("Terms", [Facts(TERMS)]),
        *(Section(heading, blocks) for heading, blocks in about.items()),
        Section("How it was computed", _computed(runs)),
    ]
    return Document(title, subtitle, sections)


def _quality(runs: Sequence[Run]) -> list[Block]:
    captions = {
        "ne": "Test NE by objective and surface; lower is better. A dot is a model's mean, a bar its range over seeds.",
        "auc": "Test AUC by objective and surface; higher is better.",
        "calibration": "Sum of predictions over sum of labels; 1 is right.",
    }
    out: list[Block] = [Tables({task: quality(runs, task) for task in objectives(runs)})]
    out += [Plot(metric, plots.by_surface(runs, metric), caption) for metric, caption in captions.items()]
    caption = (
        "Reliability: observed rate against mean prediction in ten equal shares of the test rows by prediction, on "
        "logarithmic axes. On the diagonal the promise is kept."
    )
    return [*out, Plot("reliability", plots.reliability(runs), caption)]


def _learning(runs: Sequence[Run]) -> list[Block]:
    out: list[Block] = []
    if any(run.evaluations for run in runs):
        caption = "Validation NE over training time; a ring marks the step that was kept and tested."
        out.append(Plot("learning", plots.learning_curves(runs), caption))
    if any(run.training for run in runs):
        out.append(Plot("loss", plots.training_loss(runs), "Loss on the training rows between two lines of the log."))
    return out


def _computed(runs: Sequence[Run]) -> list[Block]:
    seeds = {name: ", ".join(str(run.seed) for run in group) for name, group in by_name(runs).items()}
    facts = environment() | {"seeds": "; ".join(f"{name} {found}" for name, found in seeds.items())}
    recipes = [
        Code(f"{name}: resolved recipe", yaml.safe_dump(dict(group[0].recipe), sort_keys=False, allow_unicode=True))
        for name, group in by_name(runs).items()
    ]
    choice = "The step of each run was chosen on the validation split; the test split was looked at once, after that."
    return [Text(choice), Facts(facts), *recipes]


def write(document: Document, folder: Path) -> tuple[Path, Path]:
    """Write `folder`/report.html and report.md with plots/*.svg; returns the paths of the two."""
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    for name, svg in document.plots().items():
        (folder / "plots" / name).write_text(svg)
    page, text = folder / "report.html", folder / "report.md"
    page.write_text(document.html())
    text.write_text(document.markdown("plots"))
    return page, text
