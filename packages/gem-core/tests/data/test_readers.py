"""Readers of tables: one log in every form gives the same batches; splits; what is wrong is named."""

from __future__ import annotations

import csv
import gzip
import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from naive_log import PROPERTY, inline, logs, schema, tables
from test_encode import assert_same

from gem_core.data.batch import Batch
from gem_core.data.readers import CsvReader, MemoryReader, ParquetReader
from gem_core.data.readers.base import Split, TableReader
from gem_core.data.tables import any_table
from gem_core.errors import ConfigError, DataError
from gem_core.plugins import default_registry
from gem_core.schema import Schema

SMALL = {"user": "u", "time": "t", "sparse": {"ad": {}}, "dense": {"x": {}}, "objectives": {"y": {}}}


def whole(reader: TableReader, split: str = "test") -> Batch:
    rows = reader.load(split)
    return rows.batch(np.arange(rows.requests))


def write_csv(path: Path, rows: list[dict[str, Any]], names: list[str]) -> Path:
    def text(value: Any) -> str:
        if isinstance(value, list):
            return "|".join("" if v is None else str(v) for v in value)
        return "" if value is None else str(value)

    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([[text(r[n]) for n in names] for r in rows])
    return path


@settings(PROPERTY, max_examples=8)
@given(logs())
def test_one_log_in_every_form(tmp_path_factory: pytest.TempPathFactory, log: Any) -> None:
    rows, events = log
    folder = tmp_path_factory.mktemp("log")
    table, event_tables = tables(rows, events)
    memory = MemoryReader(MemoryReader.Config(test=table, events=event_tables, unlabelled="keep"), schema())
    expected = whole(memory)

    pq.write_table(table, folder / "rows.parquet", row_group_size=2)
    for name, stored in event_tables.items():
        pq.write_table(stored, folder / f"{name}.parquet")
    files = {name: str(folder / f"{name}.parquet") for name in events}
    config = ParquetReader.Config(test=str(folder / "rows.parquet"), events=files, unlabelled="keep")
    assert_same(whole(ParquetReader(config, schema())), expected)

    text = write_csv(folder / "rows.csv", rows, table.column_names)
    texts = {n: str(write_csv(folder / f"{n}.csv", e, event_tables[n].column_names)) for n, e in events.items()}
    csv_config = CsvReader.Config(test=[str(text)], events=texts, unlabelled="keep")
    empty_tags = [r for r in rows if r["tags"] == [None]]  # one empty field: no list, not a list of no value
    if not empty_tags:
        assert_same(whole(CsvReader(csv_config, schema())), expected)

    records = inline(rows, events)
    own = MemoryReader.Config(test=records, unlabelled="keep")
    if records:
        assert_same(whole(MemoryReader(own, schema())), expected)


def test_histories_in_list_columns_of_csv(tmp_path: Path) -> None:
    spec = SMALL | {"events": {"click": {"fields": {"ad": {}, "spent": {"kind": "dense"}}}}}
    text = "u,t,ad,x,y,click.time,click.ad,click.spent\n1,9,a,1.5,1,3|8,a|b,1|3\n2,9,b,,0,,,\n"
    (tmp_path / "rows.csv").write_text(text)
    batch = whole(CsvReader(CsvReader.Config(rows=str(tmp_path / "rows.csv")), Schema.parse(spec)), "train")
    assert batch.events["click"]["time"].values.tolist() == [8, 3]
    assert batch.events["click"]["spent"].values.tolist() == [1.0, -1.0]
    assert batch.events["click"]["ad"].lengths().tolist() == [2, 0]
    assert batch.dense[:, 0].isnan().tolist() == [False, True]


def test_csv_values(tmp_path: Path) -> None:
    """Quoted fields, tabs, words for true and false and for no number, times in ISO form; ids stay text."""
    text = 'u\tt\tad\tx\ty\n"a\tb"\t2026-01-31 12:00:00\t007\tNA\tTrue\nb\t2026-01-31T12:00:01\t7\t 1.5 \tfalse\n'
    (tmp_path / "rows.tsv").write_text(text)
    reader = CsvReader(CsvReader.Config(rows=str(tmp_path), delimiter="\t"), Schema.parse(SMALL))
    rows = reader.load("train")
    assert rows.time.tolist() == [1769860800, 1769860801]
    assert rows.labels["y"].tolist() == [1.0, 0.0]
    assert sorted(reader.schema.require_fitted().vocabularies["ad"], key=str) == ["007", "7"]
    assert np.isnan(rows.dense[:, 0]).tolist() == [True, False]
    (tmp_path / "zone.csv").write_text("u,t,ad,x,y\n1,2026-01-31T12:00:00.250+01:00,1,1,1\n")
    zoned = CsvReader(CsvReader.Config(rows=str(tmp_path / "zone.csv")), Schema.parse(SMALL))
    assert zoned.load("train").time.tolist() == [1769857200]


