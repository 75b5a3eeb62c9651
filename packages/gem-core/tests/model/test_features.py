"""Encodings and tokens of the non-sequence features."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import KNOWN, make_batch, make_model, make_schema, offsets_of

from gem_core.data.batch import Jagged
from gem_core.errors import ConfigError
from gem_core.model.features import FeatureConfig, FeatureTokens, truncate
from gem_core.model.layers import PiecewiseLinear, TokenMap, rms_unit
from gem_core.schema import UNSEEN

KNOTS = st.lists(st.integers(-20, 20), min_size=0, max_size=5, unique=True).map(lambda k: sorted(x / 8 for x in k))
NUMBERS = st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))


def naive(x: float, knots: list[float]) -> list[float]:
    """The values of one feature: bins, or itself."""
    if len(knots) < 2:
        return [0.0 if math.isnan(x) else x]
    if math.isnan(x):
        return [0.0] * (len(knots) - 1)
    return [min(max((x - a) / (b - a), 0.0), 1.0) for a, b in itertools.pairwise(knots)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(KNOTS, max_size=4), st.integers(0, 3), st.data())
def test_piecewise_linear_by_its_definition(edges: list[list[float]], rows: int, data: st.DataObject) -> None:
    x = [[data.draw(NUMBERS) for _ in edges] for _ in range(rows)]
    for row in x:  # infinities are for features with bins
        for i, knots in enumerate(edges):
            row[i] = 1.0 if len(knots) < 2 and math.isinf(row[i]) else row[i]
    layer = PiecewiseLinear(edges)
    out = layer(torch.tensor(x, dtype=torch.float32).view(rows, len(edges)))
    assert out.shape == (rows, layer.width)
    for row, got in zip(x, out.tolist(), strict=True):
        values = [naive(v, k) for v, k in zip(row, edges, strict=True)]
        bins = [v for part, k in zip(values, edges, strict=True) if len(k) >= 2 for v in part]
        plain = [v for part, k in zip(values, edges, strict=True) if len(k) < 2 for v in part]
        missing = [float(math.isnan(v)) for v in row]
        np.testing.assert_allclose(got, [*bins, *plain, *missing], rtol=1e-4, atol=1e-4)


def test_a_linear_map_of_bins_is_a_piecewise_linear_function() -> None:
    layer = PiecewiseLinear([[0.0, 1.0, 3.0]])
    slopes = torch.tensor([2.0, -4.0, 0.0])
    x = torch.tensor([[-1.0], [0.0], [0.5], [1.0], [2.0], [3.0], [9.0]])
    assert (layer(x) @ slopes).tolist() == [0.0, 0.0, 1.0, 2.0, 0.0, -2.0, -2.0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 6), max_size=6), st.integers(1, 7))
def test_truncate_keeps_the_newest(lengths: list[int], limit: int) -> None:
    offsets = offsets_of(lengths)
    n = sum(lengths)
    fields = {"time": Jagged(torch.arange(n), offsets, 6), "price": Jagged(torch.randn(n), offsets, 6)}
    out = truncate(fields, limit)
    starts = offsets.tolist()
    kept = [i for s, k in zip(starts, lengths, strict=False) for i in range(s, s + min(k, limit))]
    assert out["time"].values.tolist() == kept
    assert out["time"].lengths().tolist() == [min(k, limit) for k in lengths]
    assert torch.equal(out["price"].values, fields["price"].values[kept])
    assert out["price"].max_length == min(limit, 6)


def test_tokens_are_what_each_feature_says() -> None:
    schema = make_schema()
    model = make_model("kunlun", schema, features={"embedding_dim": 32, "embedding_dims": {"ad": 12}})
    features, batch = model.features, make_batch(schema)
    looked = model.embedding.lookup(features.ids(batch, batch.events))
    tokens = features(batch, looked)
    assert tokens.request.shape == (4, features.tokens["request"], 32) == (4, 3, 32)
    assert tokens.rows.shape == (10, features.tokens["row"], 32) == (10, 7, 32)
    rows = tokens.rows.unbind(1)
    encoded = features.encoders["row"](batch.dense)
    torch.testing.assert_close(torch.cat(rows[:2], 1), features.dense["row"](encoded))
    torch.testing.assert_close(rows[2], features.project["ad"](looked["ad"]))
    torch.testing.assert_close(rows[3], looked["cat"])
    torch.testing.assert_close(rows[5], features.vectors["creative"](batch.vectors["creative"]))
    torch.testing.assert_close(rows[6], features.surface[batch.surface])
    table = model.embedding.state()["tables.tags.weight"]
    ids = batch.ids["tags"]
    starts = ids.offsets.tolist()
    pooled = [table[ids.values[a:b]].mean(0) if b > a else torch.zeros(32) for a, b in itertools.pairwise(starts)]
    torch.testing.assert_close(rows[4], torch.stack(pooled))
    torch.testing.assert_close(tokens.request[:, 2], features.vectors["taste"](batch.request_vectors["taste"]))


def test_tables_hold_what_is_looked_up() -> None:
    schema = make_schema()
    tables = {t.name: t for t in make_model("kunlun", schema).features.tables}
    assert {n: t.features for n, t in tables.items()} == {
        "ad": ("ad", "click.ad"), "cat": ("cat", "click.cat", "view.cat"), "tags": ("tags",), "segment": ("segment",)
    }  # fmt: skip
    assert all(t.rows == KNOWN + 2 and t.dim == 16 for t in tables.values())
    only = make_model("kunlun", schema, features={"match_only": ("ad", "click.ad")}).features.tables
    assert {t.name for t in only} == {"cat", "tags", "segment"}
    # DIN reads only fields that the ad has too.
    sparse = {"ad": {}, "segment": {"level": "request"}}
    events = {"click": {"max_length": 9, "fields": ["ad", "page"]}}
    assert {t.name for t in make_model("din", make_schema(sparse=sparse, events=events)).features.tables} == {
        "ad",
        "segment",
    }


def test_a_tables_pooling_is_that_of_its_multi_valued_feature() -> None:
    sparse = {"ad": {}, "ads": {"table": "ad", "multi": True, "pooling": "sum"}}
    schema = make_schema(sparse=sparse, events={})
    (table,) = FeatureTokens(schema, FeatureConfig(), 8, ()).tables
    assert table.pooling == "sum"
    sparse["more"] = {"table": "ad", "multi": True}
    with pytest.raises(ConfigError, match='table "ad" has "ads" sum, "more" mean'):
        FeatureTokens(make_schema(sparse=sparse, events={}), FeatureConfig(), 8, ())


def test_id_dropout_keeps_its_rate_and_touches_no_other_feature() -> None:
    schema = make_schema(events={})
    torch.manual_seed(0)
    features = FeatureTokens(schema, FeatureConfig(id_dropout={"ad": 0.25, "tags": 0.5}), 16, ())
    batch = make_batch(schema, (4000,))
    ids, kept = features.train().ids(batch, {}), features.eval().ids(batch, {})
    assert torch.equal(ids["cat"], kept["cat"])
    for key, rate in (("ad", 0.25), ("tags", 0.5)):
        new, old = (x[key].values if isinstance(x[key], Jagged) else x[key] for x in (ids, kept))
        assert bool(((new == old) | (new == UNSEEN)).all())
        assert (new[old != UNSEEN] == UNSEEN).float().mean().item() == pytest.approx(rate, abs=0.03)


def test_small_blocks() -> None:
    x = torch.randn(3, 5, 4)
    assert (rms_unit(x).square().mean(-1) - 1).abs().max() < 1e-4
    assert not rms_unit(torch.zeros(2, 4)).any()
    torch.testing.assert_close(TokenMap(5, 2)(torch.ones(1, 5, 3)).shape, torch.Size([1, 2, 3]))
    assert TokenMap(5, 2).macs(4) == 40
