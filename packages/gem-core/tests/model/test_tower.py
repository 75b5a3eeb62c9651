"""Towers: CompSkip's modules and data flow, and personalisation by event type."""

from typing import Any

import pytest
import torch
from model_batches import make_batch, make_model, make_schema, one_request_per_row, stir
from torch import Tensor

from gem_core.model.kunlun import KunlunConfig


def parts(model: torch.nn.Module, event: str) -> dict[str, set[str]]:
    tower = model.towers[event]
    return {"pool": set(tower.pool), "ffn": set(tower.ffn), "attention": set(tower.attention)}


def test_comp_skip_owns_only_what_it_runs() -> None:
    schema = make_schema()
    skipping = make_model("kunlun", schema, layers=4, towers={"view": {"layers": 1}})
    assert parts(skipping, "click") == {"pool": {"0", "2", "final"}, "ffn": {"0", "2"}, "attention": {"1", "3"}}
    assert parts(skipping, "view") == {"pool": {"0", "final"}, "ffn": {"0"}, "attention": set()}
    whole = make_model("kunlun", schema, layers=2, comp_skip=False)
    assert parts(whole, "click") == {"pool": {"0", "1", "final"}, "ffn": {"0", "1"}, "attention": {"0", "1"}}
    # Weights for a feed-forward are generated only where one is.
    assert [layer.request_gen is not None for layer in skipping.layers] == [True, False, True, False]
    full = make_model("kunlun", schema, layers=2, conditioning="full")
    assert all(layer.request_gen is None for layer in full.layers)


@pytest.mark.parametrize("comp_skip", [True, False])
def test_odd_layers_read_the_last_summary(comp_skip: bool) -> None:
    schema = make_schema()
    model = stir(make_model("kunlun", schema, layers=3, comp_skip=comp_skip, towers={"view": None}))
    seen: list[Tensor] = []
    for layer in model.layers:
        layer.interaction.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        hidden = model(make_batch(schema), hidden=model.hidden_names).hidden
    r = model.config.compressed_tokens
    summaries = [x[:, r:] for x in seen]
    for index, summary in enumerate(summaries):
        assert torch.equal(hidden[f"click.layer.{index}.h"], summary)
    assert torch.equal(summaries[0], summaries[1]) == comp_skip
    assert not torch.equal(summaries[1], summaries[2])


def test_odd_layers_depend_on_the_last_summary() -> None:
    schema = make_schema()
    model = stir(make_model("kunlun", schema, layers=2, towers={"view": None}))
    inputs: list[Tensor] = []
    model.layers[1].interaction.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    out = model(make_batch(schema), hidden=("layer.1.x",)).hidden["layer.1.x"]
    (grad,) = torch.autograd.grad((out * torch.randn(out.shape)).sum(), inputs[0])
    assert grad[:, model.config.compressed_tokens :].any(2).all()


def test_a_shallow_tower_keeps_giving_its_last_summary() -> None:
    schema = make_schema()
    model = make_model("kunlun", schema, layers=4, towers={"view": {"layers": 1}})
    with torch.no_grad():
        hidden = model(make_batch(schema), hidden=model.hidden_names).hidden
    assert all(torch.equal(hidden["view.layer.0.h"], hidden[f"view.layer.{i}.h"]) for i in (1, 2, 3))
    assert not torch.equal(hidden["click.layer.0.h"], hidden["click.layer.2.h"])
    assert not torch.equal(hidden["view.layer.0.h"], hidden["view.final.h"])


def test_towers_of_unequal_size_give_tokens_of_the_common_width() -> None:
    """The record's example, an event type each (model.md 4.4), scaled down."""
    schema = make_schema()
    towers: dict[str, Any] = {
        "click": {
            "width": 64,
            "heads": 8,
            "summary_tokens": 7,
            "layers": 3,
            "attention": "window",
            "attention_size": 9,
        },
        "view": {"width": 32, "heads": 4, "summary_tokens": 2, "layers": 2, "attention": "window", "attention_size": 5},
    }
    batch = make_batch(schema)
    for n in (0, 3):
        model = make_model("kunlun", schema, dim=48, layers=3, tower={"target_queries": n}, towers=towers)
        with torch.no_grad():
            hidden = model(batch, hidden=model.hidden_names).hidden
        assert hidden["click.final.h"].shape == (batch.rows, 7 + n, 48)
        assert hidden["view.layer.1.h"].shape == (batch.rows, 2 + n, 48)
        assert hidden["trunk"].shape == (batch.rows, (16 + 9 + 2 * n) * 48)
        assert model.towers["view"].attention["1"].qkv.weight.shape == (96, 32)


