"""torch.compile for a run: the model's forward and backward in compiled pieces, kept on the disk for the next start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gem_core.errors import ConfigError, GemError
from gem_core.train.build import Parts

OFF = "set trainer.compile=false to train without it"


def compile_parts(parts: Parts) -> None:
    """Have the module that is called compiled at its first batch, for any number of rows, requests and events.

    The look-up of tables stays as it is. Compiled code is cached in $TORCHINDUCTOR_CACHE_DIR, else "compile" in
    $GEM_CACHE, else in ~/.cache/gem.

    Raises:
        ConfigError: on a processor without a C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if parts.strategy.device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f'trainer.compile: there is no C++ compiler "{compiler}" (or name one in CXX): install it, or {OFF}'
        )
    cache = Path(os.environ.get("GEM_CACHE") or "~/.cache/gem").expanduser() / "compile"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    embedding: Any = parts.embedding
    embedding.lookup = torch.compiler.disable(embedding.lookup)
    parts.module.compile(dynamic=True)


@contextmanager
def compiling() -> Iterator[None]:
    """Say what to do where the compiler fails."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise GemError(f"trainer.compile: the model cannot be compiled ({said}); {OFF}") from error
