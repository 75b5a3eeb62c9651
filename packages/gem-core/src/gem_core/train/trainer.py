"""The training loop. `train(recipe)` is all that most need; `Trainer` is what callbacks see.

One optimiser step: take `accumulate` batches, compute the gradient of all of them over all ranks (`step.py`), check it,
and move the dense parameters and the tables. Nothing in a step waits for metrics, trackers or a checkpoint's file. Every
rank takes the same decisions, as it makes them of numbers that all ranks share.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from gem_core.data.batch import Batch
from gem_core.data.position import redistribute
from gem_core.errors import ConfigError, DataError, GemError
from gem_core.plugins import Registry, default_registry
from gem_core.protocols import Callback, Metric, StopTraining, Tracker
from gem_core.recipe import Recipe, resolve
from gem_core.train import checkpoint as checkpoints
from gem_core.train import fault, seeds
from gem_core.train.build import Parts, build, create
from gem_core.train.checkpoint import Checkpoint
from gem_core.train.compiled import compile_parts, compiling
from gem_core.train.describe import description
from gem_core.train.flops import measure_peak
from gem_core.train.folder import locked, write_whole
from gem_core.train.follow import Follower
from gem_core.train.interrupt import Interrupt
from gem_core.train.measure import calibrate, measure, merged
from gem_core.train.memory import enough_memory
from gem_core.train.meter import Meter, over_ranks
from gem_core.train.optimizer import lr_factor
from gem_core.train.phases import Phases
from gem_core.train.state import Result, State, Status
from gem_core.train.step import Gradients, Stepper
from gem_core.train.warm import warm_start
from gem_core.train.writer import Writer, snapshot

Resume = Literal["auto", "never", "must"]


def train(recipe: Recipe, registry: Registry | None = None, resume: Resume = "auto", test: bool = True) -> Result:
    """Train by a recipe and evaluate the best checkpoint on the test split.

    Args:
        registry: where plugin parts are looked up; None: the installed plugins.
        resume: "auto" goes on from the newest checkpoint of `recipe.folder` if there is one, "must" fails without one,
            "never" deletes the folder's checkpoints and starts over.
        test: evaluate on the test split at the end.

    Raises:
        ConfigError: the recipe names something unknown, cannot resume, or its folder is in use or cannot be written.
        DataError: data or a checkpoint are not what they should be.
        GemError: the loss is not finite or explodes, and the policy is to stop; memory or the disk is full.
    """
    registry = default_registry() if registry is None else registry
    recipe = resolve(recipe, registry)
    with locked(recipe.folder), enough_memory():
        return Trainer(recipe, registry, test).run(resume)


class Trainer:
    """One run. Callbacks may read every public attribute; `note` writes a text to the trackers."""

    def __init__(self, recipe: Recipe, registry: Registry, test: bool = True) -> None:
        self.recipe = recipe = resolve(recipe, registry)
        self.options = recipe.trainer
        self.folder = recipe.folder
        if self.options.threads is not None:
            torch.set_num_threads(self.options.threads)
        self.parts = build(recipe, registry)
        self.strategy = self.parts.strategy
        if self.options.compile:
            compile_parts(self.parts)
        self.phase = Phases(self.strategy.device)
        self.stepper = Stepper(self.parts, self.phase)
        self.state = State()
        self.total_steps = self._total_steps()
        self.watched = self.options.early_stop.metric if self.options.early_stop else "joint/ne"
        self.callbacks: list[Callback] = [
            create(registry, "callback", c, f"callbacks.{i}") for i, c in enumerate(recipe.callbacks)
        ]
        self.trackers: list[Tracker] = []
        self._test = test
        self._registry = registry
        self.reader_state: dict[str, Any] = {"epoch": 0}
        self._window: list[Metric] = self.parts.metrics(exact=False)
        self._writer = Writer()
        self._saved: int | None = None

    def _total_steps(self) -> int:
        """Length of the schedule: `max_steps`, or the epochs at `batch_rows` rows a batch, whichever is less."""
        rows = self.parts.schema.require_fitted().rows / self.strategy.world
        steps = self.options.epochs * math.ceil(math.ceil(rows / self.recipe.data.batch_rows) / self.options.accumulate)
        return max(1, min(steps, self.options.max_steps or steps))

    # ---- the run -----------------------------------------------------------------------------------------------

    def run(self, resume: Resume = "auto") -> Result:
        """See `train`."""
        with ExitStack() as stack:
            stack.callback(self.strategy.close)
            stack.enter_context(compiling())
            if self.options.deterministic:  # not touched otherwise: setting it imports the compiler, seconds
                stack.enter_context(seeds.deterministic())
            self._interrupt = stack.enter_context(Interrupt())
            peak = measure_peak(self.strategy.device)
            seeds.seed_all(self.recipe.seed + self.strategy.rank)
            self._check_splits()
            self._start(resume)
            stack.callback(self._close)
            stack.enter_context(self._writer)
            self.meter = Meter(self.parts.model, peak, self.strategy.device)
            self.note("run", description(self.parts, self.state.step, self.total_steps, peak))
            for text in getattr(self.parts.model, "notes", ()):
                self.note("model", text)
            follower = None if self.recipe.follow is None else Follower(self, self.recipe.follow)
            try:
                for callback in self.callbacks:
                    callback.on_start(self)
                status = self._epochs()
                if follower is not None and status == "finished" and not self.done():
                    status = follower.run()
            except StopTraining:
                status = "stopped"
            return self._finish(status)

    def _check_splits(self) -> None:
        """Read what will be evaluated now: a fault in it is not to wait until the model is trained. Not what is streamed."""
        if self.parts.calibrator is not None and "validation" not in self.parts.reader.splits():
            raise ConfigError("calibration: it is fitted on the validation split, which the reader does not have")
        prepare = getattr(self.parts.reader, "prepare", None)
        if prepare is not None:
            for split in self.parts.reader.splits():
                prepare(split)

    def _start(self, resume: Resume) -> None:
        """Load the newest checkpoint if asked to, and open the trackers behind it."""
        first = self.strategy.rank == 0
        if resume == "never" and first:
            checkpoints.clear(self.folder)
        # The first rank chooses for all: looking tidies up what a killed run left.
        found = self.strategy.gather(checkpoints.newest(self.folder) if first else None)[0]
        if resume == "must" and found is None:
            raise ConfigError(f"resume=must: {self.folder} has no complete checkpoint; start with resume=auto")
        warm = None
        if found is not None:
            self._load(found)
        elif self.options.warm_start is not None:
            warm = warm_start(self.parts, checkpoints.find(self.options.warm_start))
        if first:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "recipe.yaml", self.recipe.to_yaml())
            context: dict[str, Any] = {"folder": self.folder, "resume": self.state.step}
            for i, tracker in enumerate(self.recipe.trackers):
                self.trackers.append(create(self._registry, "tracker", tracker, f"trackers.{i}", **context))
            if warm is not None:
                write_whole(self.folder / "warm_start.json", json.dumps(warm.plain(), indent=1))
                self.note("warm start", str(warm))

    def _close(self) -> None:
        for tracker in self.trackers:
            tracker.close()

    def _epochs(self) -> Status:
        self.parts.module.train()
        self._check_patience()  # a run that had stopped early is over when it is resumed
        while self.state.epoch < self.options.epochs and not self.done():
            ended = self.train_on(self.parts)
            if ended is not None:
                return ended
            self.log()
            self.state.epoch += 1
            self.reader_state = {"epoch": self.state.epoch}
            if self.options.evaluate_every is None:
                self.evaluate()
        return "finished"

    def done(self) -> bool:
        """Whether `max_steps` are done."""
        return self.options.max_steps is not None and self.state.step >= self.options.max_steps

    @property
    def signalled(self) -> bool:
        """Whether a signal came to this process."""
        return self._interrupt.caught is not None

    def train_on(self, parts: Parts) -> Status | None:
        """Train on what is left of a pass over the training split; how the run ends with it, if it does."""
        with closing(self._steps(parts)) as steps:
            for batches, position in steps:
                self._step(batches, position)
                self.reader_state = position
                self._after_step()
                if self.interrupted():
                    self.save()
                    return "interrupted"
                if self.done():
                    return "finished"
        return None

    def _steps(self, parts: Parts) -> Generator[tuple[list[Batch], dict[str, Any]], None, None]:
        """The batches of each step of a pass, none where only other ranks have some, and the reader's state after them."""
        self._writer.wait()  # reader processes are forked, and a thread that writes would be torn out of its work
        position = self.reader_state
        with closing(parts.batches("train", position)) as source:
            while True:
                taken = []
                with self.meter.waiting(), self.phase("waiting for data"):
                    for batch, position in source:  # noqa: B007 - the last one is yielded
                        taken.append(batch)
                        if len(taken) == self.options.accumulate:
                            break
                if self.strategy.agree_done(not taken):
                    return
                yield taken, position

    # ---- one step ----------------------------------------------------------------------------------------------

    def _step(self, batches: Sequence[Batch], position: Mapping[str, Any]) -> None:
        found = self.stepper.gradients(batches)
        self.state.norm = found.norm
        reason = fault.find_fault(found.loss, found.norm, self.state.running_loss, self.options.explode_factor)
        self.state.lr_factor = lr_factor(self.recipe.optimizer, self.state.step, self.total_steps)
        self.state.step += 1
        if reason is not None:
            self._skip(batches, position, reason)
            return
        self.stepper.apply(self.state.lr_factor)
        with self.phase("metrics"):
            self._count(batches, found)

    def _count(self, batches: Sequence[Batch], found: Gradients) -> None:
        """Take a good step into the window's metrics and the meter."""
        self.state.running_loss = fault.running_mean(found.loss, self.state.running_loss)
        for task, (total, count) in found.values.items():
            window = self.state.window.setdefault(task, [0.0, 0.0])
            window[0] += total
            window[1] += count
        for metric in self._window:
            for batch, output in zip(batches, found.logits, strict=True):
                metric.update(output, batch)
        self.meter.add(batches)

    def _skip(self, batches: Sequence[Batch], position: Mapping[str, Any], reason: str) -> None:
        """Forget a faulty step's gradients, or stop the run."""
        step = self.state.step
        rank = self.strategy.rank if self.strategy.world > 1 else None
        path = fault.dump(self.folder, step, batches, position, reason, rank)
        message = (
            f"step {step}: {reason}; its batches are in {path}, the reader's state after it {json.dumps(position)}"
        )
        self.state.skipped += 1
        if self.options.nan_policy == "stop":
            raise GemError(f"{message}. Lower the learning rate, look at these rows, or set trainer.nan_policy=skip")
        if self.state.skipped > self.options.max_skipped:
            raise GemError(f"{message}. More than trainer.max_skipped = {self.options.max_skipped} steps were skipped")
        self.stepper.discard()
        self.note("skipped", message)

    def _after_step(self) -> None:
        step, every = self.state.step, self.options.checkpoint_every
        self._writer.check()
        if step % self.options.log_every == 0:
            self.log()
        for callback in self.callbacks:
            callback.on_step(self, step)
        if self.options.evaluate_every is not None and step % self.options.evaluate_every == 0:
            self.evaluate()
        elif every is not None and step % every == 0:
            self.save()

    def interrupted(self) -> bool:
        """Whether a signal came, on any rank: all end after the same step."""
        return not self.strategy.agree_done(not self.signalled)

    # ---- logging, evaluation, checkpoints ------------------------------------------------------------------------

    def note(self, name: str, text: str) -> None:
        """Give a text to every tracker."""
        for tracker in self.trackers:
            tracker.text(self.state.step, name, text)

    def scalars(self, values: Mapping[str, float], kind: str) -> None:
        """Give values to every tracker."""
        for tracker in self.trackers:
            tracker.scalars(self.state.step, values, kind)

    def log(self) -> None:
        """One line about the window since the last one: its losses and metrics, then what the machine did."""
        if not self.state.window:
            return
        values = {"epoch": float(self.state.epoch)}
        values |= {f"{task}/loss": total / count for task, (total, count) in self.state.window.items() if count > 0}
        # Per task only: surfaces and deciles are for evaluations.
        found = merged(self.parts, self._window, exact=False)
        values |= {name: value for name, value in found.items() if name.count("/") == 1}
        values |= {"lr": self.recipe.optimizer.dense.lr * self.state.lr_factor, "grad_norm": self.state.norm}
        if self.state.skipped:
            values["skipped"] = float(self.state.skipped)
        self.scalars(values, "train")
        speed = over_ranks(self.strategy.gather(self.meter.read()))
        self.scalars({"progress": min(1.0, self.state.step / self.total_steps), **speed}, "speed")
        self.state.window = {}
        self._window = self.parts.metrics(exact=False)
        self.meter.reset()

    def evaluate(self) -> dict[str, float]:
        """Metrics on the validation split; keeps the checkpoint if it is the best or one is due; may end the run.

        Raises:
            StopTraining: `early_stop.patience` evaluations brought nothing better.
            ConfigError: the metric watched by `early_stop` is not among those computed.
        """
        self.log()
        with self.meter.paused():
            calibrate(self.parts)
        metrics = self._measure("validation")
        step = self.state.evaluated = self.state.step
        better = self._compare(metrics)
        if metrics:
            self.scalars(metrics, "validation")
        for callback in self.callbacks:
            callback.on_evaluate(self, step, metrics)
        every = self.options.checkpoint_every
        if better or every is None or step % every == 0:
            self.save()
        self._check_patience()
        return metrics

    def _check_patience(self) -> None:
        rule = self.options.early_stop
        if rule is not None and self.state.stale >= rule.patience:
            self.note("early stop", f"{self.state.stale} evaluations without a better {self.watched}")
            raise StopTraining

    def _measure(self, split: str) -> dict[str, float]:
        """Metrics of a split, none where there is no such split."""
        return self.measure(self.parts, split) if split in self.parts.reader.splits() else {}

    def measure(self, parts: Parts, split: str) -> dict[str, float]:
        """See `gem_core.train.measure.measure`."""
        self._writer.wait()  # as before a pass of training
        with self.meter.paused(), self.phase("evaluation"):
            return measure(parts, split)

    def _compare(self, metrics: Mapping[str, float]) -> bool:
        """Whether these are the best so far; of a run that follows a folder the newest are what counts."""
        if self.state.file:
            self.state.best_metrics = dict(metrics)
            return False
        value, rule = metrics.get(self.watched), self.options.early_stop
        if value is None:
            if rule is not None:
                found = ", ".join(sorted(n for n in metrics if n.count("/") == 1)) or "there is no validation split"
                raise ConfigError(f'trainer.early_stop.metric "{self.watched}": not a validation metric ({found})')
            return False
        delta = rule.min_delta if rule is not None else 0.0
        if self.state.best is not None and not value < self.state.best - delta:
            self.state.stale += 1
            return False
        self.state.best, self.state.best_step, self.state.stale = value, self.state.step, 0
        self.state.best_metrics = dict(metrics)
        return True

    def save(self) -> None:
        """Write a checkpoint of this moment, in the background, and delete those that are not kept."""
        self._saved = self.state.step
        with self.meter.paused(), self.phase("checkpoint"):
            self._writer.wait()
            own = {"reader": json.dumps(self.reader_state), "random": seeds.capture()}
            own["metrics"] = [metric.state() for metric in self._window]
            trainer = {"state": json.dumps(asdict(self.state)), "ranks": self.strategy.gather(own)}
            parts: dict[str, dict[str, Any]] = {"model": self.strategy.state()}
            parts |= {"embedding": self.parts.embedding.state(), "optimizer": self.stepper.optimizer.state()}
            parts["trainer"] = trainer
            parts["calibration"] = {} if self.parts.calibrator is None else self.parts.calibrator.state()
            if self.strategy.rank == 0:
                write = partial(checkpoints.save, self.folder, self.state.step, recipe=self.recipe)
                write = partial(write, schema=self.parts.schema, best_step=self.state.best_step)
                write = partial(write, keep=self.options.keep_checkpoints)
                if self.options.async_checkpoints:
                    self._writer.start(partial(write, parts=snapshot(parts)))
                else:
                    write(parts=parts)

    def checkpoint(self) -> Path:
        """A checkpoint of this moment, when it is on the disk."""
        if self._saved != self.state.step:
            self.save()
        self._writer.wait()
        return checkpoints.step_folder(self.folder, self.state.step)

    def _load(self, found: Checkpoint) -> None:
        checkpoints.check_recipe(found, self.recipe)
        if found.schema() != self.parts.schema:
            raise DataError(
                f"cannot resume from {found.path}: the schema fitted to the data differs from the checkpoint's; "
                "give back the data of that run, choose another output, or start over with resume=never"
            )
        trainer = found.part("trainer")
        saved, rank, world = trainer["ranks"], self.strategy.rank, self.strategy.world
        self.parts.load(found)
        self.stepper.optimizer.load(found.part("optimizer"))
        self.state = State(**json.loads(trainer["state"]))
        self.reader_state = redistribute([json.loads(own["reader"]) for own in saved], world)[rank]
        self._saved = found.step
        mine = saved[rank : rank + 1] if len(saved) == world else saved if rank == 0 else []
        for i, metric in enumerate(self._window):
            metric.merge([own["metrics"][i] for own in mine])
        if len(saved) == world:  # else each rank's random numbers start anew
            seeds.restore(saved[rank]["random"])

    def _finish(self, status: Status) -> Result:
        test: dict[str, float] = {}
        if status != "interrupted":
            if self.state.evaluated != self.state.step:
                with suppress(StopTraining):
                    self.evaluate()
            if self._saved != self.state.step:
                self.save()
        self._writer.wait()
        first = self.strategy.rank == 0
        found = {c.step: c for c in self.strategy.gather(checkpoints.complete(self.folder) if first else None)[0]}
        best, step = self.state.best_step, self.state.step
        chosen = found[step if best is None or status == "interrupted" else best]
        if status == "interrupted":
            self.note(
                "interrupted",
                f"{self._interrupt.caught or 'a signal to another rank'}: saved at step {step}; the same command goes on",
            )
        else:
            if chosen.step != step:
                self.parts.load(chosen)
            test = self._measure("test") if self._test else {}
            if test:
                self.scalars(test, "test")
        for callback in self.callbacks:
            callback.on_end(self)
        result = Result(status, step, self.folder, chosen.path, best, self.state.best_metrics, test)
        if self.strategy.rank == 0:
            write_whole(self.folder / "result.json", json.dumps(asdict(result), default=str, indent=1))
        return result
