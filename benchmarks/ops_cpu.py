"""Speed and memory of the ops on a processor, as ratios within one run: ragged against padding, and against plain matrix products.

    python benchmarks/ops_cpu.py [--threads 1 2] [--repeats 15] [--out benchmarks/results/ops_cpu.json]

Where both sides compute the same, results and gradients are compared first, and no speed is reported for a difference. The two sides
then alternate, and the median of the ratios counts. The padded side gets its inputs padded already, so it pays for computing the
padding only. Memory is the peak that one forward and backward adds to the process, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core import ops
from gem_core.report.environment import environment

HEADS, WIDTH = 4, 32


@dataclass(frozen=True)
class Side:
    """One side of a comparison: `run(*inputs)` gives a result whose gradient `grad` flows back."""

    run: Callable[..., Tensor]
    inputs: list[Tensor]
    grad: Tensor

    def step(self) -> None:
        """One forward and backward."""
        for x in self.inputs:
            x.grad = None
        self.run(*self.inputs).backward(self.grad)

    def totals(self) -> list[float]:
        """Root sums of squares of the result (where the gradient counts) and of every input's gradient."""
        out = self.run(*self.inputs)
        self.step()
        kept = out.detach() * (self.grad != 0)
        return [float(x.double().norm()) for x in (kept, *(i.grad for i in self.inputs if i.grad is not None))]


Pair = tuple[Side, Side]


def lognormal(batch: int, mean: int, fill: float) -> Tensor:
    """Lengths of a lognormal shape with about this mean, and mean / maximum = fill; the same on every machine."""
    quantiles = torch.special.ndtri((torch.arange(batch, dtype=torch.float64) + 0.5) / batch)
    low, high = 0.0, 4.0
    for _ in range(60):
        sigma = (low + high) / 2
        shape = (sigma * quantiles).exp()
        low, high = (sigma, high) if float(shape.mean() / shape.max()) > fill else (low, sigma)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(0))
    lengths: Tensor = (shape * (mean / shape.mean())).round().long()
    return lengths[order]


def offsets_of(lengths: Tensor) -> Tensor:
    """Lengths (B,) as offsets (B + 1)."""
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def leaf(*shape: int) -> Tensor:
    """Random values that want a gradient."""
    return torch.randn(*shape).requires_grad_()


def padded(x: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """(sum T, H, d) as (B, H, longest, d), zeros behind each sequence."""
    out = x.new_zeros((len(offsets) - 1, longest, *x.shape[1:]))
    rows = ops.segment_ids(offsets, len(x))
    out[rows, ops.positions(offsets, len(x))] = x
    return out.transpose(1, 2).contiguous()


def jagged_against_padding(batch: int, mean: int, fill: float, width: int = WIDTH) -> Pair:
    """Self-attention: `jagged_attention` against SDPA with a mask on tensors padded to the batch's maximum."""
    lengths = lognormal(batch, mean, fill)
    offsets, longest = offsets_of(lengths), int(lengths.max())
    total = int(offsets[-1])
    ragged = [leaf(total, HEADS, width) for _ in range(3)]
    wide = [padded(x.detach(), offsets, longest).requires_grad_() for x in ragged]
    mask = (torch.arange(longest) < lengths[:, None])[:, None, None, :]
    grad = torch.randn(total, HEADS, width)
    return (
        Side(lambda q, k, v: ops.jagged_attention(q, k, v, offsets, offsets, longest, longest), ragged, grad),
        Side(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), wide, padded(grad, offsets, longest)),
    )


def jagged_against_uniform(batch: int, mean: int, fill: float) -> Pair:
    """`jagged_attention` against SDPA without a mask on equal lengths with the same number of multiply-adds."""
    lengths = lognormal(batch, mean, fill)
    offsets, longest = offsets_of(lengths), int(lengths.max())
    equal = round(math.sqrt(float(lengths.double().square().mean())))
    ragged = [leaf(int(offsets[-1]), HEADS, WIDTH) for _ in range(3)]
    return (
        Side(
            lambda q, k, v: ops.jagged_attention(q, k, v, offsets, offsets, longest, longest),
            ragged,
            torch.randn(int(offsets[-1]), HEADS, WIDTH),
        ),
        Side(
            F.scaled_dot_product_attention,
            [torch.randn(batch, equal, HEADS, WIDTH).transpose(1, 2).requires_grad_() for _ in range(3)],
            torch.randn(batch, equal, HEADS, WIDTH).transpose(1, 2),
        ),
    )


