"""What goes wrong while a run writes, reads or compiles: what the message says and what is kept."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import recipe, registry
from windows import following

from gem_core.errors import ConfigError, DataError, GemError
from gem_core.train import Trainer, train
from gem_core.train import checkpoint as checkpoints
from gem_core.train.checkpoint import complete
from gem_core.train.compiled import compile_parts, compiling
from gem_core.train.writer import Writer, snapshot


def test_a_full_disk_in_the_background_reaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = checkpoints._write, []

    def fill(hidden: Path, step: int, *rest: Any) -> None:
        calls.append(threading.current_thread().name)
        if step > 4:
            (hidden / "model.pt").write_text("half")
            raise OSError(28, "No space left on device")
        real(hidden, step, *rest)

    monkeypatch.setattr(checkpoints, "_write", fill)
    chosen = recipe(tmp_path, trainer={"checkpoint_every": 4})
    with pytest.raises(GemError, match=r"step-00000008: cannot be written, .*earlier checkpoints are whole: make room"):
        train(chosen, registry())
    assert [c.step for c in complete(tmp_path)] == [4]
    assert calls == ["checkpoint", "checkpoint"]
    monkeypatch.undo()
    assert train(chosen, registry()).status == "finished", "the same command goes on"


@pytest.mark.parametrize("name", ["model.pt", "manifest.json"])
def test_a_truncated_newest_checkpoint_gives_way_to_the_older(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(recipe(tmp_path / "whole"), registry())
    train(recipe(tmp_path / "run"), registry())
    found = complete(tmp_path / "run")
    assert [c.step for c in found] == [15, 30]
    file = found[-1].path / name
    file.write_bytes(file.read_bytes()[:-20])
    assert train(recipe(tmp_path / "run"), registry()).test == whole.test
    assert "going on from the older step-00000015" in caplog.text and name in caplog.text
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_if_every_checkpoint_is_damaged_the_run_stops_and_says_so(tmp_path: Path) -> None:
    train(recipe(tmp_path, trainer={"max_steps": 3}), registry())
    (file,) = (tmp_path / "checkpoints").glob("*/embedding.pt")
    file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(DataError, match=r"embedding\.pt has 10 bytes, .*no older one is whole: .*resume=never"):
        train(recipe(tmp_path, trainer={"max_steps": 3}), registry())


def test_a_corrupt_window_keeps_what_was_trained(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    (inbox / "day-1.parquet").write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(DataError, match=r"day-1\.parquet: cannot be read as Parquet"):
        train(following(tmp_path / "run", inbox), registry())
    assert complete(tmp_path / "run")[-1].step == 8
    (inbox / "day-1.parquet").unlink()
    assert train(following(tmp_path / "run", inbox), registry()).step == 8


def test_the_writer_runs_one_job_at_a_time_and_gives_back_its_fault() -> None:
    gate, order = threading.Event(), []
    writer = Writer()
    writer.start(lambda: (gate.wait(), order.append(1)))
    writer.check()  # still at work
    gate.set()
    writer.start(lambda: order.append(2))
    writer.wait()
    assert order == [1, 2]
    writer.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.wait()
    with pytest.raises(ZeroDivisionError), writer:
        writer.start(lambda: 1 / 0)
    with pytest.raises(KeyError), writer:
        writer.start(lambda: 1 / 0)
        raise KeyError


def test_a_snapshot_is_not_changed_by_training() -> None:
    weight = torch.ones(2)
    copy = snapshot({"model": {"weight": weight, "text": "x", "list": [weight]}})
    weight.zero_()
    assert copy["model"]["weight"].tolist() == [1, 1] == copy["model"]["list"][0].tolist()


def test_checkpoints_in_the_foreground_are_the_same(tmp_path: Path) -> None:
    for name, apart in (("a", True), ("b", False)):
        train(recipe(tmp_path / name, trainer={"async_checkpoints": apart, "epochs": 1}), registry())
    one, two = (complete(tmp_path / name)[-1].part("model") for name in ("a", "b"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_without_a_compiler_or_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r'no C\+\+ compiler "no-such-compiler".*set trainer\.compile=false'):
        Trainer(recipe(tmp_path, trainer={"compile": True}), registry())

    class Failed(Exception):
        __module__ = "torch._inductor.exc"

    with pytest.raises(GemError, match=r"cannot be compiled \(no such op\); set trainer\.compile=false"), compiling():
        raise Failed("\nno such op\nmore")
    with pytest.raises(ValueError, match=r"^mine$"), compiling():
        raise ValueError("mine")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, but here a warning is an error
def test_compiled_parts_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the compiler's front end alone, which takes no C++ compiler, and the very look-up of tables."""
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: real(self, backend="eager", **options))
    chosen = recipe(tmp_path / "run", model={"name": "tiny", "dropout": 0.0}, trainer={"epochs": 1})
    plain, compiled = Trainer(chosen, registry()), Trainer(chosen, registry())
    compile_parts(compiled.parts)
    for batch, _ in list(plain.parts.batches("train"))[:3]:
        found = [t.stepper.gradients([batch]) for t in (plain, compiled)]
        assert found[0].loss == pytest.approx(found[1].loss, rel=1e-5)
        for t in (plain, compiled):
            t.stepper.apply(1.0)
    for name, value in plain.parts.embedding.state().items():
        torch.testing.assert_close(compiled.parts.embedding.state()[name], value)
    assert compiled.strategy.state().keys() == plain.strategy.state().keys()
