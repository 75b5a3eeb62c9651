"""One Kunlun, three ways to run it: ragged, padded to the batch's maximum, and with every row as a request of its own.

    python benchmarks/padding.py [--threads 1] [--repeats 9] [--out benchmarks/results/padding.json]

Histories have the lengths of the Complete Journey log (quantiles 0, 104, 465, 1,356, 4,122), cut to the schema's maximum.
The padded side gets events that are padded already and plain PyTorch in place of the ragged ops: SDPA with a mask of the real
keys, linear maps on all positions. Its block attention comes in two forms: cut into blocks by a reshape ("padded", the best
that padding can do), and as SDPA over the whole length with a block mask ("padded, dense mask"). All sides must agree in logits
and gradients before anything is timed; then they alternate, and medians count. A step is forward, backward and both optimisers. Memory is
the peak that a step adds to a fresh process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core import ops
from gem_core.data.batch import Batch, Jagged
from gem_core.model.kunlun import Kunlun, KunlunConfig
from gem_core.report.environment import environment
from gem_core.schema import DenseStats, Fitted, Schema
from gem_core.train.embedding import TorchEmbedding

QUANTILES = {0.0: 0, 0.25: 104, 0.5: 465, 0.75: 1356, 1.0: 4122}
ROWS = 29  # per request, as in the log's training batches
FIELDS = {"product": 30_000, "type": 2_000, "category": 300, "brand": 2, "store": 500}
BLOCK = 64
NOW = 500 * 86400


def lengths_of(requests: int, longest: int) -> Tensor:
    """Lengths with the log's quantiles, geometric between them, newest `longest` kept; in a fixed random order."""
    points = list(QUANTILES.items())
    out = []
    for i in range(requests):
        p = (i + 0.5) / requests
        (a, low), (b, high) = next((x, y) for x, y in itertools.pairwise(points) if p <= y[0])
        share = (p - a) / (b - a)
        out.append(round(high * share if low == 0 else low * (high / low) ** share))
    order = torch.randperm(requests, generator=torch.Generator().manual_seed(0))
    return torch.tensor(out).clamp(max=longest)[order]


def schema_of(longest: int) -> Schema:
    """Ads and events like those of the log's purchases."""
    names = [f"x{i}" for i in range(20)]
    sparse: dict[str, Any] = {name: {} for name in FIELDS}
    schema = Schema.parse(
        {
            "user": "u", "time": "t", "surface": "s", "surfaces": ["display", "mailer", "both"],
            "dense": {n: {"encoding": "piecewise"} for n in names} | {"weeks": {"level": "request"}},
            "sparse": sparse | {"income": {"level": "request"}},
            "events": {"purchase": {"max_length": longest, "fields": sparse | {"value": {"kind": "dense"}}}},
            "objectives": {"purchase": {}, "repurchase": {}},
        }
    )  # fmt: skip
    edges = [i / 8 - 2 for i in range(27)]
    fitted = Fitted.model_construct(
        rows=0,
        dense={n: DenseStats(mean=0, std=1, edges=edges) for n in names} | {"weeks": DenseStats(mean=0, std=1)},
        vocabularies={n: list(range(size)) for n, size in (*FIELDS.items(), ("income", 12))},
        surfaces=["display", "mailer", "both"],
        base_rates={"purchase": 0.1, "repurchase": 0.1},
    )
    return schema.model_copy(update={"fitted": fitted})


def batch_of(requests: int, longest: int) -> Batch:
    """Random values at the log's lengths."""
    rng = torch.Generator().manual_seed(1)
    lengths = lengths_of(requests, longest)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    rows, events = requests * ROWS, int(offsets[-1])

    def ids(n: int, size: int) -> Tensor:
        return torch.randint(2, size + 2, (n,), generator=rng)

    def single(n: int, size: int) -> Jagged:
        return Jagged(ids(n, size), torch.arange(n + 1), 1)

    fields = {name: Jagged(ids(events, size), offsets, longest) for name, size in FIELDS.items()}
    fields["value"] = Jagged(torch.randn(events, generator=rng), offsets, longest)
    fields["time"] = Jagged(NOW - torch.randint(1, NOW, (events,), generator=rng), offsets, longest)
    return Batch(
        dense=torch.randn(rows, 20, generator=rng),
        ids={name: single(rows, size) for name, size in FIELDS.items()},
        vectors={},
        request_dense=torch.randn(requests, 1, generator=rng),
        request_ids={"income": single(requests, 12)},
        request_vectors={},
        events={"purchase": fields},
        request=torch.arange(requests).repeat_interleave(ROWS),
        request_time=torch.full((requests,), NOW),
        user=torch.arange(requests),
        surface=torch.randint(0, 3, (rows,), generator=rng),
        row_id=torch.arange(rows),
    )


