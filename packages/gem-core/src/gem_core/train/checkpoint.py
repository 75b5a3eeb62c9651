"""Checkpoints: one folder each, complete or not there at all.

    <run>/checkpoints/step-00000123/
        model.pt embedding.pt optimizer.pt trainer.pt calibration.pt   tensors and plain values; loading runs no code
        recipe.yaml schema.json                          resolved recipe, fitted schema
        manifest.json                                    versions, step, size and SHA-256 of every file

A folder is written under a hidden name, flushed to disk and then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gem_core import __version__
from gem_core.errors import ConfigError, DataError, GemError, looked_for, warn
from gem_core.plugins import CONTRACT_VERSION
from gem_core.recipe import Recipe, load
from gem_core.schema import Schema

MANIFEST = "manifest.json"
PARTS = ("model", "embedding", "optimizer", "trainer", "calibration")
MAY_DIFFER = ("name", "output", "trainer", "follow", "trackers", "callbacks")
"""Sections of a recipe that may change between the runs that share a checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete folder; contents are read and verified when asked for."""

    path: Path

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return int(self.path.name.removeprefix("step-"))

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """The resolved recipe that made it, with `key.path=value` overrides."""
        return load(self._verify("recipe.yaml"), overrides)

    def schema(self) -> Schema:
        """The fitted schema."""
        self._verify("schema.json")
        return Schema.load(self.path / "schema.json")

    def part(self, name: str) -> dict[str, Any]:
        """One of `PARTS`, on the processor.

        Raises:
            DataError: the file is missing, truncated or altered.
        """
        file = self._verify(f"{name}.pt")
        out: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return out

    def manifest(self) -> dict[str, Any]:
        """Versions, step, the run's best step when it was saved, and the files."""
        try:
            out: dict[str, Any] = json.loads((self.path / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"checkpoint {self.path}: {MANIFEST} is unreadable: use another checkpoint") from error
        return out

    def check_sizes(self) -> None:
        """Raises DataError for a file that is missing or has another size; reads none of them."""
        for name in {*self.manifest()["files"], *(f"{part}.pt" for part in PARTS), "recipe.yaml", "schema.json"}:
            self._sized(name)

    def _verify(self, name: str) -> Path:
        file, expected = self._sized(name)
        if digest(file) != expected["sha256"]:
            raise DataError(f"checkpoint {self.path}: {name} was altered (its SHA-256 differs): use another checkpoint")
        return file

    def _sized(self, name: str) -> tuple[Path, dict[str, Any]]:
        file = self.path / name
        try:
            expected: dict[str, Any] = self.manifest()["files"][name]
            size = file.stat().st_size
        except (OSError, KeyError) as error:
            raise DataError(f"checkpoint {self.path}: {name} is missing: use another checkpoint") from error
        if size != expected["bytes"]:
            raise DataError(
                f"checkpoint {self.path}: {name} has {size} bytes, expected {expected['bytes']}: "
                "the copy is incomplete; copy it again or use another checkpoint"
            )
        return file, expected


def digest(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Force a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def step_folder(run: Path, step: int) -> Path:
    """Where a run's checkpoint of a step is."""
    return run / "checkpoints" / f"step-{step:08d}"


def save(
    run: Path,
    step: int,
    parts: Mapping[str, Mapping[str, Any]],
    recipe: Recipe,
    schema: Schema,
    best_step: int | None = None,
    keep: int | None = None,
) -> Checkpoint:
    """Write a checkpoint; it appears whole or not at all. An earlier one of the same step is replaced.

    Then all but the newest `keep` and the best one are deleted (None: none are).

    Raises:
        GemError: the disk is full, or the folder cannot be written.
    """
    target = step_folder(run, step)
    hidden = target.with_name(f".{target.name}")
    try:
        shutil.rmtree(hidden, ignore_errors=True)  # left by a run that was killed while it wrote
        hidden.mkdir(parents=True)
        _write(hidden, step, parts, recipe, schema, best_step)
        aside = target.with_name(f".old-{target.name}")
        if target.exists():
            target.rename(aside)
        hidden.rename(target)
        flush(target.parent)
    except (OSError, RuntimeError) as error:  # torch's writer has a RuntimeError for a full disk
        shutil.rmtree(hidden, ignore_errors=True)
        free = _free(run)
        raise GemError(
            f"checkpoint {target}: cannot be written, {free / 2**20:,.0f} MiB are free there "
            f"({str(error).splitlines()[0]}); earlier checkpoints are whole: make room, and the same command goes on"
        ) from error
    shutil.rmtree(aside, ignore_errors=True)
    if keep is not None:
        retain(run, keep, best_step)
    return Checkpoint(target)


def _free(folder: Path) -> int:
    """Bytes free where the folder is."""
    return shutil.disk_usage(next(f for f in (folder, *folder.absolute().parents) if f.exists())).free


def _write(
    hidden: Path,
    step: int,
    parts: Mapping[str, Mapping[str, Any]],
    recipe: Recipe,
    schema: Schema,
    best_step: int | None,
) -> None:
    for name in PARTS:
        torch.save(dict(parts[name]), hidden / f"{name}.pt")
    (hidden / "recipe.yaml").write_text(recipe.to_yaml())
    schema.save(hidden / "schema.json")
    files = {f.name: {"bytes": f.stat().st_size, "sha256": digest(f)} for f in sorted(hidden.iterdir())}
    manifest: dict[str, Any] = {"format": 1, "step": step, "best_step": best_step, "gem_core": __version__}
    manifest |= {"contract": CONTRACT_VERSION, "files": files}
    (hidden / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for file in hidden.iterdir():
        flush(file)
    flush(hidden)


def complete(run: Path) -> list[Checkpoint]:
    """A run's checkpoints in order of step."""
    for old in run.glob("checkpoints/.old-step-*"):  # killed between the two renames of `save`
        target = old.with_name(old.name.removeprefix(".old-"))
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)
    return [Checkpoint(f.parent) for f in sorted(run.glob(f"checkpoints/step-*/{MANIFEST}"))]


def newest(run: Path) -> Checkpoint | None:
    """The newest of a run's checkpoints whose files are all there in full length; a damaged one is passed over, with a
    warning.

    Raises:
        DataError: there are some, and each is damaged.
    """
    damaged: list[DataError] = []
    for checkpoint in reversed(complete(run)):
        try:
            checkpoint.check_sizes()
        except DataError as error:
            damaged.append(error)
            continue
        for fault in damaged:
            warn(f"{fault}; going on from the older {checkpoint.path.name}")
        return checkpoint
    if damaged:
        raise DataError(f"{damaged[0]}; no older one is whole: start over with resume=never")
    return None


def retain(run: Path, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the best one."""
    for old in complete(run)[:-keep]:
        if old.step != best:
            shutil.rmtree(old.path)


def clear(run: Path) -> None:
    """Delete a run's checkpoints."""
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


def find(path: str | Path) -> Checkpoint:
    """A checkpoint folder itself, or a run folder's best checkpoint (its newest where no evaluation chose one).

    Raises:
        ConfigError: neither is there.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return Checkpoint(path)
    found = complete(path)
    if not found:
        hint = "" if path.exists() else looked_for(path)
        raise ConfigError(
            f"{path}: neither a checkpoint nor a run's folder with complete checkpoints in checkpoints/{hint}"
        )
    best = found[-1].manifest()["best_step"]
    return next((c for c in found if c.step == best), found[-1])


def check_recipe(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Refuse to go on from a checkpoint of another recipe; what only steers the run (`MAY_DIFFER`) may change.

    Raises:
        ConfigError: names every key that differs with both values.
    """
    old, new = _flat(checkpoint.recipe().dump()), _flat(recipe.dump())
    keys = [k for k in sorted(old.keys() | new.keys()) if k.split(".")[0] not in MAY_DIFFER]
    differing = [k for k in keys if old.get(k) != new.get(k)]
    if differing:
        lines = "\n".join(f"  {k}: {old.get(k)!r} in the checkpoint, {new.get(k)!r} now" for k in differing)
        raise ConfigError(
            f"cannot resume from {checkpoint.path}: the recipe differs\n{lines}\n"
            "restore these keys, choose another output, or start over with resume=never"
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    out: dict[str, Any] = {}
    for key, inner in value.items():
        out |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return out
