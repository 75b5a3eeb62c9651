"""Folders of runs as the trainer leaves them, with made-up figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml


def write_run(folder: Path, name: str, seed: int = 0, ne: float = 0.8, auc: float = 0.75, fast: bool = True) -> Path:
    """A run with one common objective ("click", on two surfaces) and a rare one ("buy", on none of its own).

    `fast`: with the speed lines of a neural model; else only how long it took.
    """
    folder.mkdir(parents=True)
    recipe = {"name": name, "seed": seed, "model": {"name": name.lower()}}
    test: dict[str, Any] = {"joint/ne": ne, "joint/rows": 1100.0}
    for at, rows in {"click": 1000.0, "click/feed": 600.0, "click/a|b": 400.0, "buy": 100.0}.items():
        test |= {f"{at}/rows": rows, f"{at}/positives": rows / 2, f"{at}/ne": ne, f"{at}/auc": auc}
        test |= {f"{at}/calibration": 1.05, f"{at}/logloss": ne / 2}
    test |= {"click/gauc": auc - 0.01}
    for i in range(10):
        test |= {f"click/decile_{i}/rate": 0.01 * i, f"click/decile_{i}/predicted": 0.01 * i + 0.001}
    lines = [
        {"kind": "train", "step": 10, "epoch": 0.0, "click/loss": 0.6, "lr": 0.1},
        {"kind": "validation", "step": 10, "click/ne": 1.2, "joint/ne": 1.2},
        {"kind": "train", "step": 20, "epoch": 0.0, "click/loss": 0.5, "lr": 0.1},
        {"kind": "validation", "step": 20, "click/ne": ne + 0.01, "joint/ne": ne + 0.01},
        {"kind": "test", "step": 20, **test},
    ]
    speed = [
        {"kind": "text", "step": 0, "name": "run", "text": "a model"},
        {
            "kind": "speed",
            "step": 10,
            "seconds": 2.0,
            "samples_per_s": 50.0,
            "gflops_per_step": 0.1,
            "fill": 0.5,
            "mfu": 0.1,
            "rss_gib": 1.25,
        },
        {
            "kind": "speed",
            "step": 20,
            "seconds": 6.0,
            "samples_per_s": 50.0,
            "gflops_per_step": 0.3,
            "fill": 1.0,
            "mfu": 0.1,
            "rss_gib": 1.5,
        },
    ]
    if not fast:
        lines = [line for line in lines if line["kind"] != "train"]
        speed = [{"kind": "speed", "step": 20, "seconds": 8.0}]
    result = {
        "status": "finished", "step": 20, "best_step": 20 if fast else None, "validation": lines[-2], "test": test
    }  # fmt: skip
    result["validation"] = {k: v for k, v in result["validation"].items() if "/" in k}  # type: ignore[attr-defined]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "speed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in speed))
    return folder
