"""`flops(batch)` against torch's counter, which sees each op at its true ragged lengths."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import MODELS, make_batch, make_model, make_schema
from torch.utils.flop_counter import FlopCounterMode

from gem_core import ops
from gem_core.model.pooling import Rote
from gem_core.ops.masks import dense_mask

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "kunlun": ("kunlun", {}),
    "full": ("kunlun", {"conditioning": "full"}),
    "all modules": ("kunlun", {"comp_skip": False, "layers": 3}),
    "all modules, full": ("kunlun", {"comp_skip": False, "layers": 3, "conditioning": "full"}),
    "window": ("kunlun", {"tower": {"attention": "window", "attention_size": 6}}),
    "wide window": ("kunlun", {"tower": {"attention": "window", "attention_size": 60}}),
    "full attention": ("kunlun", {"tower": {"attention": "full"}}),
    "causal": ("kunlun", {"tower": {"attention": "causal", "rote": False}}),
    "block shift": ("kunlun", {"tower": {"attention_size": 6, "block_shift": True}, "layers": 4, "comp_skip": False}),
    "history tokens": ("kunlun", {"history": {"click": 3}}),
    "experts": ("kunlun", {"experts": 3, "combine": "concat", "match_bins": 5}),
    "experts sum": ("kunlun", {"experts": 2, "combine": "sum", "wukong": {"projection": "static"}}),
    "no target": ("kunlun", {"tower": {"target_queries": 0}, "head_hidden": ()}),
    "unequal towers": (
        "kunlun",
        {
            "dim": 24,
            "layers": 3,
            "towers": {"click": {"width": 48, "max_events": 9, "heads": 4}, "view": {"layers": 1}},
        },
    ),
    "no towers": ("kunlun", {"towers": {"click": None, "view": None}}),
    "tables": ("kunlun", {"features": {"embedding_dims": {"ad": 8, "tags": 4}, "dense_skip": False}}),
    "din": ("din", {"max_events": 12}),
    "dcnv2": ("dcnv2", {}),
    "interformer": ("interformer", {}),
    "interformer full": ("interformer", {"conditioning": "full", "layers": 3, "interaction": "dhen"}),
    "interformer crosses": (
        "interformer",
        {"interaction": "dcnv2", "sequences": {"view": {"width": 16, "heads": 1, "max_events": 5, "recent": 0}}},
    ),
    "interformer without sequences": ("interformer", {"sequences": {"click": None, "view": None}}),
    "wukong": ("wukong", {"block": {"fm_tokens": 5, "linear_tokens": 2}}),
    "wukong static": ("wukong", {"block": {"projection": "static"}, "features": {"embedding_dim": 32}}),
    "hstu": ("hstu", {"layers": 3, "max_events": 12}),
    "hstu of one layer": ("hstu", {"layers": 1}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_equal_the_counter(name: str) -> None:
    kind, options = VARIANTS[name]
    schema = make_schema()
    batch = make_batch(schema, (3, 0, 4, 1), {"click": [40, 3, 0, 11], "view": [0, 20, 7, 1]})
    model = make_model(kind, schema, **options)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(batch)
    assert sum(model.flops(batch).values()) == counter.get_total_flops()


def test_schemas_without_parts() -> None:
    for changes in ({"dense": {}}, {"events": {}}, {"vectors": {}, "dense": {"x": {}}, "sparse": {"ad": {}}}):
        schema = make_schema(**changes)
        batch = make_batch(schema)
        for name in MODELS:
            model = make_model(name, schema)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(batch)
            assert sum(model.flops(batch).values()) == counter.get_total_flops()


def test_comp_skip_and_request_conditioning_save_what_they_skip() -> None:
    schema = make_schema()
    batch = make_batch(schema, (10,), {"click": [40], "view": [20]})

    def tower_flops(**options: Any) -> int:
        counts = make_model("kunlun", schema, layers=4, **options).flops(batch)
        return sum(n for part, n in counts.items() if part.endswith((".ffn", ".attention")))

    assert tower_flops() * 2 == tower_flops(comp_skip=False)
    assert tower_flops() * 10 == tower_flops(conditioning="full")


def test_a_backward_counts_twice_its_forward() -> None:
    schema = make_schema()
    batch = make_batch(schema)
    model = make_model("kunlun", schema)
    with FlopCounterMode(display=False) as counter:
        logits = model(batch).logits
        forward = {k: v for k, v in counter.get_flop_counts()["Global"].items() if k.__module__ == "torch._ops.gem"}
        sum(x.sum() for x in logits.values()).backward()
    counts = counter.get_flop_counts()["Global"]
    assert len(forward) == 4
    for op, flops in forward.items():
        assert counts[getattr(torch.ops.gem, f"{op.__name__}_backward")] == 2 * flops


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4),
    st.sampled_from([("none", 0), ("causal", 0), ("window", 2), ("block", 3), ("prefix", 2)]),
)
def test_attention_ops_count_visible_pairs(sizes: list[tuple[int, int]], mask: tuple[str, int]) -> None:
    kind, size = mask
    given_size = {kind: size} if size else {}
    q_offsets, k_offsets = (torch.tensor([0, *(s[i] for s in sizes)]).cumsum(0) for i in (0, 1))
    q = torch.randn(int(q_offsets[-1]), 2, 4)
    k, v = torch.randn(2, int(k_offsets[-1]), 2, 4)
    pairs = sum(int(dense_mask(kind, size, 0, n, m, q.device).sum()) if n * m else 0 for n, m in sizes)
    for op in (ops.jagged_attention, ops.hstu_attention):
        with FlopCounterMode(display=False) as counter:
            op(q, k, v, q_offsets, k_offsets, 9, 9, mask=kind, **given_size)
        assert counter.get_total_flops() == pairs * 4 * 2 * 4


def test_gdpa_counts_and_rotations_do_not() -> None:
    offsets = torch.tensor([0, 3, 3, 8])
    q = torch.randn(8, 2, 4)
    k, v = torch.randn(2, 3, 5, 2, 4)
    for op in (ops.gdpa, ops.gdpa_ffn):
        with FlopCounterMode(display=False) as counter:
            op(q, k, v, offsets, 5)
        assert counter.get_total_flops() == 8 * 5 * 4 * 2 * 4
    with FlopCounterMode(display=False) as counter:
        ops.rote(q, torch.arange(8), torch.arange(8), Rote(4).phi)
    assert counter.get_total_flops() == 0
