"""A run's folder: one process writes to it at a time, and what it writes is whole or not there."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gem_core.errors import ConfigError, main_process

LOCK = "lock"
"""The file that the process at work holds locked; it says which one that is."""

_HELD: set[int] = set()


def _let_go() -> None:
    for handle in _HELD:
        os.close(handle)
    _HELD.clear()


# A reader process outlives a killed trainer for a moment; with the handle it would keep the lock.
os.register_at_fork(after_in_child=_let_go)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and hold it; the kernel lets go when this process ends, however it ends.

    Of the processes of one run (torchrun), the first holds it for all.

    Raises:
        ConfigError: another process holds it, or nothing can be written there.
    """
    if not main_process():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(unwritable(f"output {folder}", error)) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            raise ConfigError(f"{folder} is in use by process {owner}; choose another output, or wait") from error
        _HELD.add(handle)
        with suppress(OSError):  # a full disk: the lock holds without the number
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        _HELD.discard(handle)
        os.close(handle)


def unwritable(what: str, error: OSError) -> str:
    """Why a file or folder cannot be written, and what to do."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{what}: expected a folder, found a file there; choose another"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}: the disk is full; free some space there, or choose another place"
    return f"{what}: cannot be written: {error.strerror}; choose another place"


def write_whole(path: Path, text: str) -> None:
    """Replace a file by one with this text."""
    hidden = path.with_name(f".{path.name}")
    try:
        hidden.write_text(text)
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)
