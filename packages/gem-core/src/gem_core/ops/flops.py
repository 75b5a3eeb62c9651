"""FLOPs of the ops for `torch.utils.flop_counter`, from their true ragged lengths.

2 per multiply-add. Softmax, activations, norms and rotations are not counted, nor is what a backward recomputes: a
backward is twice its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.dispatch import Op
from gem_core.ops.masks import pairs
from gem_core.ops.pointwise import ffn_op, gdpa_op, hstu_op
from gem_core.ops.softmax import block_op, jagged_op, seed_op


def _register(op: Op, seen: Callable[..., int]) -> None:
    """`seen` gives the (query, key) pairs per head from an op's arguments; q and k are the first two."""

    def forward(q: Tensor, k: Tensor, *rest: Any, out_val: object = None) -> int:
        return 4 * seen(q, k, *rest) * q.shape[1] * q.shape[2]

    def backward(grad: Tensor, *rest: Any, out_val: object = None) -> int:
        return 2 * forward(*rest[op.outputs :])

    register_flop_formula(getattr(torch.ops.gem, op.name), get_raw=True)(forward)
    register_flop_formula(getattr(torch.ops.gem, f"{op.name}_backward"), get_raw=True)(backward)


def _lengths(offsets: Tensor) -> list[int]:
    return [b - a for a, b in pairwise(offsets.tolist())]


def _masked(queries: Sequence[int], keys: Sequence[int], mask: str, size: int, shift: int = 0) -> int:
    return sum(pairs(mask, size, shift, n, m) for n, m in zip(queries, keys, strict=True))


def _jagged(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, k_index: Tensor | None,
    max_q: int, max_k: int, mask: str, size: int, *_: object,
) -> int:  # fmt: skip
    keys = _lengths(k_offsets)
    read = keys if k_index is None else [keys[i] for i in k_index.tolist()]
    return _masked(_lengths(q_offsets), read, mask, size)


def _block(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_length: int, block: int, shift: int, *_: object
) -> int:
    lengths = _lengths(offsets)
    return _masked(lengths, lengths, "block", block, shift)


def _hstu(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int, mask: str, size: int,
    *_: object,
) -> int:  # fmt: skip
    return _masked(_lengths(q_offsets), _lengths(k_offsets), mask, size)


_register(jagged_op, _jagged)
_register(block_op, _block)
_register(hstu_op, _hstu)
_register(seed_op, lambda q, k, *_: q.shape[0] * k.shape[0])
_register(gdpa_op, lambda q, k, *_: q.shape[0] * k.shape[1])
_register(ffn_op, lambda q, k, *_: q.shape[0] * k.shape[1])
