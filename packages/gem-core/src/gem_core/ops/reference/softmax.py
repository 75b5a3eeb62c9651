"""Softmax attention, one sequence at a time with a dense mask: the truth that every other backend is compared with."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.dispatch import OpSpec, Saved
from gem_core.ops.masks import dense_mask
from gem_core.ops.reference.precision import accumulate


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One sequence: (n, H, d) over (m, H, d) gives (n, H, d) and the log-sum-exp (n, H); a query that sees no key gives 0."""
    scores = torch.einsum("ihd,jhd->hij", q, k).mul(scale).masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    return torch.einsum("hij,jhd->ihd", _weights(scores, lse), v), lse.t()


def attend_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` to q, k, v."""
    scores = torch.einsum("ihd,jhd->hij", q, k).mul(scale).masked_fill(~mask, float("-inf"))
    p = _weights(scores, lse.t())
    dp = torch.einsum("ihd,jhd->hij", grad, v)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    return (
        torch.einsum("hij,jhd->ihd", ds, k),
        torch.einsum("hij,ihd->jhd", ds, q),
        torch.einsum("hij,ihd->jhd", p, grad),
    )


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    lse = lse.masked_fill(lse == float("-inf"), 0.0)  # nothing visible: exp(-inf - 0) = 0, not NaN
    return torch.exp(scores - lse[..., None])


class JaggedReference:
    """`jagged_attention` by the definition."""

    def supports(self, spec: OpSpec) -> str | None:
        return None

    def forward(self, *tensors: Tensor | None, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, q_offsets, k_offsets, k_index = _given(*tensors[:5], tensors[5])
        qc, kc, vc = accumulate(q, k, v)
        out, lse = torch.zeros_like(qc), qc.new_full(q.shape[:2], float("-inf"))
        for rows, keys in _sequences(q_offsets, k_offsets, k_index):
            out[rows], lse[rows] = attend(qc[rows], kc[keys], vc[keys], _mask(rows, keys, q.device, o), o["scale"])
        return out.to(q.dtype), lse

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, q_offsets, k_offsets, k_index = _given(*saved.inputs[:5], saved.inputs[5])
        lse = saved.outputs[1]
        gc, qc, kc, vc = accumulate(grad, q, k, v)
        dq, dk, dv = torch.zeros_like(qc), torch.zeros_like(kc), torch.zeros_like(vc)
        for rows, keys in _sequences(q_offsets, k_offsets, k_index):
            mask = _mask(rows, keys, q.device, o)
            a, b, c = attend_gradient(gc[rows], qc[rows], kc[keys], vc[keys], lse[rows], mask, o["scale"])
            dq[rows] = a
            dk[keys] += b
            dv[keys] += c
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _mask(rows: slice, keys: slice, device: torch.device, o: dict[str, Any]) -> Tensor:
    return dense_mask(o["mask"], o["size"], o.get("shift", 0), rows.stop - rows.start, keys.stop - keys.start, device)


def _given(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tensors


def _sequences(q_offsets: Tensor, k_offsets: Tensor, k_index: Tensor | None) -> list[tuple[slice, slice]]:
    """Rows of queries and of keys, one pair a sequence."""
    a, b = q_offsets.tolist(), k_offsets.tolist()
    read = range(len(a) - 1) if k_index is None else k_index.tolist()
    return [(slice(a[i], a[i + 1]), slice(b[j], b[j + 1])) for i, j in enumerate(read)]


class BlockReference(JaggedReference):
    """`block_attention`: the block mask over one set of offsets."""

    def forward(self, *tensors: Tensor | None, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = tensors
        return super().forward(q, k, v, offsets, offsets, None, **_as_mask(o))

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = saved.inputs
        return super().backward(Saved((q, k, v, offsets, offsets, None), saved.outputs), grad, **_as_mask(o))


def _as_mask(o: dict[str, Any]) -> dict[str, Any]:
    return {"mask": "block", "size": o["block"], "shift": o["shift"], "scale": o["scale"]}


class SeedReference:
    """`seed_attention`: the seeds over each sequence's keys, without a mask."""

    def supports(self, spec: OpSpec) -> str | None:
        return None

    def forward(self, *tensors: Tensor | None, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = _given(*tensors)
        qc, kc, vc = accumulate(q, k, v)
        batch = len(offsets) - 1
        out, lse = qc.new_zeros((batch, *q.shape)), qc.new_full((batch, *q.shape[:2]), float("-inf"))
        for b, keys in enumerate(_keys(offsets)):
            out[b], lse[b] = attend(qc, kc[keys], vc[keys], _everything(q, keys), o["scale"])
        return out.to(q.dtype), lse

    def backward(self, saved: Saved, grad: Tensor, **o: Any) -> tuple[Tensor, ...]:
        q, k, v, offsets = _given(*saved.inputs)
        lse = saved.outputs[1]
        gc, qc, kc, vc = accumulate(grad, q, k, v)
        dq, dk, dv = torch.zeros_like(qc), torch.zeros_like(kc), torch.zeros_like(vc)
        for b, keys in enumerate(_keys(offsets)):
            a, dk[keys], dv[keys] = attend_gradient(
                gc[b], qc, kc[keys], vc[keys], lse[b], _everything(q, keys), o["scale"]
            )
            dq += a
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _keys(offsets: Tensor) -> list[slice]:
    a = offsets.tolist()
    return [slice(x, y) for x, y in itertools.pairwise(a)]


def _everything(q: Tensor, keys: slice) -> Tensor:
    return dense_mask("none", 0, 0, q.shape[0], keys.stop - keys.start, q.device)
