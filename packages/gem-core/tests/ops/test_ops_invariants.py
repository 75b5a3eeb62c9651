"""What the ops mean, against plain PyTorch written here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from op_cases import offsets_of

from gem_core import ops

LENGTHS = [5, 0, 130, 1, 64]
OFFSETS = offsets_of(LENGTHS)
TOTAL = sum(LENGTHS)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def pieces(x):
    return x.split(LENGTHS)


def per_sequence(q, k, v):
    """SDPA on each sequence alone."""
    out = []
    for part in zip(pieces(q), pieces(k), pieces(v), strict=True):
        out.append(F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part)).transpose(0, 1))
    return torch.cat(out)


def qkv(width: int = 8):
    return values(TOTAL, 2, width), values(TOTAL, 2, width) * 0.7, values(TOTAL, 2, width) + 1


def test_jagged_attention_is_attention_of_each_sequence():
    torch.testing.assert_close(ops.jagged_attention(*qkv(), OFFSETS, OFFSETS, 130, 130), per_sequence(*qkv()))


def test_block_attention_never_crosses_a_border():
    q, k, v = qkv()
    before = ops.block_attention(q, k, v, OFFSETS, 130)
    changed = slice(5 + 64, 5 + 128)  # the second block of the third sequence
    for x in (q, k, v):
        x[changed] += 1
    after = ops.block_attention(q, k, v, OFFSETS, 130)
    same = (after == before).all(-1).all(-1)
    assert not same[changed].any() and same[: changed.start].all() and same[changed.stop :].all()


def test_a_shifted_block_lets_neighbours_meet():
    q, k, v = qkv()
    one = ops.block_attention(q, k, v, OFFSETS, 130, shift=32)
    v[5 + 63] += 1
    two = ops.block_attention(q, k, v, OFFSETS, 130, shift=32)
    changed = (one != two).any(-1).any(-1).nonzero().squeeze(1)
    assert changed.min() == 5 + 32 and changed.max() == 5 + 95


def test_block_mask_and_block_attention_agree():
    found = ops.jagged_attention(*qkv(), OFFSETS, OFFSETS, 130, 130, mask="block", block=64)
    torch.testing.assert_close(found, ops.block_attention(*qkv(), OFFSETS, 130))


def test_seed_attention_broadcasts_the_seeds():
    _, k, v = qkv()
    seeds = values(6, 2, 8)
    found = ops.seed_attention(seeds, k, v, OFFSETS, 130)
    repeated = ops.jagged_attention(seeds.repeat(5, 1, 1), k, v, torch.arange(6) * 6, OFFSETS, 6, 130)
    torch.testing.assert_close(found.flatten(0, 1), repeated)
    assert (found[1] == 0).all()  # no events


def test_polynomial_gelu_is_near_gelu_where_it_may_be_used():
    z = torch.linspace(-1, 1, 101, dtype=torch.float64)
    error = (ops.ACTIVATIONS["gelu_poly"].value(z) - F.gelu(z)).abs()
    assert error.max() < 2e-3
    assert all(act.value(torch.zeros(1)).item() == 0 for act in ops.ACTIVATIONS.values())


def test_hstu_attention_divides_by_the_declared_maximum():
    q, k, v = qkv()
    wanted = []
    for a, b, c in zip(pieces(q), pieces(k), pieces(v), strict=True):
        scores = F.silu(torch.einsum("ihd,jhd->hij", a, b) * 0.5) / 400
        wanted.append(torch.einsum("hij,jhd->ihd", scores.tril(), c))
    found = ops.hstu_attention(q, k, v, OFFSETS, OFFSETS, 400, 400, alpha=0.5)
    torch.testing.assert_close(found, torch.cat(wanted))


def test_rote_depends_on_angle_differences_only():
    """Adding one constant to all angles leaves q k unchanged; here by positions and by gaps of equal log."""
    x, y = values(20, 2, 8), values(20, 2, 8) * 0.5
    phi, at, gaps = torch.rand(4), torch.arange(20), torch.arange(20) * 7000
    product = torch.einsum("ihd,jhd->hij", ops.rote(x, at, gaps, phi), ops.rote(y, at, gaps, phi))
    moved = torch.einsum("ihd,jhd->hij", ops.rote(x, at + 11, gaps, phi), ops.rote(y, at + 11, gaps, phi))
    torch.testing.assert_close(product, moved, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ops.rote(x, at, gaps, phi).norm(dim=-1), x.norm(dim=-1))


def test_norms():
    x, weight, bias = values(7, 6) * 2 + 1, values(6), values(6)
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(ops.layer_norm(x), normal)
    torch.testing.assert_close(ops.layer_norm(x, weight, bias), normal * weight + bias)
    rms = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(ops.rms_norm(x), rms)
    torch.testing.assert_close(ops.rms_norm(x, weight), rms * weight)
