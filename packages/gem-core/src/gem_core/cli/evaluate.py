"""`gem eval`: metrics of a run or checkpoint on a split."""

from __future__ import annotations

from pathlib import Path

import click

from gem_core.cli.output import metrics_table, results
from gem_core.errors import main_process


@click.command(short_help="Evaluate a run or a checkpoint on a split.")
@click.argument("run", metavar="RUN_OR_CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--split", default="test", show_default=True, help="One of the reader's splits.")
@click.option("--json", "machine", is_flag=True, help="Write every metric, by surface and decile too, as JSON.")
def evaluate(run: Path, overrides: tuple[str, ...], split: str, machine: bool) -> None:
    """Evaluate a run (its best checkpoint, else its newest) or a checkpoint on a split of its data.

    KEY=VALUE overrides a key of its recipe, as in data.reader.test=other.csv.
    """
    from gem_core.train import evaluate as measure

    with results(machine) as show:
        metrics = measure(run, split, overrides)
        if main_process():
            show(metrics, metrics_table({split: metrics}))