BROKEN_CSV = {
    "label": ("1,1,a,1,yes\n", r'rows.csv, line 3, column "y" \(label\): expected 0 or 1, found \'yes\''),
    "label of 2": ("1,1,a,1,2\n", r'rows.csv, line 3, column "y" \(label of y\): expected a label of 0 or 1.*2.0'),
    "number": ("1,1,a,much,1\n", r'rows.csv, line 3, column "x" \(dense\): expected a number, found \'much\''),
    "time": ("1,noon,a,1,1\n", r'rows.csv, line 3, column "t" \(time\): expected seconds since 1970 .*found \'noon\''),
    "time like noon": ("1,,a,1,1\n", r'line 3, column "t" \(request time\): expected a time, found no value'),
    "no user": (",1,a,1,1\n", r'rows.csv, line 3, column "u" \(user\): expected a user, found no value'),
    "no label": ("1,1,a,1,\n", r"rows.csv, line 3: expected a label for at least one of y, found none"),
    "too few fields": ("1,1,a\n", r"rows.csv, line 3: expected 5 fields, as in the header, found 3"),
}


@pytest.mark.parametrize(("line", "message"), BROKEN_CSV.values(), ids=BROKEN_CSV.keys())
def test_broken_csv(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "rows.csv").write_text("u,t,ad,x,y\n1,1,a,1,0\n" + line)
    with pytest.raises(DataError, match=message):
        CsvReader(CsvReader.Config(rows=str(tmp_path / "rows.csv")), Schema.parse(SMALL)).load("train")


TIMES = {
    "floats": (["1740000000.0", "1740000001", "1.740000002e9"], [1740000000, 1740000001, 1740000002]),
    "fractions of a date": (["2026-01-31 12:00:00.25", "2026-01-31 12:00:01"], [1769860800, 1769860801]),
    "a zone": (["2026-01-31T12:00:00Z", "2026-01-31T12:00:00+01:00"], [1769860800, 1769857200]),
    "days": (["1970-01-02", "1970-01-03"], [86400, 172800]),
}
BROKEN_TIMES = {
    "a fraction": (["5.0", "5.5"], r"line 3, .*expected whole seconds since 1970 \(cut or round.*found '5.5'"),
    "no number": (["5.0", "x"], r"line 3, .*expected seconds since 1970 \(as in the rows before\), found 'x'"),
    "not a time": (["noon"], r"line 2, .*expected seconds since 1970 or a time like 2026-01-31 12:00:00, found 'noon'"),
    "another form": (["2026-01-31", "5"], r"line 3, .*a time like .* \(in the form of the rows before\), found '5'"),
    "milliseconds": (["1740000000000.0"], "are these milliseconds"),
}


def csv_of(folder: Path, times: list[str]) -> CsvReader:
    (folder / "rows.csv").write_text("u,t,ad,x,y\n" + "".join(f"1,{time},a,1,0\n" for time in times))
    return CsvReader(CsvReader.Config(rows=str(folder / "rows.csv")), Schema.parse(SMALL))


@pytest.mark.parametrize(("texts", "seconds"), TIMES.values(), ids=TIMES.keys())
def test_times_of_csv(tmp_path: Path, texts: list[str], seconds: list[int]) -> None:
    assert csv_of(tmp_path, texts).load("train").time.tolist() == seconds


