"""Built-in callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gem_core.protocols import Callback, ComponentConfig

LOOKUP = "forward: table look-up"


class Profiler(Callback):
    """Where a step's time goes: `<run>/profile.txt` gets a step's parts, which add up to 100 %, the forward pass by module
    among them, and the costliest operations."""

    class Config(ComponentConfig):
        """Times `steps` steps after the first `skip` of the run; of as many more it lists the `rows` costliest
        operations (these are slower, as each operation is noted)."""

        skip: int = Field(10, ge=0)
        steps: int = Field(5, ge=1)
        rows: int = Field(30, ge=1)

    def __init__(self, config: Config) -> None:
        self.config = config
        self._done = self._since = 0
        self._hooks = ExitStack()
        self._table = ""
        self._profile: Any = None
        self._state = "before"

    def on_start(self, trainer: Any) -> None:
        """Start at once where no steps are skipped."""
        if self.config.skip == 0:
            self._time(trainer)

    def on_step(self, trainer: Any, step: int) -> None:
        """Start, change over or finish by the number of steps seen."""
        self._done += 1
        if self._state == "before" and self._done == self.config.skip:
            self._time(trainer)
        elif self._state == "timing" and self._done - self._since == self.config.steps:
            self._summarise(trainer)
            self._list_operations()
        elif self._state == "listing" and self._done - self._since == self.config.steps:
            self._write(trainer)

    def on_end(self, trainer: Any) -> None:
        """A run shorter than asked for is reported as far as it went."""
        if self._state == "timing" and self._done > self._since:
            self._summarise(trainer)
        if self._state in ("timed", "listing"):
            self._write(trainer)

    def _time(self, trainer: Any) -> None:
        self._state, self._since = "timing", self._done
        if not trainer.options.compile:  # a compiled model is one piece
            self._mark(trainer)
        trainer.phase.start()

    def _mark(self, trainer: Any) -> None:
        """Let the model's modules and the look-up of tables be parts of their own."""
        for name, module in _called(trainer.parts.model):
            before, after = _brackets(trainer.phase, f"forward: {name}")
            self._hooks.callback(module.register_forward_pre_hook(before).remove)
            self._hooks.callback(module.register_forward_hook(after, always_call=True).remove)
        embedding = trainer.parts.embedding
        lookup = embedding.lookup

        def timed(ids: Any) -> Any:
            with trainer.phase(LOOKUP):
                return lookup(ids)

        embedding.lookup = timed
        self._hooks.callback(delattr, embedding, "lookup")

    def _summarise(self, trainer: Any) -> None:
        seconds, steps = trainer.phase.stop(), self._done - self._since
        self._hooks.close()
        self._state, self._since = "timed", self._done
        self._table = _table(seconds, steps)

    def _list_operations(self) -> None:
        self._state = "listing"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self._profile = profile(activities=activities)
        self._profile.__enter__()

    def _write(self, trainer: Any) -> None:
        text, steps = self._table, self._done - self._since
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            if steps:
                sort = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
                averages = self._profile.key_averages()
                operations = averages.table(sort_by=sort, row_limit=self.config.rows, max_name_column_width=50)
                text += f"\n\nthe next {steps} steps, operations by their own time:\n{operations}"
            self._profile = None
        self._state = "written"
        if trainer.strategy.rank == 0:
            path: Path = trainer.folder / "profile.txt"
            path.write_text(text + "\n")
            trainer.note("profile", f"{path}\n{self._table}")


def _called(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A model's parts that are called: its children, and those of mere containers."""
    for name, module in model.named_children():
        if type(module).forward is nn.Module.forward:  # a list or dictionary of modules
            yield from ((f"{name}.{inner}", each) for inner, each in _called(module))
        else:
            yield name, module


Part = Callable[[str], AbstractContextManager[None]]


def _brackets(phase: Part, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks before and after a module's forward that make it a part; not while evaluating."""
    entered: list[AbstractContextManager[None]] = []

    def before(module: nn.Module, _: Any) -> None:
        if module.training:
            entered.append(phase(name))
            entered[-1].__enter__()

    def after(module: nn.Module, _: Any, __: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    return before, after


def _table(seconds: dict[str, float], steps: int) -> str:
    """Parts with milliseconds per step and share, largest first; the total is 100 %."""
    total = sum(seconds.values())
    width = max(len(name) for name in (*seconds, "total"))
    rows = [*sorted(seconds.items(), key=lambda item: -item[1]), ("total", total)]
    lines = [f"{f'{steps} steps':<{width}} {'ms/step':>9} {'share':>7}"]
    lines += [f"{name:<{width}} {1000 * s / steps:>9.2f} {s / total:>7.1%}" for name, s in rows]
    return "\n".join(lines)
