"""Console, JSON lines, TensorBoard; the profiler; the meter."""

from __future__ import annotations

import json
import os
import pty
import sys
from pathlib import Path

import pytest
import torch
from synthetic import TinyModel, fitted_schema, make_batch, recipe, registry
from torch import nn

from gem_core.errors import ConfigError
from gem_core.train import TorchEmbedding, train
from gem_core.train.flops import measure_peak, mfu
from gem_core.train.meter import Meter
from gem_core.train.trackers import Console, JsonLines, TensorBoard

TRAIN = {"epoch": 0.0, "click/loss": 0.43123, "click/auc": 0.7, "joint/ne": 0.912345, "lr": 0.01}
SPEED = {"progress": 0.5, "samples_per_s": 12_345.6, "events_per_s": 99.5, "mfu": 0.123}


def test_console_writes_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    console = Console(Console.Config(), folder=tmp_path, resume=0)
    console.scalars(20, TRAIN)
    assert capsys.readouterr().out == ""
    console.scalars(20, SPEED, "speed")
    console.scalars(20, {"click/ne": 0.9, "click/feed/ne": 0.8, "click/rows": 5.0, "joint/ne": 0.91}, "validation")
    console.text(20, "run", "[bold] is not markup here")
    console.figure(20, "curve", object())
    console.close()
    assert capsys.readouterr().out.splitlines() == [
        "train step 20  epoch 0 | click/loss 0.4312 | joint/ne 0.9123 | lr 0.01 | progress 0.5 | 12.3k samples/s | "
        "99.5 events/s | mfu 0.123",
        "validation step 20  click/ne 0.9 | joint/ne 0.91",
        "run step 20  [bold] is not markup here",
    ]


def test_console_shows_a_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        console = Console(Console.Config(), folder=tmp_path, resume=0)
        console.scalars(20, TRAIN)
        console.scalars(20, SPEED, "speed")
        console.close()
        terminal.flush()
        shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "training" in shown
    assert "50 %" in shown
    assert "12.3k samples/s" in shown


def test_json_lines_go_on_behind_the_checkpoint(tmp_path: Path) -> None:
    def rows(name: str) -> list[tuple[str, int]]:
        return [(r["kind"], r["step"]) for r in map(json.loads, (tmp_path / name).read_text().splitlines())]

    first = JsonLines(JsonLines.Config(), folder=tmp_path, resume=0)
    for step in (1, 2, 3):
        first.scalars(step, {"a": 1.0})
        first.scalars(step, {"b": 1.0}, "speed")
    first.scalars(2, {"c": 1.0}, "test")
    first.text(3, "note", "x")
    first.figure(3, "curve", object())
    first.close()
    JsonLines(JsonLines.Config(), folder=tmp_path, resume=2).close()
    assert rows("metrics.jsonl") == [("train", 1), ("train", 2)]
    assert rows("speed.jsonl") == [("speed", 1), ("speed", 2)]
    JsonLines(JsonLines.Config(), folder=tmp_path, resume=0).close()
    assert rows("metrics.jsonl") == []


def test_tensorboard_writes_events_and_purges(tmp_path: Path) -> None:
    from matplotlib.figure import Figure
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(TensorBoard.Config(), folder=tmp_path, resume=0)
    for step in (1, 2, 3):
        first.scalars(step, {"loss": float(step)})
    first.close()
    second = TensorBoard(TensorBoard.Config(), folder=tmp_path, resume=2)
    second.scalars(3, {"loss": 30.0})
    second.text(3, "note", "x")
    second.figure(3, "curve", Figure())
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    TensorBoard(TensorBoard.Config(), folder=tmp_path, resume=0).close()
    fresh = EventAccumulator(str(tmp_path / "tensorboard"))
    fresh.Reload()
    assert fresh.Tags()["scalars"] == []


def test_tensorboard_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install gem-core\[tensorboard\]"):
        TensorBoard(TensorBoard.Config(), folder=tmp_path, resume=0)


@pytest.mark.parametrize(("skip", "steps"), [(0, 2), (3, 2), (13, 9)])
def test_the_profiler_says_where_a_step_s_time_goes(tmp_path: Path, skip: int, steps: int) -> None:
    profiler = {"name": "profiler", "skip": skip, "steps": steps, "rows": 40}
    train(recipe(tmp_path, trainer={"epochs": 1}, callbacks=[profiler]), registry())
    text = (tmp_path / "profile.txt").read_text()
    for part in ("waiting for data", "forward", "forward: hidden", "forward: table look-up", "loss", "backward"):
        assert f"\n{part} " in text
    for part in ("dense update", "table update", "metrics", "other"):
        assert f"\n{part} " in text
    *shares, total = [float(line.split()[-1].rstrip("%")) for line in text.split("\n\n")[0].splitlines()[1:]]
    assert total == 100 and sum(shares) == pytest.approx(100, abs=1)
    # In the last case the run is over before the operations' turn.
    listed = f"\nthe next {steps} steps, operations by their own time:" in text and "aten::" in text
    assert listed == (skip < 13) == ("the next" in text)


def test_peak_and_the_share_of_it() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert measure_peak(torch.device("cpu"), size=64, seconds=0.0) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert mfu(1e9, seconds=2.0, peak=3e9) == pytest.approx(0.5)


def test_the_meter_adds_up_windows() -> None:
    embedding = TorchEmbedding(TorchEmbedding.Config(), seed=0)
    model = TinyModel(TinyModel.Config(), schema=fitted_schema(), embedding=embedding)
    meter = Meter(model, 1e9, torch.device("cpu"))
    batches = [make_batch(4, seed=0), make_batch(2, seed=1)]
    with meter.paused(), meter.waiting():
        pass
    meter.add(batches)
    meter.add(batches)
    got = meter.read()
    events = sum(b.events["click"]["time"].values.numel() for b in batches)
    assert got["samples_per_s"] / got["events_per_s"] == pytest.approx(24 / events)
    assert got["gflops_per_step"] == sum(sum(model.flops(b).values()) for b in batches) / 1e9
    assert got["fill"] == 1.0
    assert 0 <= got["wait_share"] <= 1
    assert got["rss_gib"] > 0.01 and "gpu_gib" not in got
    meter.reset()
    assert "fill" not in meter.read()
    plain = nn.Linear(1, 1)
    plain.flops = lambda batch: {}  # type: ignore[assignment]
    other = Meter(plain, 1e9, torch.device("cpu"))
    other.add(batches)
    assert "fill" not in other.read()


def test_the_memory_of_a_gpu_counts_from_the_run_s_start(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {torch.device("cuda:1"): 5 * 2**30}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.__getitem__)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update({device: 3 * 2**29}))
    assert Meter(nn.Linear(1, 1), 1e9, torch.device("cuda:1")).read()["gpu_gib"] == 1.5