def target_against_padding(batch: int, rows: int, queries: int) -> Pair:
    """The demo's shape: `rows` ads a request, `queries` targets an ad, over the request's events; padded: keys copied to each row."""
    lengths = lognormal(batch, 250, 0.5)
    offsets, longest = offsets_of(lengths), int(lengths.max())
    index = torch.repeat_interleave(torch.arange(batch), rows)
    q_offsets = torch.arange(batch * rows + 1) * queries
    q = leaf(batch * rows * queries, HEADS, 16)
    k, v = (leaf(int(offsets[-1]), HEADS, 16) for _ in range(2))
    wide = [padded(x.detach(), offsets, longest).requires_grad_() for x in (k, v)]
    mask = (torch.arange(longest) < lengths[:, None])[:, None, None, :]
    q_wide = q.detach().view(batch * rows, queries, HEADS, 16).transpose(1, 2).requires_grad_()
    grad = torch.randn(q.shape)
    return (
        Side(
            lambda q, k, v: ops.jagged_attention(q, k, v, q_offsets, offsets, queries, longest, k_index=index),
            [q, k, v],
            grad,
        ),
        Side(
            lambda q, k, v: F.scaled_dot_product_attention(q, k[index], v[index], mask[index]),
            [q_wide, *wide],
            grad.view(batch * rows, queries, HEADS, 16).transpose(1, 2),
        ),
    )


def products(batch: int, n_q: int, n_k: int) -> Side:
    """The multiply-adds of an attention of equal shape as plain batched matrix products: 2 forward, 4 backward."""
    q, k, v = leaf(batch * HEADS, n_q, WIDTH), leaf(batch * HEADS, n_k, WIDTH), leaf(batch * HEADS, n_k, WIDTH)
    return Side(lambda q, k, v: (q @ k.transpose(1, 2)) @ v, [q, k, v], torch.randn(batch * HEADS, n_q, WIDTH))