@pytest.mark.parametrize(("texts", "message"), BROKEN_TIMES.values(), ids=BROKEN_TIMES.keys())
def test_broken_times_of_csv(tmp_path: Path, texts: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        csv_of(tmp_path, texts).load("train")


@pytest.mark.parametrize(("value", "message"), [(5.5, "whole seconds"), (float("nan"), "expected a time, found nan")])
def test_broken_times_in_memory(value: float, message: str) -> None:
    with pytest.raises(DataError, match=message):
        memory(rows=ROWS.set_column(1, "t", pa.array([1.0, 1.0, value, 9.0]))).load("train")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_is_that_of_the_file(tmp_path: Path, suffix: str) -> None:
    """Blank lines and line breaks within quotes count."""
    path = tmp_path / f"rows.csv{suffix}"
    for last, at in (("1,1,a,much,1\n", 6), ("1,1\n", 6)):
        text = 'u,t,ad,x,y\n\n1,1,"a\nb",1,0\n1,1,a,1,0\n' + last
        path.write_bytes(gzip.compress(text.encode()) if suffix else text.encode())
        with pytest.raises(DataError, match=f"rows.csv{suffix}, line {at}"):
            CsvReader(CsvReader.Config(rows=str(path)), Schema.parse(SMALL)).load("train")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    out = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return out


def test_what_is_hardly_meant_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    spec = SMALL | {"events": {"click": {"fields": ["ad"]}}}
    for user, time, why in ((1, 99, "all are later than the user's requests"), (7, 0, "no user in common")):
        events = pa.table({"u": [user], "t": [time], "ad": ["a"]})
        reader = memory(spec, events={"click": events}, split={"test_from": 99})
        assert reader.rows("train") == reader.rows("train") == 4
        (message,) = said(caplog)
        assert message.startswith('warning: no request of split train sees any event of type "click": ')
        assert why in message
        assert reader.rows("test") == 0
        assert said(caplog) == ["warning: split test has no rows (reader option split: {'test_from': 99})"]
    seen = pa.table({"u": [1], "t": [0], "ad": ["a"]})
    assert memory(spec, events={"click": seen}).rows("train") == 4 and said(caplog) == []


def test_histories_in_list_columns_with_names_of_their_own(tmp_path: Path) -> None:
    fields = {"ad": {"column": "clicked_ads"}, "spent": {"kind": "dense"}}
    spec = SMALL | {"events": {"click": {"time": "clicked_at", "fields": fields}}}
    text = "u,t,ad,x,y,clicked_at,clicked_ads,click.spent\n1,9,a,1.5,1,3|8,a|b,1|3\n"
    (tmp_path / "rows.csv").write_text(text)
    in_csv = CsvReader(CsvReader.Config(rows=str(tmp_path / "rows.csv")), Schema.parse(spec))
    lists = {"clicked_at": [[3, 8]], "clicked_ads": [["a", "b"]], "click.spent": [[1.0, 3.0]]}
    in_memory = memory(spec, rows={"u": ["1"], "t": [9], "ad": ["a"], "x": [1.5], "y": [1], **lists})
    for reader in (in_csv, in_memory):
        events = whole(reader, "train").events["click"]
        assert events["time"].values.tolist() == [8, 3] and events["spent"].values.tolist() == [1.0, -1.0]
        assert len(set(events["ad"].values.tolist())) == 2


def test_a_parquet_column_twice(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([*ROWS.columns, ROWS["x"]], names=[*ROWS.column_names, "x"]), tmp_path / "r.pq")
    with pytest.raises(DataError, match=r'r.pq: two columns are called "x" \(dense\); rename one'):
        ParquetReader(ParquetReader.Config(rows=str(tmp_path / "r.pq")), Schema.parse(SMALL)).load("train")


ROWS = pa.table(
    {"u": [1, 1, 2, 3], "t": [1, 1, 5, 9], "ad": ["a", "b", "a", "c"], "x": [1.0, 2, 3, 4], "y": [0, 1, 0, 1]}
)


def memory(spec: dict[str, Any] = SMALL, seed: int = 0, **options: Any) -> MemoryReader:
    return MemoryReader(MemoryReader.Config(**({"rows": ROWS} | options)), Schema.parse(spec), seed)


def test_split_by_column_and_by_time() -> None:
    named = ROWS.append_column("part", pa.array(["train", "train", "test", "validation"]))
    by_column = memory(rows=named, split={"column": "part"})
    assert [by_column.rows(s) for s in by_column.splits()] == [2, 1, 1]
    assert by_column.schema.require_fitted().rows == 2
    assert by_column.load("test").row_id.tolist() == [2], "its place in the log"
    by_time = memory(split={"validation_from": 5, "test_from": 9})
    assert [by_time.rows(s) for s in ("train", "validation", "test")] == [2, 1, 1]
    assert by_time.load("test").ids.of("ad").tolist() == [1], "an ad that training never saw"
    only_test = memory(split={"test_from": 5})
    assert only_test.splits() == ["train", "test"] and only_test.rows("test") == 2
    assert memory(rows=named, split={"validation_from": 2}).rows("validation") == 2
    assert memory(split={"test_from": 9}, validation=None).rows("train") == 3


def test_split_by_dates() -> None:
    assert Split(validation_from=date(1970, 1, 2)).edges() == (86400, float("inf"))
    assert Split(test_from=datetime(1970, 1, 1, 1)).edges() == (3600, 3600)
    assert Split(test_from=datetime(1970, 1, 1, 1, tzinfo=UTC)).edges() == (3600, 3600)
    assert Split.model_validate({"test_from": "1970-01-02"}).edges()[1] == 86400


def test_separate_files_for_each_split() -> None:
    reader = memory(validation=ROWS.slice(2, 1), test=ROWS.slice(3))
    assert [reader.rows(s) for s in reader.splits()] == [4, 1, 1]


def test_a_fitted_schema_is_not_fitted_again() -> None:
    fitted = memory().schema
    again = MemoryReader(MemoryReader.Config(rows=ROWS.slice(3)), fitted)
    assert again.schema is fitted and again.load("train").ids.of("ad").tolist() == [4]


def test_unlabelled_rows() -> None:
    gaps = ROWS.set_column(4, "y", pa.array([0, 1, None, 1]))
    assert memory(rows=gaps, unlabelled="drop").load("train").row_id.tolist() == [0, 1, 3]
    kept = memory(rows=gaps, unlabelled="keep").load("train")
    assert kept.rows == 4 and kept.masks["y"].tolist() == [1, 1, 0, 1]
    with pytest.raises(DataError, match=r"rows, row 3: expected a label .*unlabelled: keep or drop"):
        memory(rows=gaps).load("train")
    fitted = memory().schema
    unlabelled = MemoryReader(MemoryReader.Config(test=ROWS.drop_columns(["y"]), unlabelled="keep"), fitted)
    assert unlabelled.load("test").masks["y"].tolist() == [0, 0, 0, 0]
    with pytest.raises(DataError, match=r'test: no column "y" \(label of y\)'):
        MemoryReader(MemoryReader.Config(test=ROWS.drop_columns(["y"])), fitted).load("test")


def test_forms_of_data_in_memory() -> None:
    for form in (ROWS.to_pandas(), ROWS.to_pylist(), ROWS.to_pydict(), ROWS.to_batches()[0], ROWS):
        assert any_table(form, "rows").select(ROWS.column_names).to_pydict() == ROWS.to_pydict()

    for wrong in (3, "rows.csv", {"u": [1], "t": [1, 2]}):
        with pytest.raises(DataError, match=r"^rows: "):
            any_table(wrong, "rows")


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "two ways to split": ({"split": {"test_from": 1}, "test": ROWS}, "give `split`, or files"),
    "no rows": ({"rows": None}, r"missing option rows"),
    "split by what": ({"split": {}}, "expected either `column`, or"),
    "split by both": ({"split": {"column": "a", "test_from": 3}}, "expected either `column`, or"),
    "backwards": ({"split": {"validation_from": 3, "test_from": 1}}, "validation_from is later than test_from"),
    "unknown split": ({"split": {"columns": "a"}}, r'unknown key "split.columns".*; did you mean "column"'),
    "unknown option": ({"row": ROWS}, r'unknown key "row".*; did you mean "rows"'),
    "policy": ({"unlabelled": "skip"}, r"unlabelled: expected 'error', 'keep' or 'drop', found 'skip'"),
    "unknown events": ({"events": {"clicks": ROWS}}, r'events: the schema has no type "clicks"'),
}


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS.keys())
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reader = default_registry().create(
            "reader", "memory", {"rows": ROWS} | options, "data.reader", schema=Schema.parse(SMALL), seed=0
        )
        reader.load("train")


