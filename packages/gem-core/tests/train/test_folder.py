"""One process at a time writes a run's folder; what cannot be written, or held in memory, is one message."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from synthetic import recipe, registry

from gem_core.errors import ConfigError, GemError
from gem_core.train import train
from gem_core.train.folder import locked, unwritable, write_whole
from gem_core.train.memory import enough_memory


def test_a_second_run_in_a_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    message = f"^{folder} is in use by process {os.getpid()}; choose another output, or wait$"
    with locked(folder), pytest.raises(ConfigError, match=message):
        train(recipe(folder), registry())
    assert list(folder.iterdir()) == [folder / "lock"], "the second run wrote nothing"
    with locked(folder):
        pass


def test_another_process_is_named(tmp_path: Path) -> None:
    program = f"""
import pathlib, sys
from gem_core.train.folder import locked
with locked(pathlib.Path({str(tmp_path)!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"in use by process {other.pid};"), locked(tmp_path):
            pass
        other.kill()
        other.wait()
        with locked(tmp_path):
            assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_forked_reader_does_not_hold_the_folder(tmp_path: Path) -> None:
    read, write = os.pipe()
    forked, ready = os.pipe()
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            os.write(ready, b"x")
            os.read(read, 1)
            os._exit(0)
        os.read(forked, 1)
    with locked(tmp_path):
        os.write(write, b"x")
    assert os.waitpid(child, 0)[1] == 0


def test_other_ranks_leave_the_lock_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with locked(tmp_path), locked(tmp_path / "other"):
            assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "x: the disk is full; free some space there"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), "x: expected a folder, found a file there"),
        (PermissionError(errno.EACCES, "Permission denied"), "x: cannot be written: Permission denied; choose another"),
    ],
)
def test_why_a_place_cannot_be_written(error: OSError, says: str) -> None:
    assert unwritable("x", error).startswith(says)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "one")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "t\udc00o")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


def test_memory_that_is_not_enough() -> None:
    message = r"^out of memory: .*you tried to allocate \d+ bytes.*lower data.batch_rows"
    with pytest.raises(GemError, match=message), enough_memory():
        torch.empty(10**15)
    with pytest.raises(GemError, match=r"^out of memory: an allocation failed\. Make the model"), enough_memory():
        raise MemoryError
    with pytest.raises(RuntimeError, match=r"^a bug$"), enough_memory():
        raise RuntimeError("a bug")