def seed_against_products(batch: int, mean: int, fill: float) -> Pair:
    """`seed_attention`, 64 seeds, against the same multiply-adds as plain matrix products."""
    lengths = lognormal(batch, mean, fill)
    offsets, longest = offsets_of(lengths), int(lengths.max())
    k, v = (leaf(int(offsets[-1]), HEADS, WIDTH) for _ in range(2))
    return (
        Side(
            lambda q, k, v: ops.seed_attention(q, k, v, offsets, longest),
            [leaf(64, HEADS, WIDTH), k, v],
            torch.randn(batch, 64, HEADS, WIDTH),
        ),
        products(batch, 64, int(offsets[-1]) // batch),
    )


def gdpa_against_products(activation: str, batch: int, mean: int, fill: float) -> Pair:
    """`gdpa`, 128 hidden units, against the same multiply-adds as plain matrix products."""
    lengths = lognormal(batch, mean, fill)
    offsets, longest = offsets_of(lengths), int(lengths.max())
    k, v = (leaf(batch, 128, HEADS, WIDTH) for _ in range(2))
    q = leaf(int(offsets[-1]), HEADS, WIDTH)
    return (
        Side(
            lambda q, k, v: ops.gdpa(q, k, v, offsets, longest, activation=activation), [q, k, v], torch.randn(q.shape)
        ),
        products(batch, int(offsets[-1]) // batch, 128),
    )


def block_time(length: int) -> Side:
    """`block_attention` of 16,384 events in sequences of one length."""
    offsets = torch.arange(0, 16384 + 1, length)
    return Side(
        lambda q, k, v: ops.block_attention(q, k, v, offsets, length),
        [leaf(16384, HEADS, WIDTH) for _ in range(3)],
        torch.randn(16384, HEADS, WIDTH),
    )


COMPARISONS: dict[str, tuple[Callable[[], Pair], str]] = {
    "jagged_attention / padded SDPA, fill 0.5, mean 200": (lambda: jagged_against_padding(64, 200, 0.5), "<= 0.45"),
    "jagged_attention / padded SDPA, fill 0.29, mean 200": (lambda: jagged_against_padding(64, 200, 0.29), "<= 0.20"),
    "jagged_attention / padded SDPA, fill 0.5, mean 40": (lambda: jagged_against_padding(256, 40, 0.5), "<= 0.45"),
    "jagged_attention / padded SDPA, fill 0.29, mean 40": (lambda: jagged_against_padding(256, 40, 0.29), "<= 0.20"),
    "jagged_attention / uniform SDPA, mean 200": (lambda: jagged_against_uniform(64, 200, 0.5), "<= 1.1"),
    "jagged_attention / uniform SDPA, mean 40": (lambda: jagged_against_uniform(256, 40, 0.5), "<= 1.4"),
    "shared keys / padded SDPA on copied keys": (lambda: target_against_padding(16, 30, 2), ""),
    "seed_attention / matrix products": (lambda: seed_against_products(64, 200, 0.5), "<= 1.2"),
    "gdpa relu / matrix products": (lambda: gdpa_against_products("relu", 64, 200, 0.5), "<= 1.2"),
    "gdpa gelu / matrix products": (lambda: gdpa_against_products("gelu", 64, 200, 0.5), "<= 1.4"),
    "block_attention, T 16384 / T 256": (lambda: (block_time(16384), block_time(256)), "0.9 to 1.1"),
}
SAME = [name for name in COMPARISONS if "padded SDPA" in name]  # both sides compute the same from the same values
MEMORY = [name for name in SAME if "fill" in name]


def agree(sides: Pair) -> None:
    """Refuse to time two sides that do not compute the same: the sums of result and gradients must be equal."""
    for a, b in zip(*(side.totals() for side in sides), strict=True):
        if not math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-2):
            raise SystemExit(f"the two sides differ: {a} and {b}; no speed is reported for a wrong result")


def clock(sides: Pair, repeats: int) -> dict[str, Any]:
    """Median milliseconds of both sides, alternating, and the median of the ratios of neighbours."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(repeats + 2):
        for side, kept in zip(sides, times, strict=True):
            start = time.perf_counter()
            side.step()
            if round_ >= 2:
                kept.append((time.perf_counter() - start) * 1e3)
    ratios = sorted(a / b for a, b in zip(*times, strict=True))
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(ratios[len(ratios) // 4], 3), round(ratios[-1 - len(ratios) // 4], 3)],
        "ms": round(statistics.median(times[0]), 3),
        "other_ms": round(statistics.median(times[1]), 3),
    }


def call_overhead(repeats: int) -> dict[str, float]:
    """Microseconds of one forward and backward on almost nothing: what the operator's wrapper costs."""
    offsets = torch.tensor([0, 1])
    q = leaf(1, 1, 8)
    side = Side(lambda q: ops.gdpa(q, q[None], q[None], offsets, 1, activation="relu"), [q], torch.ones(1, 1, 8))
    k = q.detach()[None]

    def forward() -> None:
        with torch.no_grad():
            ops.gdpa(q, k, k, offsets, 1, activation="relu")

    def median(run: Callable[[], None]) -> float:
        spent = []
        for _ in range(20 * repeats):
            start = time.perf_counter()
            run()
            spent.append((time.perf_counter() - start) * 1e6)
        return round(statistics.median(spent), 1)

    return {"forward_us": median(forward), "forward_backward_us": median(side.step)}


def peak(name: str, which: int) -> int:
    """Bytes that one forward and backward of one side adds to this process's peak."""
    side = COMPARISONS[name][0]()[which]
    for warm in jagged_against_padding(2, 8, 0.6):  # imports and thread pools are no memory of the op
        warm.step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    side.step()
    after = _status("VmHWM")
    return after - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def memory(name: str) -> dict[str, Any]:
    """Peak memory of both sides, each in a fresh process."""
    found = []
    for which in (0, 1):
        command = [sys.executable, __file__, "--peak", name, str(which)]
        fresh = {
            **os.environ,
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "OMP_NUM_THREADS": "1",
        }  # freed tensors leave the process
        found.append(int(subprocess.run(command, check=True, capture_output=True, text=True, env=fresh).stdout))
    return {
        "ratio": round(found[0] / found[1], 3),
        "mb": round(found[0] / 1e6, 1),
        "other_mb": round(found[1] / 1e6, 1),
    }


def main() -> None:
    """Run the comparisons that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="comparisons whose name contains this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--busy", action="store_true", help="measure although other work runs on this machine")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.peak:
        print(peak(given.peak[0], int(given.peak[1])))
        return
    load = os.getloadavg()[0]
    if load > 0.5 and not given.busy:
        raise SystemExit(
            f"the machine is busy (load {load:.1f}): figures would be of the other work too; wait, or pass --busy"
        )
    result: dict[str, Any] = {"environment": environment(), "time": {}, "memory": {}, "overhead": {}}
    for threads in given.threads:
        torch.set_num_threads(threads)
        result["overhead"][f"{threads} threads"] = call_overhead(given.repeats)
        for name, (make, target) in COMPARISONS.items():
            if given.only in name:
                sides = make()
                if name in SAME:
                    agree(sides)
                row = {"target": target, **clock(sides, given.repeats)}
                result["time"].setdefault(name, {})[f"{threads} threads"] = row
                print(f"{threads} threads  {name}: {row}", flush=True)
    for name in MEMORY:
        if given.only in name:
            result["memory"][name] = {"target": "<= 0.35", **memory(name)}
            print(f"memory  {name}: {result['memory'][name]}", flush=True)
    print(f"overhead: {result['overhead']}")
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
