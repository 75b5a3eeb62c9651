"""A search over options: chosen on validation alone, resumable, one message for wrong use."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic import recipe, registry

from gem_core.errors import ConfigError
from gem_core.train.sweep import Choice, Range, split_space, sweep


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe(tmp_path / "run", trainer={"max_steps": 4}, trackers=[]).to_yaml())
    return file


def test_every_combination_is_run_once_and_ranked(path: Path, tmp_path: Path) -> None:
    space = ["optimizer.dense.lr=[0.01, 1.0e-4]", "trainer.max_steps=3", "model.dropout=[0.0]"]
    found = sweep(path, space, registry())
    assert [t.values["optimizer.dense.lr"] for t in found.trials] == ["0.01", "0.0001"]
    assert found.trials[0].metric is not None and found.trials[1].metric is not None
    assert found.trials[0].metric < found.trials[1].metric
    assert all(t.step == 3 for t in found.trials)
    result = json.loads((Path(found.trials[0].folder) / "result.json").read_text())
    assert result["test"] == {}, "the test split is not looked at"
    assert json.loads((tmp_path / "run/sweep/sweep.json").read_text())["trials"][0]["metric"] == found.trials[0].metric
    assert found.table().splitlines()[0].split()[:3] == ["joint/ne", "optimizer.dense.lr", "model.dropout"]
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run/sweep").glob("trial-*/result.json")}
    assert sweep(path, space, registry()).trials == found.trials
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "run/sweep").glob("trial-*/result.json")}
    with pytest.raises(ConfigError, match="a search over other options"):
        sweep(path, ["optimizer.dense.lr=[0.5]"], registry())


def test_a_range_an_exploding_trial_and_an_interrupted_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gem_core.train.sweep as module
    from gem_core.errors import GemError

    real, runs = module.train, []

    def flaky(made: Any, *rest: Any, **options: Any) -> Any:
        runs.append(str(made.folder))
        if len(runs) == 1:
            raise GemError("the loss is nan")
        if len(runs) == 2:
            raise KeyboardInterrupt
        return real(made, *rest, **options)

    monkeypatch.setattr(module, "train", flaky)
    space = ["optimizer.dense.lr={low: 1.0e-3, high: 1.0e-1, log: true}", "model.dim={low: 2, high: 4}"]
    with pytest.raises(KeyboardInterrupt):
        sweep(path, space, registry(), trials=3)
    found = sweep(path, space, registry(), trials=3)
    assert runs[2] == runs[1], "the trial that was cut off is run again"
    assert len(found.trials) == 3 and found.trials[-1].fault == "the loss is nan"
    for trial in found.trials:
        assert 1e-3 <= float(trial.values["optimizer.dense.lr"]) <= 0.1 and trial.values["model.dim"] in "234"
    assert "the loss is nan" in found.table()


def test_what_is_searched() -> None:
    fixed, space = split_space(["a=1", "b=[x, [1, 2], 0.5]", "c={low: 1, high: 2}", "d={name: q}"])
    assert fixed == ["a=1", "d={name: q}"]
    assert space == [Choice("b", ("x", "[1, 2]", "0.5")), Range("c", 1, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["a=1"], "nothing to search"),
        (["a=[]"], "at least one value"),
        (["a={low: 1, high: 0}"], "expected low < high"),
        (["a={low: 0, high: 1, log: true}"], "above 0 with log"),
        (["a={low: x, high: 1}"], "expected numbers"),
        (["model.dims=[4]"], "dims"),
        (["optimizer.dense.lr=[0.1]", "b={"], "override"),
    ],
)
def test_wrong_use(path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep(path, options, registry())


def test_without_optuna_or_with_many_processes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start it without torchrun"):
        sweep(path, ["a=[1]"], registry())
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install gem-core\[sweep\]"):
        sweep(path, ["a=[1]"], registry())
