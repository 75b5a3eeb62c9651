"""Attention with an element-wise activation: chunks of a part small enough to stay in cache, scores never kept."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.activations import apply, apply_gradient
from gem_core.ops.dispatch import OpSpec, Saved
from gem_core.ops.ragged.runs import Run, runs, spans
from gem_core.ops.ragged.support import on_processor, ready
from gem_core.ops.ragged.tiles import Part, joined, tiles
from gem_core.ops.reference.pointwise import EPS

SCORES = 131072  # scores of one chunk: few enough to stay in cache

aten = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, work: list[Run], activation: str, inside: float, outside: float) -> Tensor:
    """outside * act(inside * q k^T) v over a work list; q (sum Tq, H, d), k and v (sum Tk, H, d). Rows in no rectangle give 0."""
    out, heads = torch.zeros_like(q), q.shape[1]
    for tile in tiles(work, heads):
        rows, keys, values = tile.rows(q), tile.keys(k), tile.keys(v)
        pieces = []
        for part in tile.parts:
            given = part.keys(keys).flatten(0, 1), part.keys(values).flatten(0, 1)
            result = _forward(part, _scaled(part.rows(rows), inside).flatten(0, 1), *given, activation, heads)
            pieces.append(_scaled(result, outside).unflatten(0, (-1, heads)))
        tile.put_rows(out, joined(pieces))
    return out


def attend_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, work: list[Run], activation: str, inside: float, outside: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` to q, k, v."""
    dq, dk, dv, heads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), q.shape[1]
    for tile in tiles(work, heads):
        above, rows, keys, values = tile.silent_rows(grad), tile.rows(q), tile.keys(k), tile.keys(v)
        pieces = []
        for part in tile.parts:
            up, given = _scaled(part.rows(above), outside).flatten(0, 1), _scaled(part.rows(rows), inside).flatten(0, 1)
            shared = part.keys(keys).flatten(0, 1), part.keys(values).flatten(0, 1)
            pieces.append([x.unflatten(0, (-1, heads)) for x in _backward(part, up, given, *shared, activation, heads)])
        tile.put_rows(dq, joined([_scaled(a, inside) for a, _, _ in pieces]))
        tile.add_keys(dk, joined([b for _, b, _ in pieces]))
        tile.add_keys(dv, joined([c for _, _, c in pieces]))
    return dq, dk, dv


