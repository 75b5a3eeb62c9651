"""What a schema learns: statistics, edges, vocabularies; never from the future."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_log import PROPERTY, SPEC, logs, tables

from gem_core.data import fit as fitting
from gem_core.errors import ConfigError, DataError
from gem_core.schema import Fitted, Schema

SPEC_UNFITTED = {k: v for k, v in SPEC.items() if k != "fitted"}


def learn(spec: dict[str, Any], table: pa.Table | list[pa.Table], events: dict[str, pa.Table] | None = None) -> Fitted:
    pieces = [table] if isinstance(table, pa.Table) else table
    return Schema.parse(spec).fit(pieces, {e: [t] for e, t in (events or {}).items()}).require_fitted()


@PROPERTY
@given(st.lists(st.sampled_from([0.0, 0.0, 1.0]) | st.floats(-100, 100), min_size=1, max_size=300), st.integers(2, 12))
def test_edges(values: list[float], bins: int) -> None:
    edges = fitting.quantile_edges(np.array(values), bins)
    distinct = np.unique(values)
    assert 2 <= len(edges) <= bins + 1
    assert (np.diff(edges) > 0).all()
    assert edges[0] == distinct[0] and (len(distinct) == 1 or edges[-1] == distinct[-1])
    assert len(distinct) == 1 or set(edges) <= set(distinct.tolist())
    if len(distinct) <= bins + 1:
        assert len(distinct) == 1 or edges == distinct.tolist()


def test_edges_of_a_count_keep_their_resolution() -> None:
    """Nine in ten values are 0: plain quantiles would leave 3 edges for the rest."""
    values = np.concatenate([np.zeros(9000), np.arange(1, 1001)])
    edges = fitting.quantile_edges(values, 26)
    assert len(edges) == 27 and edges[0] == 0
    assert np.diff(edges[1:]).max() <= 45


def test_edges_of_nothing_and_of_a_constant() -> None:
    assert fitting.quantile_edges(np.array([]), 5) == [0.0, 1.0]
    assert fitting.quantile_edges(np.array([3.0, 3.0]), 5) == [3.0, 4.0]


@PROPERTY
@given(logs(), st.integers(1, 4))
def test_pieces_equal_the_whole(log: Any, size: int) -> None:
    rows, events = log
    table, event_tables = tables(rows, events)
    if not rows:
        with pytest.raises(DataError, match="the training split has no rows"):
            learn(SPEC_UNFITTED, table, event_tables)
        return
    whole = learn(SPEC_UNFITTED, table, event_tables)
    pieces = learn(SPEC_UNFITTED, [table.slice(i, size) for i in range(0, len(table), size)], event_tables)
    assert pieces.vocabularies == whole.vocabularies
    assert pieces.base_rates == pytest.approx(whole.base_rates)
    for key, stats in whole.dense.items():
        assert pieces.dense[key].mean == pytest.approx(stats.mean, abs=1e-9)
        assert pieces.dense[key].std == pytest.approx(stats.std, abs=1e-9)
        assert pieces.dense[key].edges == pytest.approx(stats.edges, abs=1e-9)
    prices = [r["price"] for r in rows if r["price"] is not None]
    if prices:
        assert whole.dense["price"].mean == pytest.approx(np.log1p(prices).mean())
    clicks = [r for r in rows if r["clicked"] is not None and r["s"] == "feed"]
    weights = [1 / r["kept"] if r["clicked"] == 0 else 1.0 for r in clicks]
    rate = sum(w for r, w in zip(clicks, weights, strict=True) if r["clicked"]) / sum(weights) if clicks else 0.0
    assert whole.base_rates["click"] == pytest.approx(rate)
    assert len(whole.dense["score"].edges) >= 2 and whole.dense["price"].edges == []


IDS = {"user": "u", "time": "t", "sparse": {"ad": {}}, "objectives": {"y": {}}}


def rows_of(ads: list[Any], **more: Any) -> pa.Table:
    n = len(ads)
    return pa.table({"u": [1] * n, "t": list(range(n)), "ad": ads, "y": [0] * (n - 1) + [1]} | more)


def test_vocabulary_is_by_frequency_then_value() -> None:
    table = rows_of(["b", "a", "10", "9", "c", "c", None])
    assert learn(IDS, table).vocabularies["ad"] == ["c", "9", "10", "a", "b"]
    assert learn(IDS, rows_of([10, 9, 9, None])).vocabularies["ad"] == [9, 10]
    assert learn(IDS, rows_of(["10", "9", "9"])).vocabularies["ad"] == [9, 10], "as text as well"
    limited = IDS | {"sparse": {"ad": {"max_vocabulary": 2}}}

    assert learn(limited, table).vocabularies["ad"] == ["c", "9"]
    assert learn(IDS | {"sparse": {"ad": {"min_count": 2}}}, table).vocabularies["ad"] == ["c"]
    assert learn(IDS, rows_of([None, None])).vocabularies["ad"] == []


def test_only_what_is_learned_is_fitted() -> None:
    spec = IDS | {"sparse": {"ad": {"hash": 10}, "kind": {"vocabulary": ["a"]}}}
    fitted = learn(spec, rows_of([1, 2], kind=["a", "b"]))
    assert fitted.vocabularies == {} and fitted.dense == {}
    assert fitted.rows == 2 and fitted.base_rates == {"y": 0.5}


EVENTS = IDS | {"events": {"click": {"fields": {"ad": {}, "spent": {"kind": "dense"}}}}}


def test_events_share_the_vocabulary_and_later_ones_are_not_looked_at() -> None:
    """The last training request is at time 2: what happened then or later is the future."""
    clicks = pa.table({"u": [1] * 4, "t": [0, 1, 2, 9], "ad": ["x", "y", "z", "w"], "spent": [1.0, 3.0, 100.0, 100.0]})
    fitted = learn(EVENTS, rows_of(["a", "a", "y"]), {"click": clicks})
    assert fitted.vocabularies == {"ad": ["a", "y", "x"]}
    assert fitted.dense["click.spent"].mean == 2.0 and fitted.dense["click.spent"].std == 1.0


def test_events_in_the_rows() -> None:
    lists = {
        "click.time": [[0], [], [0, 1]],
        "click.ad": [["x"], None, ["x", "y"]],
        "click.spent": [[1.0], [], [2.0, 3.0]],
    }
    fitted = learn(EVENTS, rows_of(["a", "a", "a"], **lists))
    assert fitted.vocabularies == {"ad": ["a", "x", "y"]}
    assert fitted.dense["click.spent"].mean == 2.0


def test_surfaces_are_learned_in_order_of_frequency() -> None:
    fitted = learn(IDS | {"surface": "s"}, rows_of([1, 2, 3], s=["b", "a", "b"]))
    assert fitted.surfaces == ["b", "a"]


def test_a_constant_and_an_empty_feature() -> None:
    spec = IDS | {"dense": {"c": {}, "n": {"encoding": "piecewise"}}}
    fitted = learn(spec, rows_of([1, 2], c=[0.1, 0.1], n=pa.nulls(2)))
    assert (fitted.dense["c"].mean, fitted.dense["c"].std) == (pytest.approx(0.1), 1.0)
    assert fitted.dense["n"].model_dump() == {"mean": 0.0, "std": 1.0, "edges": [0.0, 1.0]}


def test_beyond_the_sample_edges_come_from_a_uniform_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "SAMPLE", 500)
    values = np.random.default_rng(0).permutation(20_000).astype(float)
    spec = IDS | {"dense": {"d": {"encoding": "piecewise", "bins": 4}}}

    def pieces(size: int) -> list[pa.Table]:
        return [rows_of([1] * len(v), d=v) for v in np.split(values, range(size, len(values), size))]

    stats = learn(spec, pieces(300)).dense["d"]
    assert stats.mean == pytest.approx(values.mean()) and stats.std == pytest.approx(values.std())
    edges = np.array(stats.edges) * stats.std + stats.mean
    assert np.abs(edges[1:-1] - [5000, 10000, 15000]).max() < 1500, "five standard errors of a sample of 500"
    assert learn(spec, pieces(300)).dense["d"].edges == stats.edges, "a seed fixes it"


def test_many_ids_are_merged_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "DISTINCT", 3)
    pieces = [rows_of(ads) for ads in ([1, 2, 3, 4], [4, 5], [5, 6, 6], [6])]
    assert learn(IDS, pieces).vocabularies["ad"] == [6, 4, 5, 1, 2, 3]


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([None, None], ["warning: objective buy has no label in the training rows: nothing is learned of it"]),
        (
            [0, None],
            ["warning: objective buy has no positive label in the training rows: there are only zeros to learn"],
        ),
        ([0, 1], []),
    ],
)
def test_an_objective_of_which_nothing_can_be_learned(
    labels: list[int | None], says: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    spec = {"user": "u", "time": "t", "objectives": ["click", "buy"]}
    learn(spec, pa.table({"u": [1, 2], "t": [1, 2], "click": [0, 1], "buy": pa.array(labels, pa.int64())}))
    assert [record.getMessage() for record in caplog.records] == says


def test_an_objective_on_a_surface_that_does_not_occur() -> None:
    spec = {"user": "u", "time": "t", "surface": "s", "objectives": {"y": {"surfaces": ["feed", "serach"]}}}
    table = pa.table({"u": [1, 2], "t": [1, 2], "s": ["feed", "search"], "y": [0, 1]})
    message = (
        r'^objectives.y.surfaces: "serach" does not occur in the training rows; did you mean "search"\? \(one that'
    )
    with pytest.raises(ConfigError, match=message):
        learn(spec, table)
    assert learn({**spec, "surfaces": ["feed", "search", "serach"]}, table).rows == 2
