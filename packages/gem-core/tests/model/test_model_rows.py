"""What a row's logits may depend on: its own features, its request, and nothing else of the batch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import (
    make_batch,
    make_model,
    make_schema,
    offsets_of,
    one_request_per_row,
    regroup,
    same,
    single_row,
    stir,
)  # fmt: skip

from gem_core.data.batch import Batch, Jagged

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "kunlun": ("kunlun", {"match_bins": 4, "layers": 3}),
    "kunlun full": ("kunlun", {"match_bins": 4, "conditioning": "full", "comp_skip": False, "experts": 2}),
    "kunlun window": (
        "kunlun",
        {"tower": {"attention": "window", "attention_size": 3}, "combine": "sum", "experts": 2},
    ),
    "kunlun causal": ("kunlun", {"tower": {"attention": "causal", "rote": False, "target_queries": 0}}),
    "din": ("din", {}),
    "dcnv2": ("dcnv2", {}),
    "interformer": ("interformer", {"interaction": "dhen"}),
    "interformer full": ("interformer", {"conditioning": "full"}),
    "wukong": ("wukong", {}),
    "hstu": ("hstu", {}),
}
each_model = pytest.mark.parametrize("name", MODELS)


def build(name: str, schema: Any = None) -> torch.nn.Module:
    kind, options = MODELS[name]
    return stir(make_model(kind, schema or make_schema(), **options))


@each_model
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_batch_equals_its_rows_one_by_one(name: str, data: st.DataObject) -> None:
    requests = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=requests, max_size=requests))
    lengths = {
        "click": data.draw(st.lists(st.sampled_from([0, 1, 2, 17, 40]), min_size=requests, max_size=requests)),
        "view": data.draw(st.lists(st.integers(0, 20), min_size=requests, max_size=requests)),
    }
    batch = make_batch(make_schema(), sizes, lengths, seed=data.draw(st.integers(0, 99)))
    model = build(name)
    with torch.no_grad():
        whole = model(batch).logits
        for row in range(batch.rows):
            same(model(single_row(batch, row)).logits, {k: v[row : row + 1] for k, v in whole.items()})


@each_model
def test_rows_as_requests_of_their_own_give_the_same(name: str) -> None:
    batch = make_batch(make_schema(), (3, 1, 0, 5))
    model = build(name)
    with torch.no_grad():
        same(model(one_request_per_row(batch)).logits, model(batch).logits)


@each_model
def test_rows_and_requests_may_be_permuted(name: str) -> None:
    batch = make_batch(make_schema(), (2, 3, 1))
    order = [5, 2, 4, 3, 1, 0]  # requests from the last to the first
    model = build(name)
    with torch.no_grad():
        expected = {k: v[torch.tensor(order)] for k, v in model(batch).logits.items()}
        same(model(regroup(batch, order, [2, 1, 0], [0, 1, 1, 1, 2, 2])).logits, expected)


@each_model
def test_changing_one_ad_leaves_the_other_rows_of_its_request(name: str) -> None:
    schema = make_schema()
    batch, other = make_batch(schema, (4, 2), seed=1), make_batch(schema, (4, 2), seed=2)
    changed = regroup(batch, range(6), [0, 1], [0, 0, 0, 0, 1, 1])
    row = 2
    changed.dense[row] = other.dense[row]
    changed.vectors["creative"][row] = other.vectors["creative"][row]
    changed.surface[row] = 1 - changed.surface[row]
    for feature in ("ad", "cat"):
        changed.ids[feature].values[row] = 2 + (changed.ids[feature].values[row] + 1) % 8
    model = build(name)
    with torch.no_grad():
        before, after = model(batch).logits, model(changed).logits
    rest = torch.arange(6) != row
    same({k: v[rest] for k, v in after.items()}, {k: v[rest] for k, v in before.items()})
    assert all((before[k][row] - after[k][row]).abs() > 1e-4 for k in before)


@each_model
def test_changing_one_users_history_leaves_other_requests(name: str) -> None:
    batch = make_batch(make_schema(), (2, 2, 2), {"click": [5, 9, 3], "view": [4, 4, 4]})
    changed = regroup(batch, range(6), [0, 1, 2], [0, 0, 1, 1, 2, 2])
    for field in ("ad", "cat"):
        values = changed.events["click"][field].values
        values[5:14] = 2 + (values[5:14] + 3) % 8
    model = build(name)
    with torch.no_grad():
        before, after = model(batch).logits, model(changed).logits
    rest = torch.tensor([0, 1, 4, 5])
    same({k: v[rest] for k, v in after.items()}, {k: v[rest] for k, v in before.items()})
    assert all((before[k][2:4] - after[k][2:4]).abs().max() > 1e-5 for k in before)


@each_model
@pytest.mark.parametrize(("rows", "lengths"), [((), []), ((0, 0), [3, 0]), ((2, 1), [0, 0]), ((1,), [0])], ids=str)
def test_nothing_is_legal(name: str, rows: tuple[int, ...], lengths: list[int]) -> None:
    batch = make_batch(make_schema(), rows, {"click": lengths, "view": [0] * len(lengths)})
    model = build(name).train()
    output = model(batch, hidden=model.hidden_names)
    assert all(v.shape == (sum(rows),) and v.isfinite().all() for v in output.logits.values())
    assert all(v.shape[0] == sum(rows) for v in output.hidden.values())
    torch.stack([v.sum() for v in output.logits.values()]).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def cut(batch: Batch, event: str, limit: int) -> Batch:
    """The newest `limit` events of a type, by a loop."""
    fields = batch.events[event]
    keep = [min(int(n), limit) for n in fields["time"].lengths()]
    starts = fields["time"].offsets.tolist()
    index = torch.tensor([s + i for s, n in zip(starts, keep, strict=False) for i in range(n)], dtype=torch.int64)
    out = {k: Jagged(v.values[index], offsets_of(keep), limit) for k, v in fields.items()}
    return Batch(**{**batch.__dict__, "events": {**batch.events, event: out}})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("kunlun", {"towers": {"click": {"max_events": 7}}}),
        ("kunlun", {"towers": {"click": {"max_events": 7}}, "conditioning": "full"}),
        ("din", {"max_events": 7}),
        ("dcnv2", {"max_events": 7}),
        ("interformer", {"sequences": {"click": {"max_events": 7}}}),
        ("interformer", {"sequences": {"click": {"max_events": 7}}, "conditioning": "full"}),
        ("wukong", {"max_events": 7}),
        ("hstu", {"max_events": 7}),
    ],
)
def test_events_beyond_the_limit_are_ignored(kind: str, options: dict[str, Any]) -> None:
    schema = make_schema()
    batch = make_batch(schema, (2, 1, 1), {"click": [40, 7, 0], "view": [5, 0, 6]})
    model = make_model(kind, schema, **options)
    with torch.no_grad():
        logits = model(batch).logits
        same(model(cut(batch, "click", 7)).logits, logits)
        assert any((model(cut(batch, "click", 6)).logits[k] - logits[k]).abs().max() > 1e-5 for k in logits)


@each_model
def test_missing_values_are_not_zeros_and_stay_finite(name: str) -> None:
    batch = make_batch(make_schema(), (2, 1), missing=0.0)
    model = build(name)

    def with_first(value: float) -> torch.Tensor:
        dense = batch.dense.clone()
        dense[0, 1] = value
        with torch.no_grad():
            return torch.stack(list(model(Batch(**{**batch.__dict__, "dense": dense})).logits.values()))

    missing, zero = with_first(float("nan")), with_first(0.0)
    assert missing.isfinite().all()
    assert (missing[:, 0] - zero[:, 0]).abs().min() > 1e-4
    torch.testing.assert_close(missing[:, 1:], zero[:, 1:])


def test_a_batch_without_any_value_is_finite() -> None:
    batch = make_batch(make_schema(), (2, 1), missing=1.1)
    for name in MODELS:
        with torch.no_grad():
            assert all(v.isfinite().all() for v in build(name)(batch).logits.values())


def test_id_dropout_only_while_training() -> None:
    schema = make_schema()
    batch = make_batch(schema)
    rates = dict.fromkeys(("ad", "cat", "tags", "segment", "click.ad"), 1.0)
    model = make_model("kunlun", schema, features={"id_dropout": rates})
    with torch.no_grad():
        expected = make_model("kunlun", schema)(batch).logits
        same(model(batch).logits, expected)
        model.train()
        first = model(batch).logits
        assert any((first[k] - expected[k]).abs().max() > 1e-3 for k in first)
        unseen = Batch(**batch.__dict__)
        for ids in (*unseen.ids.values(), *unseen.request_ids.values(), unseen.events["click"]["ad"]):
            ids.values.fill_(1)
        same(model(unseen).logits, first)


@pytest.mark.parametrize("name", ["kunlun", "din"])
def test_dropout_only_while_training(name: str) -> None:
    schema = make_schema()
    dropout: dict[str, Any] = {"features": {"dropout": 0.5}}
    dropout |= {"head_dropout": 0.5, "wukong": {"dropout": 0.5}} if name == "kunlun" else {"dropout": 0.5}
    without: dict[str, Any] = {} if name == "kunlun" else {"dropout": 0.0}
    batch = make_batch(schema)
    with torch.no_grad():
        model = make_model(name, schema, **dropout)
        # Modules without parameters do not change how the others are drawn.
        same(model(batch).logits, make_model(name, schema, **without)(batch).logits)
        assert not torch.equal(model.train()(batch).logits["buy"], model(batch).logits["buy"])


def test_order_of_a_batchs_vectors_does_not_matter() -> None:
    schema = make_schema(vectors={"a": {"width": 2}, "b": {"width": 2}})
    batch = make_batch(schema)
    turned = Batch(**{**batch.__dict__, "vectors": dict(reversed(batch.vectors.items()))})
    model = make_model("kunlun", schema)
    with torch.no_grad():
        assert torch.equal(model(turned).logits["buy"], model(batch).logits["buy"])


@each_model
def test_hidden_layers_by_name(name: str) -> None:
    model = build(name)
    batch = make_batch(make_schema())
    with torch.no_grad():
        output = model(batch, hidden=model.hidden_names)
        assert output.hidden.keys() == set(model.hidden_names)
        assert all(v.shape[0] == batch.rows for v in output.hidden.values())
        assert not model(batch).hidden
        one = model(batch, hidden=model.hidden_names[-1:]).hidden
        torch.testing.assert_close(one[model.hidden_names[-1]], output.hidden[model.hidden_names[-1]])


def test_untrained_logits_are_near_the_base_rates() -> None:
    model = make_model("kunlun", make_schema(), head_hidden=(8,))
    expected = torch.tensor(0.3 / 0.7).log()
    assert (model.heads.surface_bias - expected).abs().max() < 1e-6


@each_model
def test_autocast_stays_close(name: str) -> None:
    batch = make_batch(make_schema())
    model = build(name)
    with torch.no_grad():
        exact = model(batch).logits
        with torch.autocast("cpu", torch.bfloat16):
            rough = model(batch).logits
    for task in exact:
        assert rough[task].dtype == torch.float32
        assert (rough[task] - exact[task]).abs().max() < 0.1 * (1 + exact[task].abs().max())
