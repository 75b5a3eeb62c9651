"""Profiling counts what is in a log and every kind of fault, and goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from naive_log import PROPERTY, SPEC, inline, logs, naive, tables

from gem_core.cli.data import profile as command
from gem_core.data.profile import Profile, profile
from gem_core.data.readers import CsvReader, MemoryReader
from gem_core.errors import ConfigError
from gem_core.schema import Schema

UNFITTED = Schema.parse({k: v for k, v in SPEC.items() if k != "fitted"})


def look(schema: Schema, **options: Any) -> Profile:
    return profile(MemoryReader(MemoryReader.Config(**options), schema))


@settings(PROPERTY, max_examples=20)
@given(logs())
def test_counts_of_a_sound_log(log: Any) -> None:
    rows, events = log
    table, event_tables = tables(rows, events)
    found = look(UNFITTED, rows=table, events=event_tables)
    assert found.faults == []
    split, expected = found.splits["train"], naive(rows, events)
    assert (split.rows, split.requests) == (len(rows), len(expected["request_time"]))
    assert split.users == len({r["u"] for r in rows})
    for task in ("click", "buy"):
        labels = split.labels[task]["all"]
        assert labels.rows == sum(expected["masks"][task]) and labels.positives == sum(expected["labels"][task])
    assert split.unlabelled == sum(not (a or b) for a, b in zip(*expected["masks"].values(), strict=True))
    assert split.repeated_row_ids == 0 and split.ids["ad"].values == len(rows)
    if rows:
        assert split.ids["ad"].missing == sum(r["ad"] is None for r in rows) / len(rows)
        assert split.numbers["price"].missing == sum(r["price"] is None for r in rows) / len(rows)
        assert split.surfaces == {s: n for s in ("feed", "search") if (n := sum(r["s"] == s for r in rows))}
        records = look(UNFITTED, rows=inline(rows, events))
        assert records.faults == [] and records.splits["train"].history == split.history
        assert records.splits["train"].truncated == split.truncated
    assert found.events["click"].events == len(events["click"])
    ads = {r["ad"] for r in rows} | {e["ad"] for e in events["click"]}
    assert found.tables["ad"] == len(ads - {None}) and "campaign" not in found.tables, "hashed ids have no vocabulary"
    json.dumps(found.as_json())


SMALL = {
    "user": "u",
    "time": "t",
    "request": "q",
    "row_id": "id",
    "history_before": "h",
    "surface": "s",
    "surfaces": ["feed"],
    "sparse": {"ad": {"vocabulary": ["a", "b"], "unseen": "error"}, "kind": {}, "tags": {"multi": True}},
    "dense": {"x": {"missing": "error", "transform": "log1p"}, "z": {}, "w": {"level": "request"}},
    "vectors": {"v": {"width": 1}},
    "events": {"click": {"fields": {"ad": {}, "kind": {}, "cost": {"kind": "dense"}}}},
    "objectives": {"y": {}, "z2": {"rate": "r"}},
}
SOUND: dict[str, list[Any]] = {
    "u": [1, 1, 2], "t": [5, 5, 6], "q": [1, 1, 2], "id": [1, 2, 3], "h": [5, 5, 6], "s": ["feed"] * 3,
    "ad": ["a", "b", "a"], "kind": [1, 2, 3], "tags": [["p"], [], None], "x": [0.0, 1.0, 2.0], "z": [1, 2, 3],
    "w": [4, 4, None], "v": [[1.0], [2.0], None], "y": [0, 1, None], "z2": [1, 0, None], "r": [1.0, 0.5, None],
    "click.time": [[1, 2], None, [3]], "click.ad": [["a", "b"], None, ["a"]], "click.kind": [[1, 1], None, [1]],
    "click.cost": [[1.0, 2.0], None, [3.0]],
}  # fmt: skip

FAULTS: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "labels": ({"y": [2, 1, -1]}, 2, r'rows, row 1, column "y".*a label of 0 or 1, or none, found 2'),
    "leak": ({"click.time": [[5, 6], None, [3]]}, 2, 'column "click.time".*a leak'),
    "order of events": ({"click.time": [[2, 1], None, [3]]}, 1, "times in order, oldest event first"),
    "end of the history": ({"h": [5, 5, 9]}, 1, 'row 3, column "h".*a time not after the request'),
    "missing": ({"x": [0.0, None, 2.0]}, 1, r'row 2, column "x".*a number \(missing: error\)'),
    "infinite": ({"z": [1.0, float("inf"), 2.0]}, 1, 'row 2, column "z".*a finite number'),
    "logarithm": ({"x": [-1.0, -2.0, 0.0]}, 2, 'row 1, column "x".*above -1'),
    "out of range": ({"ad": ["a", "c", "d"]}, 2, 'row 2, column "ad".*one of the 2 ids of its vocabulary, found'),
    "surface": ({"s": ["feed", "web", "feed"]}, 1, 'row 2, column "s".*one of feed, found'),
    "user": ({"u": [1, None, 2]}, 1, 'row 2, column "u".*a user'),
    "vector": ({"v": [[1.0], [2.0, 3.0], None]}, None, 'row 2, column "v".*expected 1 numbers, found 2'),
    "rate": ({"r": [1.0, 0.0, None]}, None, 'row 2, column "r".*a rate in'),
    "type": ({"z": ["1", "2", "3"]}, None, 'column "z".*expected numbers, found type string'),
    "type of ids": ({"kind": [[1], [2], [3]]}, None, 'column "kind".*expected integers or text'),
    "type of lists": ({"tags": [1, 2, 3]}, None, 'column "tags".*expected lists'),
    "time": ({"t": [None, 5, 6]}, None, 'row 1, column "t".*a time'),
    "surface missing": ({"s": ["feed", None, "feed"]}, None, 'row 2, column "s".*a value'),
    "request level": ({"w": [4, 5, None]}, 1, r'row 2, column "w" \(dense feature w\).*of the same request.*found 5'),
    "no column": ({"y": ...}, None, 'rows: no column "y"'),
    "no history": ({"click.time": ...}, None, 'rows: no column "click.time"'),
}


def test_a_sound_log_has_no_faults() -> None:
    found = look(Schema.parse(SMALL), rows=SOUND)
    assert found.faults == []
    split = found.splits["train"]
    assert split.history["click"]["max"] == 2 and split.requests == 2
    assert split.labels["z2"]["feed"].rate == 0.5 and split.labels["y"]["all"].rows == 2


@pytest.mark.parametrize(("change", "count", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_faults_are_counted(change: dict[str, Any], count: int | None, message: str) -> None:
    columns = {k: v for k, v in (SOUND | change).items() if v is not ...}
    found = look(Schema.parse(SMALL), rows=columns)
    assert [f.count for f in found.faults] == [count]
    assert re.search(message, found.faults[0].first), found.faults[0].first
    assert found.splits["train"].rows == 3, "the rest is profiled all the same"


def test_every_kind_of_fault_of_a_csv_file_is_counted_once(tmp_path: Path) -> None:
    """Though each split reads the file; a value that cannot be read is not also one that is missing."""
    spec = {"user": "u", "time": "t", "dense": {"x": {"missing": "error"}, "z": {}}, "objectives": ["y"]}
    lines = ["1,5,1,1,0,train", "1,noon,much,2,1,test", "1,6,more,,yes,train", "1,5.5,3,few,2,test", "1,5", "2"]
    (tmp_path / "rows.csv").write_text("u,t,x,z,y,part\n" + "\n".join(lines) + "\n")
    options: dict[str, Any] = {"rows": str(tmp_path / "rows.csv"), "split": {"column": "part"}, "unlabelled": "keep"}
    found = profile(CsvReader(CsvReader.Config(**options), Schema.parse(spec)))
    places = [(f.count, *re.findall(r"line (\d+)|column \"(\w+)\"", f.first)) for f in found.faults]
    assert sorted((count, *(line or name for line, name in at)) for count, *at in places) == [
        (1, "3", "t"), (1, "4", "y"), (1, "5", "t"), (1, "5", "y"), (1, "5", "z"), (2, "3", "x"), (2, "6")
    ]  # fmt: skip
    assert found.splits["train"].rows == 2 and found.splits["test"].rows == 2


def test_a_fault_of_several_files_is_at_its_own(tmp_path: Path) -> None:
    for name, label in (("a", 0), ("b", 2)):
        (tmp_path / f"{name}.csv").write_text(f"u,t,x,y\n1,5,1,0\n1,5,1,{label}\n")
    spec = {"user": "u", "time": "t", "dense": ["x"], "objectives": ["y"]}
    found = profile(CsvReader(CsvReader.Config(rows=str(tmp_path)), Schema.parse(spec)))
    assert [f.first.partition(", column")[0] for f in found.faults] == [f"{tmp_path}/b.csv, line 3"]


def test_repeated_rows_and_ids() -> None:
    table = pa.table(SOUND)
    found = look(Schema.parse(SMALL), rows=pa.concat_tables([table, table.slice(2)]))
    assert found.splits["train"].repeated_row_ids == 1 and found.splits["train"].identical_rows == 1


def test_unseen_ids_of_later_splits() -> None:
    later = SOUND | {"kind": [1, 9, 3]}
    found = look(Schema.parse(SMALL), rows=SOUND, test=later)
    assert found.splits["train"].ids["kind"].unseen is None
    assert found.splits["test"].ids["kind"].unseen == pytest.approx(1 / 3)
    assert found.tables == {"ad": 2, "kind": 3, "tags": 1}


def test_faults_of_stored_events() -> None:
    schema = Schema.parse(SMALL)
    events = pa.table({"u": [1, None], "t": [3, 4], "ad": ["a", "c"], "kind": [1, 2], "cost": [1.0, 2.0]})
    found = look(schema, rows=SOUND, events={"click": events})
    assert sorted(str(f.count) for f in found.faults) == ["1", "1"]
    assert found.events["click"].ids["ad"].unseen == 0.5
    broken = look(schema, rows=SOUND, events={"click": events.drop_columns(["t", "cost"])})
    assert [f.first for f in broken.faults if "no column" in f.first] and broken.events == {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = ["u", "t", "id", "s", "ad", "x", "y", "z2", "r"]
    spec = {k: v for k, v in SMALL.items() if k not in ("request", "history_before", "vectors")}
    spec |= {"sparse": {"ad": {}}, "dense": {"x": {}}, "events": {"click": {"fields": {"ad": {}}}}}
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump(spec))
    pq.write_table(pa.table({n: SOUND[n] for n in names}), tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("u;t;id;s;ad;x;y;z2;r\n1;5;1;feed;a;0.5;1;;\n")
    pq.write_table(pa.table({"u": [1], "t": [4], "ad": ["a"]}), tmp_path / "click.parquet")
    (tmp_path / "click.csv").write_text("u;t;ad\n1;4;a\n")
    reader = {"name": "parquet", "rows": str(tmp_path / "rows.parquet"), "unlabelled": "keep"}
    reader["events"] = {"click": str(tmp_path / "click.parquet")}  # type: ignore[assignment]
    recipe = {"data": {"reader": reader, "schema": "schema.yaml"}, "model": "kunlun"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(command, [str(a) for a in arguments], env={"COLUMNS": "40"})


def test_command_with_a_schema(folder: Path) -> None:
    events = f"click={folder / 'click.parquet'}"
    shown = run(folder / "schema.yaml", folder / "rows.parquet", "--events", events)
    assert shown.exit_code == 0, shown.output
    for text in ("Splits", "Labels", "Events", "Ids", "Vocabularies", "Numbers", "No faults found", "feed"):
        assert text in shown.output
    lines = shown.output.splitlines()
    assert any("repeated row ids" in line and "identical rows" in line for line in lines), (
        "nothing is wrapped in a pipe"
    )
    plain = run(
        folder / "schema.yaml",
        folder / "rows.csv",
        "--events",
        f"click={folder / 'click.csv'}",
        "--delimiter",
        ";",
        "--json",
    )
    assert plain.exit_code == 0, plain.output
    found = json.loads(plain.output)
    assert found["splits"]["train"]["labels"]["y"]["all"] == {"rows": 1, "positives": 1, "rate": 1.0}


def test_command_with_a_recipe(folder: Path) -> None:
    assert run(folder / "recipe.yaml").exit_code == 0
    bad = pa.table(
        {"u": [1], "t": [4], "id": [1], "s": ["web"], "ad": ["a"], "x": [0.0], "y": [1], "z2": [1], "r": [1.0]}
    )
    pq.write_table(bad, folder / "bad.parquet")
    found = run(folder / "recipe.yaml", f"data.reader.rows={folder / 'bad.parquet'}")
    assert found.exit_code == 1 and "Faults" in found.output and "one of feed" in found.output


WRONG = {
    "no such file": (["none.yaml"], "none.yaml: cannot be read"),
    "schema alone": (["schema.yaml"], "is a schema: name the files of rows"),
    "events": (["schema.yaml", "rows.parquet", "--events", "click"], 'expected TYPE=FILE, found "click"'),
    "events of a recipe": (["recipe.yaml", "--events", "click=x"], "--events goes with a schema"),
    "recipe without a schema": (["recipe.yaml", "data.schema=null"], "data.schema: missing"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_commands(folder: Path, arguments: list[str], message: str) -> None:
    found = run(*(folder / a if a.endswith((".yaml", ".parquet")) else a for a in arguments))
    assert isinstance(found.exception, ConfigError) and message in str(found.exception)


def test_a_reader_without_tables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_core.cli.data._of_recipe", lambda *_: object())
    assert "cannot be profiled" in str(run(folder / "recipe.yaml").exception)
