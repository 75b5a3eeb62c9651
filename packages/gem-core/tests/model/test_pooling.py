"""Hierarchical seed pooling, SumKronLinear and rotary temporal embedding against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import offsets_of
from torch import Tensor

from gem_core.model.layers import rms_unit
from gem_core.model.pooling import HierarchicalSeedPooling, Rote, Sequence, SumKronLinear


def make_sequence(lengths: list[int], dim: int, seed: int = 0) -> Sequence:
    rng = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    positions = torch.cat([torch.arange(0), *(torch.arange(k) for k in lengths)])
    gaps = torch.randint(0, 10**7, (n,), generator=rng)
    return Sequence(torch.randn(n, dim, generator=rng), offsets_of(lengths), 64, gaps, positions)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_sum_kron_is_the_dense_map(batch: int, seeds: int, tokens: int, dim: int, terms: int) -> None:
    layer = SumKronLinear(seeds, tokens, dim, terms)
    x = torch.randn(batch, seeds, dim)
    # vec(Z^T X W) = kron(Z, W)^T vec(X) for row-major vec.
    dense = torch.stack([torch.kron(z, w) for z, w in zip(layer.z, layer.w, strict=True)]).sum(0)
    expected = (x.flatten(1) @ dense).view(batch, tokens, dim)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in layer.parameters()) == terms * (seeds * tokens + dim**2)


def test_sum_kron_starts_at_unit_variance() -> None:
    torch.manual_seed(0)
    out = SumKronLinear(seeds=64, tokens=32, dim=48, terms=8)(torch.randn(50, 64, 48))
    assert out.std().item() == pytest.approx(1.0, rel=0.1)


def naive_pooling(pool: HierarchicalSeedPooling, sequence: Sequence, q: Tensor, b: int) -> Tensor:
    """Multi-head softmax attention of q (n, D) over sequence b, by a loop over heads."""
    at = slice(int(sequence.offsets[b]), int(sequence.offsets[b + 1]))
    normed = torch.nn.functional.layer_norm(sequence.values[at], (pool.dim,), pool.norm.weight, pool.norm.bias)
    k, v = (normed @ pool.key_value.weight.T).chunk(2, 1)
    d = pool.dim // pool.heads
    out = []
    for h in range(pool.heads):
        cut = slice(h * d, (h + 1) * d)
        kh = k[:, cut]
        if pool.rote is not None:
            kh = naive_rote(kh, sequence.positions[at], sequence.gaps[at], pool.rote.phi)
        weights = (q[:, cut] @ kh.T * d**-0.5).softmax(1)
        out.append(weights @ v[:, cut] if kh.shape[0] else torch.zeros(q.shape[0], d))
    return torch.cat(out, 1)


def naive_rote(x: Tensor, positions: Tensor, gaps: Tensor, phi: Tensor) -> Tensor:
    out = torch.empty_like(x)
    d = x.shape[1]
    for i in range(d // 2):
        angle = positions * 10000 ** (-2 * i / d) + torch.log1p(gaps / 3600) * phi[i]
        a, b = x[:, 2 * i], x[:, 2 * i + 1]
        out[:, 2 * i] = a * angle.cos() - b * angle.sin()
        out[:, 2 * i + 1] = a * angle.sin() + b * angle.cos()
    return out


@pytest.mark.parametrize("rote", [True, False])
@pytest.mark.parametrize("target", [True, False])
def test_pooling_by_its_definition(rote: bool, target: bool) -> None:
    torch.manual_seed(1)
    pool = HierarchicalSeedPooling(12, 3, 5, 2, 2, rote, target)
    with torch.no_grad():
        pool.norm.weight.normal_()
        pool.norm.bias.normal_()
    sequence = make_sequence([4, 0, 9, 1], 12)
    row_of = torch.tensor([0, 0, 1, 2, 3])
    queries = torch.randn(5, 2, 12) if target else None
    summary, answer = pool(sequence, queries, row_of)
    seeds = rms_unit(pool.seeds) @ pool.query.weight.T
    for b in range(4):
        pooled = naive_pooling(pool, sequence, seeds, b) @ pool.out.weight.T
        expected = sum(z.T @ pooled @ w for z, w in zip(pool.compress.z, pool.compress.w, strict=True))
        torch.testing.assert_close(summary[b], expected, rtol=1e-4, atol=1e-5)
    if queries is None:
        assert answer is None
        return
    for row, b in enumerate(row_of.tolist()):
        expected = naive_pooling(pool, sequence, queries[row] @ pool.target.weight.T, b) @ pool.target_out.weight.T
        torch.testing.assert_close(answer[row], expected, rtol=1e-4, atol=1e-5)


def test_no_events_gives_what_zeros_give() -> None:
    pool = HierarchicalSeedPooling(8, 2, 4, 3, 2, True, True)
    empty = make_sequence([0, 3], 8)
    summary, answer = pool(empty, torch.randn(2, 1, 8), torch.tensor([0, 1]))
    assert not summary[0].any() and not answer[0].any()
    assert summary[1].any() and answer[1].any()
    torch.testing.assert_close(summary[0], pool.compress(pool.out(torch.zeros(1, 4, 8)))[0])


def test_permuting_events_changes_nothing_without_positions() -> None:
    sequence = make_sequence([7, 3], 8)
    order = torch.cat([torch.randperm(7, generator=torch.Generator().manual_seed(3)), torch.tensor([9, 7, 8])])
    shuffled = sequence.replace(sequence.values[order])
    plain, rotated = (HierarchicalSeedPooling(8, 2, 4, 3, 2, rote, False) for rote in (False, True))
    torch.testing.assert_close(plain(shuffled, None, None)[0], plain(sequence, None, None)[0])
    assert (rotated(shuffled, None, None)[0] - rotated(sequence, None, None)[0]).abs().max() > 1e-3


def test_rote_by_its_definition() -> None:
    sequence = make_sequence([5, 6], 12)
    rote = Rote(6)
    with torch.no_grad():
        rote.phi.normal_()
    x = torch.randn(11, 2, 6)
    for head in range(2):
        expected = naive_rote(x[:, head], sequence.positions, sequence.gaps, rote.phi)
        torch.testing.assert_close(rote(x, sequence)[:, head], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(Rote(6).phi, 10000 ** (-torch.arange(0, 6, 2) / 6))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 2000), st.integers(0, 10**6))
def test_one_constant_on_all_angles_leaves_scores(shift: int, seconds: int) -> None:
    rote = Rote(8).double()
    sequence = make_sequence([6], 8)
    q, k = torch.randn(2, 6, 1, 8, dtype=torch.float64)

    def scores(positions: Tensor, gaps: Tensor) -> Tensor:
        at = Sequence(sequence.values, sequence.offsets, 64, gaps, positions)
        return torch.einsum("ihd,jhd->ij", rote(q, at), rote(k, at))

    # Equal gaps add the same log(1 + gap) * phi to every angle, shifted positions the same shift * theta.
    constant = torch.full((6,), seconds)
    torch.testing.assert_close(
        scores(sequence.positions + shift, constant), scores(sequence.positions, torch.zeros(6, dtype=torch.int64))
    )
