"""The line that a run begins its log with."""

from __future__ import annotations

import torch

from gem_core.train.build import Parts


def description(parts: Parts, step: int, total_steps: int, peak: float) -> str:
    """What is trained, how long, and on what.

    Args:
        step: where the run starts.
        peak: the machine's operations per second.
    """
    dense = sum(p.numel() for p in parts.model.parameters())
    sparse = sum(t.numel() for name, t in parts.embedding.state().items() if name.endswith(".weight"))
    start = f"from step {step}" if step else "from the start"
    ranks = f"{parts.strategy.world} ranks, " if parts.strategy.world > 1 else ""
    return (
        f"{parts.recipe.name}: model {parts.recipe.model.name}, {dense:,} dense parameters, {sparse:,} in tables; "
        f"about {total_steps} steps, {start}; {ranks}{parts.strategy.device}, {torch.get_num_threads()} threads, "
        f"matrix product peak {peak / 1e9:.0f} GFLOP/s"
    )
