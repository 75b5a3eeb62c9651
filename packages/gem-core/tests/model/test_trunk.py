"""Kunlun's own parts of the trunk: token maps, WeightGen, history tokens."""

import pytest
import torch
from model_batches import make_batch, make_model, make_schema

from gem_core.errors import ConfigError
from gem_core.model.kunlun import WeightGen
from gem_core.model.layers import TokenMap
from gem_core.model.wukong import WukongBlock, WukongConfig


@pytest.mark.parametrize(("tokens", "mapped"), [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1)])
def test_a_token_map_near_identity_keeps_tokens_apart(tokens: int, mapped: int) -> None:
    weight = torch.stack([TokenMap(tokens, mapped, near_identity=True).weight for _ in range(400)]).mean(0)
    same = torch.zeros(mapped, tokens)
    for n in range(max(tokens, mapped)):
        same[n % mapped, n % tokens] = 1.0
    torch.testing.assert_close(weight, same / same.sum(1, keepdim=True).sqrt(), atol=0.06, rtol=0)


def test_token_map_by_its_definition() -> None:
    tokens = TokenMap(5, 3)
    x = torch.randn(4, 5, 6)
    torch.testing.assert_close(tokens(x), torch.einsum("rn,bnd->brd", tokens.weight, x))
    assert tokens(x[:0]).shape == (0, 3, 6)


def test_weight_gen_is_a_cross_of_its_compressed_tokens() -> None:
    gen = WeightGen(6, 4, 8, 3)
    x = torch.randn(5, 6, 8)
    compressed = torch.einsum("rn,bnd->brd", gen.compress.weight, x).flatten(1)
    down, up = gen.gate
    expected = compressed * (1 + compressed @ down.weight.T @ up.weight.T + up.bias)
    torch.testing.assert_close(gen(x).flatten(1), expected, rtol=1e-4, atol=1e-5)


def test_a_block_without_norm_keeps_magnitudes() -> None:
    torch.manual_seed(0)
    plain, normed = (WukongBlock(16, 8, WukongConfig(norm=norm)) for norm in (False, True))
    normed.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(3, 16, 8)
    torch.testing.assert_close(normed(x), torch.nn.functional.layer_norm(plain(x), (8,)))
    assert not [name for name, _ in plain.named_parameters() if name.startswith("out_norm")]


@pytest.mark.parametrize("tower", [True, False])
def test_history_and_tower_each_read_their_own_newest_events(tower: bool) -> None:
    """Of 40 clicks the tower reads the newest 4 and the history 9 (or nothing reads beyond these 9)."""
    schema = make_schema()
    towers = {"view": None, **({} if tower else {"click": None})}
    model = make_model("kunlun", schema, history={"click": 9}, tower={"max_events": 4}, towers=towers)
    batch = make_batch(schema, rows=(3,), lengths={"click": [40], "view": [0]})
    names = ("click.final.h",) if tower else ()

    def outputs(place: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        changed = batch.events["click"]["cat"].values
        kept = changed.clone()
        if place is not None:
            changed[place] = 2 + (changed[place] + 1) % 6
        with torch.no_grad():
            out = model(batch, names)
        changed.copy_(kept)
        return out.logits["click"], out.hidden["click.final.h"] if tower else out.logits["click"]

    logits, summary = outputs(None)
    for place, in_history, in_tower in ((1, True, True), (7, True, False), (20, False, False)):
        now, seen = outputs(place)
        assert bool((now != logits).any()) is in_history
        if tower and not in_history:
            torch.testing.assert_close(seen, summary, rtol=0, atol=0)
        if tower and in_tower:
            assert (seen != summary).any()


def test_history_is_the_mean_of_the_vectors() -> None:
    schema = make_schema()
    model = make_model("kunlun", schema, history={"view": 6}, towers={"click": None, "view": None})
    lengths = [20, 0, 3]
    batch = make_batch(schema, rows=(1, 2, 1), lengths={"view": lengths, "click": [0, 0, 0]})
    events = {"view": batch.events["view"]}
    looked = model.embedding.lookup(model.features.ids(batch, events))
    (token,) = model._history_tokens(events, looked)
    vectors = looked["view.cat"].split(lengths)
    means = torch.stack([v[:6].mean(0) if len(v) else torch.zeros(v.shape[1]) for v in vectors])
    torch.testing.assert_close(token.squeeze(1), means @ model.history["view/cat"].weight.T, rtol=1e-4, atol=1e-5)


def test_history_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'model\.history: no event type "clik" in the schema; did you mean "click"'):
        make_model("kunlun", make_schema(), history={"clik": 3})
