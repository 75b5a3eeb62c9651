"""`gem data`: look at a log before training on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from gem_core.errors import ConfigError

UNBROKEN = 10_000
"""Columns of a console that is no terminal: no line of a table is broken in a file or a pipe."""

if TYPE_CHECKING:
    from rich.console import Console

    from gem_core.data.check import Finding
    from gem_core.data.profile import IdProfile, Profile, SplitProfile
    from gem_core.data.readers.base import TableReader


def _log(command: Callable[..., None]) -> Callable[..., None]:
    """The arguments that name a log, of a recipe or of files by a schema; the function gets its reader."""

    @click.argument("target", type=click.Path(path_type=Path))
    @click.argument("rest", nargs=-1, metavar="[FILE | KEY=VALUE]...")
    @click.option("--events", multiple=True, metavar="TYPE=FILE", help="Events of a type (with a schema; repeatable).")
    @click.option(
        "--delimiter", default=",", show_default=True, help="Between the fields of CSV files (with a schema)."
    )
    @click.option("--json", "machine", is_flag=True, help="Write JSON.")
    @wraps(command)
    def named(target: Path, rest: tuple[str, ...], events: tuple[str, ...], delimiter: str, **options: Any) -> None:
        from gem_core.data.readers.base import TableReader

        reader = _of_recipe(target, rest, events) if _is_recipe(target) else _of_files(target, rest, events, delimiter)
        if not isinstance(reader, TableReader):
            raise ConfigError(f"reader {type(reader).__name__} cannot be profiled: it gives no tables")
        command(reader, **options)

    return named


@click.command(short_help="Count what is in a log, and what is wrong with it.")
@_log
def profile(reader: TableReader, machine: bool) -> None:
    """Profile the log of a recipe (TARGET; KEY=VALUE override it), or files of rows (FILE) by a schema (TARGET).

    Shows rows, requests, label rates per objective and surface, history lengths, vocabularies, missing, unseen and
    repeated values, and counts every kind of fault with the place of the first. Exit code 1 if there are faults.
    """
    from gem_core.data.profile import profile as measure

    found = measure(reader)
    if machine:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        show(found)
    if found.faults:
        raise SystemExit(1)


@click.command(short_help="Profile a log and look for leaks of the label and the future.")
@_log
@click.option(
    "--allow", multiple=True, metavar="KIND", help="A kind of finding that is counted, no error (repeatable)."
)
@click.option(
    "--leak-auc",
    default=0.99,
    show_default=True,
    type=click.FloatRange(0.5, 1),
    help="Area under the ROC curve from which on a single column counts as the label.",
)
def check(reader: TableReader, machine: bool, allow: tuple[str, ...], leak_auc: float) -> None:
    """Check the log of a recipe (TARGET; KEY=VALUE override it), or files of rows (FILE) by a schema (TARGET).

    Shows what `gem data profile` shows, and finds faulty values, rows and requests that stand twice or in two splits,
    splits that overlap in time, and features or histories that hold the label or the future. Exit code 1 if anything
    is found whose kind is not allowed.
    """
    from gem_core.data.check import check as look

    found = look(reader, allow=allow, threshold=leak_auc)
    if machine:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        show(found.profile, found.findings)
    if not found.sound:
        raise SystemExit(1)


def _is_recipe(path: Path) -> bool:
    from gem_core.validation import read_yaml

    value = read_yaml(path, str(path))
    return "data" in value or "base" in value


def _of_recipe(path: Path, overrides: Sequence[str], events: Sequence[str]) -> Any:
    from gem_core import recipe
    from gem_core.plugins import default_registry
    from gem_core.schema import Schema

    if events:
        raise ConfigError("--events goes with a schema; a recipe names its own (data.reader.events=...)")
    loaded = recipe.load(path, overrides)
    recipe.check_overridden(loaded, default_registry(), f"recipe {path}", overrides)
    data = loaded.data
    given, schema = data.schema_, None
    if given is not None:
        schema = Schema.load(given) if isinstance(given, str) else Schema.parse(given, "recipe: data.schema")
    reader = data.reader
    return default_registry().create("reader", reader.name, reader.options, "data.reader", schema=schema, seed=0)


def _of_files(path: Path, files: Sequence[str], events: Sequence[str], delimiter: str) -> Any:
    from gem_core.data.readers import CsvReader, ParquetReader
    from gem_core.schema import Schema

    if not files:
        raise ConfigError(f"{path} is a schema: name the files of rows after it (or give a recipe)")
    pairs = [text.partition("=") for text in events]
    wrong = [name + equals for name, equals, file in pairs if not (name and equals and file)]
    if wrong:
        raise ConfigError(f'--events: expected TYPE=FILE, found "{wrong[0]}"')
    options: dict[str, Any] = {"rows": list(files), "events": {name: file for name, _, file in pairs}}
    text = any(f.removesuffix(".gz").endswith((".csv", ".tsv", ".txt")) for f in files)
    if text:
        return CsvReader(CsvReader.Config(**options, delimiter=delimiter, unlabelled="keep"), Schema.load(path))
    return ParquetReader(ParquetReader.Config(**options, unlabelled="keep"), Schema.load(path))


# ---- tables for people ------------------------------------------------------------------------------------------


def show(found: Profile, findings: Sequence[Finding] | None = None) -> None:
    """Print a profile, with its faults or with all findings of a check."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = UNBROKEN
    _show_splits(found, console)
    _show_labels(found.splits, console)
    _show_history(found, console)
    _show_ids(found, console)
    _show_numbers(found.splits, console)
    if findings is not None:
        rows = [[f.kind, f.policy, _number(f.count), f.message] for f in findings]
        _table(console, "Findings", ["kind", "policy", "count", "first"], rows)
        if not findings:
            console.print("Nothing found.")
        return
    if not found.faults:
        console.print("No faults found.")
        return
    _table(console, "Faults", ["count", "first"], [[_number(f.count), f.first] for f in found.faults])


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _table(console: Console, title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table

    if not rows:
        return
    words = {"kind", "policy", "split", "surface", "task", "type", "key", "feature", "table", "from", "to", "first"}
    table = Table(title=title, title_justify="left")
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in words else "right"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in ("from", "to"))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _show_splits(found: Profile, console: Console) -> None:
    columns = ["split", "rows", "requests", "users", "rows/request", "from", "to"]
    columns += ["unlabelled", "repeated row ids", "identical rows"]
    rows = []
    for name, s in found.splits.items():
        each = _number(s.rows / s.requests if s.requests else None)
        counts = [_number(s.unlabelled), _number(s.repeated_row_ids), _number(s.identical_rows)]
        rows.append(
            [name, _number(s.rows), _number(s.requests), _number(s.users), each, s.first or "-", s.last or "-", *counts]
        )
    _table(console, "Splits", columns, rows)


