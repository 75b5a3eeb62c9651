"""Attention with an element-wise activation in place of softmax: `gdpa`, `gdpa_ffn`, `hstu_attention`.

Letters: B sequences, T rows of one, F generated hidden units, H heads, d head width. Values (sum T, H, d), offsets (B + 1) int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.errors import DataError
from gem_core.ops import checks
from gem_core.ops.activations import encode
from gem_core.ops.autocast import lower
from gem_core.ops.dispatch import Op
from gem_core.ops.masks import mask_size

GDPA = "gdpa"
FFN = "gdpa_ffn"
HSTU = "hstu_attention"


def _check_gdpa(op: str, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_length: int) -> None:
    checks.values(op, q, q=q, k=k, v=v)
    checks.shape(op, "q", q, "sum T", "H", "d")
    checks.offsets(op, "offsets", offsets, q.shape[0], max_length, q)
    checks.shape(op, "k", k, len(offsets) - 1, "F", *q.shape[1:])
    checks.shape(op, "v", v, *k.shape)


gdpa_op = Op(
    GDPA,
    "Tensor q, Tensor k, Tensor v, Tensor offsets, SymInt max_length, str activation, float scale_inside, float scale_outside",
    outputs=1,
    grads=("q", "k", "v"),
    check=lambda q, k, v, offsets, max_length, *_: _check_gdpa(GDPA, q, k, v, offsets, max_length),
    fake=lambda q, *_: (q.new_empty(q.shape),),
)


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_length: int,
    *,
    activation: str | tuple[str, ...] = "gelu",
    scale_inside: float = 1.0,
    scale_outside: float = 1.0,
) -> Tensor:
    """Generalised dot-product attention: scale_outside * act(scale_inside * q k^T) v, a two-layer MLP with generated weights.

    q (sum T, H, d); k, v (B, F, H, d), one set per sequence. activation: gelu (erf), gelu_tanh, gelu_poly (bounded scores only),
    relu, silu, hardswish, relu2, leaky_relu, or a tuple with one per head. Returns (sum T, H, d). No row sum is taken.
    """
    q, k, v = lower(q, k, v)
    return gdpa_op(q, k, v, offsets, max_length, encode(activation, q.shape[1]), scale_inside, scale_outside)


def _fake_ffn(q: Tensor, *_: object) -> tuple[Tensor, ...]:
    dtype = q.dtype if q.itemsize == 8 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape), *(q.new_empty((q.shape[0],), dtype=dtype) for _ in range(3))


ffn_op = Op(
    FFN,
    "Tensor q, Tensor k, Tensor v, Tensor offsets, SymInt max_length, str activation, float scale_inside, float scale_outside",
    outputs=5,  # result; inner sum g; mean and reciprocal deviation of the LayerNorm, reciprocal RMS of the RMSNorm, per row
    grads=("q", "k", "v"),
    check=lambda q, k, v, offsets, max_length, *_: _check_gdpa(FFN, q, k, v, offsets, max_length),
    fake=_fake_ffn,
)


def gdpa_ffn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_length: int,
    *,
    activation: str | tuple[str, ...] = "gelu",
    scale_inside: float = 1.0,
    scale_outside: float = 1.0,
) -> Tensor:
    """The GDPA feed-forward block of Kunlun (model.md 4.1), shapes as `gdpa`:

    lq = LayerNorm(q) over H * d jointly, eps 1e-5, no affine; g = gdpa(lq, k, v) + lq; result RMSNorm(g) + q, eps 1e-5.
    """
    q, k, v = lower(q, k, v)
    return ffn_op(q, k, v, offsets, max_length, encode(activation, q.shape[1]), scale_inside, scale_outside)


def _check_hstu(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int, *_: object
) -> None:
    checks.values(HSTU, q, q=q, k=k, v=v)
    checks.shape(HSTU, "q", q, "sum Tq", "H", "d")
    checks.shape(HSTU, "k", k, "sum Tk", *q.shape[1:])
    checks.shape(HSTU, "v", v, *k.shape)
    checks.offsets(HSTU, "q_offsets", q_offsets, q.shape[0], max_q, q)
    checks.offsets(HSTU, "k_offsets", k_offsets, k.shape[0], max_k, q)
    if len(q_offsets) != len(k_offsets):
        raise DataError(f"{HSTU}: k_offsets: expected {len(q_offsets)} offsets as q_offsets, found {len(k_offsets)}")


hstu_op = Op(
    HSTU,
    "Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor k_offsets, SymInt max_q, SymInt max_k, str mask, int size, float alpha",
    outputs=1,
    grads=("q", "k", "v"),
    check=_check_hstu,
    fake=lambda q, *_: (q.new_empty(q.shape),),
)


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    mask: str = "causal",
    window: int = 0,
    block: int = 0,
    prefix: int = 0,
    alpha: float | None = None,
) -> Tensor:
    """HSTU's attention, SiLU(alpha q k^T) / max_k with a mask, then v; shapes and masks as `jagged_attention`.

    alpha: default 1 / sqrt(d). The divisor is the declared maximum, so a result does not depend on its batch.
    """
    size = mask_size(mask, window=window, block=block, prefix=prefix)
    q, k, v = lower(q, k, v)
    alpha = q.shape[-1] ** -0.5 if alpha is None else alpha
    return hstu_op(q, k, v, q_offsets, k_offsets, max_q, max_k, mask, size, alpha)
