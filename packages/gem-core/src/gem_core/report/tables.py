"""The tables of a report, made from runs: summary, quality by objective and surface, speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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


FEW = 300
"""With fewer positive test rows than this, nothing is concluded: the NE's own error is several per cent."""


def counted(runs: Sequence[Run], name: str) -> float | None:
    """A count of the test split, which is the same for all runs; None where none has it."""
    return next((run.test[name] for run in runs if name in run.test), None)


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
        counts = {what: counted(runs, f"{at}/{key}") for what, key in {"rows": "rows", "positive": "positives"}.items()}
        said = ", ".join(f"{count:,.0f} {what}" for what, count in counts.items() if count is not None)
        heading = f"{name or 'all surfaces'} ({said})"
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
    columns: dict[str, tuple[Callable[[Run], float | None], int]] = {
        "training s": (lambda run: run.seconds, 0),
        "rows/s": (lambda run: run.rate("samples_per_s"), 0),
        "events/s": (lambda run: run.rate("events_per_s"), 0),
        "MFLOP/row": (Run.mflops_per_row, 2),
        "MFU": (lambda run: run.rate("mfu"), 2),
        "fill": (lambda run: run.rate("fill"), 2),
        "peak GiB": (lambda run: run.largest("rss_gib"), 1),
    }
    if any(run.largest("gpu_gib") is not None for run in runs):
        columns["GPU GiB"] = (lambda run: run.largest("gpu_gib"), 1)
    rows = []
    for name, group in by_name(runs).items():
        cells = [Cell(name)]
        for get, digits in columns.values():
            found = [value for run in group if (value := get(run)) is not None]
            cells.append(Cell(f"{mean(found):,.{digits}f}" if found else MISSING))
        rows.append(tuple(cells))
    return Table(("model", *columns), (Section("", tuple(rows)),))


def verdicts(runs: Sequence[Run]) -> list[str]:
    """One sentence an objective: which model has the lowest test NE, and by how much; then what weakens it."""
    groups = by_name(runs)
    out = [_verdict(groups, "joint", "All objectives together")] if values(runs, "joint/ne") else []
    for task in objectives(runs):
        positives = counted(runs, f"{task}/positives")
        few = positives is not None and positives < FEW
        said = f" Only {positives:,.0f} test rows are positive: nothing follows from this." if few else ""
        out.append(_verdict(groups, task, task) + said)
    if len(groups) > 1 and min(map(len, groups.values())) < 3:
        out.append("Fewer than three seeds a model: a small difference may be chance, and none of this is a claim.")
    return out


def _verdict(groups: Mapping[str, Sequence[Run]], task: str, called: str) -> str:
    ne, auc = f"{task}/ne", f"{task}/auc"
    found = {name: mean(v) for name, group in groups.items() if (v := values(group, ne))}
    first, *others = sorted(found, key=lambda name: found[name])
    said = f"{called}: {first} has the lowest NE, {figure(values(groups[first], ne))}"
    if others:
        second = others[0]
        said += f", {1 - found[first] / found[second]:.2%} below {second} ({figure(values(groups[second], ne))})"
        pair = [values(groups[name], auc) for name in (first, second)]
        said += f"; AUC {figure(pair[0])} against {figure(pair[1])}" if all(pair) else ""
    return f"{said}."
