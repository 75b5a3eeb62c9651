"""Softmax attention by the processor's flash kernel, one call a part."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.dispatch import OpSpec, Saved
from gem_core.ops.ragged.runs import CAUSAL, Run, runs, spans
from gem_core.ops.ragged.support import on_processor, ready
from gem_core.ops.ragged.tiles import Part, joined, tiles

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _mask(part: Part, like: Tensor) -> tuple[bool, Tensor | None]:
    """The kernel's causal flag and additive mask."""
    if part.band == CAUSAL and part.n_q == part.n_k:
        return True, None  # a real query never sees the padding behind it
    hidden = part.hidden()
    if hidden is None:
        return False, None
    bias = torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
    return False, bias.expand(part.n, 1, part.n_q, part.n_k)


def _part_forward(part: Part, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(n, H, n_q, d) and log-sum-exp (n, H, n_q) of one part."""
    causal, bias = _mask(part, q)
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def _part_backward(
    part: Part, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one part to q, k, v, each (n, H, L, d)."""
    causal, bias = _mask(part, q)
    dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


def attend(q: Tensor, k: Tensor, v: Tensor, work: list[Run], scale: float) -> tuple[Tensor, Tensor]:
    """The result (sum Tq, H, d) and the log-sum-exp (sum Tq, H) over a work list; rows in no rectangle give 0."""
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"))
    for tile in tiles(work, q.shape[1]):
        rows, keys, values = tile.rows(q), tile.keys(k), tile.keys(v)
        pieces = [_part_forward(p, p.rows(rows), p.keys(keys), p.keys(values), scale) for p in tile.parts]
        tile.put_rows(out, joined([o for o, _ in pieces]))
        tile.put_rows(lse, joined([s for _, s in pieces]))
    return out, lse


def attend_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: list[Run], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` to q, k, v."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for tile in tiles(work, q.shape[1]):
        by_query = tile.silent_rows(grad), tile.rows(q), tile.rows(out), tile.rows(lse)
        keys, values = tile.keys(k), tile.keys(v)
        pieces = []
        for part in tile.parts:
            up, rows, result, s = (part.rows(x) for x in by_query)
            pieces.append(_part_backward(part, up, rows, part.keys(keys), part.keys(values), result, s, scale))
        tile.put_rows(dq, joined([a for a, _, _ in pieces]))
        tile.add_keys(dk, joined([b for _, b, _ in pieces]))
        tile.add_keys(dv, joined([c for _, _, c in pieces]))
    return dq, dk, dv


class RaggedJagged:
    """`jagged_attention` on a processor."""

    def supports(self, spec: OpSpec) -> str | None:
        return on_processor(spec)

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, *layout = tensors
        qc, kc, vc = ready(q, k, v)
        out, lse = attend(qc, kc, vc, _work(*layout, **o), o["scale"])
        return out.to(q.dtype), lse

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, *layout = saved.inputs
        out, lse = saved.outputs
        up, qc, kc, vc, result = ready(grad, q, k, v, out)
        grads = attend_gradient(up, qc, kc, vc, result, lse, _work(*layout, **o), o["scale"])
        return tuple(g.to(q.dtype) for g in grads)


def _work(q_offsets: Tensor, k_offsets: Tensor, k_index: Tensor | None, *, mask: str, size: int, **_: Any) -> list[Run]:
    return runs(mask, size, 0, spans(q_offsets, k_offsets, k_index, merge=mask == "none"))


class RaggedBlock:
    """`block_attention` on a processor: a block is a small rectangle like any other."""

    def supports(self, spec: OpSpec) -> str | None:
        return on_processor(spec)

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = tensors
        qc, kc, vc = ready(q, k, v)
        out, lse = attend(qc, kc, vc, _blocks(offsets, o), o["scale"])
        return out.to(q.dtype), lse

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = saved.inputs
        out, lse = saved.outputs
        up, qc, kc, vc, result = ready(grad, q, k, v, out)
        grads = attend_gradient(up, qc, kc, vc, result, lse, _blocks(offsets, o), o["scale"])
        return tuple(g.to(q.dtype) for g in grads)


def _blocks(offsets: Tensor, o: dict[str, Any]) -> list[Run]:
    return runs("block", o["block"], o["shift"], spans(offsets, offsets, None, merge=False))


class RaggedSeed:
    """`seed_attention` on a processor: the seeds are broadcast to a part's sequences, not copied."""

    def supports(self, spec: OpSpec) -> str | None:
        return on_processor(spec)

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = tensors
        qc, kc, vc = ready(q, k, v)
        batch, seeds = len(offsets) - 1, q.shape[0]
        out = qc.new_zeros((batch * seeds, *q.shape[1:]))
        lse = qc.new_full((batch * seeds, q.shape[1]), float("-inf"))
        for tile in tiles(_seed_work(offsets, seeds), q.shape[1]):
            keys, values = tile.keys(kc), tile.keys(vc)
            pieces = [_part_forward(p, _spread(qc, p), p.keys(keys), p.keys(values), o["scale"]) for p in tile.parts]
            tile.put_rows(out, joined([result for result, _ in pieces]))
            tile.put_rows(lse, joined([s for _, s in pieces]))
        return out.view(batch, *q.shape).to(q.dtype), lse.view(batch, *q.shape[:2])

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = saved.inputs
        out, lse = saved.outputs
        g, qc, kc, vc, out = ready(grad.flatten(0, 1), q, k, v, out.flatten(0, 1))
        lse = lse.flatten(0, 1)
        dq, dk, dv = torch.zeros_like(qc), torch.zeros_like(kc), torch.zeros_like(vc)
        for tile in tiles(_seed_work(offsets, q.shape[0]), q.shape[1]):
            by_query, keys, values = (tile.rows(g), tile.rows(out), tile.rows(lse)), tile.keys(kc), tile.keys(vc)
            pieces = []
            for part in tile.parts:
                up, result, s = (part.rows(x) for x in by_query)
                given = (_spread(qc, part), part.keys(keys), part.keys(values), result, s)
                pieces.append(_part_backward(part, up, *given, o["scale"]))
            dq += torch.stack([a.sum(0) for a, _, _ in pieces]).sum(0).transpose(0, 1)
            tile.add_keys(dk, joined([b for _, b, _ in pieces]))
            tile.add_keys(dv, joined([c for _, _, c in pieces]))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _spread(q: Tensor, part: Part) -> Tensor:
    return q.transpose(0, 1)[None].expand(part.n, -1, -1, -1)


def _seed_work(offsets: Tensor, seeds: int) -> list[Run]:
    a = offsets.tolist()
    return [Run(b * seeds, seeds, k, end - k) for b, (k, end) in enumerate(itertools.pairwise(a)) if end > k and seeds]
