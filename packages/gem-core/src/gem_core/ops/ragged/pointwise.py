"""Attention with an element-wise activation: chunks of a tile small enough to stay in cache, scores never kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.activations import apply, apply_gradient
from gem_core.ops.dispatch import OpSpec, Saved
from gem_core.ops.ragged.runs import Run, runs, spans
from gem_core.ops.ragged.support import on_processor, ready
from gem_core.ops.ragged.tiles import Tile, tiles
from gem_core.ops.reference.pointwise import EPS

SCORES = 65536  # scores of one chunk: 256 KiB in float32

aten = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, work: list[Run], activation: str, inside: float, outside: float) -> Tensor:
    """outside * act(inside * q k^T) v over a work list; q (sum Tq, H, d), k and v (sum Tk, H, d). Rows in no rectangle give 0."""
    out, heads = torch.zeros_like(q), q.shape[1]
    for tile in tiles(work, heads):
        keys, values, keep = _batch(tile.keys(k)), _batch(tile.keys(v)), _keep(tile, q)
        queries = tile.rows(q)
        result = torch.empty_like(queries)
        for part in _parts(tile, heads):
            z = _scores(queries[:, :, part], keys, inside)
            p = apply(activation, _heads(z, tile)).flatten(0, 1)
            if keep is not None:
                _heads(p, tile).mul_(keep[:, :, part])
            result[:, :, part] = _heads(torch.bmm(p, values), tile)
        tile.put_rows(out, result.mul_(outside))
    return out


def attend_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, work: list[Run], activation: str, inside: float, outside: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` to q, k, v."""
    dq, dk, dv, heads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), q.shape[1]
    for tile in tiles(work, heads):
        keys, values, keep = _batch(tile.keys(k)), _batch(tile.keys(v)), _keep(tile, q)
        queries, above = tile.rows(q), tile.silence(tile.rows(grad))
        result, d_keys, d_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        for part in _parts(tile, heads):
            rows, up = _batch(queries[:, :, part]), _batch(above[:, :, part])
            z = torch.bmm(rows, keys.transpose(1, 2)).mul_(inside)
            p = apply(activation, _heads(z, tile))
            dz = apply_gradient(activation, _heads(torch.bmm(up, values.transpose(1, 2)), tile), _heads(z, tile))
            if keep is not None:
                p, dz = p.mul_(keep[:, :, part]), dz.mul_(keep[:, :, part])
            p, dz = p.flatten(0, 1), dz.flatten(0, 1)
            d_values.baddbmm_(p.transpose(1, 2), up, alpha=outside)
            d_keys.baddbmm_(dz.transpose(1, 2), rows, alpha=inside * outside)
            result[:, :, part] = _heads(torch.bmm(dz, keys), tile)
        tile.put_rows(dq, result.mul_(inside * outside))
        tile.add_keys(dk, _heads(d_keys, tile))
        tile.add_keys(dv, _heads(d_values, tile))
    return dq, dk, dv


def _scores(queries: Tensor, keys: Tensor, inside: float) -> Tensor:
    return torch.bmm(_batch(queries), keys.transpose(1, 2)).mul_(inside)


def _parts(tile: Tile, heads: int) -> Iterator[slice]:
    """Slices of the tile's query axis with about SCORES scores each, of even size."""
    pieces = max(1, -(-tile.n * heads * tile.n_q * tile.n_k // SCORES))
    step = max(16, -(-tile.n_q // pieces))
    return (slice(a, min(a + step, tile.n_q)) for a in range(0, tile.n_q, step))


def _keep(tile: Tile, like: Tensor) -> Tensor | None:
    hidden = tile.hidden()
    return None if hidden is None else (~hidden).to(like.dtype).expand(tile.n, 1, tile.n_q, tile.n_k)


def _batch(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def _heads(x: Tensor, tile: Tile) -> Tensor:
    return x.unflatten(0, (tile.n, -1))


def _options(o: dict[str, Any]) -> tuple[str, float, float]:
    return o["activation"], o["scale_inside"], o["scale_outside"]


def _gdpa_work(offsets: Tensor, k: Tensor) -> list[Run]:
    a, hidden = offsets.tolist(), k.shape[1]
    return [Run(q, end - q, b * hidden, hidden) for b, (q, end) in enumerate(zip(a, a[1:], strict=False)) if end > q and hidden]


class RaggedGdpa:
    """`gdpa` on a processor."""

    def supports(self, spec: OpSpec) -> str | None:
        return on_processor(spec)

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = tensors
        values = ready(q, k.flatten(0, 1), v.flatten(0, 1))
        return (attend(*values, _gdpa_work(offsets, k), *_options(o)).to(q.dtype),)

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = saved.inputs
        values = ready(grad, q, k.flatten(0, 1), v.flatten(0, 1))
        dq, dk, dv = attend_gradient(*values, _gdpa_work(offsets, k), *_options(o))
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
        return (attend(*ready(q, k, v), *_hstu(q_offsets, k_offsets, o)).to(q.dtype),)

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, q_offsets, k_offsets = saved.inputs
        grads = attend_gradient(*ready(grad, q, k, v), *_hstu(q_offsets, k_offsets, o))
        return tuple(g.to(q.dtype) for g in grads)


def _hstu(q_offsets: Tensor, k_offsets: Tensor, o: dict[str, Any]) -> tuple[list[Run], str, float, float]:
    work = runs(o["mask"], o["size"], 0, spans(q_offsets, k_offsets, None, merge=False))
    return work, "silu", o["alpha"], 1.0 / max(o["max_k"], 1)
