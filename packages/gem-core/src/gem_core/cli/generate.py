"""`gem data generate`: a generated ads log as files, or just its rates and oracle."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from gem_core.cli.output import results
from gem_core.errors import ConfigError


@click.command(short_help="Write a generated ads log whose best possible NE is known.")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("--rows", type=int, help="Rows (impressions) of the log.")
@click.option("--users", type=int, help="Users of the log (default: one per 128 rows).")
@click.option("--seed", type=int, help="Fixes the log bit for bit.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="YAML file with options of the reader `generated`, or a recipe with that reader.",
)
@click.option("--json", "machine", is_flag=True, help="Write the manifest as JSON.")
def generate(
    out: Path | None, rows: int | None, users: int | None, seed: int | None, config: Path | None, machine: bool
) -> None:
    """Write a generated ads log to the new folder OUT, and show its label rates and the best possible NE per objective.

    OUT gets train/, validation/ and test/ by time (Parquet), events/<type>.parquet, schema.yaml for the reader `parquet`,
    and manifest.json. Columns oracle_<objective> hold the true probabilities; the schema does not use them. Without OUT
    nothing is written: that shows the oracle of a recipe's log.
    """
    from gem_core.data.generated import measure, write
    from gem_core.plugins import default_registry

    options, where = ({}, "options") if config is None else _options(config)
    given = {"rows": rows, "users": users, "seed": seed}
    options |= {name: value for name, value in given.items() if value is not None}
    blamed: dict[tuple[int | str, ...], str] = {(n,): f"--{n} {v}" for n, v in given.items() if v is not None}
    checked = default_registry().config("reader", "generated", options, where, (), blamed)

    def progress(stage: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{stage} {100 * done // total} %  ", nl=done == total, err=True)

    manifest = measure(checked, progress) if out is None else write(checked, out, progress)
    with results(machine) as show:
        show(manifest, _table(manifest, out))


def _options(path: Path) -> tuple[dict[str, Any], str]:
    """The options in a file, and what messages call it."""
    from gem_core.recipe import load
    from gem_core.validation import read_yaml

    value = read_yaml(path, str(path))
    if "data" not in value and "base" not in value:
        return value, str(path)
    reader = load(path).data.reader
    if reader.name != "generated":
        raise ConfigError(f'{path}: data.reader: expected the reader "generated", found "{reader.name}"')
    return reader.options, f"{path}: data.reader"


def _table(manifest: Mapping[str, Any], out: Path | None) -> str:
    """A line per split and objective."""
    rows = sum(int(split["click/rows"]) for split in manifest["splits"].values())
    place = "" if out is None else f" in {out}"
    lines = [
        f"{rows:,} rows, {sum(manifest['requests'].values()):,} requests, {manifest['users']:,} users{place}",
        f"{'split':<11}{'objective':<14}{'rows':>13}{'positives':>11}{'rate':>9}{'oracle NE':>11}{'expected':>10}"
        f"{'no history':>12}",
    ]
    for split, found in manifest["splits"].items():
        for task in [name.removesuffix("/rows") for name in found if name.endswith("/rows")]:
            rate = found.get(f"{task}/rate")
            cells = [found.get(f"{task}/{name}") for name in ("oracle_ne", "expected_ne", "static_ne")]
            shown = [
                f"{c:>{w}.4f}" if c is not None else f"{'-':>{w}}" for c, w in zip(cells, (11, 10, 12), strict=True)
            ]
            share = f"{100 * rate:>7.2f} %" if rate is not None else f"{'-':>9}"
            counts = f"{found[f'{task}/rows']:>13,.0f}{found[f'{task}/positives']:>11,.0f}"
            lines.append(f"{split:<11}{task:<14}{counts}{share}{''.join(shown)}")
    return "\n".join(lines)