def _show_labels(splits: Mapping[str, SplitProfile], console: Console) -> None:
    rows = [
        [split, task, group, _number(labels.rows), _number(labels.positives), _share(labels.rate)]
        for split, s in splits.items()
        for task, groups in s.labels.items()
        for group, labels in groups.items()
    ]
    _table(console, "Labels", ["split", "task", "surface", "rows", "positives", "rate"], rows)


def _show_history(found: Profile, console: Console) -> None:
    from gem_core.data.profile import QUANTILES

    rows = [
        ["stored", e, _number(p.events), _number(p.users), *(_number(p.per_user.get(q)) for q in QUANTILES), "-"]
        for e, p in found.events.items()
    ]
    rows += [
        [split, e, "-", "-", *(_number(lengths.get(q)) for q in QUANTILES), _share(s.truncated.get(e))]
        for split, s in found.splits.items()
        for e, lengths in s.history.items()
    ]
    title = "Events: per user as stored, and per request as seen by each split"
    _table(console, title, ["split", "type", "events", "users", *QUANTILES, "truncated"], rows)


def _show_ids(found: Profile, console: Console) -> None:
    def row(split: str, key: str, p: IdProfile) -> list[str]:
        return [split, key, _number(p.values), _number(p.distinct), _share(p.missing), _share(p.unseen)]

    rows = [row("stored", f"{e}.{name}", p) for e, of in found.events.items() for name, p in of.ids.items()]
    rows += [row(split, key, p) for split, s in found.splits.items() for key, p in s.ids.items()]
    _table(console, "Ids", ["split", "key", "ids", "distinct", "missing", "unseen"], rows)
    tables = [[name, _number(size)] for name, size in found.tables.items()]
    _table(console, "Vocabularies before max_vocabulary and min_count", ["table", "ids"], tables)


def _show_numbers(splits: Mapping[str, SplitProfile], console: Console) -> None:
    rows = [
        [split, name, _share(n.missing), _number(n.least), _number(n.mean), _number(n.greatest)]
        for split, s in splits.items()
        for name, n in s.numbers.items()
    ]
    _table(console, "Numbers", ["split", "feature", "missing", "least", "mean", "greatest"], rows)
