"""A run that was killed or interrupted goes on to the very bits of one that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import recipe, registry

from gem_core.data.position import redistribute
from gem_core.errors import DataError
from gem_core.plugins import hookimpl
from gem_core.protocols import Callback, ComponentConfig
from gem_core.recipe import Recipe
from gem_core.train import Trainer, train
from gem_core.train.checkpoint import complete
from gem_core.train.interrupt import Interrupt


class Signal(Callback):
    """Sends this process a signal after a step."""

    class Config(ComponentConfig):
        step: int
        signal: str

    def __init__(self, config: Config) -> None:
        self.config = config

    def on_step(self, trainer: Trainer, step: int) -> None:
        if step == self.config.step:
            os.kill(os.getpid(), getattr(signal, self.config.signal))


class Plugin:
    @staticmethod
    @hookimpl
    def gem_register_callback(register: Any) -> None:
        register("signal", Signal)


def chosen(folder: Path, interrupted: tuple[int, str] | None = None, workers: int = 0) -> Recipe:
    """Two epochs of 8 steps of two batches (the last of one); checkpoints lie between log lines."""
    callbacks = [] if interrupted is None else [{"name": "signal", "step": interrupted[0], "signal": interrupted[1]}]
    return recipe(
        folder,
        data={"workers": workers},
        trainer={"accumulate": 2, "checkpoint_every": 5, "log_every": 3, "keep_checkpoints": 3},
        callbacks=callbacks,
    )


def assert_same_end(one: Path, two: Path) -> None:
    """The same metrics file, byte for byte, and the same last checkpoint, bit for bit."""
    assert (one / "metrics.jsonl").read_bytes() == (two / "metrics.jsonl").read_bytes()
    last = [complete(run)[-1] for run in (one, two)]
    assert last[0].step == last[1].step == 16
    for part in ("model", "embedding", "optimizer"):
        tensors, others = last[0].part(part), last[1].part(part)
        assert tensors.keys() == others.keys()
        for name, value in tensors.items():
            assert torch.equal(value, others[name]), name
    trainers = [checkpoint.part("trainer") for checkpoint in last]
    assert trainers[0]["state"] == trainers[1]["state"]
    assert torch.equal(trainers[0]["ranks"][0]["random"]["torch"], trainers[1]["ranks"][0]["random"]["torch"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(chosen(folder), registry(Plugin))
    return folder


@pytest.mark.parametrize(
    ("name", "step", "workers"), [("SIGTERM", 4, 0), ("SIGINT", 8, 0), ("SIGTERM", 11, 2), ("SIGINT", 16, 0)]
)
def test_after_a_signal(whole: Path, tmp_path: Path, name: str, step: int, workers: int) -> None:
    result = train(chosen(tmp_path, (step, name), workers), registry(Plugin))
    assert (result.status, result.step, result.exit_code, result.test) == ("interrupted", step, 1, {})
    assert result.checkpoint == tmp_path / "checkpoints" / f"step-{step:08d}"
    assert f"{name}: saved at step {step}; the same command goes on" in (tmp_path / "speed.jsonl").read_text()
    again = train(chosen(tmp_path, workers=workers), registry(Plugin))
    assert (again.status, again.step) == ("finished", 16)
    assert_same_end(whole, tmp_path)


@pytest.mark.parametrize("step", [13])
def test_after_kill_9(whole: Path, tmp_path: Path, step: int) -> None:
    """Of a run with reader processes: they end with it, silently, and leave its folder free."""
    program = f"""
        import pathlib, test_resume
        from synthetic import registry
        from gem_core.train import train
        recipe = test_resume.chosen(pathlib.Path({str(tmp_path)!r}), ({step}, "SIGKILL"), workers=2)
        train(recipe, registry(test_resume.Plugin))
    """
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=here, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert complete(tmp_path)[-1].step in (8, 10), "that of step 10 may still have been on its way to the disk"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # the kill may come in the middle of a line
    (tmp_path / "checkpoints" / ".step-00000013").mkdir()
    train(chosen(tmp_path, workers=2), registry(Plugin))
    assert_same_end(whole, tmp_path)


def test_other_data_is_refused(tmp_path: Path) -> None:
    train(chosen(tmp_path, (4, "SIGTERM")), registry(Plugin))
    run = complete(tmp_path)[-1]
    schema = run.schema()
    assert schema.fitted is not None
    changed = schema.model_copy(update={"fitted": schema.fitted.model_copy(update={"rows": 961})})
    trainer = Trainer(chosen(tmp_path), registry(Plugin))
    object.__setattr__(trainer.parts, "schema", changed)
    with pytest.raises(DataError, match="the schema fitted to the data differs"):
        trainer.run()


def test_another_number_of_ranks_shares_what_is_left(tmp_path: Path) -> None:
    train(chosen(tmp_path, (4, "SIGTERM")), registry(Plugin))
    run = complete(tmp_path)[-1]
    saved = [json.loads(own["reader"]) for own in run.part("trainer")["ranks"]]
    trainer = Trainer(chosen(tmp_path), registry(Plugin))
    trainer.strategy.world, trainer.strategy.rank = 2, 1
    trainer._load(run)
    assert trainer.state.step == run.step
    assert trainer.reader_state == redistribute(saved, 2)[1]


def test_a_second_signal_acts_as_it_would_without_us() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt), Interrupt() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.caught == "SIGINT"
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def handlers() -> list[Any]:
        with Interrupt():
            return [signal.getsignal(s) for s in Interrupt.SIGNALS]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handlers).result() == [signal.getsignal(s) for s in Interrupt.SIGNALS]


def test_best_survives_a_resume(tmp_path: Path) -> None:
    result = train(chosen(tmp_path), registry(Plugin))
    state = json.loads(complete(tmp_path)[-1].part("trainer")["state"])
    assert state["best_step"] == result.best_step
    assert state["best_metrics"] == result.validation
