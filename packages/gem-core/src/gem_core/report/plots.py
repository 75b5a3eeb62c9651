"""The plots of a report as SVG, drawn by matplotlib (extra: gem-core[demo]) without its global state."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gem_core.errors import ConfigError
from gem_core.report.run import Run, by_name, objectives, surfaces
from gem_core.report.table import mean
from gem_core.report.tables import TITLES, values

COLOURS = ("#0b62d6", "#e8710a", "#188038", "#9334e6", "#d01884", "#80868b")
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa0a6",
    "axes.labelcolor": "#3c4043",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8eaed",
    "xtick.color": "#5f6368",
    "ytick.color": "#5f6368",
    "legend.frameon": False,
    "svg.hashsalt": "gem",  # the same figures give the same bytes
}


@contextmanager
def _panels(columns: int, width: float, height: float) -> Iterator[tuple[Any, list[Any]]]:
    """A figure with a row of axes, in this report's style."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('plots need matplotlib: pip install "gem-core[demo]"') from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _svg(figure: Any) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def colours(runs: Sequence[Run]) -> dict[str, str]:
    """A colour for each model, the same in all plots."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(by_name(runs))}


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    found = {label: handle for a in axes for handle, label in zip(*a.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=max(1, len(found)))


def by_surface(runs: Sequence[Run], metric: str) -> str:
    """A test metric by objective and surface; a dot is a model's mean, a bar its range over seeds."""
    tasks, groups, colour = objectives(runs), by_name(runs), colours(runs)
    places = {task: ["", *surfaces(runs, task)] for task in tasks}
    height = 1.1 + 0.34 * max(map(len, places.values()))
    with _panels(len(tasks), 3.3 * len(tasks), height) as (figure, axes):
        for task, axis in zip(tasks, axes, strict=True):
            for i, (name, group) in enumerate(groups.items()):
                shift = (i - (len(groups) - 1) / 2) * 0.14
                for y, surface in enumerate(places[task]):
                    found = values(group, f"{task}/{surface}/{metric}" if surface else f"{task}/{metric}")
                    if found:
                        axis.plot([min(found), max(found)], [y + shift] * 2, color=colour[name], linewidth=1.5)
                        label = name if y == 0 else None
                        axis.plot(mean(found), y + shift, "o", color=colour[name], markersize=4.5, label=label)
            if metric == "calibration":
                axis.axvline(1, color="#5f6368", linewidth=0.8)
            axis.set_yticks(range(len(places[task])), [s or "all" for s in places[task]])
            axis.invert_yaxis()
            axis.set_title(task)
            axis.set_xlabel(TITLES[metric])
        _legend(figure, axes)
        return _svg(figure)


def learning_curves(runs: Sequence[Run]) -> str:
    """Validation NE of each objective over training time; a ring marks the model that was kept."""
    colour = colours(runs)
    tasks = [t for t in objectives(runs) if any(f"{t}/ne" in line for run in runs for line in run.evaluations)]
    with _panels(len(tasks), 3.3 * len(tasks), 2.9) as (figure, axes):
        for task, axis in zip(tasks, axes, strict=True):
            every = []
            for name, group in by_name(runs).items():
                for run in group:
                    lines = [line for line in run.evaluations if f"{task}/ne" in line]
                    at = [run.seconds_at(line["step"]) for line in lines]
                    ne = [line[f"{task}/ne"] for line in lines]
                    every += ne
                    label = name if run is group[0] else None
                    marker = "o" if len(lines) <= 30 else ""
                    axis.plot(at, ne, color=colour[name], marker=marker, markersize=3, linewidth=1.3, label=label)
                    if run.best_step is not None and f"{task}/ne" in run.validation:
                        place = run.seconds_at(run.best_step), run.validation[f"{task}/ne"]
                        axis.plot(*place, "o", markersize=8, markerfacecolor="none", markeredgecolor=colour[name])
            _limit(axis, every)
            axis.set_title(task)
            axis.set_xlabel("training time, s")
        axes[0].set_ylabel("validation NE")
        _legend(figure, axes)
        return _svg(figure)


