"""Encoding equals a plain, row by row Python implementation; records with their history equal the stored form."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_log import PROPERTY, SPEC, inline, logs, naive, schema, tables
from torch.utils import _pytree as pytree

from gem_core.data.batch import Batch, Jagged
from gem_core.data.columns import Column, Source
from gem_core.data.encode import Encoder, encoder_of
from gem_core.data.rows import EventLog
from gem_core.errors import ConfigError, DataError
from gem_core.schema import Schema

SCHEMA = schema()


def as_lists(value: Any) -> Any:
    """Tensors as lists, ragged ones as lists of lists."""
    if isinstance(value, dict):
        return {k: as_lists(v) for k, v in value.items()}
    if isinstance(value, Jagged):
        return [value.values[a:b].tolist() for a, b in zip(value.offsets, value.offsets[1:], strict=False)]
    return value.tolist()


def assert_close(found: Any, expected: Any, where: str = "batch") -> None:
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key in expected:
            assert_close(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_close(a, b, f"{where}[{i}]")
    else:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5, nan_ok=True), where


def assert_same(a: Batch, b: Batch) -> None:
    """Bit-equal."""
    one, tree_a = pytree.tree_flatten(a)
    two, tree_b = pytree.tree_flatten(b)
    assert tree_a == tree_b
    for x, y in zip(one, two, strict=True):
        assert x.dtype == y.dtype and torch.equal(x.nan_to_num(nan=-7), y.nan_to_num(nan=-7))


def stored(events: dict[str, pa.Table]) -> EventLog:
    return encoder_of(SCHEMA).events({name: [(t, Source(name))] for name, t in events.items()})


@PROPERTY
@given(logs())
def test_equals_the_plain_implementation(log: Any) -> None:
    rows, events = log
    table, event_tables = tables(rows, events)
    batch = SCHEMA.encode(table, stored(event_tables))
    expected = naive(rows, events)
    for name, value in expected.items():
        if name == "dense":  # 0 rows have no second dimension as lists
            value = value or np.zeros((0, 2)).tolist()
        assert_close(as_lists(getattr(batch, name)), value, name)
    assert batch.dense.shape == (len(rows), 2) and batch.vectors["look"].shape == (len(rows), 2)
    assert batch.events["click"]["ad"].max_length == 3 and batch.ids["tags"].max_length == 2
    assert batch.request_vectors == {}
    for field in fields(batch):
        for leaf in pytree.tree_leaves(getattr(batch, field.name)):
            assert leaf.dtype in (torch.int64, torch.float32), field.name


@PROPERTY
@given(logs())
def test_records_with_their_history_equal_the_stored_form(log: Any) -> None:
    rows, events = log
    table, event_tables = tables(rows, events)
    assert_same(SCHEMA.encode(inline(rows, events)), SCHEMA.encode(table, stored(event_tables)))


@PROPERTY
@given(logs())
def test_pieces_equal_the_whole(log: Any) -> None:
    """A request may run over the border of two pieces."""
    rows, events = log
    table, event_tables = tables(rows, events)
    whole = SCHEMA.encode(table, stored(event_tables))
    pieces = [(table.slice(i, 2), Source("rows", i)) for i in range(0, max(len(table), 1), 2)]
    rows_in_pieces = encoder_of(SCHEMA).rows(pieces, stored(event_tables), unlabelled="keep")
    assert_same(rows_in_pieces.batch(np.arange(rows_in_pieces.requests)), whole)


@PROPERTY
@given(logs())
def test_any_choice_of_requests(log: Any) -> None:
    """Requests one by one, backwards, have the same rows and histories as together."""
    rows, events = log
    table, event_tables = tables(rows, events)
    encoded = encoder_of(SCHEMA).rows([(table, Source("rows"))], stored(event_tables), unlabelled="keep")
    every = as_lists(encoded.batch(np.arange(encoded.requests)).events["click"])
    ids = []
    for q in reversed(range(encoded.requests)):
        one = encoded.batch(np.array([q]))
        ids = [*one.row_id.tolist(), *ids]
        for name, jagged in one.events["click"].items():
            assert as_lists(jagged) == [every[name][q]]
    assert ids == [r["id"] for r in rows]


def test_no_records_are_an_empty_batch() -> None:
    batch = SCHEMA.encode([])
    assert batch.rows == batch.requests == 0
    assert batch.events["view"]["place"].offsets.tolist() == [0]
    assert_same(
        SCHEMA.encode(
            tables([], {"click": [], "view": []})[0].slice(0, 0), stored(tables([], {"click": [], "view": []})[1])
        ),
        batch,
    )


RECORD: dict[str, Any] = {
    "u": 1, "t": 5, "id": 1, "h": 5, "s": "feed", "price": 1.0, "raw_score": 0.0, "age": 3, "ad": 5, "device": "desk",
    "campaign": "a", "tags": ["x"], "look": [1.0, 2.0], "clicked": 1, "bought": 0, "known": True, "value": 1.0,
    "kept": 1.0,
    "click.time": [1, 4], "click.ad": [5, 3], "click.tag": ["x", "y"], "click.spent": [1.0, 2.0],
    "view.time": [], "view.place": [],
}  # fmt: skip


def test_labels_may_be_absent() -> None:
    unlabelled = {k: v for k, v in RECORD.items() if k not in ("clicked", "bought", "known", "value", "kept")}
    batch = SCHEMA.encode([unlabelled])
    assert batch.masks["click"].tolist() == batch.masks["buy"].tolist() == [0.0]
    assert SCHEMA.encode([RECORD]).masks["click"].tolist() == [1.0]


def test_only_the_newest_events_are_kept() -> None:
    long = RECORD | {f"click.{k}": [v] * 5 for k, v in (("ad", 5), ("tag", "x"), ("spent", 0.0))}
    batch = SCHEMA.encode([long | {"click.time": [0, 1, 2, 3, 4]}])
    assert batch.events["click"]["time"].values.tolist() == [4, 3, 2]


def test_ids_are_the_same_as_integers_and_as_text() -> None:
    texts = RECORD | {"u": "1", "ad": "5", "id": "1", "click.ad": ["5", "3"], "campaign": "42"}
    numbers = RECORD | {"campaign": 42}
    assert_same(SCHEMA.encode([texts]), SCHEMA.encode([numbers]))
    assert_same(SCHEMA.encode([RECORD | {"ad": 5.0}]), SCHEMA.encode([RECORD]))


def test_text_and_integers_in_one_column_of_records() -> None:
    batch = SCHEMA.encode([RECORD | {"ad": "new"}, RECORD | {"ad": 5}])
    assert batch.ids["ad"].values.tolist() == [1, 2]


def test_what_was_missing_and_unseen_is_counted() -> None:
    table, events = tables(
        [{k: v for k, v in RECORD.items() if "." not in k} | {"ad": a} for a in (5, None, 77)],
        {"click": [], "view": []},
    )
    rows = encoder_of(SCHEMA).rows([(table, Source("rows"))], stored(events))
    assert (rows.counts["ad"].values, rows.counts["ad"].missing, rows.counts["ad"].unseen) == (3, 1, 1)
    assert (rows.counts["click.ad"].values, rows.counts["device"].unseen) == (0, 0)


def test_times_may_be_timestamps() -> None:
    spec = {"user": "u", "time": "t", "sparse": {"ad": {"hash": 10}}, "objectives": {"y": {}}}
    table = pa.table({"u": [1, 1], "t": pa.array([0, 1_700_000_000_000], pa.timestamp("ms", "UTC")), "ad": [1, 2]})
    assert Schema.parse(spec).encode(table).request_time.tolist() == [0, 1_700_000_000]
    table = pa.table({"u": [1], "t": pa.array([19000], pa.date32()), "ad": pa.array(["a"]).dictionary_encode()})
    assert Schema.parse(spec).encode(table).request_time.tolist() == [19000 * 86400]


def test_requests_by_column() -> None:
    spec = {"user": "u", "time": "t", "request": "q", "sparse": {"ad": {"hash": 10}}, "objectives": {"y": {}}}
    table = pa.table({"u": [1, 1, 1], "t": [5, 5, 5], "q": ["a", "b", "b"], "ad": [1, 2, 3]})
    assert Schema.parse(spec).encode(table).request.tolist() == [0, 1, 1]


def test_the_encoder_is_built_once_and_not_kept_for_ever() -> None:
    import gc

    from gem_core.data import encode

    one = schema()
    assert encoder_of(one) is encoder_of(one)
    assert encoder_of(one.model_copy(update={"fitted": one.fitted})) is not encoder_of(one)
    before = len(encode._ENCODERS)
    del one
    gc.collect()
    assert len(encode._ENCODERS) < before


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no column": ({"price": ...}, r'no column "price" \(dense feature price\)'),
    "no history": ({"click.time": ...}, r'no column "click.time": without stored click events .*option events.click'),
    "no field": ({"click.ad": ...}, r'no column "click.ad" \(field click.ad\)'),
    "text as a number": ({"price": "dear"}, r'column "price".*expected numbers, found type string'),
    "infinite number": ({"price": float("inf")}, r'row 2, column "price".*a finite number, found inf'),
    "logarithm": ({"price": -3.0}, r'row 2, column "price".*above -1.*found -3.0'),
    "half an id": ({"ad": 1.5}, r'row 2, column "ad".*an integer or a text, found 1.5'),
    "list as an id": ({"ad": [1]}, r'column "ad".*'),
    "id as a list": ({"tags": "x"}, r'column "tags".*'),
    "unknown surface": ({"s": "feeed"}, r'row 2, column "s".*found \'feeed\'; did you mean "feed"'),
    "no surface": ({"s": None}, r'row 2, column "s".*expected a value, found no value'),
    "no user": ({"u": None}, r'row 2, column "u" \(user\): expected a user, found no value'),
    "no time": ({"t": None}, r'row 2, column "t".*expected a time'),
    "milliseconds": ({"t": 1_700_000_000_000, "h": 5}, r'row 2, column "t".*are these milliseconds'),
    "no row id": ({"id": None}, r'row 2, column "id".*expected a row id'),
    "history after the request": ({"h": 6}, r'row 2, column "h".*not after the request.*found 6'),
    "text as a time": ({"t": "noon"}, r'column "t".*expected seconds since 1970 .* found type string'),
    "label of 2": ({"clicked": 2}, r'row 2, column "clicked" \(label of click\): expected a label of 0 or 1.*found 2'),
    "rate of 0": ({"clicked": 0, "kept": 0.0}, r'row 2, column "kept".*a rate in \(0, 1\], found 0.0'),
    "negative rate": ({"clicked": 0, "kept": -1.0}, r'row 2, column "kept".*found -1.0'),
    "negative weight": ({"value": -1.0}, r'row 2, column "value".*a weight of at least 0, found -1.0'),
    "mask of 3": ({"known": 3.0}, r'row 2, column "known".*true or false'),
    "short vector": ({"look": [1.0]}, r'row 2, column "look".*expected 2 numbers, found 1'),
    "NaN in a vector": ({"look": [1.0, float("nan")]}, r'row 2, column "look".*a finite number'),
    "future event": ({"click.time": [1, 5]}, r'row 2, column "click.time".*a leak\), found 5'),
    "events backwards": ({"click.time": [4, 1]}, r'row 2, column "click.time".*oldest event first, found 1'),
    "uneven events": ({"click.ad": [1]}, r'row 2, column "click.ad".*expected 2 values.*found 1'),
    "no time of an event": ({"click.time": [1, None]}, r'row 2, column "click.time".*expected a time'),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_records(change: dict[str, Any], message: str) -> None:
    first, second = RECORD | {"u": 0, "known": None}, RECORD | change
    if ... in change.values():
        first, second = ({k: v for k, v in r.items() if k not in change} for r in (first, second))
    elif any(isinstance(v, str | list) and not isinstance(RECORD[k], type(v)) for k, v in change.items()):
        first = second
    with pytest.raises(DataError, match=message):
        SCHEMA.encode([first, second])


def test_broken_forms() -> None:
    with pytest.raises(DataError, match="record 2: expected a mapping"):
        SCHEMA.encode([RECORD, 3])  # type: ignore[list-item]
    with pytest.raises(DataError, match='column "price": expected values of one kind, found float and str'):
        SCHEMA.encode([RECORD, RECORD | {"price": "dear"}])
    with pytest.raises(ConfigError, match="the schema is not fitted"):
        SCHEMA.model_copy(update={"fitted": None}).encode([RECORD])
    with pytest.raises(DataError, match='two columns are called "id"'):
        SCHEMA.encode(pa.Table.from_arrays([pa.array([1]), pa.array([1])], names=["id", "id"]))


def test_a_request_has_one_user_and_time() -> None:
    spec = {"user": "u", "time": "t", "request": "q", "sparse": {"ad": {"hash": 10}}, "objectives": {"y": {}}}
    for column, values in (("u", [1, 2]), ("t", [5, 6])):
        table = pa.table({"u": [1, 1], "t": [5, 5], "q": [3, 3], "ad": [1, 2]} | {column: values})
        with pytest.raises(DataError, match=f'row 2, column "{column}".*the rows of a request are adjacent'):
            Schema.parse(spec).encode(table)


VALUES = {
    pa.float64(): st.sampled_from([0.0, 1.0, math.nan]),
    pa.int64(): st.integers(0, 1),
    pa.bool_(): st.booleans(),
    pa.string(): st.sampled_from(["", "a", "aa"]),
    pa.list_(pa.string()): st.lists(st.none() | st.sampled_from("ab"), max_size=2),
    pa.list_(pa.float32(), 2): st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=2),
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
@PROPERTY
@given(data=st.data())
def test_changed(kind: pa.DataType, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | VALUES[kind], max_size=6))
    rows = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    texts = ["[]" if v is None and pa.types.is_nested(kind) else str(v) for v in values]  # NaN is equal to itself
    texts = ["None" if t == "nan" else t for t in texts]  # a number without a value
    expected = [i > 0 and rows[i] and texts[i] != texts[i - 1] for i in range(len(values))]
    array = pa.concat_arrays([pa.array([values[0]] if values else [], kind), pa.array(values, kind)]).slice(
        bool(values)
    )
    found = Column(array, "x", "feature x", Source("rows")).changed(np.array(rows, np.bool_))
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("n", [1.0, math.nan], r"\(dense feature n\): expected what the row before it has.*level: row\), found nan"),
        ("n", [None, 2.0], "found 2.0"),
        ("i", ["a", "b"], r"\(sparse feature id\).*found 'b'"),
        ("i", ["a", None], "found no value"),
        ("m", [["a", "b"], ["a", "c"]], r"\(sparse feature m\).*found \['a', 'c'\]"),
        ("m", [["a"], []], r"found \[\]"),
        ("v", [[1.0, 0.0], [1.0, 2.0]], r"\(vector feature v\).*found \[1.0, 2.0\]"),
    ],
)
def test_request_level_features_are_those_of_all_its_rows(name: str, values: list[Any], message: str) -> None:
    spec = {
        "user": "u",
        "time": "t",
        "dense": {"n": {"level": "request"}},
        "sparse": {
            "id": {"column": "i", "level": "request", "hash": 9},
            "m": {"level": "request", "hash": 9, "multi": True},
        },
        "vectors": {"v": {"level": "request", "width": 2}},
        "objectives": {"y": {}},
        "fitted": SPEC["fitted"] | {"dense": {"n": {"mean": 0.0, "std": 1.0}}},
    }
    log = Schema.parse(spec)
    sound = {"u": [1, 2, 2, 1], "t": [5] * 4, "n": [0.0, math.nan, math.nan, 1.0], "i": ["a", None, None, "a"]}
    sound |= {"m": [["a"], ["a", "b"], ["a", "b"], None], "v": [None, [1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]}
    table = pa.table(sound)
    pieces = [(table.slice(0, 2), Source("log", 0)), (table.slice(2), Source("log", 2))]
    for whole in ([(table, Source("log"))], pieces):
        assert encoder_of(log).rows(whole, None, "keep").requests == 3
    first, second = values
    broken = pa.table(sound | {name: [sound[name][0], first, second, sound[name][3]]})
    for whole in (
        [(broken, Source("log"))],
        [(broken.slice(0, 2), Source("log", 0)), (broken.slice(2), Source("log", 2))],
    ):
        with pytest.raises(DataError, match=rf'^log, row 3, column "{name}".*{message}'):
            encoder_of(log).rows(whole, None, "keep")


def test_a_request_over_two_files_may_write_its_ids_in_two_ways() -> None:
    spec = {"user": "u", "time": "t", "sparse": {"ad": {"level": "request", "hash": 9}}, "objectives": {"y": {}}}
    log = Schema.parse(spec)
    one, two = ({"u": [u], "t": [5], "ad": [u]} for u in (7, "7"))
    rows = encoder_of(log).rows([(pa.table(one), Source("one")), (pa.table(two), Source("two"))], None, "keep")
    assert rows.requests == 1
    assert rows.identity.to_pydict() == {"row_id": [0, 1], "user": ["7", "7"]}


def test_identity_is_what_the_log_calls_its_rows() -> None:
    spec = {"user": "u", "time": "t", "request": "q", "row_id": "id", "sparse": {"ad": {"hash": 9}}}
    log = Schema.parse(spec | {"objectives": {"y": {}}})
    columns = {"u": ["ann", "ann", "007"], "q": [3.0, 3.0, 4.0], "id": ["x", "y", "z"], "t": [1, 1, 2], "ad": [1, 2, 3]}
    table = pa.table(columns | {"y": [1, None, 0]})
    rows = encoder_of(log).rows([(table, Source("rows"))], None, "drop")
    assert rows.identity.to_pydict() == {"row_id": ["x", "z"], "request": [3, 4], "user": ["ann", "007"]}
    assert rows.rows == 2


def test_unseen_ids_can_be_an_error() -> None:
    spec = {
        "user": "u",
        "time": "t",
        "sparse": {"ad": {"vocabulary": ["a", "b"], "unseen": "error"}},
        "objectives": {"y": {}},
    }
    strict = Schema.parse(spec)
    assert strict.encode(pa.table({"u": [1], "t": [1], "ad": ["b"]})).ids["ad"].values.tolist() == [3]
    with pytest.raises(DataError, match=r"row 2, column \"ad\".*one of the 2 ids of table \"ad\".*found 'c'"):
        strict.encode(pa.table({"u": [1, 1], "t": [1, 1], "ad": ["b", "c"]}))


def test_a_missing_number_can_be_an_error() -> None:
    spec = {"user": "u", "time": "t", "dense": {"x": {"missing": "error"}}, "objectives": {"y": {}}}
    strict = Schema.parse(spec | {"fitted": SPEC["fitted"] | {"dense": {"x": {"mean": 0.0, "std": 1.0}}}})
    assert strict.encode(pa.table({"u": [1], "t": [1], "x": [2.0]})).dense.tolist() == [[2.0]]
    with pytest.raises(DataError, match=r'row 2, column "x".*a number \(missing: error\), found no value'):
        strict.encode(pa.table({"u": [1, 1], "t": [1, 1], "x": [2.0, None]}))


def test_event_types_must_match_the_schema() -> None:
    with pytest.raises(DataError, match='no events of type "view" are given'):
        Encoder(SCHEMA).events({"click": []})
    with pytest.raises(DataError, match='events of type "clicks" are not in the schema; did you mean "click"'):
        Encoder(SCHEMA).events({"click": [], "view": [], "clicks": []})
    assert len(Encoder(SCHEMA).events({"click": [], "view": []}).types["click"].users) == 0
