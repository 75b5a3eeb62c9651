"""An exported program where nothing of GEM is imported but `gem_core.ops`, whose operators it calls.

As a script it runs a program on inputs and writes what comes out: `python -P fresh.py FORMAT PROGRAM INPUTS OUTPUTS`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import gem_core.ops  # noqa: F401 - the operators gem::*

FILES = {"torch-export": "program.pt2", "aoti": "program.aoti.pt2"}
"""The program's file by format."""


def program(form: str, file: str) -> Callable[[dict[str, torch.Tensor]], dict[str, dict[str, torch.Tensor]]]:
    """Tensors by name -> {"logits": {task: (B,)}, "probabilities": {task: (B,)}}."""
    if form == "aoti":
        loaded: Any = torch._inductor.aoti_load_package(file)
    else:
        loaded = torch.export.load(file).module()
    return loaded  # type: ignore[no-any-return]


def main(form: str, file: str, inputs: str, outputs: str) -> None:
    """Write {"scores": one for each of the inputs, "load_s": seconds to load, "first_s": seconds of the first call}."""
    batches = torch.load(inputs)
    start = time.perf_counter()
    run = program(form, file)
    loaded = time.perf_counter()
    with torch.no_grad():
        scores = [run(batches[0])]
        first = time.perf_counter()
        scores += [run(batch) for batch in batches[1:]]
    torch.save({"scores": scores, "load_s": loaded - start, "first_s": first - loaded}, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
