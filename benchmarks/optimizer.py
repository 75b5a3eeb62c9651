"""Forms of AdamW and of gradient clipping for a dense model of many small parameters, on a processor.

    python benchmarks/optimizer.py [--threads 1] [--repeats 30] [--out benchmarks/results/optimizer.json]

122 parameters of 1.0 M numbers in all. "import" is what making a `torch.optim.AdamW` costs at the start of a process,
which gem-core's optimiser avoids by calling the functional form. Times are medians of processor time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from embedding import timed
from torch import nn
from torch.optim.adamw import adamw

from gem_core.report.environment import environment

SHAPES = [(256, 256)] * 12 + [(256,)] * 40 + [(64, 64)] * 40 + [(128, 8)] * 30
IMPORT = """
import time, torch
p = torch.nn.Parameter(torch.zeros(2, 2))
start = time.process_time()
torch.optim.AdamW([p])
print(time.process_time() - start)
"""


def adamw_times(repeats: int) -> dict[str, float]:
    """Milliseconds of one update by each form."""
    params, grads = ([torch.randn(s) for s in SHAPES] for _ in range(2))
    first, second = ([torch.rand(s) for s in SHAPES] for _ in range(2))
    steps = [torch.zeros(()) for _ in SHAPES]
    out = {}
    for form in ("fused", "foreach", "loop"):

        def update(form: str = form) -> None:
            adamw(
                params,
                grads,
                first,
                second,
                [],
                steps,
                fused=form == "fused",
                foreach=form == "foreach",
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=1e-3,
                weight_decay=0.01,
                eps=1e-8,
                maximize=False,
            )

        out[form] = timed(update, repeats)
    return out


def clip_times(repeats: int) -> dict[str, float]:
    """Milliseconds of one clip by each form."""
    params = [nn.Parameter(torch.randn(s)) for s in SHAPES]
    for p in params:
        p.grad = torch.randn_like(p)
    out = {}
    for name, form in {"foreach": True, "loop": False, "default": None}.items():

        def clip(form: bool | None = form) -> None:
            nn.utils.clip_grad_norm_(params, 1.0, foreach=form)

        out[name] = timed(clip, repeats)
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
    imported = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
    result = {
        "environment": environment(),
        "threads": options.threads,
        "adamw_ms": adamw_times(options.repeats),
        "clip_ms": clip_times(options.repeats),
        "import_s": float(imported),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
