"""Parquet in bounded memory: each row once, requests whole, an order of seed and epoch only, exact positions."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_log import PROPERTY, inline, logs, schema, tables
from test_encode import assert_same
from test_loader import assert_equal, taken

from gem_core.data.batch import Batch
from gem_core.data.loader import Loader
from gem_core.data.position import redistribute
from gem_core.data.readers import ParquetReader
from gem_core.data.readers.stream import even_ends
from gem_core.errors import ConfigError, DataError
from gem_core.schema import Schema

SPEC = {
    "user": "u",
    "time": "t",
    "row_id": "id",
    "dense": {"x": {}},
    "sparse": {"ad": {"hash": 50}, "tags": {"multi": True, "hash": 9}},
    "events": {"click": {"max_length": 4, "fields": {"ad": {}}}},
    "objectives": {"y": {}},
}
SIZES = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 1, 1, 6]


def log(sizes: list[int]) -> pa.Table:
    """Requests of so many rows, with histories in lists."""
    request = np.repeat(np.arange(len(sizes)), sizes)
    n = len(request)
    history = [list(range(r % 4)) for r in request]
    return pa.table(
        {
            "u": pa.array(request % 5, pa.int64()),
            "t": pa.array(request + 10, pa.int64()),
            "id": pa.array(np.arange(n) + 1000, pa.int64()),
            "x": np.random.default_rng(7).normal(size=n),
            "ad": pa.array(np.arange(n) % 11, pa.int64()),
            "tags": pa.array([list(range(i % 3)) for i in range(n)], pa.list_(pa.int64())),
            "y": pa.array(np.arange(n) % 2, pa.int64()),
            "click.time": pa.array(history, pa.list_(pa.int64())),
            "click.ad": pa.array(history, pa.list_(pa.int64())),
        }
    )


def write(folder: Path, table: pa.Table, files: int, group: int) -> str:
    """The table in so many files of row groups of `group` rows; borders lie anywhere within requests."""
    folder.mkdir(exist_ok=True, parents=True)
    cut = np.linspace(0, len(table), files + 1).astype(int)
    for i, (start, end) in enumerate(pairwise(cut)):
        pq.write_table(table.slice(start, end - start), folder / f"{i}.parquet", row_group_size=group)
    return str(folder)


FITTED = Schema.parse(
    SPEC
    | {
        "fitted": {
            "rows": 85,
            "dense": {"x": {"mean": 0.0, "std": 1.0}},
            "vocabularies": {},
            "surfaces": [],
            "base_rates": {"y": 0.5},
        }
    }
)


def reader(rows: str, seed: int = 0, **options: Any) -> ParquetReader:
    options = {"hold_mib": 0, "pool_rows": 20, "test": rows} | options
    return ParquetReader(ParquetReader.Config(rows=rows, **options), FITTED, seed)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> ParquetReader:
    """About 15 row groups of 7 rows in 3 files, in pools of at least 20 rows."""
    return reader(write(tmp_path_factory.mktemp("log"), log(SIZES), 3, 7))


def ids(batches: list[tuple[Batch, dict[str, Any]]]) -> list[int]:
    return [i for batch, _ in batches for i in batch.row_id.tolist()]


ALL = list(range(1000, 1000 + sum(SIZES)))


@settings(PROPERTY, max_examples=20)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(1, 15),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["train", "test"]),
)
def test_every_row_once_in_whole_requests(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    files: int,
    group: int,
    pool_rows: int,
    batch_rows: int,
    places: tuple[int, int],
    split: str,
) -> None:
    """Wherever row groups end: within requests, after them, or with several in one request."""
    table = log(sizes)
    own = reader(write(tmp_path_factory.mktemp("log"), table, files, group), pool_rows=pool_rows)
    expected = FITTED.encode(table)
    found: list[int] = []
    for rank in range(places[0]):
        for worker in range(places[1]):
            place: dict[str, Any] = {"rank": rank, "world": places[0], "worker": worker, "workers": places[1]}
            for batch in own.iterate(split, **place, state={"epoch": 1}, batch_rows=batch_rows):
                assert 0 < batch.rows < batch_rows + max(sizes)
                lengths = np.bincount(batch.request.numpy())
                assert lengths.tolist() == [sizes[t - 10] for t in batch.request_time.tolist()], "requests are whole"
                assert batch.events["click"]["ad"].lengths().tolist() == [
                    (t - 10) % 4 for t in batch.request_time.tolist()
                ]
                rows = batch.row_id.numpy() - 1000
                assert (batch.dense == expected.dense[rows]).all()
                found += batch.row_id.tolist()
    assert sorted(found) == list(range(1000, 1000 + sum(sizes)))


@settings(PROPERTY, max_examples=6)
@given(logs(), st.integers(1, 5), st.integers(1, 8))
def test_a_streamed_log_is_the_log(
    tmp_path_factory: pytest.TempPathFactory, drawn: Any, group: int, pool_rows: int
) -> None:
    """Whole batches in order are bit-equal to those of the log held in memory; with events apart, and in lists."""
    rows, events = drawn
    folder = tmp_path_factory.mktemp("log")
    table, event_tables = tables(rows, events)
    pq.write_table(table, folder / "rows.parquet", row_group_size=group)
    for name, stored in event_tables.items():
        pq.write_table(stored, folder / f"{name}.parquet")
    files = {name: str(folder / f"{name}.parquet") for name in events}
    common: dict[str, Any] = {"unlabelled": "keep", "pool_rows": pool_rows}
    logs_: list[dict[str, Any]] = [{"test": str(folder / "rows.parquet"), "events": files}]
    own = inline(rows, events)
    if own:
        lists = pa.list_(pa.int64())
        nested = pa.Table.from_pylist(own)
        empty = [f for f in nested.schema if f.type == pa.list_(pa.null()) or pa.types.is_null(f.type)]
        for field in empty:
            i = nested.schema.get_field_index(field.name)
            kind = lists if pa.types.is_list(field.type) else table.schema.field(field.name).type
            nested = nested.set_column(i, field.name, nested.column(i).cast(kind))
        pq.write_table(nested, folder / "nested.parquet", row_group_size=group)
        logs_.append({"test": str(folder / "nested.parquet")})
    for each in logs_:
        held = ParquetReader(ParquetReader.Config(**each, **common), schema())
        small = ParquetReader(ParquetReader.Config(**each, **common, hold_mib=0), schema())
        assert not held.streams("test") and small.streams("test") == bool(rows)
        for one, other in zip(held.in_order("test", 1), small.in_order("test", 1), strict=True):
            assert_same(one[0], other[0])
            assert one[1].equals(other[1])


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("world", [1, 3])
def test_resume_after_any_batch(streamed: ParquetReader, workers: int, world: int) -> None:
    """Bit-equal, whatever the number of workers before and after; a state goes through JSON."""
    for rank in range(world):
        options: dict[str, Any] = {"batch_rows": 8, "rank": rank, "world": world}
        whole = taken(Loader(streamed, "train", **options, state={"epoch": 2}))
        assert len(whole) > 1
        if workers:
            assert_equal(taken(Loader(streamed, "train", **options, state={"epoch": 2}, workers=workers)), whole)
        for i, (_, state) in enumerate(whole):
            chosen = workers if i in (1, len(whole) // 2) else 0
            state = json.loads(json.dumps(state))
            assert_equal(taken(Loader(streamed, "train", **options, state=state, workers=chosen)), whole[i + 1 :])


def test_the_order_is_one_of_seed_and_epoch(streamed: ParquetReader) -> None:
    def order(own: ParquetReader, epoch: int, split: str = "train", rows: int = 8) -> list[int]:
        return ids(taken(Loader(own, split, state={"epoch": epoch}, batch_rows=rows)))

    first = order(streamed, 0)
    assert sorted(first) == ALL and first != ALL and order(streamed, 1) != first
    assert order(reader(streamed.config.rows), 0) == first and order(reader(streamed.config.rows, 1), 0) != first
    assert order(streamed, 0, rows=30) == first, "batches are cut from an order that does not depend on their size"
    assert order(streamed, 3, "test") == ALL, "evaluation goes in the order stored"


@settings(PROPERTY, max_examples=12)
@given(st.data())
def test_redistributed_from_any_number_of_ranks_to_any(streamed: ParquetReader, data: st.DataObject) -> None:
    """Ranks stop anywhere, each elsewhere; what they gave and what the new ranks give is every row once."""
    worlds = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    states: list[dict[str, Any]] = [{"epoch": 1}] * worlds[0]
    found: list[int] = []
    for number, world in enumerate(worlds):
        states = redistribute(states, world)
        for rank in range(world):
            run = iter(Loader(streamed, "train", batch_rows=8, rank=rank, world=world, state=states[rank]))
            last = number == len(worlds) - 1
            for _ in range(1000 if last else data.draw(st.integers(0, 6))):
                batch = next(run, None)
                if batch is not None:
                    found += batch[0].row_id.tolist()
                    states[rank] = batch[1]
    assert sorted(found) == ALL


def test_from_four_ranks_to_three(streamed: ParquetReader) -> None:
    """As a job would: all ranks took as many steps, then three go on, with two workers each."""
    states, found = [], []
    for rank in range(4):
        begun = taken(Loader(streamed, "train", batch_rows=8, rank=rank, world=4))[:2]
        found += ids(begun)
        states.append(begun[-1][1])
    assert redistribute(states, 4) == states, "as many ranks: bit-equal"
    for rank, state in enumerate(redistribute(states, 3)):
        found += ids(taken(Loader(streamed, "train", batch_rows=8, rank=rank, world=3, state=state, workers=2)))
    assert sorted(found) == ALL


def test_what_cannot_be_redistributed_exactly(streamed: ParquetReader, tmp_path: Path) -> None:
    held = reader(streamed.config.rows, hold_mib=1)
    in_memory = [taken(Loader(held, batch_rows=8, rank=r, world=2)) for r in (0, 1)]
    same = redistribute([run[1][1] for run in in_memory], 3)
    assert same == [in_memory[0][1][1]] * 3
    one, two = (taken(Loader(streamed, batch_rows=8, rank=r, world=2))[0][1] for r in (0, 1))
    assert redistribute([{"epoch": 2}] * 2, 3) == [{"epoch": 2}] * 3
    for states, message in (
        ([in_memory[0][0][1], in_memory[1][1][1]], "the ranks stand at different places: request"),
        ([one, two | {"epoch": 1}], "different places: epoch is 0 and 1"),
        ([one, two | {"log": "0"}], "different places: log"),
        ([one, two | {"skip": 1}], "the batcher of rank 1 holds back rows"),
        ([one], "1 states of a run of 2 ranks; give all"),
        ([two, one], "state 0 is that of rank 1"),
        ([], "states of 0 ranks"),
    ):
        with pytest.raises(DataError, match=f"cannot redistribute.*{message}"):
            redistribute(states, 3)


def test_a_position_of_something_else_is_refused(streamed: ParquetReader, tmp_path: Path) -> None:
    state = taken(Loader(streamed, batch_rows=8, world=2))[0][1]
    other = reader(write(tmp_path / "other", log(SIZES[:-1]), 3, 7))
    held = taken(Loader(reader(streamed.config.rows, hold_mib=1), batch_rows=8))[0][1]
    rows = streamed.config.rows
    cases: list[tuple[ParquetReader, dict[str, Any], int, str]] = [
        (other, state, 2, "expected log .*the files differ"),
        (reader(rows, seed=3), state, 2, "expected seed 0, found 3"),
        (reader(rows, pool_rows=21), state, 2, "expected pool_rows 20, found 21"),
        (streamed, state, 1, "expected world 2, found 1; .*redistribute"),
        (streamed, state | {"rank": 1}, 2, "expected rank 1, found 0"),
        (streamed, {"epoch": -1}, 1, "no position"),
        (streamed, held, 1, "a split held in memory, and this one is streamed"),
    ]
    for own, position, world, message in cases:
        with pytest.raises(DataError, match=f'cannot resume split "train".*{message}'):
            taken(Loader(own, batch_rows=8, world=world, state=position))


@pytest.mark.parametrize("by", ["time", "column"])
def test_splits_of_one_streamed_log(tmp_path: Path, by: str) -> None:
    """Row groups without a row of the split are not read; a row is called by its place in the log."""
    named = [("train", "validation", "test")[(i > 50) + (i > 70)] for i in range(sum(SIZES))]
    table = log(SIZES).append_column("part", pa.array(named)).drop_columns(["id"])
    rows = write(tmp_path / "log", table, 2, 7)
    split = {"column": "part"} if by == "column" else {"validation_from": 20, "test_from": 24}
    without = Schema.parse({k: v for k, v in SPEC.items() if k != "row_id"} | {"fitted": FITTED.fitted})
    own, held = (
        ParquetReader(ParquetReader.Config(rows=rows, split=split, hold_mib=mib, pool_rows=10), without)
        for mib in (0, 1)
    )
    found = []
    for name in ("train", "validation", "test"):
        assert own.streams(name) and not held.streams(name)
        each = ids(taken(Loader(own, name, batch_rows=8, workers=1)))
        assert sorted(each) == sorted(ids(taken(Loader(held, name, batch_rows=8))))
        found += each
    assert sorted(found) == list(range(sum(SIZES)))


def test_fitting_is_the_same(tmp_path: Path) -> None:
    rows = write(tmp_path / "log", log(SIZES), 3, 7)
    one, two = (
        ParquetReader(ParquetReader.Config(rows=rows, hold_mib=mib), Schema.parse(SPEC)).schema for mib in (0, 1)
    )
    assert one == two and one.require_fitted().rows == sum(SIZES)


def damage(path: Path, group: int, column: int) -> None:
    """Overwrite the middle of a column of a row group."""
    place = pq.read_metadata(path).row_group(group).column(column)
    start = place.dictionary_page_offset or place.data_page_offset
    whole = bytearray(path.read_bytes())
    middle = start + place.total_compressed_size // 2
    whole[middle : middle + 8] = b"\xff" * 8
    path.write_bytes(whole)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("hold_mib", [0, 1])
def test_a_damaged_row_group_is_named(tmp_path: Path, workers: int, hold_mib: int) -> None:
    table = log([2] * 40)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=16, write_page_checksum=True, compression="snappy")
    damage(tmp_path / "a.parquet", 3, table.schema.get_field_index("x"))
    own = reader(str(tmp_path), hold_mib=hold_mib)
    with pytest.raises(DataError, match=r"a.parquet, row group 3: cannot be read as Parquet: ") as caught:
        taken(Loader(own, batch_rows=8, workers=workers))
    assert "\n" not in str(caught.value)


def test_a_value_that_is_wrong_is_named_by_its_row(tmp_path: Path) -> None:
    wrong = log(SIZES)
    labels = wrong["y"].to_pylist()
    labels[60] = 7
    pq.write_table(wrong.set_column(6, "y", pa.array(labels)), tmp_path / "a.parquet", row_group_size=7)
    with pytest.raises(DataError, match=r'a.parquet, row 61, column "y".*found 7'):
        taken(Loader(reader(str(tmp_path)), batch_rows=8))


def test_empty_files_and_row_groups(tmp_path: Path) -> None:
    """A file without rows, and a row group without rows in which a request goes on behind it."""
    table = log(SIZES)
    pq.write_table(table.slice(0, 0), tmp_path / "a.parquet")
    with pq.ParquetWriter(tmp_path / "b.parquet", table.schema) as file:
        for piece in (table.slice(0, 0), table.slice(0, 6), table.slice(0, 0), table.slice(6)):
            file.write_table(piece)
    assert ids(taken(Loader(reader(str(tmp_path)), "test", batch_rows=8))) == ALL
    assert sorted(ids(taken(Loader(reader(str(tmp_path)), "train", batch_rows=8)))) == ALL
    (tmp_path / "b.parquet").unlink()
    assert taken(Loader(reader(str(tmp_path)), "test")) == []
    ((batch, named),) = reader(str(tmp_path), hold_mib=0).in_order("test", 8)
    assert batch.rows == named.num_rows == 0


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, a folder and a glob in a file system of fsspec; what is missing is named."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    folder = Path(write(tmp_path / "log", log(SIZES), 2, 7))
    for path in folder.iterdir():
        memory.pipe(f"/log/{path.name}", path.read_bytes())
    memory.pipe("/log/notes.txt", b"no data")
    memory.pipe("/log/_SUCCESS.parquet", b"no data")
    alone = taken(Loader(reader(str(folder)), batch_rows=8))
    for rows in ("memory://log", "memory://log/[0-9].parquet"):
        assert_equal(taken(Loader(reader(rows), batch_rows=8)), alone)
    assert ids(taken(Loader(reader("memory://log", hold_mib=1), "test", batch_rows=8))) == ALL
    both = [str(folder / "0.parquet"), "memory://log/1.parquet"]
    assert ids(taken(Loader(ParquetReader(ParquetReader.Config(test=both, hold_mib=0), FITTED), "test"))) == ALL
    for url, message in (
        ("memory://nothing/*.parquet", "reader: rows: memory://nothing/.*: no such file"),
        ("memory://log/9.parquet", "no such file"),
        ("nosuch://log", "reader: rows: nosuch://log: .*nosuch"),
    ):
        with pytest.raises(ConfigError, match=message):
            reader(url).streams("train")
    memory.pipe("/log/2.parquet", b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"memory://.*log/2.parquet: cannot be read as Parquet"):
        reader("memory://log").streams("train")
    memory.rm("/log", recursive=True)
    monkeypatch.setattr("fsspec.spec.AbstractFileSystem.exists", lambda *_: 1 / 0)
    with pytest.raises(ConfigError, match="memory://log: cannot be listed: ZeroDivisionError"):
        reader("memory://log").streams("train")
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"URLs need fsspec: pip install gem-core\[fsspec\]"):
        reader("memory://log").streams("train")


@PROPERTY
@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 30))
def test_batches_are_about_equal(sizes: list[int], batch_rows: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    ends = even_ends(offsets, np.arange(len(sizes)), batch_rows)
    rows = np.diff(offsets[np.concatenate([[0], ends]).astype(int)])
    assert rows.sum() == sum(sizes) and (rows > 0).all()
    assert len(rows) <= -(-sum(sizes) // batch_rows)
    if sizes:
        assert rows.max() < rows.mean() + 9 or len(rows) == 1
