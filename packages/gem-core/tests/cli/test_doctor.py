"""`gem doctor`: what it finds wrong, its advice, exit code, and that it works without torch."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gem_core
from gem_core.cli import doctor, main
from gem_core.cli.doctor import Check
from gem_core.plugins import Plugin, default_registry

pytestmark = pytest.mark.light

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Check]]:
    """The checks by name, of an environment that holds just these distributions; torch is not imported."""

    def check(**versions: str) -> dict[str, Check]:
        known = {"gem-core": gem_core.__version__, **{k.replace("_", "-"): v for k, v in versions.items()}}
        monkeypatch.setattr(doctor, "installed", known.get)
        monkeypatch.setattr(doctor, "_torch_at_work", lambda: [])
        return {c.name: c for c in doctor.checks()}

    return check


def test_a_sound_environment(has: Callable[..., dict[str, Check]]) -> None:
    found = has(torch="2.13.0+cpu", gem_serve=gem_core.__version__, triton="3.7.1", torchrec="1.8.0")
    assert {c.status for c in found.values()} == {"ok", "note"}
    assert "gem-kernels" not in found, "not installed is not wrong"
    assert found["extra tensorboard"] == Check(
        "extra tensorboard", "note", "without tensorboard", 'pip install "gem-core[tensorboard]"'
    )
    assert found["python"].found == ".".join(map(str, sys.version_info[:3]))
    assert "GiB" in found["memory"].found and "usable of" in found["processors"].found


@pytest.mark.parametrize(
    ("versions", "name", "found", "advice"),
    [
        ({}, "torch", "not installed", 'pip install "torch>=2.11,<2.15"'),
        ({"torch": "2.10.0"}, "torch", "2.10.0", 'pip install "torch>=2.11,<2.15"'),
        ({"torch": "2.15.0"}, "torch", "2.15.0", 'pip install "torch>=2.11,<2.15"'),
        ({"torch": "unknown"}, "torch", "unknown", 'pip install "torch>=2.11,<2.15"'),
        ({"torch": "2.13.0", "triton": "3.5.1"}, "triton", "3.5.1", 'pip install "triton>=3.6,<4"'),
        ({"torch": "2.13.0", "torchrec": "1.7.0"}, "torchrec", "1.7.0", "pip install torchrec==1.8.*"),
        (
            {"torch": "2.13.0", "gem_serve": "0.0.9"},
            "gem-serve",
            "0.0.9",
            f"pip install gem-serve=={gem_core.__version__}",
        ),
    ],
)
def test_what_is_broken(
    versions: dict[str, str], name: str, found: str, advice: str, has: Callable[..., dict[str, Check]]
) -> None:
    check = has(**versions)[name]
    assert (check.status, check.found) == ("broken", found)
    assert check.advice.startswith(advice)


@pytest.mark.parametrize(
    ("torch", "fbgemm", "advice"),
    [
        ("2.13.0", "1.8.0", ""),
        ("2.14.0", "1.9.0", ""),
        ("2.13.0", "1.5.0", "built for torch 2.10: pip install fbgemm-gpu-cpu==1.8.*"),
        ("2.11.0", "1.8.0", "built for torch 2.13: pip install fbgemm-gpu-cpu==1.6.*"),
    ],
)
def test_fbgemm_and_torch_are_a_pair(
    torch: str, fbgemm: str, advice: str, has: Callable[..., dict[str, Check]]
) -> None:
    found = has(torch=torch, fbgemm_gpu_cpu=fbgemm)
    assert found["fbgemm-gpu-cpu"].status == ("broken" if advice else "ok")
    assert found["fbgemm-gpu-cpu"].advice == advice


def test_fbgemm_that_does_not_load(
    has: Callable[..., dict[str, Check]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def with_package(source: str) -> dict[str, Check]:
        (tmp_path / "fbgemm_gpu.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return has(torch="2.13.0", fbgemm_gpu="1.8.0")

    broken = with_package("raise OSError('undefined symbol: x')")["import fbgemm_gpu"]
    assert (broken.status, broken.found) == ("broken", "OSError: undefined symbol: x")
    assert with_package("import os; os._exit(9)")["import fbgemm_gpu"].found == "exit code 9"
    assert "import fbgemm_gpu" not in with_package("")


def test_memory_limit_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "some").write_text("1073741824\n")
    assert doctor._cgroup_limit(tmp_path / "none") is None
    assert doctor._cgroup_limit(tmp_path / "max") is None
    assert doctor._cgroup_limit(tmp_path / "some") == 2**30
    monkeypatch.setattr(doctor, "_cgroup_limit", lambda: 2**20)
    assert next(c for c in doctor._machine() if c.name == "memory").found.endswith("0.0 GiB for this container")


def test_broken_plugin(has: Callable[..., dict[str, Check]], monkeypatch: pytest.MonkeyPatch) -> None:
    sick = Plugin("sick", "sick-dist", "1.0", "ImportError: no libsick")
    monkeypatch.setattr(default_registry(), "plugins", [*default_registry().plugins, sick])
    check = has(torch="2.13.0")["plugin sick"]
    assert (check.status, check.found) == ("broken", "sick-dist 1.0: ImportError: no libsick")
    assert check.advice == "update it, or pip uninstall sick-dist"


@pytest.mark.parametrize("torch", [None, "2.13.0"])
def test_command(torch: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"gem-core": gem_core.__version__} | ({"torch": torch} if torch else {})
    monkeypatch.setattr(doctor, "installed", known.get)
    monkeypatch.setattr(doctor, "_torch_at_work", lambda: [])
    assert main(["doctor"]) == (0 if torch else 1)
    out, err = capsys.readouterr()
    assert err == ("" if torch else "broken: torch\n")
    assert ("-> pip install" in out) and ("broken  torch" in out) is (torch is None)
    assert main(["doctor", "--json"]) == (0 if torch else 1)
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert err == "" and value["ok"] is (torch is not None)
    assert {"name": "gem-core", "status": "ok", "found": gem_core.__version__, "advice": ""} in value["checks"]


@needs_torch
def test_torch_at_work() -> None:
    found = {c.name: c for c in doctor._torch_at_work()}
    assert found["torch build"].found
    assert "OMP_NUM_THREADS" in found["torch threads"].found
    assert "GFLOP/s" in found["matmul peak"].found


def test_torch_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (check,) = doctor._torch_at_work()
    assert check.status == "broken" and check.name == "import torch"
