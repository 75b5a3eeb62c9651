"""The tables of a report, made from runs: summary, quality by objective and surface, speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gem_core.report.run import Run, by_name, objectives, surfaces
from gem_core.report.table import MISSING, Cell, Section, Table, figure, mean

BEST: dict[str, Callable[[float], float]] = {
    "ne": lambda value: value,
    "auc": lambda value: -value,
    "gauc": lambda value: -value,
    "calibration": lambda value: abs(value - 1),
}
"""Metrics of quality, and the quantity of which the lowest is best."""
TITLES = {"ne": "NE", "auc": "AUC", "gauc": "GAUC", "calibration": "calibration"}


def values(runs: Sequence[Run], metric: str) -> list[float]:
    """A test metric of each of a model's runs that has it."""
    return [run.test[metric] for run in runs if metric in run.test]


def summary(runs: Sequence[Run]) -> Table:
    """One row a model: joint NE, then NE and AUC of each objective."""
    metrics = {"joint NE": "joint/ne"}
    for task in objectives(runs):
        metrics |= {f"{task} NE": f"{task}/ne", f"{task} AUC": f"{task}/auc"}
    return Table(("model", *metrics), (_section("", runs, list(metrics.values())),))


def quality(runs: Sequence[Run], objective: str) -> Table:
    """NE, AUC, GAUC and calibration of every model, on all surfaces and on each."""
    sections = []
    for name in ["", *surfaces(runs, objective)]:
        at = f"{objective}/{name}" if name else objective
        rows = next((run.test[f"{at}/rows"] for run in runs if f"{at}/rows" in run.test), 0.0)
        rate = runs[0].test.get(f"{at}/base_rate")
        heading = f"{name or 'all surfaces'} ({rows:,.0f} rows{f', base rate {rate:.2%}' if rate is not None else ''})"
        sections.append(_section(heading, runs, [f"{at}/{metric}" for metric in BEST]))
    return Table(("model", *TITLES.values()), tuple(sections))


def _section(heading: str, runs: Sequence[Run], metrics: Sequence[str]) -> Section:
    groups = by_name(runs)
    best = {}
    for metric in metrics:
        key = BEST[metric.rpartition("/")[2]]
        means = [key(mean(found)) for group in groups.values() if (found := values(group, metric))]
        best[metric] = min(means, default=None)
    rows = []
    for name, group in groups.items():
        cells = [Cell(name)]
        for metric in metrics:
            found = values(group, metric)
            key = BEST[metric.rpartition("/")[2]]
            cells.append(Cell(figure(found), bool(found) and len(groups) > 1 and key(mean(found)) == best[metric]))
        rows.append(tuple(cells))
    return Section(heading, tuple(rows))


def speed(runs: Sequence[Run]) -> Table:
    """What training cost: time, rows and events per second, FLOPs, fill, memory. Means over the seeds of a model."""
    columns: dict[str, Callable[[Run], float | None]] = {
        "training s": lambda run: run.seconds,
        "rows/s": lambda run: run.rate("samples_per_s"),
        "events/s": lambda run: run.rate("events_per_s"),
        "MFLOP/row": lambda run: run.flops_per_row and run.flops_per_row / 1e6,
        "MFU": lambda run: run.rate("mfu"),
        "fill": lambda run: run.rate("fill"),
        "peak GiB": lambda run: run.memory,
    }
    digits = {"training s": 0, "rows/s": 0, "events/s": 0}
    rows = []
    for name, group in by_name(runs).items():
        cells = [Cell(name)]
        for column, get in columns.items():
            found = [value for run in group if (value := get(run)) is not None]
            cells.append(Cell(f"{mean(found):,.{digits.get(column, 2)}f}" if found else MISSING))
        rows.append(tuple(cells))
    return Table(("model", *columns), (Section("", tuple(rows)),))


def verdicts(runs: Sequence[Run]) -> list[str]:
    """One sentence an objective: which model has the lowest test NE, and by how much."""
    groups = by_name(runs)
    seeds = min(len(group) for group in groups.values())
    out = []
    for metric in ["joint/ne", *(f"{task}/ne" for task in objectives(runs))]:
        found = {name: mean(v) for name, group in groups.items() if (v := values(group, metric))}
        first, *others = sorted(found, key=lambda name: found[name])
        task = metric.partition("/")[0]
        task = "All objectives together" if task == "joint" else task
        said = f"{task}: {first} has the lowest NE, {figure(values(groups[first], metric))}"
        if others:
            behind = 1 - found[first] / found[others[0]]
            said += f", {behind:.2%} below {others[0]} ({figure(values(groups[others[0]], metric))})"
            auc = metric.replace("/ne", "/auc")
            pair = [values(groups[name], auc) for name in (first, others[0])]
            if all(pair):
                said += f"; its AUC is {figure(pair[0])} against {figure(pair[1])}"
        out.append(said + ".")
    if len(groups) > 1 and seeds == 1:
        out.append(
            "One seed a model: small differences may be chance. A claim needs at least three seeds and their spread."
        )
    return out
