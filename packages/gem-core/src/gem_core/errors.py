"""Errors that are the user's to mend: one message, no traceback, and the exit code of the command line."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

SHOWN = 20
"""Valid names that a message lists."""


class GemError(Exception):
    """Something failed that the message explains fully (exit code 1)."""

    exit_code = 1


class ConfigError(GemError, ValueError):
    """A recipe, schema, option or plugin name is wrong (exit code 2)."""

    exit_code = 2


class DataError(GemError, ValueError):
    """A file, column or value is not what the schema declares (exit code 1)."""


def main_process() -> bool:
    """Whether this process speaks for the run (rank 0 under torchrun)."""
    return os.environ.get("RANK", "0") == "0"


def warn(message: str) -> None:
    """Say on stderr what is no error but hardly meant; the logger "gem_core" carries it. Of many processes the first."""
    if main_process():
        logging.getLogger("gem_core").warning("warning: %s", message)


def looked_for(path: Path) -> str:
    """Where a relative path was looked for, for a message that it is not there."""
    return "" if path.is_absolute() else f" (looked for {path.absolute()}: relative to the current folder)"


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a mistyped `name`: `; did you mean "x"?`, or the valid names when none is really near."""
    names = sorted(valid)
    found = min(((d, each) for each in names if (d := _typos(name.lower(), each.lower())) is not None), default=None)
    if found is not None:
        return f'; did you mean "{found[1]}"?'
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return f"; valid: {shown}" if names else ""


def _typos(name: str, other: str) -> int | None:
    """Letters put in, left out, replaced or swapped between two names; None where they are too many for a typo."""
    short, long = sorted((len(name), len(other)))
    if short >= 3 and long <= 2 * short + 1 and (name.startswith(other) or other.startswith(name)):
        return long - short
    limit = 1 if long <= 5 else 2 if long <= 10 else 3
    if long - short > limit or (short < 5 and name[:1] != other[:1]):
        return None
    before, row = [], list(range(len(other) + 1))
    for i, a in enumerate(name, 1):
        before, last, row = row, before, [i]
        for j, b in enumerate(other, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b)))
            if i > 1 and j > 1 and a == other[j - 2] and b == name[i - 2]:
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1] if row[-1] <= limit else None
