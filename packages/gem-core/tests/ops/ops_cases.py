"""Shared by the tests of the ops: ragged shapes, comparison of backends, and one small call of every op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_core import ops

MASKS = [
    {},
    {"mask": "causal"},
    {"mask": "window", "window": 0},
    {"mask": "window", "window": 7},
    {"mask": "window", "window": 70},
    {"mask": "block", "block": 8},
    {"mask": "block", "block": 64},
    {"mask": "prefix", "prefix": 5},
]
ALL = ("jagged_attention", "block_attention", "seed_attention", "gdpa", "gdpa_ffn", "hstu_attention", "rote")


def offsets_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])


def poisoned(monkeypatch) -> None:
    """torch.empty and its like give NaN, so a read of unwritten memory shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(x: Tensor) -> Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: fill(new_empty(*a, **k)))


def gradients(call: Callable[..., Tensor], inputs: Sequence[Tensor], backend: str) -> list[Tensor]:
    """The result and the gradient of every input, with a backend forced."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with ops.use_backend({"all": backend}):
        out = call(*leaves)
    grad = torch.linspace(-1, 1, max(out.numel(), 1), dtype=out.dtype)[: out.numel()].view(out.shape)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def agree(call: Callable[..., Tensor], inputs: Sequence[Tensor], *, tolerance: float = 3e-4) -> None:
    """The ragged backend equals the reference, forward and every gradient."""
    wanted, found = gradients(call, inputs, "reference"), gradients(call, inputs, "ragged")
    for name, a, b in zip(("result", *(f"gradient {i}" for i in range(len(inputs)))), wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@dataclass
class Case:
    """One small call: `call(*inputs)` differentiates to all inputs; `arguments` are those of the raw operator."""

    call: Callable[..., Tensor]
    inputs: list[Tensor]
    arguments: Callable[[list[Tensor]], tuple]


def case(
    op: str,
    dtype: torch.dtype = torch.float32,
    lengths: Sequence[int] = (3, 0, 5, 1),
    keys: Sequence[int] = (4, 2, 0, 6),
) -> Case:
    """A small call of any op."""
    torch.manual_seed(0)
    rows, cols, heads, width = sum(lengths), sum(keys), 2, 4
    qo, ko = offsets_of(lengths), offsets_of(keys)
    batch, most = len(lengths), 100

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    q, k, v = values(rows, heads, width), values(cols, heads, width), values(cols, heads, width)
    made = values(batch, 5, heads, width), values(batch, 5, heads, width)
    if op == "jagged_attention":
        return Case(
            lambda q, k, v: ops.jagged_attention(q, k, v, qo, ko, most, most),
            [q, k, v],
            lambda x: (*x, qo, ko, None, most, most, "none", 0, 0.5, ""),
        )
    if op == "hstu_attention":
        return Case(
            lambda q, k, v: ops.hstu_attention(q, k, v, qo, ko, most, most),
            [q, k, v],
            lambda x: (*x, qo, ko, most, most, "causal", 0, 0.5, ""),
        )
    if op == "block_attention":
        return Case(
            lambda q, k, v: ops.block_attention(q, k, v, ko, most, block=2),
            [values(cols, heads, width), k, v],
            lambda x: (*x, ko, most, 2, 0, 0.5, ""),
        )
    if op == "seed_attention":
        return Case(
            lambda q, k, v: ops.seed_attention(q, k, v, ko, most),
            [values(3, heads, width), k, v],
            lambda x: (*x, ko, most, 0.5, ""),
        )
    if op == "rote":
        positions, gaps = ops.positions(ko, cols), torch.arange(cols) * 1000
        return Case(
            lambda x, phi: ops.rote(x, positions, gaps, phi),
            [k, values(width // 2)],
            lambda x: (x[0], positions, gaps, x[1], 10000.0, 3600.0, ""),
        )
    function = {"gdpa": ops.gdpa, "gdpa_ffn": ops.gdpa_ffn}[op]
    return Case(
        lambda q, k, v: function(q, k, v, qo, most, scale_inside=0.7, scale_outside=1.3),
        [q, *made],
        lambda x: (*x, qo, most, "gelu", 0.7, 1.3, ""),
    )
