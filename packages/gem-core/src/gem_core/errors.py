"""Errors that are the user's to mend: one message, no traceback, and the exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GemError(Exception):
    """Something failed that the message explains fully (exit code 1)."""

    exit_code = 1


class ConfigError(GemError, ValueError):
    """A recipe, schema, option or plugin name is wrong (exit code 2)."""

    exit_code = 2


class DataError(GemError, ValueError):
    """A file, column or value is not what the schema declares (exit code 1)."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a mistyped `name`: `; did you mean "x"?` or the valid names when nothing is close."""
    names = sorted(valid)
    folded = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), folded, n=1)
    if close:
        return f'; did you mean "{folded[close[0]]}"?'
    return f"; valid: {', '.join(names)}" if names else ""
