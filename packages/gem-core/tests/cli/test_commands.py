"""`gem train`, `eval` and `predict` on a small log: what they print, write and return."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pyarrow.csv
import pytest
import yaml

from gem_core.cli import main
from gem_core.plugins import default_registry, hookimpl
from gem_core.protocols import Callback, ComponentConfig
from gem_core.recipe import load, parse, resolve

RUN = "runs/small"
BEST = "runs/small/checkpoints/step-00000003"


@pytest.fixture
def run(run_folder: Path, log: Path) -> Path:
    """The working directory, with the log and a finished run."""
    shutil.copytree(run_folder, log, dirs_exist_ok=True)
    return log


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == code
    return capsys.readouterr().out


# ---- train ---------------------------------------------------------------------------------------------------------


def test_print_config_is_the_resolved_recipe(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "train", "recipe.yaml", "trainer.epochs=4", "model.max_events=5", "--print-config")
    printed = parse(yaml.safe_load(out))
    given = load("recipe.yaml", ["trainer.epochs=4", "model.max_events=5"])
    assert printed == resolve(given, default_registry())
    assert printed.trainer.epochs == 4
    assert printed.model.options["max_events"] == 5
    assert printed.model.options["features"]["embedding_dim"] == 16, "a default of the model's own"
    assert isinstance(printed.data.schema_, dict) and printed.data.schema_["user"] == "user"
    assert not (log / "runs").exists(), "nothing was trained"
    (log / "again.yaml").write_text(out)
    assert output(capsys, "train", "again.yaml", "--print-config") == out


def test_summary_reads_no_data(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (log / "rows.csv").unlink()
    out = output(capsys, "train", "recipe.yaml", "model.hidden=[4]", "--summary")
    titles = [line.split(",")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert titles == ["dense parameters", "table parameters", "forward FLOPs per row"]
    assert "1 row a request and events 8 click" in out and "category (at most)" in out
    counts = json.loads(output(capsys, "train", "recipe.yaml", "model.hidden=[4]", "--summary", "--json"))
    assert (
        counts["at_most"] == ["ad", "category"]
        and {"features", "attention.click", "mlp", "heads"} == counts["parameters"].keys()
    )
    assert not (log / "runs").exists(), "nothing was trained"


def test_train_prints_a_table(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "train", "recipe.yaml")
    assert out.splitlines()[0] == f"finished at step 3, best at step 3; checkpoint {BEST}"
    assert out.splitlines()[1].split() == ["validation", "test"]
    assert {"click/ne", "joint/ne", "buy/logloss"} <= {line.split()[0] for line in out.splitlines()[2:]}
    assert "search" not in out, "surfaces are for --json"


def test_train_json_is_alone_on_stdout(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipe.yaml", "trackers=[console]", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["status"], result["step"], result["checkpoint"]) == ("finished", 3, BEST)
    assert result["validation"]["joint/ne"] > 0
    assert "train step 2" in err, "progress goes to stderr"
    assert result["test"] == json.loads((log / RUN / "result.json").read_text())["test"]


def test_train_again_goes_on_and_never_starts_over(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "recipe.yaml", "trainer.epochs=2", "--json"]
    assert json.loads(output(capsys, *arguments, "--resume", "must"))["step"] == 6
    lines = (run / RUN / "metrics.jsonl").read_text().splitlines()
    steps = [row["step"] for row in map(json.loads, lines) if row["kind"] == "validation"]
    assert steps == [3, 6], "the first three steps were not done again"
    assert json.loads(output(capsys, *arguments, "--resume", "never"))["step"] == 6
    assert len((run / RUN / "metrics.jsonl").read_text().splitlines()) <= len(lines) + 1


def test_only_the_main_process_prints(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert output(capsys, "train", "recipe.yaml") == ""


class Terminates(Callback):
    """Sends this process SIGTERM after its first step."""

    class Config(ComponentConfig):
        """No options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def on_step(self, trainer: object, step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def terminates() -> Iterator[None]:
    module = types.ModuleType("terminates")
    module.gem_register_callback = hookimpl(lambda register: register("terminates", Terminates))  # type: ignore[attr-defined]
    default_registry().register_plugin(module, "terminates")
    yield
    default_registry().unregister_plugin("terminates")


@pytest.mark.usefixtures("terminates")
def test_sigterm_saves_and_the_same_command_goes_on(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = json.loads(output(capsys, "train", "recipe.yaml", "callbacks=[terminates]", "--json", code=1))
    assert (first["status"], first["step"]) == ("interrupted", 1)
    assert json.loads(output(capsys, "train", "recipe.yaml", "--json"))["status"] == "finished"


# ---- eval and predict ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [RUN, BEST])
def test_eval_gives_the_metrics_of_training(path: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads((run / RUN / "result.json").read_text())
    assert json.loads(output(capsys, "eval", path, "--json")) == result["test"]
    assert json.loads(output(capsys, "eval", path, "--split", "validation", "--json")) == result["validation"]


def test_eval_prints_a_table_and_takes_overrides(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(run / "rows.csv", run / "other.csv")
    out = output(capsys, "eval", RUN, "data.reader.split=null", "data.reader.rows=null", "data.reader.test=other.csv")
    assert out.split()[0] == "test"
    assert ["click/rows", "60"] in [line.split() for line in out.splitlines()]


def test_predict_scores_rows_without_labels(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pyarrow.csv.read_csv("rows.csv").drop_columns(["clicked", "bought", "split"])
    pyarrow.csv.write_csv(table, run / "new rows.csv")
    shutil.move(run / "events.csv", run / "new events.csv")
    arguments = [
        "predict",
        RUN,
        "--rows",
        "new rows.csv",
        "--events",
        "click=new events.csv",
        "--out",
        "out/scores.csv",
    ]
    assert output(capsys, *arguments, "--out", "out/scores.csv") == "60 rows in out/scores.csv\n"
    scores = pyarrow.csv.read_csv(run / "out" / "scores.csv")
    assert scores.column_names == ["row_id", "user", "click", "buy"]
    assert all(0 < p < 1 for name in ("click", "buy") for p in scores[name].to_pylist())
    assert scores["row_id"].to_pylist() == list(range(60)), "the place in the file"
    assert scores["user"].to_pylist() == table["user"].to_pylist(), "as in the file"


def test_doctor_and_plugins_run_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    assert '"matmul peak"' in output(capsys, "doctor", "--json")
    assert "kunlun" in output(capsys, "plugins")
    assert "torch" in sys.modules