def test_wrong_uses() -> None:
    with pytest.raises(ConfigError, match=r"data.schema: missing"):
        MemoryReader(MemoryReader.Config(rows=ROWS))
    with pytest.raises(ConfigError, match='there is no split "valid'):
        memory(validation=ROWS).load("validate")
    with pytest.raises(DataError, match=r'row 1, column "part" \(split\): expected one of train, .*found \'TRAIN\''):
        memory(rows=ROWS.append_column("part", pa.array(["TRAIN"] * 4)), split={"column": "part"}).load("train")
    two = SMALL | {"events": {"a": {"fields": ["ad"]}, "b": {"fields": ["ad"]}}}
    with pytest.raises(ConfigError, match='events: missing "b"'):
        memory(two, events={"a": ROWS}).load("train")


def test_paths(tmp_path: Path) -> None:
    """A folder, a glob and a list of files, in order of name; hidden files are no data."""
    for name, part in (("b", ROWS.slice(2)), ("a", ROWS.slice(0, 2)), (".c", ROWS)):
        pq.write_table(part, tmp_path / f"{name}.parquet")
    (tmp_path / "notes.txt").write_text("no data")
    for rows in (str(tmp_path), str(tmp_path / "*.parquet"), [str(tmp_path / f"{n}.parquet") for n in "ab"]):
        reader = ParquetReader(ParquetReader.Config(rows=rows), Schema.parse(SMALL))
        assert reader.load("train").user.tolist() == [1, 2, 3]
    for wrong, message in (
        (str(tmp_path / "none.parquet"), "no such file"),
        (str(tmp_path / "*.pq"), "no such file"),
        (str(tmp_path.parent / "empty"), "a folder without .parquet or .pq files"),
    ):
        (tmp_path.parent / "empty").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=message):
            ParquetReader(ParquetReader.Config(rows=wrong), Schema.parse(SMALL)).load("train")


