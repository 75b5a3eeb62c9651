"""Several processes in one test: each rank runs the same function, as under torchrun, over gloo."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run_ranks(world: int, folder: Path, function: Callable[[int], Any]) -> list[Any]:
    """What `function(rank)` returns on each rank, or the exception that it raised; ranks are forked, and all end."""
    port, children = free_port(), []
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    for rank in range(world):
        child = os.fork()
        if child == 0:
            _rank(rank, world, port, folder, function)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return [pickle.loads((folder / f"rank-{rank}.pickle").read_bytes()) for rank in range(world)]


def _rank(rank: int, world: int, port: int, folder: Path, function: Callable[[int], Any]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        try:
            out = function(rank)
        except Exception as error:
            traceback.print_exc()
            out = error
        (folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps(out))
        _save_coverage()
    finally:
        os._exit(0)


def _save_coverage() -> None:
    try:
        from coverage import Coverage
    except ImportError:
        return
    running = Coverage.current()
    if running is not None:
        running.stop()
        running.save()
