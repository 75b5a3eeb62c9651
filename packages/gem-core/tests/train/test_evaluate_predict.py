"""Evaluation and prediction from a run's folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from synthetic import recipe, registry

from gem_core.errors import ConfigError, DataError
from gem_core.train import Result, evaluate, predict, restore, train
from gem_core.train.checkpoint import complete


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(recipe(tmp_path_factory.mktemp("run"), trainer={"epochs": 1}), registry())


def test_evaluate_repeats_what_training_measured(run: Result) -> None:
    assert evaluate(run.folder, registry=registry()) == run.test
    assert evaluate(run.checkpoint, "validation", registry=registry()) == run.validation
    other = evaluate(run.folder, overrides=["data.reader.rows.test=640"], registry=registry())
    assert other["click/rows"] == 640
    with pytest.raises(ConfigError, match='no split "tests"; did you mean "test"'):
        evaluate(run.folder, "tests", registry=registry())
    with pytest.raises(DataError, match='no row of split "test" has a label'):
        evaluate(run.folder, overrides=["data.reader.rows.test=0"], registry=registry())


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_predictions_are_the_model_s_in_the_split_s_order(run: Result, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "deep" / f"out.{suffix}"
    assert predict(run.folder, path, registry=registry()) == 320
    table = pyarrow.parquet.read_table(path) if suffix == "parquet" else pyarrow.csv.read_csv(path)
    assert table.column_names == ["row_id", "user", "click", "buy"]
    parts = restore(run.folder, registry())
    with torch.no_grad():
        batches = [(batch, parts.module(batch)) for batch, _ in parts.batches("test")]
    assert table["row_id"].to_pylist() == torch.cat([b.row_id for b, _ in batches]).tolist()
    assert table["user"].to_pylist() == torch.cat([b.user[b.request] for b, _ in batches]).tolist()
    for task in ("click", "buy"):
        expected = torch.cat([o.logits[task].sigmoid() for _, o in batches])
        torch.testing.assert_close(torch.tensor(table[task].to_pylist()), expected)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_predictions_are_streamed_in_pieces(run: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys.modules["gem_core.train.predict"], "ROW_GROUP", 100)
    predict(run.folder, tmp_path / "out.parquet", registry=registry())
    file = pyarrow.parquet.ParquetFile(tmp_path / "out.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [128, 128, 64]


def test_prediction_without_rows_gives_an_empty_file(run: Result, tmp_path: Path) -> None:
    overrides = ["data.reader.rows.test=0"]
    assert predict(run.folder, tmp_path / "out.parquet", overrides=overrides, registry=registry()) == 0
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet").num_rows == 0


def test_wrong_use_of_predict(run: Result, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.parquet or \.csv file, not out\.json"):
        predict(run.folder, tmp_path / "out.json", registry=registry())
    with pytest.raises(ConfigError, match='no split "trian"; did you mean "train"'):
        predict(run.folder, tmp_path / "out.csv", "trian", registry=registry())
    with pytest.raises(ConfigError, match="neither a checkpoint nor a run"):
        predict(tmp_path, tmp_path / "out.csv", registry=registry())
    with pytest.raises(DataError, match="not this model's"):
        predict(run.folder, tmp_path / "out.csv", overrides=["model.dim=4"], registry=registry())
    assert list(tmp_path.iterdir()) == []
    assert complete(run.folder)[-1].step == run.step


def test_data_in_memory_from_training_to_prediction(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    price = rng.normal(size=400)
    rows = pa.table(
        {
            "user": rng.integers(0, 20, 400),
            "time": np.arange(400),
            "price": price,
            "clicked": (rng.random(400) < 1 / (1 + np.exp(-2 * price))).astype(int),
            "split": ["train"] * 300 + ["test"] * 100,
        }
    )
    schema = {"user": "user", "time": "time", "dense": ["price"], "objectives": {"click": {"label": "clicked"}}}
    reader = {"name": "memory", "rows": rows, "split": {"column": "split"}}
    chosen = recipe(
        tmp_path,
        data={"reader": reader, "schema": schema, "batch_rows": 64},
        model={"name": "dcnv2", "hidden": [8], "dropout": 0.0},
        trainer={"epochs": 4},
    )
    result = train(chosen, registry())
    assert result.test["click/auc"] > 0.7
    assert "<pyarrow.lib.Table>" in (tmp_path / "recipe.yaml").read_text()
    assert train(chosen, registry(), resume="must").test == result.test
    new = {"name": "memory", "test": rows.slice(300)}
    assert evaluate(tmp_path, registry=registry(), reader=new)["click/ne"] == pytest.approx(result.test["click/ne"])
    assert predict(tmp_path, tmp_path / "out.csv", registry=registry(), reader=new) == 100


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_predictions_name_their_rows_as_the_log_does(tmp_path: Path, suffix: str, split: str) -> None:
    """In the log's order, training rows too, though training draws them in another."""
    request = np.repeat(np.arange(100), 3)
    rows = pa.table(
        {
            "id": [f"row-{i}" for i in range(300)],
            "request": [f"r{r}" for r in request],
            "member": request % 7 + 10**12,
            "time": request,
            "price": np.random.default_rng(0).normal(size=300),
            "clicked": np.arange(300) % 2,
            "split": ["train"] * 210 + ["test"] * 90,
        }
    )
    schema = {"user": "member", "time": "time", "request": "request", "row_id": "id", "dense": ["price"]}
    chosen = recipe(
        tmp_path / "run",
        data={
            "reader": {"name": "memory", "rows": rows, "split": {"column": "split"}},
            "schema": schema | {"objectives": {"click": {"label": "clicked"}}},
            "batch_rows": 50,
        },
        model={"name": "dcnv2", "hidden": [8]},
        trainer={"epochs": 1},
    )
    train(chosen, registry())
    reader = {"name": "memory", "rows": rows, "split": {"column": "split"}}
    path = tmp_path / f"out.{suffix}"
    expected = rows.filter(pa.compute.equal(rows["split"], split))
    assert predict(tmp_path / "run", path, split, registry=registry(), reader=reader) == len(expected)
    found = pyarrow.parquet.read_table(path) if suffix == "parquet" else pyarrow.csv.read_csv(path)
    assert found.column_names == ["row_id", "request", "user", "click"]
    for name, column in {"row_id": "id", "request": "request", "user": "member"}.items():
        assert found[name].to_pylist() == expected[column].to_pylist()
    parts = restore(tmp_path / "run", registry(), reader=reader)
    with torch.no_grad():
        logits = parts.module(parts.reader.load(split).batch(np.arange(len(expected) // 3))).logits["click"]
    torch.testing.assert_close(torch.tensor(found["click"].to_pylist()), logits.sigmoid())
