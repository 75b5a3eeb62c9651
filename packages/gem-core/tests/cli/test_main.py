"""The group, global options, exit codes and messages; nothing here imports torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest

import gem_core
from gem_core.cli import main
from gem_core.errors import ConfigError, DataError
from gem_core.plugins import Plugin, Registry, default_registry, hookimpl

pytestmark = pytest.mark.light


@pytest.fixture
def command() -> Iterator[Callable[[str, object], None]]:
    """Registers a command for the length of a test."""
    registry, names = default_registry(), []

    def add(name: str, target: object, help: str = "") -> None:
        module = types.ModuleType("made_up")
        module.gem_register_command = hookimpl(lambda register: register(name, target, help))  # type: ignore[attr-defined]
        names.append(f"test-{name}")
        registry.register_plugin(module, names[-1])

    yield add
    for name in names:
        registry.unregister_plugin(name)


def raises(error: BaseException) -> click.Command:
    @click.command()
    def fails() -> None:
        raise error

    return fails


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err.removeprefix("error: ").strip()


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


# ---- help ----------------------------------------------------------------------------------------------------------


def test_help_lists_the_commands_with_their_help_and_imports_nothing_heavy() -> None:
    program = (
        "import sys; from gem_core.cli import main; code = main(['--help']); "
        "heavy = {'torch', 'numpy', 'pyarrow', 'pydantic', 'rich', 'yaml'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = run(program)
    assert done.returncode == 0, done.stderr
    for line in ["train  ", "data profile  ", "Train a model from a recipe.", "--strict-plugins", "--debug"]:
        assert line in done.stdout


@pytest.mark.parametrize("name", ["train", "eval", "predict", "plugins", "doctor"])
def test_a_commands_help_needs_no_torch(name: str) -> None:
    program = (
        f"import sys; from gem_core.cli import main; code = main(['{name}', '--help']); "
        "sys.exit('imported torch' if 'torch' in sys.modules else code)"
    )
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert "--strict-plugins" in done.stdout


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: gem" in capsys.readouterr().out
    assert main(["data"]) == 0
    assert "profile" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gem {gem_core.__version__}\n"


def test_module_form() -> None:
    done = subprocess.run([sys.executable, "-m", "gem_core.cli", "trian"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'error: command "trian" is not known; did you mean "train"?\n'


# ---- exit codes and messages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], 'command "trian" is not known; did you mean "train"?'),
        (["data", "profil"], 'command "data profil" is not known; did you mean "data profile"?'),
        (["--nope"], "No such option '--nope'. (see gem --help)"),
        (["plugins", "--jsn"], "No such option '--jsn'. Did you mean '--json'? (see gem plugins --help)"),
        (["plugins", "extra"], "Got unexpected extra argument (extra) (see gem plugins --help)"),
        (["train"], "Missing argument 'RECIPE'. (see gem train --help)"),
        (["train", "r.yaml", "--resume", "perhaps"], "'perhaps' is not one of 'auto', 'never', 'must'."),
    ],
)
def test_wrong_use(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    # click's words vary a little between its releases.
    shown = (
        one_error(capsys)
        .replace("No such option: --nope", "No such option '--nope'.")
        .replace(": --jsn ", " '--jsn'. ")
    )
    assert message in shown


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("file a.csv: bad"), 1, "file a.csv: bad"),
        (ConfigError("recipe r: bad"), 2, "recipe r: bad"),
        (click.UsageError("not so"), 2, "not so (see gem fails --help)"),
        (click.ClickException("no\nluck"), 1, "no luck"),
        (ValueError("odd"), 1, "ValueError: odd (unexpected: run with --debug to see where)"),
        (AssertionError(), 1, "AssertionError (unexpected: run with --debug to see where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
        (SystemExit("own words"), 1, "own words"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_failure_is_one_message(
    error: BaseException, code: int, message: str, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command("fails", raises(error))
    assert main(["fails"]) == code
    assert one_error(capsys) == message


@pytest.mark.parametrize("arguments", [["--debug", "fails"], ["fails", "--debug"]])
@pytest.mark.parametrize("error", [DataError("bad"), ValueError("odd")])
def test_debug_shows_the_traceback(
    arguments: list[str], error: Exception, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command("fails", raises(error))
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and "test_main.py" in err
    assert err.splitlines()[-1] in ("error: bad", "error: ValueError: odd")


@pytest.mark.parametrize(("given", "code"), [(SystemExit(3), 3), (SystemExit(None), 0), (click.exceptions.Exit(4), 4)])
def test_a_commands_own_exit_code(given: BaseException, code: int, command: Any) -> None:
    command("fails", raises(given))
    assert main(["fails"]) == code


def test_what_a_command_returns_is_no_exit_code(command: Any) -> None:
    command("gives", click.Command("gives", callback=lambda: [1, 2]))
    assert main(["gives"]) == 0


def test_sigterm_runs_what_is_to_be_closed_and_says_so(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def wait() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()  # not reached
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGTERM)
    command("waits", click.Command("waits", callback=wait))
    assert main(["waits"]) == 143
    assert one_error(capsys) == "terminated"
    assert closed == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_output_cut_off_by_its_reader_is_no_traceback() -> None:
    command = f"{sys.executable} -m gem_core.cli plugins --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{", "")


# ---- plugins' commands ---------------------------------------------------------------------------------------------


def test_a_plugins_command_in_a_group_of_several_words(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    @click.argument("word")
    def say(word: str) -> None:
        click.echo(word)

    command("tools say aloud", say, "Say it.")
    assert main(["tools", "say", "aloud", "hello"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert main(["--help"]) == 0
    assert "tools say aloud" in capsys.readouterr().out
    assert main(["tools", "--help"]) == 0
    assert "say aloud  Say it." in capsys.readouterr().out
    assert main(["tools", "say", "loud"]) == 2
    assert one_error(capsys) == 'command "tools say loud" is not known; did you mean "tools say aloud"?'


def test_a_plugins_own_debug_option_is_its_own(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    @click.option("--debug", type=int)
    def mine(debug: int) -> None:
        click.echo(f"debug {debug}")

    command("mine", mine)
    assert main(["mine", "--debug", "3"]) == 0
    assert capsys.readouterr().out == "debug 3\n"


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        (lambda: None, 1, 'command "odd" of plugin test-odd is not a click command'),
        (
            "no_such_module_anywhere:command",
            1,
            'command "odd" of plugin test-odd cannot be loaded from no_such_module_anywhere',
        ),
    ],
)
def test_a_command_that_cannot_be_used(
    target: object, code: int, message: str, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command("odd", target)
    assert main(["--help"]) == 0
    assert "odd" in capsys.readouterr().out, "listed without an import"
    assert main(["odd"]) == code
    assert message in one_error(capsys)


def test_a_command_of_a_package_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gem_core.plugins.registry._version", lambda _: None)
    assert main(["serve", "--port", "80"]) == 2
    assert one_error(capsys) == 'command "serve" is not installed: pip install gem-serve'


# ---- gem plugins ---------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The installed registry, and a plugin that did not load."""
    sick = Plugin("sick", "sick-dist", "1.0", "ImportError: no libsick", "Traceback of sick")
    monkeypatch.setattr(default_registry(), "plugins", [*default_registry().plugins, sick])
    return default_registry()