def _limit(axis: Any, ne: Sequence[float]) -> None:
    """Leave the untrained beginning of a curve out of sight: what is above NE 1 says little."""
    if ne and min(ne) < 1 < max(ne):
        axis.set_ylim(min(ne) - 0.05 * (1 - min(ne)), 1.0)


def training_loss(runs: Sequence[Run]) -> str:
    """Loss of each objective in training, over time."""
    tasks, colour = objectives(runs), colours(runs)
    with _panels(len(tasks), 3.3 * len(tasks), 2.7) as (figure, axes):
        for task, axis in zip(tasks, axes, strict=True):
            for name, group in by_name(runs).items():
                for run in group:
                    lines = [line for line in run.training if f"{task}/loss" in line]
                    at = [run.seconds_at(line["step"]) for line in lines]
                    label = name if run is group[0] and lines else None
                    axis.plot(
                        at, [line[f"{task}/loss"] for line in lines], color=colour[name], linewidth=1, label=label
                    )
            axis.set_title(task)
            axis.set_xlabel("training time, s")
        axes[0].set_ylabel("training loss")
        _legend(figure, axes)
        return _svg(figure)


def reliability(runs: Sequence[Run]) -> str:
    """Observed rate against mean prediction in ten equal shares of the test rows by prediction."""
    tasks, colour = objectives(runs), colours(runs)
    with _panels(len(tasks), 3.3 * len(tasks), 3.1) as (figure, axes):
        for task, axis in zip(tasks, axes, strict=True):
            every: list[float] = []
            for name, group in by_name(runs).items():
                for run in group:
                    shares = [f"{task}/decile_{i}" for i in range(10)]
                    points = [
                        (run.test[f"{s}/predicted"], run.test[f"{s}/rate"]) for s in shares if f"{s}/rate" in run.test
                    ]
                    points = [point for point in points if min(point) > 0]  # the axes are logarithmic
                    every += [value for point in points for value in point]
                    label = name if run is group[0] else None
                    x, y = [p[0] for p in points], [p[1] for p in points]
                    axis.plot(x, y, color=colour[name], marker="o", markersize=3.5, linewidth=1.1, label=label)
            if every:
                ends = [min(every), max(every)]
                axis.plot(ends, ends, color="#5f6368", linewidth=0.8, zorder=0)
                _logarithmic(axis)
            axis.set_title(task)
            axis.set_xlabel("mean prediction")
        axes[0].set_ylabel("observed rate")
        _legend(figure, axes)
        return _svg(figure)


def _logarithmic(axis: Any) -> None:
    """Logarithmic axes with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_xscale("log")
    axis.set_yscale("log")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
        side.set_minor_locator(NullLocator())
        side.set_major_formatter(StrMethodFormatter("{x:g}"))


def costs(runs: Sequence[Run]) -> str:
    """Training speed, FLOPs per row and fill of each model that says them."""
    groups, colour = by_name(runs), colours(runs)
    panels: list[tuple[str, Callable[[Run], float | None], str]] = [
        ("training rows/s", lambda run: run.rate("samples_per_s"), "{:,.0f}"),
        ("forward MFLOP per row", Run.mflops_per_row, "{:.2f}"),
        ("fill", lambda run: run.rate("fill"), "{:.2f}"),
    ]
    with _panels(len(panels), 9.9, 0.9 + 0.32 * len(groups)) as (figure, axes):
        for (title, get, form), axis in zip(panels, axes, strict=True):
            for y, (name, group) in enumerate(groups.items()):
                found = [value for run in group if (value := get(run)) is not None]
                width = mean(found) if found else 0.0
                axis.barh(y, width, color=colour[name], height=0.6)
                axis.text(width, y, f" {form.format(width)}" if found else " not measured", va="center", fontsize=8)
            axis.set_yticks(range(len(groups)), list(groups))
            axis.invert_yaxis()
            axis.margins(x=0.25)
            axis.grid(axis="y", visible=False)
            axis.set_title(title, fontsize=9)
        return _svg(figure)