def test_broken_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"rows.parquet: cannot be read as Parquet: "):
        ParquetReader(ParquetReader.Config(rows=str(path)), Schema.parse(SMALL)).load("train")
    pq.write_table(ROWS.rename_columns(["u", "t", "ad", "xx", "y"]), path)
    with pytest.raises(DataError, match=r'rows.parquet: no column "x" \(dense feature x\); did you mean "xx"'):
        ParquetReader(ParquetReader.Config(rows=str(path)), Schema.parse(SMALL)).load("train")
    pq.write_table(ROWS.set_column(4, "y", pa.array([0, 1, 7, 1])), path)
    with pytest.raises(DataError, match=r'rows.parquet, row 3, column "y".*found 7'):
        ParquetReader(ParquetReader.Config(rows=str(path)), Schema.parse(SMALL)).load("train")


def test_the_row_of_a_fault_is_that_of_the_file_behind_a_split(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    named = ROWS.append_column("part", pa.array(["test", "train", "test", "train"]))
    pq.write_table(named.set_column(4, "y", pa.array([0, 1, 0, 7])), path)
    reader = ParquetReader(ParquetReader.Config(rows=str(path), split={"column": "part"}), Schema.parse(SMALL))
    with pytest.raises(DataError, match=r'rows.parquet, row 4, column "y".*found 7'):
        reader.load("train")


def test_no_rows_are_legal(tmp_path: Path) -> None:
    fitted = memory().schema
    pq.write_table(ROWS.slice(0, 0), tmp_path / "none.parquet")
    (tmp_path / "none.csv").write_text("u,t,ad,x,y\n")
    readers: list[TableReader] = [
        ParquetReader(ParquetReader.Config(test=str(tmp_path / "none.parquet")), fitted),
        CsvReader(CsvReader.Config(test=str(tmp_path / "none.csv")), fitted),
        MemoryReader(MemoryReader.Config(test=ROWS.slice(0, 0)), fitted),
    ]
    for reader in readers:
        assert reader.rows("test") == 0 and list(reader.iterate("test")) == []
    with pytest.raises(DataError, match="the training split has no rows"):
        memory(rows=ROWS.slice(0, 0)).load("train")


def test_a_schema_survives_its_file(tmp_path: Path) -> None:
    table, events = tables(*([], {"click": [], "view": []}))
    fitted = memory().schema
    fitted.save(tmp_path / "schema.json")
    assert Schema.load(tmp_path / "schema.json") == fitted
    assert json.loads((tmp_path / "schema.json").read_text())["fitted"]["vocabularies"] == {"ad": ["a", "b", "c"]}
    assert table.num_rows == events["click"].num_rows == 0
