"""A run that follows a folder: windows in order, each evaluated before it is trained on, exact after a stop."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from ranks import run_ranks
from synthetic import SyntheticReader, recipe, registry
from test_trainer import lines
from windows import arrive, following

from gem_core.errors import ConfigError, DataError
from gem_core.plugins import hookimpl
from gem_core.protocols import Callback, ComponentConfig
from gem_core.recipe import Follow
from gem_core.schema import Schema
from gem_core.train import Trainer, restore, train
from gem_core.train.checkpoint import complete, find
from gem_core.train.follow import Follower
from gem_core.train.measure import measure
from gem_core.train.publish import Publish


class Arrivals(Callback):
    """New files after a window; a signal after a step."""

    class Config(ComponentConfig):
        inbox: str
        after: dict[str, list[int]] = {}
        signal_at: int | None = None

    def __init__(self, config: Config) -> None:
        self.config = config

    def on_step(self, trainer: Trainer, step: int) -> None:
        if step == self.config.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_window(self, trainer: Trainer, name: str, metrics: Mapping[str, float]) -> None:
        for day in self.config.after.get(name, ()):
            arrive(Path(self.config.inbox), day)


class OwnData(SyntheticReader):
    """A reader that knows where its data is."""

    class Config(ComponentConfig):
        pass

    def __init__(self, config: Config, schema: Schema | None = None, seed: int = 0) -> None:
        super().__init__(SyntheticReader.Config(), schema, seed)


class Plugin:
    @staticmethod
    @hookimpl
    def gem_register_reader(register: Any) -> None:
        register("own-data", OwnData)

    @staticmethod
    @hookimpl
    def gem_register_callback(register: Any) -> None:
        register("arrivals", Arrivals)


def notes(run: Path, name: str) -> list[str]:
    return [row["text"] for row in lines(run, "text", "speed") if row["name"] == name]


def test_windows_are_evaluated_then_trained_on_in_order(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    for day in (2, 1):
        arrive(inbox, day)
    (inbox / ".day-0.parquet").write_text("half a file")
    arrivals = {"name": "arrivals", "inbox": str(inbox), "after": {"day-2.parquet": [3, 0]}}
    run = tmp_path / "run"
    result = train(following(run, inbox, callbacks=[arrivals]), registry(Plugin))
    base = 8  # 60 training rows, 8 a batch
    assert (result.status, result.step) == ("finished", base + 3 * 3)
    progressive = lines(run, "progressive")
    assert [row["step"] for row in progressive] == [base, base + 3, base + 6]
    assert all(row["click/rows"] == 20 and "click/ne" in row for row in progressive)
    last = json.loads(complete(run)[-1].part("trainer")["state"])
    assert (last["file"], last["file_ended"], last["windows"]) == ("day-3.parquet", True, 3)
    assert notes(run, "follow") == [
        "day-0.parquet came after day-2.parquet and is left out: windows go by name",
        "no new file within 0 s; 3 windows so far",
    ]
    assert result.best_step is None and find(run).step == result.step, "the newest is what counts"
    # What was measured before a window is what the checkpoint before it gives on it.
    reader = {"name": "parquet", "rows": str(inbox / "day-3.parquet")}
    before = next(c for c in complete(run) if c.step == base + 6)
    again = measure(restore(before.path, registry(Plugin), reader=reader), "train")
    assert again["click/logloss"] == pytest.approx(progressive[-1]["click/logloss"], rel=1e-6)


def test_a_file_that_comes_too_late_is_named(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    arrive(inbox, 2)
    arrivals = {"name": "arrivals", "inbox": str(inbox), "after": {"day-2.parquet": [1]}}
    result = train(following(tmp_path / "run", inbox, callbacks=[arrivals]), registry(Plugin))
    assert result.step == 8 + 3
    assert notes(tmp_path / "run", "follow")[0] == (
        "day-1.parquet came after day-2.parquet and is left out: windows go by name"
    )


@pytest.mark.parametrize("step", [9, 11, 13])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path, step: int) -> None:
    """In the middle of a window, at its last step, and in a later window; then with a file that came meanwhile."""
    inbox = tmp_path / "inbox"
    for day in (1, 2):
        arrive(inbox, day)
    whole = train(following(tmp_path / "whole", inbox), registry(Plugin))
    stop = {"name": "arrivals", "inbox": str(inbox), "signal_at": step}
    cut = train(following(tmp_path / "run", inbox, callbacks=[stop]), registry(Plugin))
    assert (cut.status, cut.step) == ("interrupted", step)
    again = train(following(tmp_path / "run", inbox), registry(Plugin))
    assert (again.status, again.step) == ("finished", whole.step)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    ends = [complete(tmp_path / name)[-1] for name in ("run", "whole")]
    for part in ("model", "embedding", "optimizer"):
        assert all(torch.equal(value, ends[1].part(part)[n]) for n, value in ends[0].part(part).items())
    arrive(inbox, 3)
    assert train(following(tmp_path / "run", inbox), registry(Plugin)).step == whole.step + 3


def test_the_file_in_hand_must_still_be_there(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    arrive(inbox, 1)
    stop = {"name": "arrivals", "inbox": str(inbox), "signal_at": 9}
    train(following(tmp_path / "run", inbox, callbacks=[stop]), registry(Plugin))
    (inbox / "day-1.parquet").unlink()
    with pytest.raises(DataError, match=r"day-1\.parquet: the run stands in the middle of this file"):
        train(following(tmp_path / "run", inbox), registry(Plugin))


def test_a_stop_file_and_the_number_of_steps_end_it(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    arrive(inbox, 1)
    short = following(tmp_path / "short", inbox, trainer={"max_steps": 10}, follow={"idle_s": None})
    assert train(short, registry(Plugin)).step == 10
    (inbox / "STOP").touch()
    result = train(following(tmp_path / "run", inbox, follow={"idle_s": None}), registry(Plugin))
    assert (result.status, result.step) == ("finished", 8)
    assert notes(tmp_path / "run", "follow") == [f"found {inbox / 'STOP'}; 0 windows so far"]


def test_waiting_looks_for_files_and_signals(tmp_path: Path) -> None:
    """With a clock of its own: three looks a second apart, then idle; a signal while waiting saves and ends."""
    now, naps = [0.0], [0.0]
    trainer = Trainer(
        following(tmp_path / "run", tmp_path / "inbox", follow={"poll_s": 1.0, "idle_s": 3.0}), registry()
    )
    options = trainer.recipe.follow
    assert options is not None

    class Interrupt:
        caught: str | None = None

    trainer._interrupt = Interrupt()  # type: ignore[assignment]

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        now[0] += seconds

    follower = Follower(trainer, options, clock=lambda: now[0], sleep=sleep)
    assert follower.run() == "finished"
    assert now[0] == pytest.approx(3.0) and max(naps) <= 0.2 + 1e-9
    saved: list[int] = []
    trainer.save = lambda: saved.append(1)  # type: ignore[method-assign]
    now[0], naps[:] = 0.0, []

    def interrupted(seconds: float) -> None:
        Interrupt.caught = "SIGTERM"

    assert Follower(trainer, options, clock=lambda: now[0], sleep=interrupted).run() == "interrupted"
    assert saved == [1]


def test_ranks_follow_together(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    for day in (1, 2):
        arrive(inbox, day)

    def on(rank: int) -> Any:
        return train(following(tmp_path / "run", inbox, parallel={"strategy": "ddp"}), registry(Plugin))

    one, two = run_ranks(2, tmp_path / "out", on)
    assert (one.step, one.status, one.validation) == (two.step, two.status, two.validation)
    assert [row["click/rows"] for row in lines(tmp_path / "run", "progressive")] == [20, 20]


def test_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"follow\.folder: .*/gone is no folder"):
        train(recipe(tmp_path / "run", follow={"folder": str(tmp_path / "gone")}), registry())
    with pytest.raises(ConfigError, match=r'follow: reader "own-data" has no option `rows`'):
        train(recipe(tmp_path / "own", data={"reader": "own-data"}, follow={"folder": str(tmp_path)}), registry(Plugin))
    with pytest.raises(ConfigError, match=r"follow: give trainer\.early_stop up"):
        recipe(tmp_path, follow={"folder": "x"}, trainer={"early_stop": {"patience": 1}})
    with pytest.raises(ValidationError):
        Follow(folder="x", poll_s=0)


def test_publish_runs_a_command_with_a_checkpoint(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    for day in (1, 2, 3):
        arrive(inbox, day)
    script = tmp_path / "export.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "assert 'RANK' not in os.environ\n"
        "assert (pathlib.Path(sys.argv[1]) / 'manifest.json').is_file()\n"
        "pathlib.Path(sys.argv[2]).write_text(sys.argv[1])\n"
    )
    command = f"{sys.executable} {script} {{checkpoint}} {{run}}/{{window}}-{{step}}.txt"
    publish = {"name": "publish", "windows": 2, "command": command}
    run = tmp_path / "run"
    result = train(following(run, inbox, callbacks=[publish, "publish"]), registry(Plugin))
    assert result.status == "finished"
    assert [p.name for p in run.glob("*.txt")] == ["day-2-14.txt"]
    assert (run / "day-2-14.txt").read_text().endswith("step-00000014")
    assert len(notes(run, "publish")) == 1 and notes(run, "publish")[0].endswith(": done")


@pytest.mark.parametrize(
    ("command", "said"), [("gem-no-such-command", "failed: No such file"), ("ls /no/such", "failed with exit code")]
)
def test_a_command_that_fails_is_noted_and_training_goes_on(tmp_path: Path, command: str, said: str) -> None:
    inbox = tmp_path / "inbox"
    arrive(inbox, 1)
    callbacks = [{"name": "publish", "command": command}]
    assert train(following(tmp_path / "run", inbox, callbacks=callbacks), registry(Plugin)).status == "finished"
    assert said in notes(tmp_path / "run", "publish")[0]


def test_publish_refuses_unknown_placeholders() -> None:
    with pytest.raises(ValidationError, match=r"no placeholders but \{checkpoint\}"):
        Publish.Config(command="gem export {chekpoint}")
