"""The package installs in lockstep with gem-core and, as its docstring says, registers nothing yet."""

from importlib.metadata import distribution, requires

import pytest

import gem_core
import gem_parallel

pytestmark = pytest.mark.light


def test_version_is_gem_cores() -> None:
    assert gem_parallel.__version__ == gem_core.__version__
    assert requires("gem-parallel") == [f"gem-core=={gem_core.__version__}"]


def test_registers_nothing() -> None:
    assert list(distribution("gem-parallel").entry_points) == []
    assert "registers no plugin yet" in (gem_parallel.__doc__ or "")
