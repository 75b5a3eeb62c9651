"""GDPA, its feed-forward block and HSTU attention by their definitions, one sequence at a time (kernels.md 2)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.activations import apply, apply_gradient
from gem_core.ops.dispatch import OpSpec, Saved
from gem_core.ops.masks import dense_mask
from gem_core.ops.reference.precision import accumulate

EPS = 1e-5


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, activation: str, inside: float, outside: float
) -> Tensor:
    """outside * act(inside * q k^T) v of one sequence, q (n, H, d), k and v (m, H, d); masked scores are zeroed first."""
    return torch.einsum("hij,jhd->ihd", apply(activation, _scores(q, k, mask, inside), q.shape[1]), v) * outside


def attend_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, activation: str, inside: float, outside: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` to q, k, v: dV = P^T dO, dZ = act'(Z) (dO V^T), dQ = dZ K, dK = dZ^T Q."""
    z = _scores(q, k, mask, inside)
    dz = apply_gradient(activation, torch.einsum("ihd,jhd->hij", grad, v), z, q.shape[1]) * (inside * outside)
    if mask is not None:
        dz = dz.masked_fill(~mask, 0.0)
    return (
        torch.einsum("hij,jhd->ihd", dz, k),
        torch.einsum("hij,ihd->jhd", dz, q),
        torch.einsum("hij,ihd->jhd", apply(activation, z, q.shape[1]), grad) * outside,
    )


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, inside: float) -> Tensor:
    z = torch.einsum("ihd,jhd->hij", q, k) * inside
    return z if mask is None else z.masked_fill(~mask, 0.0)


def gdpa(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, activation: str, inside: float, outside: float) -> Tensor:
    """All sequences of `gdpa`."""
    out = torch.zeros_like(q)
    for b, rows in enumerate(_slices(offsets)):
        out[rows] = attend(q[rows], k[b], v[b], None, activation, inside, outside)
    return out


def gdpa_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, activation: str, inside: float, outside: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `gdpa` to q, k, v."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for b, rows in enumerate(_slices(offsets)):
        dq[rows], dk[b], dv[b] = attend_gradient(grad[rows], q[rows], k[b], v[b], None, activation, inside, outside)
    return dq, dk, dv


def normalise(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm over H * d jointly, with the mean and the reciprocal deviation per row."""
    mean = x.mean((1, 2))
    rstd = torch.rsqrt((x - mean[:, None, None]).square().mean((1, 2)) + EPS)
    return (x - mean[:, None, None]) * rstd[:, None, None], mean, rstd


def _options(o: dict[str, Any]) -> tuple[str, float, float]:
    return o["activation"], o["scale_inside"], o["scale_outside"]


def _slices(offsets: Tensor) -> list[slice]:
    a = offsets.tolist()
    return [slice(x, y) for x, y in itertools.pairwise(a)]


class GdpaReference:
    """`gdpa` by the definition."""

    def supports(self, spec: OpSpec) -> str | None:
        return None

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = tensors
        qc, kc, vc = accumulate(q, k, v)
        return (gdpa(qc, kc, vc, offsets, *_options(o)).to(q.dtype),)

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = saved.inputs
        up, qc, kc, vc = accumulate(grad, q, k, v)
        grads = gdpa_gradient(up, qc, kc, vc, offsets, *_options(o))
        return tuple(g.to(q.dtype) for g in grads)


class FfnReference:
    """`gdpa_ffn` by the definition: three steps in full."""

    def supports(self, spec: OpSpec) -> str | None:
        return None

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = tensors
        qc, kc, vc = accumulate(q, k, v)
        lq, mean, rstd = normalise(qc)
        g = gdpa(lq, kc, vc, offsets, *_options(o)) + lq
        rrms = torch.rsqrt(g.square().mean((1, 2)) + EPS)
        out = g * rrms[:, None, None] + qc
        return out.to(q.dtype), g.to(q.dtype), mean, rstd, rrms

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = saved.inputs
        _, g, mean, rstd, rrms = saved.outputs
        gradc, qc, kc, vc, g = accumulate(grad, q, k, v, g)
        mean, rstd, rrms = mean[:, None, None], rstd[:, None, None], rrms[:, None, None]
        y, lq = g * rrms, (qc - mean) * rstd
        dg = rrms * (gradc - y * (gradc * y).mean((1, 2), keepdim=True))
        dlq, dk, dv = gdpa_gradient(dg, lq, kc, vc, offsets, *_options(o))
        dlq = dlq + dg
        dq = gradc + rstd * (dlq - dlq.mean((1, 2), keepdim=True) - lq * (dlq * lq).mean((1, 2), keepdim=True))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


class HstuReference:
    """`hstu_attention` by the definition."""

    def supports(self, spec: OpSpec) -> str | None:
        return None

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, q_offsets, k_offsets = tensors
        qc, kc, vc = accumulate(q, k, v)
        out = torch.zeros_like(qc)
        for rows, keys in zip(_slices(q_offsets), _slices(k_offsets), strict=True):
            out[rows] = attend(qc[rows], kc[keys], vc[keys], *_hstu(rows, keys, q.device, o))
        return (out.to(q.dtype),)

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, q_offsets, k_offsets = saved.inputs
        gc, qc, kc, vc = accumulate(grad, q, k, v)
        dq, dk, dv = torch.zeros_like(qc), torch.zeros_like(kc), torch.zeros_like(vc)
        for rows, keys in zip(_slices(q_offsets), _slices(k_offsets), strict=True):
            given = _hstu(rows, keys, q.device, o)
            dq[rows], dk[keys], dv[keys] = attend_gradient(gc[rows], qc[rows], kc[keys], vc[keys], *given)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _hstu(rows: slice, keys: slice, device: torch.device, o: dict[str, Any]) -> tuple[Tensor, str, float, float]:
    mask = dense_mask(o["mask"], o["size"], 0, rows.stop - rows.start, keys.stop - keys.start, device)
    return mask, "silu", o["alpha"], 1.0 / max(o["max_k"], 1)
