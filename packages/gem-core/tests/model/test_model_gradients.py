"""Every parameter of every variant gets a gradient that is not zero, and the tables too."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import FULL, MODELS, make_batch, make_model, make_schema, stir

from gem_core.errors import ConfigError
from gem_core.ops import ACTIVATIONS

ATTENTIONS = ("block", "window", "full", "causal")


def assert_all_get_gradients(name: str, schema: Any, **options: Any) -> None:
    model = stir(make_model(name, schema, **options)).train()
    logits = model(make_batch(schema)).logits
    # Random weights: a plain sum could cancel.
    torch.stack([(x * torch.randn(x.shape)).sum() for x in logits.values()]).sum().backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not dead
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    before = {k: v.clone() for k, v in model.embedding.state().items()}
    model.embedding.step(0.1)
    still = [k for k, v in model.embedding.state().items() if torch.equal(v, before[k])]
    assert not still


KUNLUN: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"conditioning": "full"},
    "all modules": {"comp_skip": False},
    "all modules, full": {"comp_skip": False, "conditioning": "full", "layers": 3},
    "no rote": {"tower": {"rote": False}},
    "block shift": {"tower": {"attention": "block", "attention_size": 4, "block_shift": True}, "layers": 4},
    "experts sum": {"experts": 3, "combine": "sum"},
    "experts concat": {"experts": 2, "combine": "concat", "layers": 3},
    "one match bin": {"match_bins": 1},
    "match bins": {"match_bins": 6, "match_tokens": 3},
    "history tokens": {"history": {"click": 3}},
    "no target queries": {"tower": {"target_queries": 0}},
    "three target queries": {"tower": {"target_queries": 3}},
    "unequal towers": {
        "layers": 3,
        "towers": {
            "click": {"width": 24, "heads": 3, "layers": 1, "summary_tokens": 5, "attention": "causal"},
            "view": {"width": 48, "heads": 4, "target_queries": 0, "attention": "window", "attention_size": 2},
        },
    },
    "one tower left out": {"towers": {"view": None}},
    "no tower": {"towers": {"view": None, "click": None}},
    "static projection": {"wukong": {"projection": "static", "hidden": (24, 12)}},
    "equal tokens": {"compressed_tokens": 4, "wukong": {"fm_tokens": 8, "linear_tokens": 8}},
    "plain": {
        "objective_tokens": False,
        "features": {"dense_skip": False},
        "head_hidden": (),
        "tower": {"time_waves": 0},
    },
    "dropout": {"head_dropout": 0.2, "wukong": {"dropout": 0.1}, "features": {"dropout": 0.1}},
    "id dropout": {"features": {"id_dropout": {"ad": 0.3, "click.ad": 0.3, "tags": 0.2}}},
    "match only": {"match_bins": 4, "features": {"match_only": ("ad", "click.ad")}},
    "table widths": {"features": {"embedding_dim": 32, "embedding_dims": {"ad": 12, "tags": 7}}},
}


@pytest.mark.parametrize("options", KUNLUN.values(), ids=KUNLUN.keys())
def test_kunlun_variants(options: dict[str, Any]) -> None:
    assert_all_get_gradients("kunlun", make_schema(), **options)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("comp_skip", [True, False])
def test_depths(layers: int, comp_skip: bool) -> None:
    assert_all_get_gradients("kunlun", make_schema(), layers=layers, comp_skip=comp_skip)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    assert_all_get_gradients("kunlun", make_schema(), tower={"activation": activation})


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("rote", [True, False])
def test_attentions(attention: str, rote: bool) -> None:
    assert_all_get_gradients("kunlun", make_schema(), tower={"attention": attention, "attention_size": 3, "rote": rote})


NAMES = {"type": {}, "items": {}, "forward": {"level": "request"}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "no events": {"events": {}},
    "no request features": {
        "dense": {"x": {"encoding": "piecewise"}},
        "sparse": {"ad": {}, "cat": {}},
        "vectors": {},
    },
    "no dense": {"dense": {}},
    "no sparse": {"sparse": {}, "events": {"click": {"max_length": 9, "fields": {"price": {"kind": "dense"}}}}},
    "no vectors": {"vectors": {}},
    "one surface": {"surface": None},
    "one objective": {"objectives": {"click": {}}},
    "nothing but events": {"dense": {}, "sparse": {}, "vectors": {}},
    "shared table": {"sparse": {**FULL["sparse"], "other": {"table": "ad"}}},
    "names of torch": {
        "sparse": NAMES,
        "vectors": {"train": {"width": 2}},
        "events": {"keys": {"max_length": 9, "fields": ["type", "values"]}},
        "objectives": {"float": {}, "modules": {}},
    },
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
@pytest.mark.parametrize("name", MODELS)
def test_schemas(name: str, schema: dict[str, Any]) -> None:
    options: dict[str, Any] = {} if name != "kunlun" else {"features": {"embedding_dims": {}}}
    assert_all_get_gradients(name, make_schema(**schema), **options)


@pytest.mark.parametrize("name", ["din", "dcnv2"])
@pytest.mark.parametrize(
    "options", [{}, {"features": {"dense_skip": False}, "dropout": 0.0, "hidden": (16,), "max_events": 3}]
)
def test_baselines(name: str, options: dict[str, Any]) -> None:
    assert_all_get_gradients(name, make_schema(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layers": 1, "interaction": "dcnv2"},
        {"layers": 3, "interaction": "dhen", "conditioning": "full"},
        {"sequence": {"rote": False, "recent": 0, "time_waves": 0}, "sequences": {"view": {"width": 8, "heads": 2}}},
        {"sequences": {"view": None}, "head_hidden": (), "tokens": 1, "compressed_tokens": 1},
    ],
    ids=str,
)
def test_interformer_variants(options: dict[str, Any]) -> None:
    assert_all_get_gradients("interformer", make_schema(), **options)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_depths_of_hstu_and_wukong(layers: int) -> None:
    for name in ("hstu", "wukong"):
        assert_all_get_gradients(name, make_schema(), layers=layers)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_any_combination_of_switches(data: st.DataObject) -> None:
    draw = data.draw
    tower = {
        "attention": draw(st.sampled_from(ATTENTIONS)),
        "attention_size": draw(st.sampled_from([2, 5, 64])),
        "block_shift": draw(st.booleans()),
        "rote": draw(st.booleans()),
        "target_queries": draw(st.integers(0, 3)),
        "activation": draw(st.sampled_from(list(ACTIVATIONS))),
        "width": draw(st.sampled_from([16, 32, 40])),
    }
    assert_all_get_gradients(
        "kunlun",
        make_schema(**draw(st.sampled_from([{}, *SCHEMAS.values()]))),
        layers=draw(st.integers(1, 4)),
        conditioning=draw(st.sampled_from(["full", "request"])),
        comp_skip=draw(st.booleans()),
        experts=draw(st.integers(1, 3)),
        combine=draw(st.sampled_from(["sum", "concat"])),
        tower=tower,
    )


def test_bad_options_are_refused() -> None:
    for options, message in [
        ({"towers": {"clik": {}}}, 'no event type "clik" in the schema; did you mean "click"'),
        ({"experts": 40}, "at most one expert per token"),
        ({"features": {"match_only": ("cta",)}}, '"cta" is no sparse feature of the schema; did you mean "cat"'),
        ({"features": {"embedding_dims": {"da": 4}}}, 'no table "da"; valid: ad, cat'),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_model("kunlun", make_schema(), **options)
    with pytest.raises(ConfigError, match="nothing can match"):
        make_model("kunlun", make_schema(events={}), match_bins=2)
    with pytest.raises(ValueError, match="must split into 3 heads of even width"):
        make_model("kunlun", make_schema(), towers={"view": {"width": 32, "heads": 3}})
    with pytest.raises(ValueError, match="must split into 3 heads of even width"):
        make_model("interformer", make_schema(), sequences={"view": {"heads": 3}})
    with pytest.raises(ValueError, match="must split into 3 heads of even width"):
        make_model("hstu", make_schema(), heads=3)
    with pytest.raises(ConfigError, match=r'model\.sequences: no event type "veiw" in the schema; did you mean "view"'):
        make_model("interformer", make_schema(), sequences={"veiw": None})
    for name in MODELS:
        with pytest.raises(ConfigError, match="has no hidden layer"):
            make_model(name, make_schema())(make_batch(make_schema()), hidden=("layer.9.x",))
