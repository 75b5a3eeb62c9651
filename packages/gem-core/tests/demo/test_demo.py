import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sklearn.metrics import roc_auc_score

from gem_core.data.completejourney import CompleteJourneyReader
from gem_core.demo import main as demo
from gem_core.demo import runs as demo_runs
from gem_core.demo.__main__ import main
from gem_core.demo.console import DemoTracker, Pace
from gem_core.demo.log import describe
from gem_core.demo.runs import Folder, Interrupted, train_model, train_trees
from gem_core.demo.trees import TreeFeatures, TreeOptions
from gem_core.errors import ConfigError
from gem_core.plugins import default_registry
from gem_core.train import Result

TREES = TreeOptions(learning_rate=0.3, leaves=7, trees=5, patience=3, threads=1)
STEPS = (
    "trainer.max_steps=2",
    "trainer.log_every=1",
    "trainer.evaluate_every=1",
    "data.batch_rows=128",
    "data.workers=0",
)
TINY = demo.Size(None, (*STEPS, "trainer.threads=1"), TREES)


def run(out: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The command, at a tiny size; what it printed."""
    monkeypatch.setattr(demo, "FULL", TINY)
    done = CliRunner().invoke(main, ["--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


@pytest.mark.usefixtures("journey")
def test_the_demo_trains_reports_and_does_not_train_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run(tmp_path, monkeypatch)
    for text in (
        "== 1. The log", "call simulated from real shopping patterns", "request      a household's visit",
        "households   14 of 2,469", "== 2. Train Kunlun", "step    2, 100%: NE",
        "-> validation NE: purchase", "=> test NE: purchase", "== 4. Train DCNv2", "== 5. Train LightGBM",
        "== 6. Results on the test weeks", "joint NE   purchase NE", "NE           normalised entropy", "fill", "report.html",
    ):  # fmt: skip
        assert text in printed, text
    page = (tmp_path / "report.html").read_text()
    assert page.count("<figure>") == 7 and "simulated from real shopping patterns" in page
    for name in ("Kunlun", "DIN", "DCNv2", "LightGBM"):
        assert f'<th scope="row">{name}</th>' in page and f"| {name} |" in (tmp_path / "report.md").read_text()
    before = {path: path.read_bytes() for path in tmp_path.rglob("result.json")}
    assert len(before) == 4

    again = run(tmp_path, monkeypatch)
    assert again.count("already trained") == 4 and "step    2" not in again
    assert {path: path.read_bytes() for path in tmp_path.rglob("result.json")} == before


@pytest.mark.usefixtures("journey")
def test_another_recipe_in_the_same_folder_starts_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def trained(*overrides: str) -> list[int]:
        recipe = demo.recipes_for(demo.Size(None, (*TINY.overrides, *overrides), TREES), tmp_path)["dcnv2"]
        run = train_model(recipe.model_copy(update={"trackers": recipe.trackers[:1]}), default_registry())
        return [int(line["step"]) for line in run.evaluations]

    assert trained() == [1, 2]
    (tmp_path / "dcnv2" / "leftover").write_text("of the other recipe")
    assert trained("trainer.max_steps=1") == [1]
    assert not (tmp_path / "dcnv2" / "leftover").exists()
    assert "already trained" not in capsys.readouterr().out


def test_runs_on_another_log_are_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.forget_other_log(tmp_path / "out", "one")
    (tmp_path / "out" / "din").mkdir()
    demo.forget_other_log(tmp_path / "out", "one")
    assert (tmp_path / "out" / "din").exists() and not capsys.readouterr().out
    demo.forget_other_log(tmp_path / "out", "two")
    assert not (tmp_path / "out" / "din").exists() and "start over" in capsys.readouterr().out
    demo.forget_other_log(tmp_path / "out", "two")
    assert not capsys.readouterr().out


def test_a_folder_is_done_by_its_own_recipe_and_a_whole_result(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", {"name": "x", "seed": 1})
    assert not folder.done() and not folder.same()
    folder.prepare()  # nothing there: nothing to do
    folder.path.mkdir()
    (folder.path / "recipe.yaml").write_text("{name: x, seed: 1}")
    (folder.path / "checkpoint").write_text("half way")
    assert folder.same() and not folder.done()
    for text, done in (
        ('{"status": "fin', False),
        ('{"status": "interrupted"}', False),
        ('{"status": "stopped"}', True),
    ):
        (folder.path / "result.json").write_text(text)
        assert folder.done() is done
    folder.prepare()
    assert not (folder.path / "result.json").exists() and (folder.path / "checkpoint").exists()  # the run goes on
    other = Folder(folder.path, {"name": "x", "seed": 2})
    assert not other.done()
    other.prepare()
    assert not folder.path.exists()
    folder.path.mkdir()
    (folder.path / "recipe.yaml").write_text("{: [")
    assert not folder.same()


@pytest.mark.usefixtures("journey")
def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(recipe: Any, registry: Any) -> Result:
        return Result("interrupted", 1, recipe.folder, None, None, {}, {})

    monkeypatch.setattr(demo_runs, "train", interrupted)
    recipe = demo.recipes_for(TINY, tmp_path)["kunlun"].model_copy(update={"trackers": []})
    with pytest.raises(Interrupted, match=r"interrupted in Kunlun; .* the same command goes on") as caught:
        train_model(recipe, default_registry())
    assert caught.value.exit_code == 1


def test_trees_are_measured_on_the_rows_of_the_reader(reader: CompleteJourneyReader, tmp_path: Path) -> None:
    features = TreeFeatures(reader.schema, ("product", "coupon"))
    run = train_trees(reader, {"reader": "tiny"}, tmp_path / "trees", features, TREES)
    rows = reader.load("test")
    for task in ("purchase", "repurchase"):
        assert run.test[f"{task}/rows"] == (rows.masks[task] > 0).sum()
    assert run.test["joint/rows"] == sum((mask > 0).sum() for mask in rows.masks.values())
    assert 0 < run.seconds == run.speed[0]["seconds"] and run.best_step is None
    assert run.largest("rss_gib") > 0.01
    assert min(line["purchase/ne"] for line in run.evaluations if "purchase/ne" in line) == pytest.approx(
        run.validation["purchase/ne"], rel=1e-5
    )
    fitted = demo_runs.fit_trees(features, reader.load("train"), reader.load("validation"), TREES, lambda *_: None)
    counted = rows.masks["purchase"] > 0
    scores = fitted["purchase"].logits(features.matrix(rows))[counted]
    expected = roc_auc_score(rows.labels["purchase"][counted], scores)
    assert run.test["purchase/auc"] == pytest.approx(expected)
    (tmp_path / "trees" / "metrics.jsonl").write_text("")  # would be written again if it were trained again
    assert train_trees(reader, {"reader": "tiny"}, tmp_path / "trees", features, TREES).evaluations == ()


@pytest.mark.parametrize(
    ("quick", "households", "expected"), [(False, None, None), (True, None, 100), (True, 30, 30), (False, 99, 99)]
)
def test_sizes(quick: bool, households: int | None, expected: int | None) -> None:
    size = demo.size_of(quick, households)
    assert size.households == expected
    recipes = demo.recipes_for(size, Path("out dir"))
    full = demo.recipes_for(demo.FULL, Path("out dir"))["kunlun"].data.reader.options["households"]
    for name, recipe in recipes.items():
        assert recipe.folder == Path("out dir") / name
        assert recipe.data.reader.options["households"] == (expected or full)
        assert recipe.trainer.epochs == (1 if quick else 2)
    assert {r.data.model_dump_json() for r in recipes.values()} == {recipes["din"].data.model_dump_json()}  # same rows


def test_the_share_of_households_is_said() -> None:
    surfaces = {"display": 10}
    label = {"display": {"rows": 10, "positives": 3, "rate": 0.3}}
    manifest: Mapping[str, Any] = {
        "households": 450,
        "rows": dict.fromkeys(("train", "validation", "test"), surfaces),
        "requests": dict.fromkeys(("train", "validation", "test"), 2),
        "labels": {"purchase": {"test": label}},
        "purchase_history_length_per_row": {"train": [0, 5, 50, 500, 1000]},
        "sends": {"negatives_kept": 0.1},
    }
    facts = describe(dict(manifest))
    assert facts["households"] == "450 of 2,469 (18%), sampled by a hash of their ids; counts are over all households"
    assert facts["purchase"] == "3 of 10 test rows (30.0%)"
    assert facts["histories"] == "0 to 1,000 purchases, median 50"
    assert describe({**manifest, "households": 2469})["households"] == "2,469 of 2,469 (100%)"
    redeem = describe({**manifest, "labels": {"redeem": {"test": label}}})["redeem"]
    assert redeem.endswith("negatives sampled at 10% and weighted back")


def test_a_users_mistake_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(size: demo.Size, out: Path) -> None:
        raise ConfigError("no such log")

    monkeypatch.setattr(demo, "run", broken)
    monkeypatch.setattr(sys, "argv", ["demo", "--quick"])
    monkeypatch.delitem(sys.modules, "gem_core.demo.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("gem_core.demo", run_name="__main__")
    assert ended.value.code == 2 and capsys.readouterr().err == "error: no such log\n"
    assert CliRunner().invoke(main, ["--households", "3"]).exit_code == 2


def test_the_tracker_prints_one_short_line_for_each_thing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tracker = DemoTracker(DemoTracker.Config(), tmp_path, resume=40)
    tracker.scalars(50, {"joint/ne": 0.5, "purchase/loss": 0.1}, "train")
    tracker.scalars(50, {"progress": 0.25, "samples_per_s": 1234.5, "fill": 1.0}, "speed")
    tracker.scalars(50, {"purchase/ne": 0.75, "purchase/display/ne": 0.7, "joint/ne": 0.8}, "validation")
    tracker.text(50, "run", "long")
    tracker.text(50, "early stop", "no better")
    tracker.figure(50, "f", None)
    tracker.close()
    assert capsys.readouterr().out.splitlines() == [
        "  going on from the checkpoint of step 40",
        "  step   50,  25%: NE 0.5000, 1,234 rows/s, fill 1.00",
        "  -> validation NE: purchase 0.7500, joint 0.8000",
        "  early stop: no better",
    ]


def test_progress_is_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("gem_core.demo.console.time.monotonic", lambda: now[0])
    pace = Pace(3)
    due = []
    for now[0] in (1.0, 3.0, 4.0, 6.5):
        due.append(pace.due())
    assert due == [False, True, False, True]
