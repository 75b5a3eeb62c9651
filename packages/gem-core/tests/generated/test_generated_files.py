"""The reader, the written files and the oracle agree: one log in two forms."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from generated_small import SMALL

from gem_core.cli import main
from gem_core.data.generated import GeneratedReader, Oracle, write
from gem_core.data.generated.config import EVENTS
from gem_core.data.readers import ParquetReader
from gem_core.errors import ConfigError
from gem_core.schema import Schema
from gem_core.train import RankingMetrics

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def reader() -> GeneratedReader:
    return GeneratedReader(SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log as files of about 2,000 rows."""
    out = tmp_path_factory.mktemp("generated") / "log"
    stages: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gem_core.data.generated.files.ROWS_PER_FILE", 2_000)
        write(SMALL, out, lambda *stage: stages.append(stage))
    assert ("users", 2, 2) in stages and stages[-1][0] == "files" and stages[-1][1] == stages[-1][2]
    return out


def parquet(folder: Path) -> ParquetReader:
    options = {"rows" if split == "train" else split: str(folder / split) for split in SPLITS}
    events = {event: str(folder / "events" / f"{event}.parquet") for event in EVENTS}
    return ParquetReader(ParquetReader.Config(**options, events=events), Schema.load(folder / "schema.yaml"))


def test_files_are_the_reader_s_log_in_order_of_time(folder: Path, reader: GeneratedReader) -> None:
    assert sorted(p.name for p in folder.iterdir()) == [
        "events", "manifest.json", "schema.yaml", "test", "train", "validation"
    ]  # fmt: skip
    last = 0
    for split in SPLITS:
        files = sorted((folder / split).iterdir())
        assert len(files) == (4 if split == "train" else 1)
        rows = pa.concat_tables(pq.read_table(f) for f in files)
        time = rows["time"].to_numpy()
        assert time[0] >= last and (np.diff(time) >= 0).all()
        last = time[-1]
        expected = pa.concat_tables(table for table, _ in reader.tables(split))
        assert len(rows) == len(expected) and (np.diff(expected["row_id"].to_numpy()) > 0).all()
        rows = rows.take(pa.array(np.argsort(rows["row_id"].to_numpy())))
        for name in expected.column_names:
            assert rows[name].cast(pa.string()).equals(expected[name].cast(pa.string())), name


def test_the_parquet_reader_reads_them(folder: Path, reader: GeneratedReader) -> None:
    files = parquet(folder)
    assert files.given_schema == reader.given_schema
    found, expected = files.load("test"), reader.load("test")
    order, same = np.argsort(found.row_id), np.argsort(expected.row_id)
    for task in SMALL.tasks:
        assert (found.masks[task][order] == expected.masks[task][same]).all()
        known = expected.masks[task][same] > 0
        assert (found.labels[task][order][known] == expected.labels[task][same][known]).all()
    for event in EVENTS:
        assert found.spans[event][1].max() > 0
        assert (found.log.types[event].time == expected.log.types[event].time).all()
    oracle = [key for key in pq.read_schema(folder / "test/part-00000.parquet").names if key.startswith("oracle")]
    schema = files.schema.model_dump_json()
    assert len(oracle) == len(SMALL.tasks) and "oracle" not in schema and "static" not in schema


def test_the_same_bytes_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_core.data.generated.files.ROWS_PER_FILE", 2_000)
    write(SMALL, tmp_path / "again", lambda *_: None)
    files = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file())
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes(), file


def test_oracle_is_the_metric_of_the_true_probabilities(folder: Path, reader: GeneratedReader) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    for split in SPLITS:
        oracle = reader.oracle(split)
        assert manifest["splits"][split] == pytest.approx(oracle)
        table = pa.concat_tables(t for t, _ in reader.tables(split))
        place = {row: i for i, row in enumerate(table["row_id"].to_pylist())}
        metrics = RankingMetrics(RankingMetrics.Config(), reader.schema)
        for batch in reader.iterate(split, batch_rows=500):
            rows = [place[i] for i in batch.row_id.tolist()]
            p = {t: torch.from_numpy(table[f"oracle_{t}"].to_numpy()[rows].astype(np.float64)) for t in SMALL.tasks}
            metrics.update({t: torch.logit(v).nan_to_num() for t, v in p.items()}, batch)
        found = metrics.compute()
        for task in SMALL.tasks:
            assert oracle[f"{task}/oracle_ne"] == pytest.approx(found[f"{task}/ne"], rel=1e-4)
            assert oracle[f"{task}/positives"] == found[f"{task}/positives"]
        assert oracle["joint/oracle_ne"] == pytest.approx(found["joint/ne"], rel=1e-4)
        assert oracle["click/expected_ne"] < oracle["click/static_ne"] - 0.02 < 0.95
    assert manifest["options"] == SMALL.model_dump(mode="json")
    assert sum(manifest["requests"].values()) == sum(reader.load(s).requests for s in SPLITS)
    for event in EVENTS:
        assert manifest["events"][event] == pq.read_metadata(folder / f"events/{event}.parquet").num_rows


