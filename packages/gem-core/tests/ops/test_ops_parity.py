"""The ragged backend equals the reference for any ragged shape: result and every gradient, with unwritten memory poisoned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops_cases import MASKS, agree, offsets_of, poisoned

from gem_core import ops

quick = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
length = st.one_of(st.integers(0, 3), st.integers(0, 70), st.just(150))
batches = st.lists(st.tuples(length, length), max_size=5)
heads = st.sampled_from([(1, 4), (2, 8), (4, 16)])


def values(rows: int, head: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, *head, generator=torch.Generator().manual_seed(seed + rows))


def self_and_cross(batch, head):
    q_lengths, k_lengths = [a for a, _ in batch], [b for _, b in batch]
    q, k, v = values(sum(q_lengths), head), values(sum(k_lengths), head, 1), values(sum(k_lengths), head, 2)
    return q, k, v, offsets_of(q_lengths), offsets_of(k_lengths)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@quick
@given(batch=batches, head=heads)
def test_jagged_attention(mask, batch, head, monkeypatch):
    q, k, v, q_offsets, k_offsets = self_and_cross(batch, head)
    with monkeypatch.context() as patch:
        poisoned(patch)
        agree(lambda q, k, v: ops.jagged_attention(q, k, v, q_offsets, k_offsets, 150, 150, **mask), [q, k, v])


@pytest.mark.parametrize("mask", MASKS[:4], ids=str)
@quick
@given(
    batch=batches,
    head=heads,
    reads=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=8),
    ordered=st.booleans(),
)
def test_shared_keys(mask, batch, head, reads, ordered):
    """Sequences that read shared keys equal sequences that each have a copy; gradients of the keys add up."""
    _, k, v, _, k_offsets = self_and_cross(batch, head)
    reads = [(b % len(batch), n) for b, n in reads] if batch else []
    reads = sorted(reads) if ordered else reads
    index = torch.tensor([b for b, _ in reads], dtype=torch.int64)
    q_offsets = offsets_of([n for _, n in reads])
    q = values(int(q_offsets[-1]), head, 3)
    agree(
        lambda q, k, v: ops.jagged_attention(q, k, v, q_offsets, k_offsets, 150, 150, k_index=index, **mask), [q, k, v]
    )

    def copied(q, k, v):
        keys, offsets = ops.gather_segments(k, k_offsets, index)
        return ops.jagged_attention(
            q, keys, ops.gather_segments(v, k_offsets, index)[0], q_offsets, offsets, 150, 150, **mask
        )

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    shared = ops.jagged_attention(*leaves, q_offsets, k_offsets, 150, 150, k_index=index, **mask)
    one = torch.autograd.grad(shared.square().sum(), leaves)
    two = torch.autograd.grad(copied(*leaves).square().sum(), leaves)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize(("block", "shift"), [(64, 0), (64, 32), (5, 3), (1, 0)])
@quick
@given(batch=batches, head=heads)
def test_block_attention(block, shift, batch, head):
    _, k, v, _, offsets = self_and_cross(batch, head)
    agree(
        lambda q, k, v: ops.block_attention(q, k, v, offsets, 150, block=block, shift=shift),
        [values(len(k), head, 4), k, v],
    )


@quick
@given(batch=batches, head=heads, seeds=st.sampled_from([0, 1, 7, 33]))
def test_seed_attention(batch, head, seeds, monkeypatch):
    _, k, v, _, offsets = self_and_cross(batch, head)
    with monkeypatch.context() as patch:
        poisoned(patch)
        agree(lambda q, k, v: ops.seed_attention(q, k, v, offsets, 150), [values(seeds, head, 5), k, v])


@pytest.mark.parametrize("activation", [*ops.ACTIVATIONS, "mixed"])
@quick
@given(batch=batches, head=heads, hidden=st.sampled_from([1, 9, 64]))
def test_gdpa_and_ffn(activation, batch, head, hidden, monkeypatch):
    q, _, _, offsets, _ = self_and_cross(batch, head)
    k, v = (torch.randn(len(batch), hidden, *head, generator=torch.Generator().manual_seed(s)) for s in (6, 7))
    names = tuple(["gelu", "relu", "relu", "silu"][: head[0]]) if activation == "mixed" else activation
    options = {"activation": names, "scale_inside": 0.3, "scale_outside": 2.0}
    with monkeypatch.context() as patch:
        poisoned(patch)
        agree(lambda q, k, v: ops.gdpa(q, k, v, offsets, 150, **options), [q, k, v])
        agree(lambda q, k, v: ops.gdpa_ffn(q, k, v, offsets, 150, **options), [q, k, v])


@pytest.mark.parametrize("mask", MASKS, ids=str)
@settings(quick, max_examples=5)
@given(batch=batches, head=heads)
def test_hstu_attention(mask, batch, head):
    q, k, v, q_offsets, k_offsets = self_and_cross(batch, head)
    agree(lambda q, k, v: ops.hstu_attention(q, k, v, q_offsets, k_offsets, 150, 150, **mask), [q, k, v])


@quick
@given(batch=batches, head=heads)
def test_rote(batch, head):
    _, x, _, _, offsets = self_and_cross(batch, head)
    positions, gaps = ops.positions(offsets, len(x)), torch.arange(len(x)) * 5000
    agree(lambda x, phi: ops.rote(x, positions, gaps, phi), [x, torch.rand(head[1] // 2)])


@pytest.mark.parametrize("lengths", [[700, 3, 0, 1, 130, 2], [65] * 4, [31, 33, 32, 64, 63], [2] * 50])
def test_one_very_long_among_short_and_equal_lengths(lengths):
    head, offsets = (2, 8), offsets_of(lengths)
    q, k, v = (values(sum(lengths), head, s) for s in range(3))
    for mask in ({}, {"mask": "causal"}, {"mask": "window", "window": 20}, {"mask": "prefix", "prefix": 3}):
        agree(lambda q, k, v, m=mask: ops.jagged_attention(q, k, v, offsets, offsets, 700, 700, **m), [q, k, v])
    k, v = (torch.randn(len(lengths), 16, *head) for _ in range(2))
    agree(lambda q, k, v: ops.gdpa(q, k, v, offsets, 700), [q, k, v])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype):
    """float64 agrees to its own precision; bfloat16 computes in float32 inside and returns bfloat16."""
    lengths = [70, 3, 0, 40]
    offsets, tolerance = offsets_of(lengths), 1e-9 if dtype == torch.float64 else 5e-2
    q, k, v = (values(sum(lengths), (2, 8), s).to(dtype) for s in range(3))
    agree(lambda q, k, v: ops.jagged_attention(q, k, v, offsets, offsets, 70, 70), [q, k, v], tolerance=tolerance)
    agree(lambda s, k, v: ops.seed_attention(s, k, v, offsets, 70), [q[:5], k, v], tolerance=tolerance)
    made = [torch.randn(4, 6, 2, 8).to(dtype) for _ in range(2)]
    agree(lambda q, k, v: ops.gdpa_ffn(q, k, v, offsets, 70), [q, *made], tolerance=tolerance)


def test_extras_are_the_same_in_both_backends():
    """The log-sum-exp is part of the contract: any backend may run the backward of another's forward."""
    q_offsets, k_offsets = offsets_of([40, 0, 3, 90]), offsets_of([40, 5, 0, 80])
    q, k = values(133, (2, 8)), values(125, (2, 8), 1)
    found = [
        torch.ops.gem.jagged_attention(q, k, k, q_offsets, k_offsets, None, 90, 90, "window", 4, 0.5, backend)[1]
        for backend in ("reference", "ragged")
    ]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert (found[1][40:43] == float("-inf")).all()  # no keys at all


def test_strided_values_need_no_copy_by_the_caller():
    """q, k, v as slices of one projection."""
    lengths = [30, 0, 100]
    offsets, joint = offsets_of(lengths), torch.randn(130, 3, 2, 8)
    agree(lambda x: ops.jagged_attention(*x.unbind(1), offsets, offsets, 100, 100), [joint])
