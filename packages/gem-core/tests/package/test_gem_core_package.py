"""What a user meets before any training: the version, the types, and imports that do not wait for torch."""

import subprocess
import sys
from importlib.metadata import entry_points, version
from importlib.resources import files

import pytest

import gem_core

pytestmark = pytest.mark.light

LIGHT_MODULES = ["gem_core"] + [f"gem_core.{name}" for name in ("errors", "plugins", "schema", "recipe", "cli")]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_version_and_type_marker() -> None:
    assert gem_core.__version__ == version("gem-core")
    assert files("gem_core").joinpath("py.typed").is_file()


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_import_needs_no_torch(module: str) -> None:
    assert run(f"import sys, {module}; print(sorted({{'torch', 'pandas', 'matplotlib'}} & set(sys.modules)))") == "[]\n"


def test_help_needs_no_torch() -> None:
    out = run("import sys; from gem_core.cli import main; print(main(['--help']), 'torch' in sys.modules)")
    assert "train" in out
    assert out.endswith("0 False\n")


def test_entry_points() -> None:
    (script,) = entry_points(group="console_scripts", name="gem")
    assert script.value == "gem_core.cli:main"
    (core,) = (point for point in entry_points(group="gem") if point.name == "core")
    assert core.value == "gem_core.plugins.builtin"
