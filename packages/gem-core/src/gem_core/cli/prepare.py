"""`gem data prepare`: a raw event log to a log that can be trained on."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(short_help="Make impressions, labels, counts and histories from a raw event log.")
@click.argument("options", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option(
    "--partitions", type=click.IntRange(1, 256), help="Parts that the log is cut into: memory is that of one."
)
@click.option("--overwrite", is_flag=True, help="Replace the folder if it is there.")
@click.option("--json", "machine", is_flag=True, help="Write JSON.")
def prepare(options: Path, out: Path, partitions: int | None, overwrite: bool, machine: bool) -> None:
    """Prepare the raw log that the YAML file OPTIONS describes: user, item, time and action of each event.

    Writes train, validation and test rows with labels and as-of counts, the events of each type, a schema and a recipe
    that `gem train` takes. Streams with bounded memory; what is interrupted leaves nothing half-written.
    """
    from dataclasses import asdict

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from gem_core.data.prepare import Options
    from gem_core.data.prepare import prepare as run

    given, console = Options.load(options), Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("log", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=f"{stage} {done:,}" + (f" of {total}" if total else ""))

        found = run(given, out, partitions=partitions, overwrite=overwrite, progress=show)
    if machine:
        click.echo(json.dumps(asdict(found), indent=1))
        return
    for split, rows in found.rows.items():
        labels = "; ".join(f"{task} {p:,} of {n:,}" for task, (n, p) in found.labels[split].items())
        click.echo(f"{split}: {rows:,} rows, positives: {labels}")
    for name, events in found.events.items():
        click.echo(f"{name} events: {events:,}")
    for reason, rows in found.left_out.items():
        click.echo(f"left out: {rows:,} rows: {reason}")
    click.echo(f"train with: gem train {out / 'recipe.yaml'}")
