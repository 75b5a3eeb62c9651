"""What a layer does to a sequence: attention of each kind, and the GDPA feed-forward."""

from typing import Any

import pytest
import torch
from test_pooling import make_sequence, naive_rote
from torch import Tensor

from gem_core import ops
from gem_core.model.sequence import GdpaFeedForward, SequenceAttention

KINDS: dict[str, tuple[Any, int, bool]] = {
    "block": ("block", 4, False),
    "shifted block": ("block", 4, True),
    "window": ("window", 3, False),
    "full": ("full", 1, False),
    "causal": ("causal", 1, False),
}


def sees(kind: str, size: int, shift: bool, i: int, j: int) -> bool:
    if kind == "block":
        moved = size // 2 if shift else 0
        return (i + moved) // size == (j + moved) // size
    if kind == "window":
        return abs(i - j) <= size
    return kind == "full" or j <= i


def naive(layer: SequenceAttention, x: Tensor, positions: Tensor, gaps: Tensor, mask: Tensor) -> Tensor:
    width = x.shape[1]
    d = width // layer.heads
    q, k, v = (layer.norm(x) @ layer.qkv.weight.T).split(width, 1)
    out = []
    for h in range(layer.heads):
        cut = slice(h * d, (h + 1) * d)
        qh, kh = q[:, cut], k[:, cut]
        if layer.rote is not None:
            qh, kh = (naive_rote(y, positions, gaps, layer.rote.phi) for y in (qh, kh))
        out.append(
            (qh @ kh.T * d**-0.5).masked_fill(~mask.view(len(qh), len(qh)), float("-inf")).softmax(1) @ v[:, cut]
        )
    return x + torch.cat(out, 1) @ layer.out.weight.T


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rote", [True, False])
def test_attention_by_its_definition(kind: str, rote: bool) -> None:
    torch.manual_seed(0)
    mode, size, shift = KINDS[kind]
    layer = SequenceAttention(8, 2, mode, size, shift, rote)
    sequence = make_sequence([11, 0, 1, 6], 8)
    out = layer(sequence).values
    start = 0
    for n in (11, 0, 1, 6):
        at = slice(start, start + n)
        mask = torch.tensor([[sees(mode, size, shift, i, j) for j in range(n)] for i in range(n)], dtype=torch.bool)
        expected = naive(layer, sequence.values[at], sequence.positions[at], sequence.gaps[at], mask)
        torch.testing.assert_close(out[at], expected, rtol=1e-4, atol=1e-5)
        start += n


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("changed", [0, 3, 4, 9, 10])
def test_another_block_never_changes_a_block(shift: bool, changed: int) -> None:
    layer = SequenceAttention(8, 2, "block", 4, shift, True)
    sequence = make_sequence([11], 8)
    values = sequence.values.clone()
    values[changed] = torch.randn(8)
    moved = (layer(sequence.replace(values)).values != layer(sequence).values).any(1).tolist()
    assert moved == [sees("block", 4, shift, changed, j) for j in range(11)]


@pytest.mark.parametrize("kind", KINDS)
def test_attention_without_events(kind: str) -> None:
    mode, size, shift = KINDS[kind]
    layer = SequenceAttention(8, 2, mode, size, shift, True)
    assert layer(make_sequence([0, 0], 8)).values.shape == (0, 8)
    assert layer(make_sequence([], 8)).values.shape == (0, 8)


@pytest.mark.parametrize(("dim", "width"), [(12, 12), (12, 8)])
def test_feed_forward_by_its_definition(dim: int, width: int) -> None:
    torch.manual_seed(0)
    heads, hidden = 2, 5
    layer = GdpaFeedForward(3, dim, width, heads, hidden, "gelu")
    sequence = make_sequence([4, 0, 3], width)
    xsum = torch.randn(3, 3, dim)
    out = layer(sequence, xsum).values
    d = width // heads
    x = xsum / (xsum.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    x = x @ layer.resize.weight.T if dim != width else x
    for b in range(3):
        at = slice(int(sequence.offsets[b]), int(sequence.offsets[b + 1]))
        raw = sequence.values[at]
        lq = torch.nn.functional.layer_norm(raw, (width,))
        key, value = layer.key.weight @ x[b], layer.value.weight @ x[b]
        heads_out = []
        for h in range(heads):
            cut = slice(h * d, (h + 1) * d)
            z = lq[:, cut] @ key[:, cut].T / d**0.5
            heads_out.append(torch.nn.functional.gelu(z) @ value[:, cut] / hidden**0.5)
        g = torch.cat(heads_out, 1) + lq
        expected = g * torch.rsqrt(g.square().mean(1, keepdim=True) + 1e-5) + raw
        torch.testing.assert_close(out[at], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [64, 32])
@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_feed_forward_starts_alive_but_bounded(width: int, activation: str) -> None:
    """Scores of unit variance, and a generated part that is neither inert nor above the residual (model.md 4.1)."""
    torch.manual_seed(0)
    layer = GdpaFeedForward(8, 64, width, 2, 128, activation)
    x = layer.resize(torch.nn.functional.rms_norm(torch.randn(40, 8, 64), (64,)))
    k, v = (m(x).view(40, 128, 2, width // 2) for m in (layer.key, layer.value))
    assert k.std().item() == pytest.approx(1.0, rel=0.1)
    assert v.std().item() == pytest.approx(1.0, rel=0.1)
    q = torch.nn.functional.layer_norm(torch.randn(400, width), (width,)).view(-1, 2, width // 2)
    offsets = torch.arange(0, 401, 10)
    scales = {"scale_inside": (width // 2) ** -0.5, "scale_outside": 128**-0.5}
    rms = ops.gdpa(q, k, v, offsets, 10, activation=activation, **scales).square().mean().sqrt()
    assert 0.2 < rms <= 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 7, 8, 11])
def test_multiply_adds_count_the_visible_pairs(kind: str, length: int) -> None:
    mode, size, shift = KINDS[kind]
    layer = SequenceAttention(8, 2, mode, size, shift, True)
    pairs = sum(sees(mode, size, shift, i, j) for i in range(length) for j in range(length))
    assert layer.macs(torch.tensor([length, 0])) == length * 4 * 64 + pairs * 2 * 8
