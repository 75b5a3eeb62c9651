"""FLOPs of the ops for `torch.utils.flop_counter`: those of the real lengths and of the pairs that the mask leaves.

Two per multiply-add, matrix products only; a backward counts twice its forward, as computing scores again is no work of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.dispatch import Op
from gem_core.ops.masks import pairs
from gem_core.ops.pointwise import ffn_op, gdpa_op, hstu_op
from gem_core.ops.softmax import block_op, jagged_op, seed_op


def attention(n: int, heads: int, width: int) -> int:
    """Scores and weighted sum of n (query, key) pairs: 2 products."""
    return 4 * n * heads * width


def _masked(q: Tensor, q_sizes: Tensor, k_sizes: Tensor, mask: str, size: int, shift: int = 0) -> int:
    found = zip(q_sizes.tolist(), k_sizes.tolist(), strict=True)
    return attention(sum(pairs(mask, size, shift, a, b) for a, b in found), q.shape[1], q.shape[2])


def _jagged(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, k_index: Tensor | None, *o: Any
) -> int:
    k_sizes = k_offsets.diff() if k_index is None else k_offsets.diff()[k_index]
    return _masked(q, q_offsets.diff(), k_sizes, o[2], o[3])


def _hstu(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *o: Any) -> int:
    return _masked(q, q_offsets.diff(), k_offsets.diff(), o[2], o[3])


def _block(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, _: int, block: int, shift: int, *o: Any) -> int:
    return _masked(q, offsets.diff(), offsets.diff(), "block", block, shift)


def _seed(q: Tensor, k: Tensor, *o: Any) -> int:
    return attention(q.shape[0] * k.shape[0], q.shape[1], q.shape[2])


def _gdpa(q: Tensor, k: Tensor, *o: Any) -> int:
    return attention(q.shape[0] * k.shape[1], q.shape[1], q.shape[2])


def _register(op: Op, formula: Callable[..., int]) -> None:
    skip = 1 + op.outputs  # a backward's first arguments: the gradient and what was saved
    register_flop_formula(op.forward.overloadpacket, get_raw=True)(lambda *a, out_val=None, **_: formula(*a))
    register_flop_formula(op.backward.overloadpacket, get_raw=True)(
        lambda *a, out_val=None, **_: 2 * formula(*a[skip:])
    )


for _op, _formula in (
    (jagged_op, _jagged),
    (hstu_op, _hstu),
    (block_op, _block),
    (seed_op, _seed),
    (gdpa_op, _gdpa),
    (ffn_op, _gdpa),
):
    _register(_op, _formula)
