"""Softmax attention over ragged sequences: `jagged_attention`, `block_attention`, `seed_attention`.

Letters: B sequences, T rows of one, S seeds, H heads, d head width. Values (sum T, H, d), offsets (B + 1) int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.errors import ConfigError, DataError
from gem_core.ops import checks
from gem_core.ops.autocast import lower
from gem_core.ops.dispatch import Op
from gem_core.ops.masks import mask_size

JAGGED = "jagged_attention"
BLOCK = "block_attention"
SEED = "seed_attention"


def statistic(q: Tensor, *shape: int) -> Tensor:
    """An empty log-sum-exp: float32, or float64 for float64 values."""
    return q.new_empty(shape, dtype=q.dtype if q.itemsize == 8 else torch.float32)


def _check_jagged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    k_index: Tensor | None,
    max_q: int,
    max_k: int,
    *_: object,
) -> None:
    checks.values(JAGGED, q, q=q, k=k, v=v)
    checks.shape(JAGGED, "q", q, "sum Tq", "H", "d")
    checks.shape(JAGGED, "k", k, "sum Tk", *q.shape[1:])
    checks.shape(JAGGED, "v", v, *k.shape)
    checks.offsets(JAGGED, "q_offsets", q_offsets, q.shape[0], max_q, q)
    checks.offsets(JAGGED, "k_offsets", k_offsets, k.shape[0], max_k, q)
    if k_index is not None:
        checks.index(JAGGED, "k_index", k_index, len(q_offsets) - 1, len(k_offsets) - 1, q)
    elif len(q_offsets) != len(k_offsets):
        raise DataError(
            f"{JAGGED}: k_offsets: expected {len(q_offsets)} offsets as q_offsets (or a k_index), found {len(k_offsets)}"
        )


def _fake_rows(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), statistic(q, q.shape[0], q.shape[1])


jagged_op = Op(
    JAGGED,
    "Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor k_offsets, Tensor? k_index, SymInt max_q, SymInt max_k, str mask, int size, float scale",
    outputs=2,
    grads=("q", "k", "v"),
    check=_check_jagged,
    fake=_fake_rows,
)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    k_index: Tensor | None = None,
    mask: str = "none",
    window: int = 0,
    block: int = 0,
    prefix: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention of each sequence's queries over its keys; a sequence without keys gives 0 and gets no gradient.

    q (sum Tq, H, d); k, v (sum Tk, H, d); the two lengths of a sequence may differ. max_q, max_k: declared maximum lengths.
    k_index (B,) int64: sequence b of the queries reads sequence k_index[b] of the keys, which are shared and not copied; rows that
    share keys run fastest as neighbours. Without it sequence b reads sequence b.
    mask: none; causal (key j <= query i); window (|i - j| <= window); block (blocks of `block` from the start);
    prefix (causal, but the first `prefix` queries see every key). scale: default 1 / sqrt(d).
    Returns (sum Tq, H, d). Raises DataError for wrong types, shapes or offsets, ConfigError for a wrong mask.
    """
    size = mask_size(mask, window=window, block=block, prefix=prefix)
    q, k, v = lower(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return jagged_op(q, k, v, q_offsets, k_offsets, k_index, max_q, max_k, mask, size, scale)


def _check_block(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_length: int, *_: object) -> None:
    checks.values(BLOCK, q, q=q, k=k, v=v)
    checks.shape(BLOCK, "q", q, "sum T", "H", "d")
    checks.shape(BLOCK, "k", k, *q.shape)
    checks.shape(BLOCK, "v", v, *q.shape)
    checks.offsets(BLOCK, "offsets", offsets, q.shape[0], max_length, q)


block_op = Op(
    BLOCK,
    "Tensor q, Tensor k, Tensor v, Tensor offsets, SymInt max_length, int block, int shift, float scale",
    outputs=2,
    grads=("q", "k", "v"),
    check=_check_block,
    fake=_fake_rows,
)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_length: int,
    *,
    block: int = 64,
    shift: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention inside blocks of `block` cut from each sequence's start; no information crosses a border.

    q, k, v (sum T, H, d). The last block may be partial. shift (0 <= shift < block) moves every border to the left, so that a
    shifted layer after an unshifted one lets information cross. Returns (sum T, H, d). Cost is linear in T.
    """
    if block < 1 or not 0 <= shift < block:
        raise ConfigError(f"{BLOCK}: expected block >= 1 and 0 <= shift < block, found block={block}, shift={shift}")
    q, k, v = lower(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return block_op(q, k, v, offsets, max_length, block, shift, scale)


def _check_seed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_length: int, *_: object) -> None:
    checks.values(SEED, q, q=q, k=k, v=v)
    checks.shape(SEED, "q", q, "S", "H", "d")
    checks.shape(SEED, "k", k, "sum T", *q.shape[1:])
    checks.shape(SEED, "v", v, *k.shape)
    checks.offsets(SEED, "offsets", offsets, k.shape[0], max_length, q)


def _fake_seed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch = offsets.shape[0] - 1
    return q.new_empty((batch, *q.shape)), statistic(q, batch, q.shape[0], q.shape[1])


seed_op = Op(
    SEED,
    "Tensor q, Tensor k, Tensor v, Tensor offsets, SymInt max_length, float scale",
    outputs=2,
    grads=("q", "k", "v"),
    check=_check_seed,
    fake=_fake_seed,
)


def seed_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_length: int, *, scale: float | None = None
) -> Tensor:
    """One set of queries, shared by the batch, attends to every sequence's keys; a sequence without keys gives 0.

    q (S, H, d); k, v (sum T, H, d). Returns (B, S, H, d). The gradient of the seeds is summed over the batch.
    """
    q, k, v = lower(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return seed_op(q, k, v, offsets, max_length, scale)
