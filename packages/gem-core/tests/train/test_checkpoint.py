"""Checkpoint folders: whole or absent, verified, retained, refused for another recipe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import fitted_schema, recipe

from gem_core.errors import ConfigError, DataError, GemError
from gem_core.recipe import Recipe
from gem_core.train import checkpoint as checkpoints
from gem_core.train.checkpoint import Checkpoint, check_recipe, complete, find, retain, save

PARTS: dict[str, dict[str, Any]] = {name: {"x": torch.arange(1000.0), "n": 3} for name in checkpoints.PARTS}


def write(run: Path, step: int, best: int | None = None, made_by: Recipe | None = None) -> Checkpoint:
    return save(run, step, PARTS, recipe(run) if made_by is None else made_by, fitted_schema(), best)


FULL = "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"


@pytest.mark.parametrize("error", [RuntimeError(FULL), OSError(28, "No space left on device")], ids=["torch", "system"])
def test_a_full_disk_leaves_the_earlier_checkpoints(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def fail(value: object, path: Path) -> None:
        path.write_text("half")
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(GemError, match=r"step-00000002: cannot be written, [\d,]+ MiB are free .*make room"):
        write(tmp_path, 2)
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_round_trip(tmp_path: Path) -> None:
    saved = write(tmp_path, 12, best=7)
    assert saved.path == tmp_path / "checkpoints" / "step-00000012"
    assert saved.step == 12
    assert saved.recipe() == recipe(tmp_path)
    assert saved.recipe(["seed=9"]).seed == 9
    assert saved.schema() == fitted_schema()
    for name in checkpoints.PARTS:
        assert torch.equal(saved.part(name)["x"], torch.arange(1000.0))
    manifest = saved.manifest()
    assert manifest["best_step"] == 7
    assert manifest["contract"] == 1
    assert set(manifest["files"]) == {p.name for p in saved.path.iterdir()} - {"manifest.json"}


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    saved = write(tmp_path, 1)
    file = saved.path / "model.pt"
    content = bytearray(file.read_bytes())
    file.write_bytes(content[:-100])
    with pytest.raises(DataError, match=r"model\.pt has \d+ bytes, expected \d+: the copy is incomplete"):
        saved.part("model")
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"model\.pt was altered"):
        saved.part("model")
    file.unlink()
    with pytest.raises(DataError, match=r"model\.pt is missing"):
        saved.part("model")
    (saved.path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json is unreadable"):
        saved.recipe()


def test_loading_runs_no_code(tmp_path: Path) -> None:
    saved = write(tmp_path, 1)
    file = saved.path / "model.pt"
    torch.save({"x": Path("/")}, file)  # an object, which only code can make
    manifest = saved.manifest()
    manifest["files"]["model.pt"] = {"bytes": file.stat().st_size, "sha256": checkpoints.digest(file)}
    (saved.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Exception, match="Weights only load failed"):
        saved.part("model")


def test_incomplete_folders_are_not_seen(tmp_path: Path) -> None:
    write(tmp_path, 3)
    newer = write(tmp_path, 5).path
    (newer / "manifest.json").unlink()
    (tmp_path / "checkpoints" / ".step-00000009").mkdir()
    assert [c.step for c in complete(tmp_path)] == [3]
    write(tmp_path, 9)  # over what a killed run left
    assert [c.step for c in complete(tmp_path)] == [3, 9]


@pytest.mark.parametrize("renamed", [False, True])
def test_a_checkpoint_survives_a_kill_while_it_is_replaced(tmp_path: Path, renamed: bool) -> None:
    target = write(tmp_path, 4).path
    aside = target.with_name(f".old-{target.name}")
    if renamed:
        shutil.copytree(target, aside)
    else:
        target.rename(aside)
    assert [c.step for c in complete(tmp_path)] == [4]
    assert not aside.exists()
    assert write(tmp_path, 4, best=4).manifest()["best_step"] == 4
    assert sorted(p.name for p in target.parent.iterdir()) == [target.name]


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    retain(tmp_path, keep=2, best=1)
    assert [c.step for c in complete(tmp_path)] == [1, 3, 4]
    retain(tmp_path, keep=1, best=None)
    assert [c.step for c in complete(tmp_path)] == [4]


def test_find_takes_a_folder_or_the_best_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a checkpoint nor a run"):
        find(tmp_path)
    first = write(tmp_path, 1)
    assert find(tmp_path) == first
    write(tmp_path, 2, best=1)
    assert find(str(tmp_path)) == first
    write(tmp_path, 3, best=None)
    assert find(tmp_path).step == 3
    assert find(tmp_path / "checkpoints" / "step-00000002").step == 2


def test_another_recipe_is_refused_with_its_differences(tmp_path: Path) -> None:
    saved = write(tmp_path, 1)
    check_recipe(saved, recipe(tmp_path / "moved", name="other", trainer={"epochs": 9}, trackers=[], callbacks=[]))
    with pytest.raises(ConfigError) as caught:
        check_recipe(saved, recipe(tmp_path, seed=4, model={"name": "tiny", "dim": 4}, task_weights={"buy": 2.0}))
    message = str(caught.value)
    for line in (
        "  model.dim: None in the checkpoint, 4 now",
        "  seed: 3 in the checkpoint, 4 now",
        "  task_weights.buy: None in the checkpoint, 2.0 now",
        "resume=never",
    ):
        assert line in message
