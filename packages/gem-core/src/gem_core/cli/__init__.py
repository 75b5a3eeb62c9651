"""The `gem` command line; see gem_core.cli.app, which is imported when called: Ctrl-C meanwhile ends with one line."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return its exit code."""
    own = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, _quit) if own else None
    try:
        from gem_core.cli.app import run
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    return run(arguments)


def _quit(_: int, __: FrameType | None) -> NoReturn:
    os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)