def pad(batch: Batch) -> tuple[Batch, Tensor]:
    """Every history filled up to the batch's longest (a whole number of blocks), and (Q, L) True where an event is real."""
    time_ = batch.events["purchase"]["time"]
    lengths = time_.lengths()
    longest = -(-int(lengths.max()) // BLOCK) * BLOCK
    real = torch.arange(longest) < lengths[:, None]
    offsets = torch.arange(0, (len(lengths) + 1) * longest, longest)
    fields = {}
    for name, jagged in batch.events["purchase"].items():
        values = jagged.values.new_zeros(real.shape)
        values[real] = jagged.values
        fields[name] = Jagged(values.flatten(), offsets, longest)
    fields["time"] = Jagged(torch.where(real.flatten(), fields["time"].values, NOW), offsets, longest)
    return Batch(**{**batch.__dict__, "events": {"purchase": fields}}), real


def row_by_row(batch: Batch) -> Batch:
    """The same rows, each as a request of its own with its own copy of the history."""
    index = batch.request

    def copies(jagged: Jagged) -> Jagged:
        return Jagged(*ops.gather_segments(jagged.values, jagged.offsets, index), jagged.max_length)

    return Batch(
        **{
            **batch.__dict__,
            "request_dense": batch.request_dense[index],
            "request_ids": {name: copies(x) for name, x in batch.request_ids.items()},
            "events": {"purchase": {name: copies(x) for name, x in batch.events["purchase"].items()}},
            "request": torch.arange(batch.rows),
            "request_time": batch.request_time[index],
            "user": batch.user[index],
        }
    )


class PaddedOps:
    """The ops on padded sequences (Q, L, H, d), in plain differentiable PyTorch."""

    def __init__(self, real: Tensor, dense_mask: bool) -> None:
        self.real, self.dense_mask = real, dense_mask
        self.some = real.any(1)
        # What has no real key sees all of them, so that no softmax runs over nothing; its output is not used, or zeroed.
        self.keys = (real | ~self.some[:, None])[:, None, None]
        blocks = real.view(-1, BLOCK)
        self.block_keys = (blocks | ~blocks.any(1, keepdim=True))[:, None, None]
        at = torch.arange(real.shape[1]) // BLOCK
        inside = at[:, None] == at
        visible = self.block_keys.view(len(real), 1, 1, -1) & inside
        self.square = visible if dense_mask else None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of gem_core.ops' functions."""
        names = ("block_attention", "seed_attention", "jagged_attention", "gdpa_ffn")
        with mock.patch.multiple(ops, **{name: getattr(self, name) for name in names}):
            yield

    def _split(self, x: Tensor, length: int) -> Tensor:
        return x.view(-1, length, *x.shape[1:]).transpose(1, 2)

    def block_attention(self, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
        length = self.real.shape[1] if self.dense_mask else BLOCK
        mask = self.square if self.dense_mask else self.block_keys
        q_wide, k_wide, v_wide = (self._split(x, length) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q_wide, k_wide, v_wide, mask)
        return out.transpose(1, 2).reshape(q.shape)

    def seed_attention(self, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        length = self.real.shape[1]
        seeds = q.transpose(0, 1).expand(len(self.real), -1, -1, -1)
        out = F.scaled_dot_product_attention(seeds, self._split(k, length), self._split(v, length), self.keys)
        return out.transpose(1, 2) * self.some[:, None, None, None]

    def jagged_attention(self, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
        """Of the ads' queries: those of a request's rows side by side."""
        length = self.real.shape[1]
        queries = self._split(q, len(q) // len(self.real))
        out = F.scaled_dot_product_attention(queries, self._split(k, length), self._split(v, length), self.keys)
        return (out.transpose(1, 2) * self.some[:, None, None, None]).reshape(q.shape)

    def gdpa_ffn(
        self, q: Tensor, k: Tensor, v: Tensor, *_: object, scale_inside: float, scale_outside: float, **__: str
    ) -> Tensor:
        lq = F.layer_norm(q, q.shape[1:])
        scores = self._split(lq, self.real.shape[1]) @ k.permute(0, 2, 3, 1)
        g = (F.gelu(scores * scale_inside) @ v.transpose(1, 2)) * scale_outside
        inner = g.transpose(1, 2).reshape(q.shape) + lq
        return F.rms_norm(inner, q.shape[1:], eps=1e-5) + q


class Side:
    """A model, a batch, and the ops that it runs on; sides start from the same parameters."""

    def __init__(self, name: str, requests: int, longest: int) -> None:
        torch.manual_seed(0)
        config = KunlunConfig(features={"dropout": 0.0})
        self.embedding = cast(Any, TorchEmbedding(TorchEmbedding.Config(), seed=0))
        self.model = Kunlun(config, schema=schema_of(longest), embedding=self.embedding)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = batch_of(requests, longest)
        self.label = torch.rand(self.batch.rows, generator=torch.Generator().manual_seed(2)).round()
        self.ops: Callable[[], AbstractContextManager[None]] = nullcontext
        if name == "per row":
            self.batch = row_by_row(self.batch)
        elif name != "ragged":
            self.batch, real = pad(self.batch)
            self.ops = PaddedOps(real, dense_mask=name == "padded, dense mask").installed

    def forward_backward(self) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        with self.ops():
            logits: dict[str, Tensor] = self.model(self.batch).logits
        loss = torch.stack([F.binary_cross_entropy_with_logits(x, self.label) for x in logits.values()]).sum()
        loss.backward()
        return logits

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.embedding.step(0.01)


def agree(sides: dict[str, Side]) -> None:
    """Logits and gradients of all sides are those of the first."""
    first, *others = sides.values()
    logits = first.forward_backward()
    for other in others:
        for task, found in other.forward_backward().items():
            torch.testing.assert_close(found, logits[task], rtol=1e-3, atol=1e-4)
        for a, b in zip(other.model.parameters(), first.model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-2, atol=1e-4)
        other.embedding.discard()
    first.embedding.discard()


def compare(names: list[str], requests: int, longest: int, repeats: int) -> dict[str, Any]:
    """Rows per second of each side, and the speed of the first as a multiple of each other's (median over neighbours)."""
    sides = {name: Side(name, requests, longest) for name in names}
    agree(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(repeats + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side.step()
            if round_:
                times[name].append(time.perf_counter() - start)
    rows = requests * ROWS
    positions = {name: int(side.batch.events["purchase"]["time"].offsets[-1]) for name, side in sides.items()}
    return {
        "requests": requests,
        "rows": rows,
        "positions": positions,
        "rows_per_second": {name: round(rows / statistics.median(t)) for name, t in times.items()},
        "speed_ratio": {
            name: round(statistics.median(b / a for a, b in zip(times[names[0]], times[name], strict=True)), 3)
            for name in names[1:]
        },
    }


def peak(name: str, requests: int, longest: int) -> int:
    """Bytes that one step adds to this process's peak."""
    side = Side(name, requests, longest)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    side.step()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def memory(names: list[str], requests: int, longest: int) -> dict[str, Any]:
    """Peak of each side in a fresh process, and the first's as a share of each other's."""
    found = {}
    for name in names:
        command = [sys.executable, __file__, "--peak", name, str(requests), str(longest)]
        found[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    ratios = {name: round(found[names[0]] / found[name], 3) for name in names[1:]}
    return {"peak_mb": {name: round(n / 1e6) for name, n in found.items()}, "memory_ratio": ratios}


PADDED = ["ragged", "padded", "padded, dense mask"]


def main() -> None:
    """Compare all, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--requests", type=int, default=70)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.peak:
        print(peak(given.peak[0], int(given.peak[1]), int(given.peak[2])))
        return
    result: dict[str, Any] = {
        "environment": environment(),
        "threads": given.threads,
        "target": {"speed_ratio": ">= 1.8", "memory_ratio": "<= 0.6"},
        "model": "kunlun, defaults (width 32, 2 layers), one event type, 20 dense features",
    }
    few = max(given.requests // 4, 1)
    cases = {
        "ragged against padded, at most 512 events": (512, given.requests, PADDED),
        "ragged against padded, at most 1024 events": (1024, given.requests, PADDED),
        "ragged against padded, whole histories": (4122, few, PADDED[:2]),
        f"per request against per row, {ROWS} rows a request": (512, few, ["ragged", "per row"]),
    }
    for title, (longest, requests, names) in cases.items():
        result[title] = compare(names, requests, longest, given.repeats) | memory(names, requests, longest)
        print(f"{title}: {result[title]}", flush=True)
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
