"""The package installs in lockstep with gem-core and, as its docstring says, registers nothing yet."""

from importlib.metadata import distribution, requires

import pytest

import gem_core
import gem_kernels

pytestmark = pytest.mark.light


def test_version_is_gem_cores() -> None:
    assert gem_kernels.__version__ == gem_core.__version__
    assert requires("gem-kernels") == [f"gem-core=={gem_core.__version__}"]


def test_registers_nothing() -> None:
    assert list(distribution("gem-kernels").entry_points) == []
    assert "registers no plugin yet" in (gem_kernels.__doc__ or "")
