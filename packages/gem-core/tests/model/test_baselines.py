"""DIN and DCNv2 against their definitions."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import make_batch, make_model, make_schema, offsets_of

from gem_core.model.dcnv2 import CrossLayer
from gem_core.model.din import TargetAttention


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=4))
def test_target_attention_equals_a_loop(requests: list[tuple[int, int]]) -> None:
    """`requests`: rows and events of each."""
    torch.manual_seed(0)
    layer = TargetAttention(3, (4,))
    request = torch.tensor([q for q, (rows, _) in enumerate(requests) for _ in range(rows)], dtype=torch.int64)
    offsets = offsets_of([n for _, n in requests])
    query, keys = torch.randn(len(request), 3), torch.randn(int(offsets[-1]), 3)
    out = layer(query, keys, offsets, request)
    for row, q in enumerate(request.tolist()):
        expected = torch.zeros(3)
        for k in keys[int(offsets[q]) : int(offsets[q + 1])]:
            pair = torch.cat([query[row], k, query[row] - k, query[row] * k])
            expected = expected + layer.score(pair) * k
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)


def test_din_compares_what_events_and_ads_share() -> None:
    model = make_model("din", make_schema())
    assert model.fields == {"click": [("click.ad", "ad"), ("click.cat", "cat")], "view": [("view.cat", "cat")]}
    left_out = make_model("din", make_schema(), features={"match_only": ("ad", "view.cat")})
    assert left_out.fields == {"click": [("click.cat", "cat")]}


def test_cross_layer_by_its_definition() -> None:
    layer = CrossLayer(5, 2)
    x0, x = torch.randn(2, 3, 5)
    expected = x0 * (x @ layer.down.weight.T @ layer.up.weight.T + layer.up.bias) + x
    torch.testing.assert_close(layer(x0, x), expected)


def test_positions_are_the_events_that_are_computed() -> None:
    schema = make_schema()
    batch = make_batch(schema, (2, 3), {"click": [40, 5], "view": [0, 20]})
    assert make_model("kunlun", schema).positions(batch) == (65, 65)
    assert make_model("kunlun", schema, towers={"click": {"max_events": 10}, "view": None}).positions(batch) == (15, 15)
    assert make_model("din", schema, max_events=10).positions(batch) == (2 * 10 + 3 * 15, 2 * 10 + 3 * 15)
