"""Helpers on ragged values: against loops over the sequences, values and gradients, empty sequences included."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import offsets_of, upstream, values
from torch import Tensor

from gem_core import ops

LENGTHS = st.lists(st.one_of(st.just(0), st.integers(0, 7)), max_size=6)
WIDTHS = st.sampled_from([(), (1,), (3,), (2, 2)])
DRAWN = settings(max_examples=40, deadline=None, derandomize=True)


def assert_same(found: Tensor, expected: Tensor, x: Tensor) -> None:
    """Values, and gradients to x."""
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(y, x, upstream(y), retain_graph=True)[0] for y in (found, expected)]
    torch.testing.assert_close(*grads)


def sequences(x: Tensor, lengths: list[int]) -> list[Tensor]:
    return list(x.split(lengths)) if lengths else []


@DRAWN
@given(LENGTHS)
def test_lengths_ids_and_positions(lengths: list[int]) -> None:
    offsets, total = offsets_of(lengths), sum(lengths)
    assert ops.lengths(offsets).tolist() == lengths
    assert ops.segment_ids(offsets, total).tolist() == [b for b, n in enumerate(lengths) for _ in range(n)]
    assert ops.positions(offsets, total).tolist() == [i for n in lengths for i in range(n)]


@DRAWN
@given(LENGTHS, WIDTHS)
def test_segment_sum_and_mean(lengths: list[int], width: tuple[int, ...]) -> None:
    x = values(1, sum(lengths), *width).requires_grad_()
    offsets = offsets_of(lengths)
    parts = sequences(x, lengths)
    empty = x.sum() * x.new_zeros((0, *width))
    sums = torch.stack([p.sum(0) for p in parts]) if parts else empty
    means = torch.stack([p.mean(0) if len(p) else p.sum(0) for p in parts]) if parts else empty
    assert_same(ops.segment_sum(x, offsets), sums, x)
    assert_same(ops.segment_mean(x, offsets), means, x)


@DRAWN
@given(LENGTHS, WIDTHS, st.data())
def test_gather_segments(lengths: list[int], width: tuple[int, ...], data: st.DataObject) -> None:
    """Any order, with repeats, whose gradients add up."""
    index = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8)) if lengths else []
    x = values(1, sum(lengths), *width).requires_grad_()
    found, offsets = ops.gather_segments(x, offsets_of(lengths), torch.tensor(index, dtype=torch.int64))
    parts = sequences(x, lengths)
    expected = torch.cat([parts[i] for i in index]) if index else x[:0]
    assert offsets.tolist() == offsets_of([lengths[i] for i in index]).tolist()
    assert_same(found, expected, x)