def test_a_tower_changes_only_what_its_entry_says() -> None:
    config = KunlunConfig(tower={"width": 48, "seeds": 9}, towers={"click": {"heads": 4}, "view": None})
    click = config.tower_of("click")
    assert click is not None and (click.width, click.seeds, click.heads) == (48, 9, 4)
    assert config.tower_of("view") is None
    other = config.tower_of("other")
    assert other is not None and (other.width, other.heads) == (48, 2)
    with pytest.raises(ValueError, match="widht"):
        KunlunConfig(towers={"click": {"widht": 3}})


def test_request_conditioning_runs_a_tower_once_per_request() -> None:
    schema = make_schema()
    batch = make_batch(schema, (5, 4), {"click": [10, 20], "view": [3, 0]})
    for conditioning, sequences, events in (("request", 2, 30), ("full", 9, 130)):
        model = make_model("kunlun", schema, conditioning=conditioning)
        seen: list[Any] = []
        model.towers["click"].ffn["0"].register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x))
        with torch.no_grad():
            model(batch)
        sequence, weights = seen[0]
        assert (len(sequence.offsets) - 1, sequence.values.shape[0], weights.shape[0]) == (sequences, events, sequences)


def test_full_conditioning_depends_on_the_ad_and_request_conditioning_does_not() -> None:
    schema = make_schema()
    batch = one_request_per_row(make_batch(schema, (1,)))
    for conditioning in ("request", "full"):
        model = stir(make_model("kunlun", schema, conditioning=conditioning, tower={"target_queries": 0}))
        with torch.no_grad():
            before = model(batch, hidden=("click.final.h",)).hidden["click.final.h"]
            batch.dense[0, 1] = 5.0
            after = model(batch, hidden=("click.final.h",)).hidden["click.final.h"]
            batch.dense[0, 1] = 0.0
        assert torch.equal(before, after) == (conditioning == "request")


def test_target_queries_see_the_ad() -> None:
    schema = make_schema()
    batch = make_batch(schema, (2, 2))
    model = stir(make_model("kunlun", schema, tower={"target_queries": 2, "summary_tokens": 3}))
    with torch.no_grad():
        before = model(batch, hidden=("click.final.h",)).hidden["click.final.h"]
        batch.dense[0, 1] = 5.0
        after = model(batch, hidden=("click.final.h",)).hidden["click.final.h"]
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[0, 3:] - after[0, 3:]).abs().max() > 1e-4
    torch.testing.assert_close(before[1:], after[1:])


def test_event_inputs_use_age_and_missing_numbers() -> None:
    schema = make_schema()
    model = make_model("kunlun", schema)
    batch = make_batch(schema, (1, 1), {"click": [2, 2], "view": [0, 0]}, missing=0.0)
    embed = model.towers["click"].embed
    fields = batch.events["click"]
    looked = {k: torch.zeros(4, model.features.widths[k]) for k in embed.sparse}
    gaps = torch.tensor([60, 60, 86400, 60])
    fields["price"].values.copy_(torch.tensor([0.0, float("nan"), 0.0, 0.0]))
    with torch.no_grad():
        out = embed(fields, gaps, looked)
    assert out.isfinite().all()
    torch.testing.assert_close(out[0], out[3])
    assert (out[0] - out[1]).abs().max() > 1e-3 and (out[0] - out[2]).abs().max() > 1e-3


def test_options_of_an_attention_that_is_not_there_are_noted() -> None:
    """One layer under CompSkip has no self-attention; nothing is said of options that were left alone or have an effect."""
    schema = make_schema()
    notes = make_model("kunlun", schema, layers=1, towers={"click": {"attention": "full"}, "view": {"heads": 2}}).notes
    assert notes == ("tower click: attention: without effect, as it has no self-attention (one layer under comp_skip)",)
    notes = make_model("kunlun", schema, layers=2, tower={"block_shift": True}, towers={"view": {"layers": 1}}).notes
    assert [note.partition(":")[0] for note in notes] == ["tower view"]
    assert make_model("kunlun", schema, layers=1, comp_skip=False, tower={"attention": "full"}).notes == ()
