"""Parts of InterFormer and HSTU against their definitions, one sequence at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import make_batch, make_model, make_schema, offsets_of, stir
from torch.nn.functional import layer_norm, silu

from gem_core.model.hstu import HSTULayer, _oldest_first
from gem_core.model.interaction import Interaction
from gem_core.model.interformer import Gate, PersonalFeedForward
from gem_core.model.pooling import Sequence

ragged = st.lists(st.integers(0, 5), max_size=4)


def sequence(lengths: list[int], width: int) -> Sequence:
    n = sum(lengths)
    positions = torch.tensor([i for length in lengths for i in range(length)], dtype=torch.int64)
    return Sequence(torch.randn(n, width), offsets_of(lengths), 7, positions * 60, positions)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(ragged)
def test_personal_feed_forward_multiplies_by_a_matrix_of_each_sequence(lengths: list[int]) -> None:
    ffn = PersonalFeedForward(6, 4)
    s, xsum = sequence(lengths, 4), torch.randn(len(lengths), 2, 3)
    out = ffn(s, xsum).values
    for b, part in enumerate(s.values.split(lengths) if lengths else ()):
        scale = 1 + ffn.generate(xsum[b].flatten())
        matrix = ffn.into.weight.T @ torch.diag(scale) @ ffn.back.weight.T
        torch.testing.assert_close(out[s.offsets[b] : s.offsets[b + 1]], part @ matrix, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        ffn.generate.weight.zero_()
        torch.testing.assert_close(ffn(s, xsum).values, s.values, rtol=1e-4, atol=1e-5)  # starts at the identity


def test_gate_by_its_definition() -> None:
    gate, x = Gate(5), torch.randn(2, 3, 5)
    torch.testing.assert_close(gate(x), torch.sigmoid(x * (x @ gate.map.weight.T + gate.map.bias)))


@pytest.mark.parametrize("kind", ["dot", "dcnv2", "dhen"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_interaction_by_its_definition(kind: str, tokens: int) -> None:
    layer, x = Interaction(tokens, 3, 4, kind, (6,), 2, 0.0), torch.randn(2, tokens, 4)  # type: ignore[arg-type]
    expected = torch.einsum("rn,bnd->brd", layer.residual.weight, x)
    if layer.dot_mlp is not None:
        pairs = [(x[:, i] * x[:, j]).sum(1) / 2 for i in range(tokens) for j in range(i + 1, tokens)]
        expected = expected + layer.dot_mlp(torch.stack(pairs, 1)).view(2, 3, 4)
    if layer.cross is not None and layer.cross_mlp is not None:
        flat = x.flatten(1)
        crossed = flat * layer.cross.up(layer.cross.down(flat)) + flat
        expected = expected + layer.cross_mlp(crossed).view(2, 3, 4)
    assert (layer.dot_mlp is None) == (kind == "dcnv2" or tokens == 1)
    torch.testing.assert_close(layer(x), layer_norm(expected, (4,)), rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(ragged)
def test_cls_tokens_stand_before_each_sequence(lengths: list[int]) -> None:
    model = make_model("interformer", make_schema(), sequence={"recent": 3})
    tower, s = model.towers["click"], sequence(lengths, 32)
    xsum = torch.randn(len(lengths), 4, 32)
    with torch.no_grad():
        out, tokens = tower.start(s, xsum), tower.cls(xsum)
        summary = tower.summary(out, 0)
    assert out.offsets.diff().tolist() == [n + 4 for n in lengths]
    assert out.max_length == s.max_length + 4
    for b, n in enumerate(lengths):
        rows = slice(int(out.offsets[b]), int(out.offsets[b + 1]))
        events = slice(int(s.offsets[b]), int(s.offsets[b + 1]))
        torch.testing.assert_close(out.values[rows], torch.cat([tokens[b], s.values[events]]))
        assert out.positions[rows].tolist() == list(range(n + 4))
        assert out.gaps[rows].tolist() == [0] * 4 + s.gaps[events].tolist()
        recent = torch.cat([s.values[events][:3], torch.zeros(max(0, 3 - n), 32)])
        with torch.no_grad():
            torch.testing.assert_close(summary[b, :7], tower.gate[0](torch.cat([tokens[b], recent])))
    assert summary.shape == (len(lengths), tower.tokens_out, 32)


@pytest.mark.parametrize("name", ["interformer", "hstu"])
def test_histories_run_once_per_request(name: str) -> None:
    schema = make_schema()
    batch = make_batch(schema, (5, 4), {"click": [10, 20], "view": [3, 0]})
    model = make_model(name, schema)
    seen: list[int] = []
    module = model.towers["click"].attention[0].qkv if name == "interformer" else model.stacks["click"][0].key_value
    module.register_forward_pre_hook(lambda _, x: seen.append(len(x[0])))
    with torch.no_grad():
        model(batch)
    assert seen == [30 + 2 * 4 * (name == "interformer")]
    assert model.positions(batch) == (33, 33)


def test_full_conditioning_depends_on_the_ad_and_request_conditioning_does_not() -> None:
    schema = make_schema()
    batch = make_batch(schema, (2, 2))
    names = ("click.layer.1.h", "click.final.h")
    for conditioning in ("request", "full"):
        model = stir(make_model("interformer", schema, conditioning=conditioning))
        with torch.no_grad():
            before = model(batch, names).hidden
            batch.dense[0, 1] = 5.0
            after = model(batch, names).hidden
            batch.dense[0, 1] = 0.0
        assert all(torch.equal(before[n], after[n]) == (conditioning == "request") for n in names)
    no_request = make_schema(dense={"x": {}}, sparse={"ad": {}, "cat": {}}, vectors={})
    assert make_model("interformer", no_request).notes == (
        "conditioning: full, as the schema has no request-level feature",
    )


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4))
def test_hstu_layer_equals_a_loop(sizes: list[tuple[int, int]]) -> None:
    """`sizes`: rows and events of each request."""
    layer = HSTULayer(8, 2)
    lengths = [n for _, n in sizes]
    history, x = _oldest_first(sequence(lengths, 8)), torch.randn(sum(rows for rows, _ in sizes), 8)
    row_offsets = offsets_of([rows for rows, _ in sizes])
    with torch.no_grad():
        k, v = layer.keys(history)
        targets, events = layer.targets(x, row_offsets, history, k, v), layer.events(history, k, v).values

        def step(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            """One query (2, 4) over its visible keys."""
            u = silu(layer.gate_query(layer.norm(x)))[:8]
            scores = silu((q * k).sum(-1) / 2) / 7
            seen = (scores.unsqueeze(-1) * v).sum(0).flatten()
            return x + layer.out(layer.attended_norm(seen) * u)

        queries = silu(layer.gate_query(layer.norm(history.values)))[:, 8:].view(-1, 2, 4)
        rotated = layer.rote(queries.contiguous(), history)
        for b, (rows, n) in enumerate(sizes):
            at, row = int(history.offsets[b]), int(row_offsets[b])
            for i in range(at, at + n):
                expected = step(history.values[i], rotated[i], k[at : i + 1], v[at : i + 1])
                torch.testing.assert_close(events[i], expected, rtol=1e-4, atol=1e-5)
            for i in range(row, row + rows):
                q = silu(layer.gate_query(layer.norm(x[i])))[8:].view(2, 4)
                expected = step(x[i], q, k[at : at + n], v[at : at + n])
                torch.testing.assert_close(targets[i], expected, rtol=1e-4, atol=1e-5)


def test_events_turned_round_keep_their_positions() -> None:
    s = sequence([3, 0, 2], 1)
    out = _oldest_first(s)
    assert out.positions.tolist() == [2, 1, 0, 1, 0]
    torch.testing.assert_close(out.values, s.values[[2, 1, 0, 4, 3]])
    assert torch.equal(out.gaps, out.positions * 60)


def test_wukong_reads_the_means_of_the_newest_events() -> None:
    schema = make_schema()
    model = make_model("wukong", schema, max_events=6)
    seen: list[torch.Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    lengths = [20, 0, 3]
    batch = make_batch(schema, (1, 2, 1), {"view": lengths, "click": [0, 0, 0]})
    with torch.no_grad():
        model(batch)
        table = model.embedding.lookup({"view.cat": batch.events["view"]["cat"].values})["view.cat"]
        means = [v[:6].mean(0) if len(v) else torch.zeros(v.shape[1]) for v in table.split(lengths)]
        expected = torch.stack(means) @ model.history["view/cat"].weight.T
    place = model.features.tokens["request"] + list(model.history).index("view/cat")
    torch.testing.assert_close(seen[0][:, place], expected[batch.request], rtol=1e-4, atol=1e-5)
