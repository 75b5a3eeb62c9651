"""What the demo prints: headings, wrapped paragraphs, and one short line for each step of progress."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from gem_core.plugins import hookimpl
from gem_core.protocols import ComponentConfig

WIDTH = 96


def heading(text: str) -> None:
    """A line that starts a stage."""
    click.echo(f"\n== {text} {'=' * max(0, WIDTH - len(text) - 4)}")


def say(text: str) -> None:
    """A paragraph."""
    click.echo(textwrap.fill(" ".join(text.split()), WIDTH))


def define(term: str, text: str) -> None:
    """A term and what it means."""
    click.echo(textwrap.fill(f"{term:<12} {' '.join(text.split())}", WIDTH, subsequent_indent=" " * 13))


def progress(text: str) -> None:
    """A line of progress."""
    click.echo(f"  {text}")


class Pace:
    """Lets a line of progress through every few seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time for the next line."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


class DemoTracker:
    """A tracker for newcomers: one short line a log line, another for each evaluation."""

    class Config(ComponentConfig):
        """No options."""

    def __init__(self, config: Config, folder: Path, resume: int) -> None:
        self._train: Mapping[str, float] = {}
        if resume:
            progress(f"going on from the checkpoint of step {resume}")

    def scalars(self, step: int, values: Mapping[str, float], kind: str = "train") -> None:
        """Print what of these a newcomer can use."""
        if kind == "train":
            self._train = values
        elif kind == "speed":
            fill = f", fill {values['fill']:.2f}" if "fill" in values else ""
            ne = f"NE {self._train['joint/ne']:.4f}, " if "joint/ne" in self._train else ""
            progress(f"step {step:>4}, {values['progress']:>4.0%}: {ne}{values['samples_per_s']:,.0f} rows/s{fill}")
        else:
            tasks = [name.removesuffix("/ne") for name in values if name.count("/") == 1 and name.endswith("/ne")]
            scores = ", ".join(f"{task} {values[f'{task}/ne']:.4f}" for task in tasks)
            progress(f"{'-> ' if kind == 'validation' else '=> '}{kind} NE: {scores}")

    def text(self, step: int, name: str, value: str) -> None:
        """Say what happened to the run itself."""
        if name != "run":
            progress(f"{name}: {value}")

    def figure(self, step: int, name: str, figure: Any) -> None:
        """Figures are not for a console."""

    def close(self) -> None:
        """Nothing is held open."""


class DemoPlugin:
    """Registers the tracker as any plugin would: the demo is its own example of one."""

    @staticmethod
    @hookimpl
    def gem_register_tracker(register: Any) -> None:
        """`trackers: [demo]`."""
        register("demo", DemoTracker)
