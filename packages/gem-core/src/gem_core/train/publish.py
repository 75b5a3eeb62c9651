"""The callback that hands checkpoints on while a run follows a folder."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from gem_core.protocols import Callback, ComponentConfig

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Publish(Callback):
    """Every so many windows of `follow`, write a checkpoint and run a command with it, an export for one."""

    class Config(ComponentConfig):
        """`command` may hold {checkpoint}, {run}, {window} (the file's name without suffix) and {step}; no shell runs it.
        If it fails, the log says so and training goes on."""

        windows: int = Field(1, ge=1)
        command: str | None = None

        @field_validator("command")
        @classmethod
        def _known_placeholders(cls, value: str | None) -> str | None:
            if value is not None:
                try:
                    [word.format(checkpoint="", run="", window="", step=0) for word in shlex.split(value)]
                except (KeyError, IndexError, ValueError, AttributeError) as error:
                    expected = "a command with no placeholders but {checkpoint}, {run}, {window} and {step}"
                    raise ValueError(f"expected {expected}, found {value!r}") from error
            return value

    def __init__(self, config: Config) -> None:
        self.config = config

    def on_window(self, trainer: Any, name: str, metrics: Mapping[str, float]) -> None:
        """Write the checkpoint if it is due; the first rank runs the command."""
        if trainer.state.windows % self.config.windows:
            return
        checkpoint = trainer.checkpoint()
        if self.config.command is None or trainer.strategy.rank != 0:
            return
        known = {"checkpoint": checkpoint, "run": trainer.folder, "window": Path(name).stem, "step": trainer.state.step}
        words = [word.format(**known) for word in shlex.split(self.config.command)]
        trainer.note("publish", f"{shlex.join(words)}: {_run(words)}")


def _run(words: list[str]) -> str:
    """How a command ended."""
    alone = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    try:
        done = subprocess.run(words, env=alone, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        return f"failed: {error.strerror}"
    if done.returncode == 0:
        return "done"
    return f"failed with exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}"
