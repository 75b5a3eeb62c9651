"""The `gem` command line. Commands are plugins of the kind `command`: listed without an import, loaded when called.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 and 143 ended by Ctrl-C and SIGTERM. A mistake is one message on stderr; `--debug` adds the traceback.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from gem_core import __version__
from gem_core.cli import INTERRUPTED
from gem_core.errors import GemError, main_process
from gem_core.plugins import Entry, default_registry

TERMINATED = 128 + signal.SIGTERM


class _Terminated(BaseException):
    """SIGTERM, as an exception: open files, trackers and worker processes are closed on the way out."""


DEBUG = "gem_core.cli.debug"
"""Key of `click.Context.meta` that is set by `--debug`."""


def _debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.meta[DEBUG] = True


def _version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"gem {__version__}")
        context.exit()


def _strict(_: click.Context, __: click.Parameter, value: bool) -> None:
    if value:
        default_registry().require_sound()


def _global_options() -> list[click.Option]:
    flag: dict[str, Any] = {"is_flag": True, "expose_value": False}
    return [
        click.Option(["--debug"], help="Show the traceback of an error.", callback=_debug, **flag),
        click.Option(["--strict-plugins"], help="Fail if a plugin is broken.", callback=_strict, is_eager=True, **flag),
    ]


class _Commands(click.Group):
    """The registered commands below a word: all of them for "", those of `gem data` for "data"."""

    def __init__(self, word: str, **options: Any) -> None:
        super().__init__(word or "gem", callback=self._help, invoke_without_command=True, **options)
        self.word = word

    @staticmethod
    def _help() -> None:
        context = click.get_current_context()
        if context.invoked_subcommand is None:
            click.echo(context.get_help())

    def _entries(self) -> dict[str, Entry]:
        """By the rest of the name, which may be several words."""
        prefix = f"{self.word} " if self.word else ""
        entries = default_registry().entries["command"]
        return {name[len(prefix) :]: entry for name, entry in entries.items() if name.startswith(prefix)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({name.partition(" ")[0] for name in self._entries()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        entries = self._entries()
        full = f"{self.word} {cmd_name}".strip()
        if cmd_name not in entries and any(name.startswith(f"{cmd_name} ") for name in entries):
            return _Commands(full, params=_global_options(), help=f"Commands of {full}.")
        entry = default_registry().get("command", full)
        command = entry.load()
        if not isinstance(command, click.Command):
            raise GemError(f'command "{full}" of plugin {entry.plugin} is not a click command')
        command = copy.copy(command)
        command.name = cmd_name
        taken = {text for parameter in command.params for text in parameter.opts}
        command.params = [*command.params, *(o for o in _global_options() if not taken.intersection(o.opts))]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, entry.help) for name, entry in sorted(self._entries().items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _gem() -> _Commands:
    show_version = click.Option(
        ["--version"], is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version."
    )
    return _Commands(
        "",
        params=[*_global_options(), show_version],
        help="Train, evaluate and use GEM, an ads ranking foundation model, on your own logs.",
    )


@contextmanager
def _sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(_: int, __: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(arguments: Sequence[str] | None = None) -> int:
    """See `gem_core.cli.main`."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in argv

    def fail(message: str, code: int) -> int:
        if debug:
            traceback.print_exc()
        who = "" if main_process() else f" (rank {os.environ['RANK']})"
        click.echo(f"error{who}: {message}", err=True)
        return code

    try:
        with _sigterm():
            return _invoke(argv)
    except GemError as error:
        return fail(str(error), error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context else ""
        return fail(f"{' '.join(error.format_message().split())}{hint}", error.exit_code)
    except BrokenPipeError:  # `gem plugins | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, click.Abort):
        return fail("interrupted", INTERRUPTED)
    except _Terminated:
        return fail("terminated", TERMINATED)
    except OSError as error:  # a full disk, a folder that may not be written
        place = "" if error.filename is None else f"{error.filename}: "
        return fail(f"{place}{error.strerror or error}", 1)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".removesuffix(": ")
        return fail(why if debug else f"{why} (unexpected: run with --debug to see where)", 1)


def _invoke(argv: list[str]) -> int:
    try:
        with _gem().make_context("gem", argv) as context:
            context.command.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except SystemExit as done:
        if isinstance(done.code, str):
            raise GemError(done.code) from done
        return done.code or 0
    return 0