def test_plugins_lists_components_owners_and_broken_ones(broken: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert ["model", "kunlun", "core"] in [line.split() for line in out.splitlines()]
    assert ["planner", "-"] in [line.split() for line in out.splitlines()]
    assert f"plugin     core (gem-core {gem_core.__version__})\n" in out
    assert "plugin     sick (sick-dist 1.0): broken, skipped: ImportError: no libsick\n" in out
    assert "Traceback" not in out
    assert main(["plugins", "--debug"]) == 0
    assert "Traceback of sick" in capsys.readouterr().out


def test_plugins_as_json(broken: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert {p["name"]: p["error"] for p in value["plugins"]}["sick"] == "ImportError: no libsick"
    kunlun = next(c for c in value["components"] if (c["kind"], c["name"]) == ("model", "kunlun"))
    assert kunlun == {
        "kind": "model",
        "name": "kunlun",
        "plugin": "core",
        "target": "gem_core.model.kunlun:Kunlun",
        "help": "",
    }
    assert value["contract"] == 1


@pytest.mark.parametrize("arguments", [["--strict-plugins", "plugins"], ["plugins", "--strict-plugins"]])
def test_strict_plugins(
    arguments: list[str], capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    assert main(arguments) == 0
    capsys.readouterr()
    request.getfixturevalue("broken")
    assert main(arguments) == 2
    assert one_error(capsys) == "plugin sick (sick-dist): ImportError: no libsick"


def test_main_works_off_the_main_thread(capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(["--version"])))
    thread.start()
    thread.join()
    assert codes == [0]


def test_ctrl_c_while_the_command_line_is_imported() -> None:
    program = """
import os, signal, sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "gem_core.cli.app":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
from gem_core.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_a_full_disk_is_one_message(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        raise OSError(28, "No space left on device", "x.json")

    command("full", click.Command("full", callback=write))
    assert main(["full"]) == 1
    assert one_error(capsys) == "x.json: No space left on device"
