"""`gem predict`: probabilities for the rows of a file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gem_core.errors import ConfigError


@click.command(short_help="Score the rows of a file with a run.")
@click.argument("run", metavar="RUN_OR_CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--rows", required=True, metavar="FILE", help="Rows to score, as the run's reader takes them.")
@click.option("--events", multiple=True, metavar="TYPE=FILE", help="Events of a type (default: the run's); repeatable.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A .parquet or .csv file.")
def predict(run: Path, rows: str, events: tuple[str, ...], out: Path) -> None:
    """Score the rows of a file with a run (its best checkpoint, else its newest) or a checkpoint.

    The rows need no labels. The output has them in order: row_id (the row's place in the file, from 0, if the schema
    names none), request (if the schema names it) and user, as they are in the file, and a probability per objective.
    """
    from gem_core.train import predict as write

    # Quoted: override values are YAML, and a path may look like something else.
    overrides = ["data.reader.split=null", f"data.reader.test={json.dumps(rows)}", "data.reader.unlabelled=keep"]
    for text in events:
        kind, equals, file = text.partition("=")
        if not (kind and equals and file):
            raise ConfigError(f'--events "{text}": expected TYPE=FILE')
        overrides.append(f"data.reader.events.{kind}={json.dumps(file)}")
    count = write(run, out, "test", overrides)
    click.echo(f"{count} rows in {out}")
