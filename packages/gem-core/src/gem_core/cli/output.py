"""What commands print: a table for people, or JSON alone on stdout with everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, is_dataclass
from typing import Any

import click


@contextmanager
def results(machine: bool) -> Iterator[Callable[[Any, str], None]]:
    """`show(value, text)` prints one of the two; for a machine, whatever else is printed meanwhile goes to stderr."""
    stdout = sys.stdout

    def show(value: Any, text: str) -> None:
        plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        click.echo(json.dumps(plain, default=str, indent=1) if machine else text, file=stdout)

    with redirect_stdout(sys.stderr if machine else stdout):
        yield show


def metrics_table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Metrics per task (not per surface or decile) as rows, splits as columns; splits without metrics are left out."""
    shown = {split: metrics for split, metrics in columns.items() if metrics}
    names = dict.fromkeys(n for metrics in shown.values() for n in metrics if n.count("/") == 1)
    width = max(map(len, names), default=0)
    lines = [" ".join([" " * width, *(f"{split:>12}" for split in shown)])]
    for name in names:
        values = (f"{metrics[name]:>12.5g}" if name in metrics else f"{'-':>12}" for metrics in shown.values())
        lines.append(" ".join([f"{name:<{width}}", *values]))
    return "\n".join(lines)
