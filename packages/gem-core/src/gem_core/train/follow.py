"""Continuous training: files that arrive in a folder are windows of the log, each evaluated and then trained on once.

The windows come in order of name. A checkpoint knows the window and the place in it, so a run that was killed goes on with
the very next batch, and a new start with the next file. All ranks follow the first one's view of the folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gem_core.errors import ConfigError, DataError
from gem_core.recipe import Follow
from gem_core.train.build import Parts, create
from gem_core.train.state import Status

if TYPE_CHECKING:
    from gem_core.train.trainer import Trainer

Event = tuple[Literal["window", "wait", "end"], str]
TICK = 0.2
"""Longest sleep, in seconds, after which a signal is looked for."""


class Follower:
    """What a trainer does once its epochs are done.

    Raises:
        ConfigError: no such folder, or a reader without the option `rows`.
    """

    def __init__(
        self,
        trainer: Trainer,
        options: Follow,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.trainer, self.options, self.clock, self.sleep = trainer, options, clock, sleep
        self.state = trainer.state
        self.folder = Path(options.folder).expanduser()
        if not self.folder.is_dir():
            raise ConfigError(f"follow.folder: {self.folder} is no folder; make it, or name another")
        reader = trainer.recipe.data.reader
        if "rows" not in type(trainer.parts.reader).Config.model_fields:
            raise ConfigError(f'follow: reader "{reader.name}" has no option `rows` to name a file; use parquet or csv')
        # A window's file stands for the rows; what splits these, or names other files, is not the window's.
        kept = {key: value for key, value in reader.options.items() if key not in ("split", "validation", "test")}
        self._reader = {"name": reader.name, **kept}
        self._behind: set[str] | None = None

    def run(self) -> Status:
        """Train on window after window until the folder is idle, a stop file or signal comes, or the steps are done."""
        parts = None if self.state.file_ended else self._parts(self.state.file)
        idle_since = self.clock()
        while True:
            if parts is not None:
                ended = self.trainer.train_on(parts)
                if ended is not None:
                    return ended
                self._end()
                parts, idle_since = None, self.clock()
            what, text = self.trainer.strategy.gather(self._look(idle_since))[0]
            if self.trainer.interrupted():
                self.trainer.save()
                return "interrupted"
            if what == "end":
                self.trainer.note("follow", f"{text}; {self.state.windows} windows so far")
                return "finished"
            if what == "wait":
                self._wait()
            else:
                parts = self._begin(text)

    def _look(self, idle_since: float) -> Event:
        """What is next, as this process sees the folder."""
        stop, idle = self.folder / self.options.stop_file, self.options.idle_s
        if stop.exists():
            return "end", f"found {stop}"
        names = sorted(f.name for f in self.folder.glob(self.options.pattern) if f.is_file() and f.name[0] not in "._")
        behind = {name for name in names if name <= self.state.file}
        for name in sorted(behind - self._behind) if self._behind is not None else ():
            self.trainer.note("follow", f"{name} came after {self.state.file} and is left out: windows go by name")
        self._behind = behind | set(names[: len(behind) + 1])  # with the one that is begun now
        if len(names) > len(behind):
            return "window", names[len(behind)]
        if idle is not None and self.clock() - idle_since >= idle:
            return "end", f"no new file within {idle:g} s"
        return "wait", ""

    def _wait(self) -> None:
        """Sleep until the next look, or a signal."""
        until = self.clock() + self.options.poll_s
        while (left := until - self.clock()) > 0 and not self.trainer.signalled:
            self.sleep(min(TICK, left))

    def _parts(self, name: str) -> Parts:
        """The run's parts with a reader of one file."""
        path, parts = self.folder / name, self.trainer.parts
        if not path.is_file():
            raise DataError(f"{path}: the run stands in the middle of this file, and it is gone; put it back")
        chosen = type(parts.recipe.data.reader).model_validate({**self._reader, "rows": str(path)})
        context: dict[str, Any] = {"schema": parts.schema, "seed": parts.recipe.seed}
        return replace(parts, reader=create(parts.registry, "reader", chosen, "data.reader", **context))

    def _begin(self, name: str) -> Parts:
        """Evaluate a new window, and stand at its start."""
        parts, state = self._parts(name), self.state
        if not state.file:  # the best by a validation split of yesterday is not what a run that goes on is for
            state.best, state.best_step, state.best_metrics = None, None, {}
        state.file_metrics = self.trainer.measure(parts, "train")
        if state.file_metrics:
            self.trainer.scalars(state.file_metrics, "progressive")
        state.file, state.file_ended = name, False
        self.trainer.reader_state = {"epoch": state.windows}
        return parts

    def _end(self) -> None:
        """Close a window: log, checkpoint, callbacks."""
        state = self.state
        self.trainer.log()
        state.windows, state.file_ended = state.windows + 1, True
        if self.trainer.options.checkpoint_every is None:
            self.trainer.save()
        for callback in self.trainer.callbacks:
            callback.on_window(self.trainer, state.file, state.file_metrics)