def _forward(part: Part, queries: Tensor, keys: Tensor, values: Tensor, activation: str, heads: int) -> Tensor:
    """act(queries keys^T) values of one part, all (n * H, L, d), a chunk of query rows at a time."""
    step, keep, parts = _step(part, heads), _keep(part, queries), []
    for at, rows in enumerate(queries.split(step, 1)):
        p = apply(activation, torch.bmm(rows, keys.transpose(1, 2)), heads)
        parts.append(torch.bmm(_masked(p, keep, at * step), values))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _backward(
    part: Part, grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, activation: str, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `_forward` to queries, keys, values; scores are computed again, and P and dZ live for one chunk."""
    step, keep, parts = _step(part, heads), _keep(part, queries), []
    d_keys, d_values = keys.new_zeros(keys.shape), values.new_zeros(values.shape)
    for at, (rows, up) in enumerate(zip(queries.split(step, 1), grad.split(step, 1), strict=True)):
        z = torch.bmm(rows, keys.transpose(1, 2))
        dz = apply_gradient(activation, torch.bmm(up, values.transpose(1, 2)), z, heads)
        p, dz = _masked(apply(activation, z, heads), keep, at * step), _masked(dz, keep, at * step)
        d_values.baddbmm_(p.transpose(1, 2), up)
        d_keys.baddbmm_(dz.transpose(1, 2), rows)
        parts.append(torch.bmm(dz, keys))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1), d_keys, d_values


def _step(part: Part, heads: int) -> int:
    """Query rows of a chunk: about SCORES scores, chunks of even size."""
    chunks = max(1, round(part.n * heads * part.n_q * part.n_k / SCORES))
    return -(-part.n_q // chunks)


def _keep(part: Part, like: Tensor) -> Tensor | None:
    """The mask as a factor, (n or 1, 1, n_q, n_k)."""
    hidden = part.hidden()
    return None if hidden is None else (~hidden).to(like.dtype).expand(-1, 1, part.n_q, part.n_k)


def _masked(x: Tensor, keep: Tensor | None, start: int) -> Tensor:
    """x (n * H, rows, keys) times its rows of the mask, in place."""
    if keep is not None:
        n = keep.shape[0]
        x.view(n, -1, *x.shape[1:]).mul_(keep[:, :, start : start + x.shape[1]])
    return x


def _scaled(x: Tensor, by: float) -> Tensor:
    return x if by == 1.0 else x * by


def _options(o: dict[str, Any]) -> tuple[str, float, float]:
    return o["activation"], o["scale_inside"], o["scale_outside"]


def _gdpa_work(offsets: Tensor, k: Tensor) -> list[Run]:
    a, hidden = offsets.tolist(), k.shape[1]
    return [
        Run(q, end - q, b * hidden, hidden) for b, (q, end) in enumerate(itertools.pairwise(a)) if end > q and hidden
    ]


class RaggedGdpa:
    """`gdpa` on a processor."""

    def supports(self, spec: OpSpec) -> str | None:
        return on_processor(spec)

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = tensors
        qc, kc, vc = ready(q, k.flatten(0, 1), v.flatten(0, 1))
        return (attend(qc, kc, vc, _gdpa_work(offsets, k), *_options(o)).to(q.dtype),)

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = saved.inputs
        up, qc, kc, vc = ready(grad, q, k.flatten(0, 1), v.flatten(0, 1))
        dq, dk, dv = attend_gradient(up, qc, kc, vc, _gdpa_work(offsets, k), *_options(o))
        return dq.to(q.dtype), dk.view(k.shape).to(q.dtype), dv.view(v.shape).to(q.dtype)


class RaggedFfn:
    """`gdpa_ffn` on a processor."""

    def supports(self, spec: OpSpec) -> str | None:
        return on_processor(spec)

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = tensors
        qc, kc, vc = ready(q, k.flatten(0, 1), v.flatten(0, 1))
        lq, mean, rstd = torch.native_layer_norm(qc, qc.shape[1:], None, None, EPS)
        g = attend(lq, kc, vc, _gdpa_work(offsets, k), *_options(o)).add_(lq)
        rrms = torch.linalg.vector_norm(g, dim=(1, 2)).square_().div_(q.shape[1] * q.shape[2]).add_(EPS).rsqrt_()
        out = torch.addcmul(qc, g, rrms[:, None, None])
        return out.to(q.dtype), g.to(q.dtype), mean.view(-1), rstd.view(-1), rrms

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = saved.inputs
        _, g, mean, rstd, rrms = saved.outputs
        up, qc, kc, vc, g = ready(grad, q, k.flatten(0, 1), v.flatten(0, 1), g)
        mean, rstd, rrms = mean[:, None, None], rstd[:, None, None], rrms[:, None, None]
        lq = (qc - mean).mul_(rstd)
        inner = (up * g).mean((1, 2), keepdim=True).mul_(rrms.pow(3))
        dg = (up * rrms).addcmul_(g, inner, value=-1)
        dlq, dk, dv = attend_gradient(dg, lq, kc, vc, _gdpa_work(offsets, k), *_options(o))
        dlq.add_(dg)
        dq, _, _ = aten.native_layer_norm_backward(dlq, qc, qc.shape[1:], mean, rstd, None, None, [True, False, False])
        return dq.add_(up).to(q.dtype), dk.view(k.shape).to(q.dtype), dv.view(v.shape).to(q.dtype)


class RaggedHstu:
    """`hstu_attention` on a processor."""

    def supports(self, spec: OpSpec) -> str | None:
        return on_processor(spec)

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, q_offsets, k_offsets = tensors
        qc, kc, vc = ready(q, k, v)
        return (attend(qc, kc, vc, *_hstu(q_offsets, k_offsets, o)).to(q.dtype),)

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, q_offsets, k_offsets = saved.inputs
        up, qc, kc, vc = ready(grad, q, k, v)
        grads = attend_gradient(up, qc, kc, vc, *_hstu(q_offsets, k_offsets, o))
        return tuple(g.to(q.dtype) for g in grads)


def _hstu(q_offsets: Tensor, k_offsets: Tensor, o: dict[str, Any]) -> tuple[list[Run], str, float, float]:
    work = runs(o["mask"], o["size"], 0, spans(q_offsets, k_offsets, None, merge=False))
    return work, "silu", o["alpha"], 1.0 / max(o["max_k"], 1)
