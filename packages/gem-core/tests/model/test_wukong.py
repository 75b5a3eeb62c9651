"""Wukong blocks and their mixture."""

import pytest
import torch

from gem_core.model.wukong import WukongBlock, WukongConfig, WukongExperts


def test_interaction_doubles_the_degree_per_layer() -> None:
    """Without its MLP and norms a block with a static projection is a form of degree 2: f(t x) = t^2 f(x)."""
    blocks = [WukongBlock(6, 4, WukongConfig(projection="static", rank=4)) for _ in range(3)]

    def stack(x: torch.Tensor, depth: int) -> torch.Tensor:
        for block in blocks[:depth]:
            fm = block.interaction(x, None)  # (B, n, k), with k = D the next layer's tokens
            x = fm
        return x

    torch.manual_seed(0)
    x = torch.randn(5, 6, 4, dtype=torch.float64)
    for block in blocks:
        block.double()
    for depth in (1, 2, 3):
        torch.testing.assert_close(stack(3 * x, depth), 3.0 ** (2**depth) * stack(x, depth))


def test_interaction_by_its_definition() -> None:
    block = WukongBlock(5, 4, WukongConfig(projection="static", rank=3))
    x = torch.randn(2, 5, 4)
    for b in range(2):
        expected = x[b] @ x[b].T @ block.static / (4 * 5) ** 0.5
        torch.testing.assert_close(block.interaction(x, None)[b], expected)


def test_attentive_projection_depends_on_the_sample() -> None:
    block = WukongBlock(5, 4, WukongConfig(rank=3))
    x = torch.randn(2, 5, 4)
    for b in range(2):
        y = block.project((block.compress.weight @ x[b]).flatten()).view(5, 3)
        torch.testing.assert_close(
            block.interaction(x, block.compress(x))[b], x[b] @ x[b].T @ y / (4 * 5) ** 0.5, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("tokens", [9, 16])
def test_block_by_its_definition(tokens: int) -> None:
    config = WukongConfig(fm_tokens=10, linear_tokens=6)
    block = WukongBlock(tokens, 8, config)
    x = torch.randn(3, tokens, 8)
    fm = block.mlp(block.norm(block.interaction(x, block.compress(x)).flatten(1))).view(3, 10, 8)
    linear = torch.einsum("rn,bnd->brd", block.linear.weight, x)
    residual = x if tokens == 16 else torch.einsum("rn,bnd->brd", block.residual.weight, x)
    expected = torch.nn.functional.layer_norm(torch.cat([fm, linear], 1) + residual, (8,))
    torch.testing.assert_close(block(x), expected)
    assert (tokens == 16) == (not list(block.residual.parameters()))


@pytest.mark.parametrize(("combine", "tokens"), [("sum", 16), ("concat", 48)])
def test_each_expert_owns_its_part(combine: str, tokens: int) -> None:
    experts = WukongExperts(7, 8, 3, combine, WukongConfig())  # type: ignore[arg-type]
    x = torch.randn(2, 7, 8)
    parts = [experts.experts[m](x[:, m::3]) for m in range(3)]
    expected = torch.cat(parts, 1) if combine == "concat" else parts[0] + parts[1] + parts[2]
    torch.testing.assert_close(experts(x), expected)
    assert experts.tokens_out == tokens == expected.shape[1]
    if combine == "concat":
        changed = x.clone()
        changed[:, 1] += 1  # token 1 belongs to expert 1
        moved = (experts(changed) != experts(x)).any(0).any(1)
        assert moved[16:32].all() and not moved[:16].any() and not moved[32:].any()
