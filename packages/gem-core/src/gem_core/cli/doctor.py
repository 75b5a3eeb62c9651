"""`gem doctor`: this machine, the installed versions, and what is wrong with them. Works without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

import click

from gem_core import __version__
from gem_core.plugins import default_registry

PACKAGES = ("gem-core", "gem-kernels", "gem-parallel", "gem-distill", "gem-serve")
TORCH = ((2, 11), (2, 15))
"""Oldest torch that works, and the first that is not known to."""
FBGEMM_BEHIND_TORCH = 5
"""fbgemm 1.n is built for torch 2.(n + 5): 1.5 with 2.10, 1.8 with 2.13; another pair fails with undefined symbols."""


@dataclass(frozen=True)
class Check:
    """`status`: "ok", "note" (works without) or "broken". `advice` is what to do about the latter two."""

    name: str
    status: Literal["ok", "note", "broken"]
    found: str
    advice: str = ""


def installed(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def minor(release: str) -> tuple[int, int]:
    """("2.13.0+cpu") -> (2, 13)."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def checks() -> Iterator[Check]:
    """Every check, in the order in which they are printed."""
    python = ".".join(map(str, sys.version_info[:3]))
    fine = sys.version_info >= (3, 11)
    yield Check("python", "ok" if fine else "broken", python, "" if fine else "install Python >= 3.11")
    yield from _packages()
    torch = installed("torch")
    yield _torch(torch)
    yield from _fbgemm(torch)
    yield from _triton(torch)
    yield from _machine()
    if torch is not None:
        yield from _torch_at_work()
    yield from _extras()
    yield from _plugins()


def _packages() -> Iterator[Check]:
    """All of the workspace's packages have one version and are released together."""
    for name in PACKAGES:
        found = installed(name)
        if found is not None:
            same = found == __version__
            advice = "" if same else f"pip install {name}=={__version__} (the version of gem-core)"
            yield Check(name, "ok" if same else "broken", found, advice)


def _torch(found: str | None) -> Check:
    oldest, beyond = (".".join(map(str, v)) for v in TORCH)
    want = f'pip install "torch>={oldest},<{beyond}"'
    if found is None:
        return Check("torch", "broken", "not installed", want)
    known = TORCH[0] <= minor(found) < TORCH[1]
    return Check("torch", "ok" if known else "broken", found, "" if known else want)


def _lockstep(torch: str) -> tuple[int, int]:
    """The release of fbgemm and torchrec for a torch."""
    return 1, minor(torch)[1] - FBGEMM_BEHIND_TORCH


def _fbgemm(torch: str | None) -> Iterator[Check]:
    for name in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
        found = installed(name)
        if found is None or torch is None:
            continue
        if minor(found) != _lockstep(torch):
            want = f"pip install {name}=={'.'.join(map(str, _lockstep(torch)))}.*"
            advice = f"built for torch 2.{minor(found)[1] + FBGEMM_BEHIND_TORCH}: {want}"
            yield Check(name, "broken", f"{found} with torch {torch}", advice)
        else:
            yield Check(name, "ok", found)
    if installed("fbgemm-gpu") or installed("fbgemm-gpu-cpu"):
        # In a process of its own: a binary that does not fit may end the process that loads it.
        probe = subprocess.run([sys.executable, "-c", "import fbgemm_gpu"], capture_output=True, text=True, check=False)
        if probe.returncode:
            last = (probe.stderr.strip() or f"exit code {probe.returncode}").splitlines()[-1]
            yield Check("import fbgemm_gpu", "broken", last, "install the fbgemm that fits this torch, or uninstall it")
    torchrec = installed("torchrec")
    if torchrec is not None and torch is not None:
        fits = minor(torchrec) == _lockstep(torch)
        advice = "" if fits else f"pip install torchrec=={'.'.join(map(str, _lockstep(torch)))}.*"
        yield Check("torchrec", "ok" if fits else "broken", torchrec, advice)


def _triton(torch: str | None) -> Iterator[Check]:
    found = installed("triton")
    if found is not None:
        fits = (3, 6) <= minor(found) < (4, 0)
        yield Check("triton", "ok" if fits else "broken", found, "" if fits else 'pip install "triton>=3.6,<4"')


def _machine() -> Iterator[Check]:
    here, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    yield Check("processors", "ok", f"{usable} usable of {here}")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_limit()
    shown = f"{total / 2**30:.1f} GiB"
    if limit is not None and limit < total:
        shown += f", {limit / 2**30:.1f} GiB for this container"
    yield Check("memory", "ok", shown)


def _cgroup_limit(path: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)


def _torch_at_work() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Check("import torch", "broken", f"{type(error).__name__}: {error}", "reinstall torch")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "processor only"
    yield Check("torch build", "ok", build)
    for index in range(torch.cuda.device_count()):
        yield Check(f"cuda:{index}", "ok", torch.cuda.get_device_name(index))
    threads = f"{torch.get_num_threads()} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')})"
    yield Check("torch threads", "ok", threads)
    from gem_core.train.flops import measure_peak

    peak = measure_peak(torch.device("cpu"))
    yield Check("matmul peak", "ok", f"{peak / 1e9:.1f} GFLOP/s in float32 on the processor")


def _extras() -> Iterator[Check]:
    """Optional parts whose packages are not there."""
    missing: dict[str, list[str]] = {}
    for requirement in requires("gem-core") or []:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        name = re.match(r"[\w.-]+", requirement)
        if extra and name and installed(name[0]) is None:
            missing.setdefault(extra[1], []).append(name[0])
    for group, names in missing.items():
        yield Check(f"extra {group}", "note", f"without {', '.join(names)}", f'pip install "gem-core[{group}]"')


def _plugins() -> Iterator[Check]:
    for plugin in default_registry().plugins:
        shown = f"{plugin.distribution} {plugin.version}"
        if plugin.error:
            advice = f"update it, or pip uninstall {plugin.distribution}"
            yield Check(f"plugin {plugin.name}", "broken", f"{shown}: {plugin.error}", advice)
        else:
            yield Check(f"plugin {plugin.name}", "ok", shown)


@click.command(short_help="Check this machine and the installed versions.")
@click.option("--json", "machine", is_flag=True, help="Write JSON.")
@click.pass_context
def doctor(context: click.Context, machine: bool) -> None:
    """Check this machine and the installed versions; exit code 1 if something is broken."""
    done = []
    for check in checks():
        done.append(check)
        if not machine:
            click.echo(f"{check.status:<7} {check.name:<20} {check.found}")
            if check.advice:
                click.echo(f"{'':<7} {'':<20} -> {check.advice}")
    broken = [check.name for check in done if check.status == "broken"]
    if machine:
        click.echo(json.dumps({"ok": not broken, "checks": [asdict(check) for check in done]}, indent=1))
    elif broken:
        click.echo(f"broken: {', '.join(broken)}", err=True)
    if broken:
        context.exit(1)