def test_oracle_of_nothing_and_of_one_class() -> None:
    types = {"click": pa.int8(), "oracle_click": pa.float32(), "static_click": pa.float32()}
    empty = pa.schema(types).empty_table()
    assert Oracle.of([empty], ["click"]) == {"click/rows": 0, "click/positives": 0}
    one = pa.table({"click": [0, 0], "oracle_click": [0.1, 0.2], "static_click": [0.1, 0.1]}, pa.schema(types))
    assert Oracle.of([one], ["click"]) == {"click/rows": 2, "click/positives": 0, "click/rate": 0}


def test_histories_end_before_the_request_and_reach_before_the_first_row(reader: GeneratedReader) -> None:
    for batch in reader.iterate("train", batch_rows=800):
        for fields in batch.events.values():
            time = fields["time"]
            owner = np.repeat(np.arange(batch.requests), time.lengths().numpy())
            assert (time.values.numpy() < batch.request_time.numpy()[owner]).all()
    first = int(reader.load("train").time.argmin())
    start, end = reader.load("train").spans["impression"]
    assert (end > start).mean() > 0.95 and end[first] >= start[first]


def test_a_schema_of_ones_own_goes_before_the_log_s(reader: GeneratedReader) -> None:
    spec = {"user": "user", "time": "time", "sparse": ["ad"], "objectives": {"app_install": {}}}
    own = GeneratedReader(SMALL, Schema.parse(spec))
    batch = next(own.iterate("test"))
    assert batch.events == {} and batch.masks["app_install"].min() == 1, "rows without a label are left out"
    assert own.splits() == list(SPLITS) and own.rows("test") < reader.rows("test")
    short = SMALL.model_copy(update={"max_length": {"click": 3}})
    assert GeneratedReader.schema_of(short).events["click"].max_length == 3
    assert reader.given_schema.events["click"].max_length == EVENTS["click"]


def test_something_in_the_way_is_kept(folder: Path) -> None:
    with pytest.raises(ConfigError, match="log: already there; name a new folder, or remove it first"):
        write(SMALL, folder, lambda *_: None)


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gem_core.data.generated.files.pq.write_table", full)
    with pytest.raises(OSError, match="No space left"):
        write(SMALL, tmp_path / "log", lambda *_: None)
    assert list(tmp_path.iterdir()) == []


# ---- gem data generate --------------------------------------------------------------------------------------------


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["data", "generate", *arguments]) == code
    return capsys.readouterr()


def test_command_writes_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "options.yaml"
    config.write_text("ads: 400\nctr: 0.2\nusers: 7\n")
    given = ("--rows", "3000", "--users", "100", "--seed", "3", "--config", str(config))
    out, _ = output(capsys, str(tmp_path / "a/log"), *given)
    lines = out.splitlines()
    assert lines[0].startswith("3,000 rows, ") and lines[0].endswith(f"100 users in {tmp_path / 'a/log'}")
    assert len(lines) == 2 + 3 * 4 and lines[2].split()[:2] == ["train", "click"]
    manifest = json.loads((tmp_path / "a/log/manifest.json").read_text())
    assert f"{manifest['splits']['train']['click/oracle_ne']:.4f}" == lines[2].split()[6]
    assert manifest["options"]["seed"] == 3 and manifest["options"]["users"] == 100
    machine, _ = output(capsys, "--json", *given)
    assert json.loads(machine) == manifest, "without OUT: the same, unwritten"


def test_command_takes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: din\ndata: {reader: {name: generated, rows: 900, users: 50, ads: 400}}\n")
    out, _ = output(capsys, "--config", str(recipe))
    assert out.startswith("900 rows, ") and "-" in out, "no NE where a split has no positive"
    recipe.write_text("model: din\ndata: {reader: {name: csv, rows: x.csv}}\n")
    _, err = output(capsys, "--config", str(recipe), code=2)
    assert 'data.reader: expected the reader "generated", found "csv"' in err


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (("--rows", "0"), "", '"--rows 0": rows: expected a value greater than or equal to 1, found 0'),
        ((), "row: 5\n", 'did you mean "rows"'),
        (("--rows", "10", "--users", "20"), "", "expected 1 to 10,000 rows per user"),
    ],
)
def test_command_refuses(
    arguments: tuple[str, ...], text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "options.yaml"
    config.write_text(text or "ads: 4000\n")
    _, err = output(capsys, "--config", str(config), *arguments, code=2)
    assert err.startswith("error: ") and message in err
