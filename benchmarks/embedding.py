"""Time of the sparse side of one training step on a processor: look-up, backward and row-wise AdaGrad of all tables.

    python benchmarks/embedding.py [--threads 1] [--repeats 30] [--out benchmarks/results/embedding.json]

A step as of the demo's recipe: 20,000 events x 5 fields and 2,000 rows x 8 features, ids by a power law. "torch" is
`nn.Embedding` per table with sparse gradients and `torch.optim.Adagrad` (one moment per number, not per row). The
second part times one update of one table in each form (dense, distinct rows by bitmap, by sorting): what the rule of
size rests on. Times are medians of processor time, so what else runs on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from gem_core.data.batch import Jagged
from gem_core.protocols import Table
from gem_core.report.environment import environment
from gem_core.train import TorchEmbedding
from gem_core.train import embedding as module

EVENTS, ROWS = 20_000, 2_000
TABLES = {  # name: rows, event fields, row features
    "product": (90_000, 1, 1),
    "type": (2_400, 1, 1),
    "category": (320, 1, 1),
    "brand": (4_800, 1, 1),
    "store": (460, 1, 1),
    "display": (12, 0, 1),
    "mailer": (12, 0, 1),
    "segment": (40, 0, 1),
}
FORMS = {"dense": (1e18, 0.0), "bitmap": (0.0, 1e18), "sorted": (0.0, 0.0)}


def ids(rows: int, count: int) -> Tensor:
    """Ids of a power law over a table, in no order."""
    return (torch.rand(count) ** 3 * rows).long()


def timed(run: Callable[[], None], repeats: int) -> float:
    """Median milliseconds of processor time."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times) * 1e3


def step_times(dim: int, repeats: int) -> dict[str, float]:
    """Milliseconds of the parts of a step of all tables, and of torch's."""
    tables: list[Table] = []
    wanted: dict[str, Tensor | Jagged] = {}
    for name, (rows, fields, features) in TABLES.items():
        events = {f"event.{name}.{i}": ids(rows, EVENTS) for i in range(fields)}
        values = {f"{name}.{i}": Jagged(ids(rows, ROWS), torch.arange(ROWS + 1), 1) for i in range(features)}
        tables.append(Table(name, rows, dim, (*events, *values)))
        wanted |= {**events, **values}
    ours = TorchEmbedding(TorchEmbedding.Config(), seed=0)
    ours.setup(tables)
    grads = {key: torch.randn(v.shape) for key, v in ours.lookup(wanted).items()}
    out: dict[str, float] = {}

    def lookup() -> None:
        ours.lookup(wanted)

    def backward() -> None:
        found = ours.lookup(wanted)
        torch.autograd.backward(list(found.values()), [grads[key] for key in found])
        ours.discard()

    def whole() -> None:
        found = ours.lookup(wanted)
        torch.autograd.backward(list(found.values()), [grads[key] for key in found])
        ours.step(0.01)

    theirs = {t.name: nn.Embedding(t.rows, dim, sparse=True) for t in tables}
    adagrad = torch.optim.Adagrad([e.weight for e in theirs.values()], lr=0.01)
    flat = {key: v.values if isinstance(v, Jagged) else v for key, v in wanted.items()}

    def torch_step() -> None:
        found = {key: theirs[t.name](flat[key]) for t in tables for key in t.features}
        torch.autograd.backward(list(found.values()), [grads[key] for key in found])
        adagrad.step()
        adagrad.zero_grad()

    out["lookup_ms"] = timed(lookup, repeats)
    out["lookup_and_backward_ms"] = timed(backward, repeats)
    out["step_ms"] = timed(whole, repeats)
    out["torch_step_ms"] = timed(torch_step, repeats)
    out["ratio"] = out["torch_step_ms"] / out["step_ms"]
    return out


def form_times(rows: int, count: int, dim: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one update in each form."""
    embedding = TorchEmbedding(TorchEmbedding.Config(), seed=0)
    embedding.setup([Table("t", rows, dim, ("f",))])
    chosen, grad = ids(rows, count), torch.randn(count, dim)
    out = {}
    before = module.DENSE_UP_TO, module.BITMAP_UP_TO
    for form, bounds in FORMS.items():
        module.DENSE_UP_TO, module.BITMAP_UP_TO = bounds

        def update() -> None:
            embedding.lookup({"f": chosen})["f"].backward(grad)
            embedding.step(0.01)

        out[form] = timed(update, repeats)
    module.DENSE_UP_TO, module.BITMAP_UP_TO = before
    return out


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    result: dict[str, object] = {"environment": environment(), "threads": options.threads}
    steps = {}
    for dim in (16, 64):
        steps[f"dim {dim}"] = step_times(dim, options.repeats)
        print(f"step, dim {dim}:", json.dumps({k: round(v, 2) for k, v in steps[f"dim {dim}"].items()}), flush=True)
    forms = {}
    for rows in (1_000, 5_000, 20_000, 40_000, 90_000, 400_000, 2_000_000):
        key = f"{rows} rows, {EVENTS} ids, dim 16"
        forms[key] = form_times(rows, EVENTS, 16, options.repeats)
        print(f"update, {key}:", json.dumps({k: round(v, 2) for k, v in forms[key].items()}), flush=True)
    result |= {"step": steps, "update_ms": forms}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
