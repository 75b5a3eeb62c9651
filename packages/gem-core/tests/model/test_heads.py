"""Options of the heads: ESMM's products, feed-forwards of surfaces, heads of attribution windows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import FULL, MODELS, make_batch, make_model, make_schema, stir
from torch.utils.flop_counter import FlopCounterMode

from gem_core.errors import ConfigError
from gem_core.model.heads import SurfaceFeedForward, product_logit

ESMM: dict[str, Any] = {"head": {"conversions": {"buy": "click"}, "surface_rank": 3}}
WINDOWS = {**FULL["objectives"], "buy": {"label": "b", "windows": ["90m", "1d", "7d"], "converted_at": "at"}}


@settings(deadline=None, derandomize=True)
@given(st.floats(-60, 60), st.floats(-60, 60))
def test_product_of_probabilities(a: float, b: float) -> None:
    x, y = torch.tensor([a, b], dtype=torch.float64, requires_grad=True).unbind()
    out = product_logit(x, y)
    torch.testing.assert_close(
        torch.nn.functional.logsigmoid(out), torch.nn.functional.logsigmoid(x) + torch.nn.functional.logsigmoid(y)
    )
    assert all(g.isfinite() for g in torch.autograd.grad(out, [x, y]))


def test_gradients_of_the_product() -> None:
    a, b = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(product_logit, (a, b))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_takes_the_options_of_heads(name: str) -> None:
    """A conversion is never likelier than its click; each parameter gets a gradient; FLOPs are counted."""
    schema = make_schema(objectives=WINDOWS)
    model = stir(make_model(name, schema, **ESMM))
    batch = make_batch(schema)
    with FlopCounterMode(display=False) as counter:
        logits = model(batch).logits
    assert sum(model.flops(batch).values()) == counter.get_total_flops()
    assert list(logits) == ["click", "buy@90m", "buy@1d", "buy"]
    assert all((logits[head] < logits["click"]).all() for head in list(logits)[1:])
    torch.stack([(x * torch.randn(x.shape)).sum() for x in logits.values()]).sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_chains_of_conversions() -> None:
    schema = make_schema(objectives={"buy": {}, "cart": {}, "click": {}})
    model = stir(make_model("dcnv2", schema, head={"conversions": {"buy": "cart", "cart": "click"}}))
    assert model.heads.products == [("cart", "click"), ("buy", "cart")]
    with torch.no_grad():
        logits = model(make_batch(schema)).logits
    assert (logits["buy"] < logits["cart"]).all() and (logits["cart"] < logits["click"]).all()


def test_the_start_is_calibrated() -> None:
    schema = make_schema(objectives=["click", "buy"])
    rates = {"click": 0.2, "buy": 0.05}
    fitted = schema.require_fitted().model_copy(update={"base_rates": rates})
    model = make_model("dcnv2", schema.model_copy(update={"fitted": fitted}), **ESMM)
    bias = model.heads.surface_bias
    torch.testing.assert_close(product_logit(bias[0], bias[1]).sigmoid(), torch.full((2,), 0.05))


def test_wrong_conversions_are_refused() -> None:
    for conversions, message in [
        ({"buy": "clik"}, r'model\.head\.conversions: the schema has no objective "clik"; did you mean "click"'),
        ({"bye": "click"}, r'no objective "bye"; valid: buy, click'),
        ({"buy": "click", "click": "buy"}, r"buy, click: each waits for itself"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_model("dcnv2", make_schema(), head={"conversions": conversions})


def test_feed_forward_of_a_surface_by_its_definition() -> None:
    ffn, x, surface = SurfaceFeedForward(3, 5, 2), torch.randn(4, 5), torch.tensor([2, 0, 1, 2])
    torch.testing.assert_close(ffn(x, surface), x)  # the identity at the start
    torch.nn.init.normal_(ffn.up.weight)
    for row, s in enumerate(surface.tolist()):
        own = slice(2 * s, 2 * s + 2)
        hidden = torch.nn.functional.gelu(ffn.down.weight[own] @ x[row])
        torch.testing.assert_close(ffn(x, surface)[row], x[row] + ffn.up.weight[:, own] @ hidden, rtol=1e-4, atol=1e-5)


def test_a_surface_learns_of_its_own_rows_only() -> None:
    ffn = SurfaceFeedForward(3, 5, 2)
    torch.nn.init.normal_(ffn.up.weight)
    ffn(torch.randn(4, 5), torch.tensor([0, 0, 2, 2])).square().sum().backward()
    used = ffn.down.weight.grad.view(3, 2, 5).flatten(1).any(1)  # type: ignore[union-attr]
    assert used.tolist() == [True, False, True]
