"""The training loop. `train(recipe)` is all that most need; `Trainer` is what callbacks see.

One optimiser step: take `accumulate` batches, add up the losses' denominators over them (and over ranks), then go
forward and backward batch by batch with these denominators: the gradient is the large batch's, whatever the batches'
sizes. Then clip, check, and step the dense parameters and the tables. Nothing in a step waits for metrics or trackers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from gem_core.data.batch import Batch
from gem_core.errors import ConfigError, DataError, GemError
from gem_core.plugins import Registry, default_registry
from gem_core.protocols import Callback, Metric, StopTraining, Tracker
from gem_core.recipe import Recipe, resolve
from gem_core.train import checkpoint as checkpoints
from gem_core.train import fault, seeds
from gem_core.train.build import build, create
from gem_core.train.checkpoint import Checkpoint
from gem_core.train.flops import measure_peak
from gem_core.train.folder import locked, write_whole
from gem_core.train.interrupt import Interrupt
from gem_core.train.measure import calibrate, measure
from gem_core.train.memory import enough_memory
from gem_core.train.meter import Meter
from gem_core.train.optimizer import DenseOptimizer, lr_factor
from gem_core.train.state import Result, State, Status

Resume = Literal["auto", "never", "must"]


def train(recipe: Recipe, registry: Registry | None = None, resume: Resume = "auto") -> Result:
    """Train by a recipe and evaluate the best checkpoint on the test split.

    Args:
        registry: where plugin parts are looked up; None: the installed plugins.
        resume: "auto" goes on from the newest checkpoint of `recipe.folder` if there is one, "must" fails without one,
            "never" deletes the folder's checkpoints and starts over.

    Raises:
        ConfigError: the recipe names something unknown, cannot resume, or its folder is in use or cannot be written.
        DataError: data or a checkpoint are not what they should be.
        GemError: the loss is not finite or explodes, and the policy is to stop; memory or the disk is full.
    """
    registry = default_registry() if registry is None else registry
    recipe = resolve(recipe, registry)
    with locked(recipe.folder), enough_memory():
        return Trainer(recipe, registry).run(resume)


class Trainer:
    """One run. Callbacks may read every public attribute; `note` writes a text to the trackers."""

    def __init__(self, recipe: Recipe, registry: Registry) -> None:
        self.recipe = recipe = resolve(recipe, registry)
        self.options = recipe.trainer
        self.folder = recipe.folder
        if self.options.threads is not None:
            torch.set_num_threads(self.options.threads)
        self.parts = build(recipe, registry)
        self.strategy = self.parts.strategy
        self.optimizer = DenseOptimizer(self.parts.module.named_parameters(), recipe.optimizer.dense)
        self.state = State()
        self.total_steps = self._total_steps()
        self.watched = self.options.early_stop.metric if self.options.early_stop else "joint/ne"
        self.callbacks: list[Callback] = [
            create(registry, "callback", c, f"callbacks.{i}") for i, c in enumerate(recipe.callbacks)
        ]
        self.trackers: list[Tracker] = []
        self._registry = registry
        self._reader_state: dict[str, Any] = {"epoch": 0}
        self._window: list[Metric] = self.parts.metrics(exact=False)

    def _total_steps(self) -> int:
        """Length of the schedule: `max_steps`, or the epochs at `batch_rows` rows a batch, whichever is less."""
        rows = self.parts.schema.require_fitted().rows / self.strategy.world
        steps = self.options.epochs * math.ceil(math.ceil(rows / self.recipe.data.batch_rows) / self.options.accumulate)
        return max(1, min(steps, self.options.max_steps or steps))

    # ---- the run -----------------------------------------------------------------------------------------------

    def run(self, resume: Resume = "auto") -> Result:
        """See `train`."""
        with ExitStack() as stack:
            if self.options.deterministic:  # not touched otherwise: setting it imports the compiler, seconds
                stack.enter_context(seeds.deterministic())
            self._interrupt = stack.enter_context(Interrupt())
            peak = measure_peak(self.strategy.device)
            seeds.seed_all(self.recipe.seed + self.strategy.rank)
            self._check_splits()
            self._start(resume)
            stack.callback(self._close)
            self.meter = Meter(self.parts.model, peak, self.strategy.device)
            self.note("run", self._description(peak))
            for text in getattr(self.parts.model, "notes", ()):
                self.note("model", text)
            try:
                for callback in self.callbacks:
                    callback.on_start(self)
                status = self._epochs()
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
        found = checkpoints.complete(self.folder)
        if resume == "must" and not found:
            raise ConfigError(f"resume=must: {self.folder} has no complete checkpoint; start with resume=auto")
        if resume == "never":
            checkpoints.clear(self.folder)
        elif found:
            self._load(found[-1])
        if self.strategy.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "recipe.yaml", self.recipe.to_yaml())
            context: dict[str, Any] = {"folder": self.folder, "resume": self.state.step}
            for i, tracker in enumerate(self.recipe.trackers):
                self.trackers.append(create(self._registry, "tracker", tracker, f"trackers.{i}", **context))

    def _close(self) -> None:
        for tracker in self.trackers:
            tracker.close()

    def _epochs(self) -> Status:
        self.parts.module.train()
        self._check_patience()  # a run that had stopped early is over when it is resumed
        while self.state.epoch < self.options.epochs and not self._done():
            with closing(self._steps()) as steps:
                for batches, position in steps:
                    self._step(batches, position)
                    self._reader_state = position
                    self._after_step()
                    if self._interrupted():
                        self.save()
                        return "interrupted"
                    if self._done():
                        return "finished"
            self.log()
            self.state.epoch += 1
            self._reader_state = {"epoch": self.state.epoch}
            if self.options.evaluate_every is None:
                self.evaluate()
        return "finished"

    def _done(self) -> bool:
        return self.options.max_steps is not None and self.state.step >= self.options.max_steps

    def _steps(self) -> Generator[tuple[list[Batch], dict[str, Any]], None, None]:
        """The batches of each step of this epoch, and the reader's state after them."""
        with closing(self.parts.batches("train", self._reader_state)) as source:
            while True:
                taken = []
                with self.meter.waiting(), record_function("data"):
                    for item in source:
                        taken.append(item)
                        if len(taken) == self.options.accumulate:
                            break
                if self.strategy.agree_done(not taken):
                    return
                yield [batch for batch, _ in taken], taken[-1][1]

    # ---- one step ----------------------------------------------------------------------------------------------

    def _step(self, batches: list[Batch], position: Mapping[str, Any]) -> None:
        parts, strategy = self.parts, self.strategy
        counts = strategy.sum_counts(_added([parts.loss.counts(batch) for batch in batches]))
        logits, losses = [], []
        for batch in batches:
            with record_function("forward"), parts.precision.autocast(strategy.device):
                output = parts.module(batch)
                sums = {task: total for task, (total, _) in parts.loss(output, batch).items()}
            with record_function("backward"):
                strategy.backward(sums, counts, parts.task_weights)
            logits.append({task: x.detach() for task, x in output.logits.items()})
            losses.append({task: x.detach() for task, x in sums.items()})
        totals = strategy.sum_counts(_added(losses))
        self.state.norm = float(strategy.clip(self.recipe.optimizer.clip_norm or math.inf))
        values = {task: (float(totals[task]), float(counts[task])) for task in totals}
        loss = sum(parts.task_weights[task] * total / count for task, (total, count) in values.items() if count > 0)
        reason = fault.find_fault(loss, self.state.norm, self.state.running_loss, self.options.explode_factor)
        self.state.lr_factor = lr_factor(self.recipe.optimizer, self.state.step, self.total_steps)
        self.state.step += 1
        if reason is not None:
            self._skip(batches, position, reason)
            return
        with record_function("dense update"):
            self.optimizer.step(self.state.lr_factor)
        with record_function("table update"):
            parts.embedding.step(self.recipe.optimizer.sparse_lr * self.state.lr_factor)
        with record_function("metrics"):
            self._count(batches, logits, values, loss)

    def _count(
        self,
        batches: list[Batch],
        logits: list[dict[str, Tensor]],
        values: Mapping[str, tuple[float, float]],
        loss: float,
    ) -> None:
        """Take a good step into the window's metrics and the meter."""
        self.state.running_loss = fault.running_mean(loss, self.state.running_loss)
        for task, (total, count) in values.items():
            window = self.state.window.setdefault(task, [0.0, 0.0])
            window[0] += total
            window[1] += count
        for metric in self._window:
            for batch, output in zip(batches, logits, strict=True):
                metric.update(output, batch)
        self.meter.add(batches)

    def _skip(self, batches: list[Batch], position: Mapping[str, Any], reason: str) -> None:
        """Forget a faulty step's gradients, or stop the run."""
        step = self.state.step
        path = fault.dump(self.folder, step, batches, position, reason)
        message = (
            f"step {step}: {reason}; its batches are in {path}, the reader's state after it {json.dumps(position)}"
        )
        self.state.skipped += 1
        if self.options.nan_policy == "stop":
            raise GemError(f"{message}. Lower the learning rate, look at these rows, or set trainer.nan_policy=skip")
        if self.state.skipped > self.options.max_skipped:
            raise GemError(f"{message}. More than trainer.max_skipped = {self.options.max_skipped} steps were skipped")
        self.optimizer.zero_grad()
        self.parts.embedding.discard()
        self.note("skipped", message)

    def _after_step(self) -> None:
        step, every = self.state.step, self.options.checkpoint_every
        if step % self.options.log_every == 0:
            self.log()
        for callback in self.callbacks:
            callback.on_step(self, step)
        if self.options.evaluate_every is not None and step % self.options.evaluate_every == 0:
            self.evaluate()
        elif every is not None and step % every == 0:
            self.save()

    def _interrupted(self) -> bool:
        # One rank's signal is every rank's; asking costs a collective, so many ranks ask only when they log.
        if self.strategy.world > 1 and self.state.step % self.options.log_every:
            return False
        return any(self.strategy.gather(self._interrupt.caught is not None))

    # ---- logging, evaluation, checkpoints ------------------------------------------------------------------------

    def note(self, name: str, text: str) -> None:
        """Give a text to every tracker."""
        for tracker in self.trackers:
            tracker.text(self.state.step, name, text)

    def _scalars(self, values: Mapping[str, float], kind: str) -> None:
        for tracker in self.trackers:
            tracker.scalars(self.state.step, values, kind)

    def log(self) -> None:
        """One line about the window since the last one: its losses and metrics, then what the machine did."""
        if not self.state.window:
            return
        values = {"epoch": float(self.state.epoch)}
        values |= {f"{task}/loss": total / count for task, (total, count) in self.state.window.items() if count > 0}
        for metric in self._window:
            states = self.strategy.gather(metric.state())
            metric.merge([s for rank, s in enumerate(states) if rank != self.strategy.rank])
            # Per task only: surfaces and deciles are for evaluations.
            values |= {name: value for name, value in metric.compute().items() if name.count("/") == 1}
        values |= {"lr": self.recipe.optimizer.dense.lr * self.state.lr_factor, "grad_norm": self.state.norm}
        if self.state.skipped:
            values["skipped"] = float(self.state.skipped)
        self._scalars(values, "train")
        self._scalars({"progress": min(1.0, self.state.step / self.total_steps), **self.meter.read()}, "speed")
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
            self._scalars(metrics, "validation")
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
        return measure(self.parts, split) if split in self.parts.reader.splits() else {}

    def _compare(self, metrics: Mapping[str, float]) -> bool:
        """Whether these are the best so far."""
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
        """Write a checkpoint of this moment and delete those that are not kept."""
        own = {"reader": json.dumps(self._reader_state), "random": seeds.capture()}
        own["metrics"] = [metric.state() for metric in self._window]
        trainer = {"state": json.dumps(asdict(self.state)), "ranks": self.strategy.gather(own)}
        parts: dict[str, dict[str, Any]] = {"model": self.strategy.state(), "embedding": self.parts.embedding.state()}
        parts |= {"optimizer": self.optimizer.state(), "trainer": trainer}
        parts["calibration"] = {} if self.parts.calibrator is None else self.parts.calibrator.state()
        if self.strategy.rank == 0:
            with self.meter.paused():
                best = self.state.best_step
                checkpoints.save(self.folder, self.state.step, parts, self.recipe, self.parts.schema, best)
                checkpoints.retain(self.folder, self.options.keep_checkpoints, best)

    def _load(self, found: Checkpoint) -> None:
        checkpoints.check_recipe(found, self.recipe)
        if found.schema() != self.parts.schema:
            raise DataError(
                f"cannot resume from {found.path}: the schema fitted to the data differs from the checkpoint's; "
                "give back the data of that run, choose another output, or start over with resume=never"
            )
        trainer = found.part("trainer")
        if len(trainer["ranks"]) != self.strategy.world:
            raise DataError(f"{found.path} was saved by {len(trainer['ranks'])} ranks, not {self.strategy.world}")
        own = trainer["ranks"][self.strategy.rank]
        self.parts.load(found)
        self.optimizer.load(found.part("optimizer"))
        self.state = State(**json.loads(trainer["state"]))
        self._reader_state = json.loads(own["reader"])
        for metric, state in zip(self._window, own["metrics"], strict=True):
            metric.merge([state])
        seeds.restore(own["random"])

    def _finish(self, status: Status) -> Result:
        test: dict[str, float] = {}
        if status != "interrupted":
            if self.state.evaluated != self.state.step:
                with suppress(StopTraining):
                    self.evaluate()
            newest = checkpoints.complete(self.folder)
            if not newest or newest[-1].step != self.state.step:
                self.save()
        found = {c.step: c for c in checkpoints.complete(self.folder)}
        best, step = self.state.best_step, self.state.step
        chosen = found[step if best is None or status == "interrupted" else best]
        if status == "interrupted":
            self.note("interrupted", f"{self._interrupt.caught}: saved at step {step}; the same command goes on")
        else:
            if chosen.step != step:
                self.parts.load(chosen)
            test = self._measure("test")
            if test:
                self._scalars(test, "test")
        for callback in self.callbacks:
            callback.on_end(self)
        result = Result(status, step, self.folder, chosen.path, best, self.state.best_metrics, test)
        if self.strategy.rank == 0:
            write_whole(self.folder / "result.json", json.dumps(asdict(result), default=str, indent=1))
        return result

    def _description(self, peak: float) -> str:
        dense = sum(p.numel() for p in self.parts.model.parameters())
        sparse = sum(t.numel() for name, t in self.parts.embedding.state().items() if name.endswith(".weight"))
        start = f"from step {self.state.step}" if self.state.step else "from the start"
        return (
            f"{self.recipe.name}: model {self.recipe.model.name}, {dense:,} dense parameters, {sparse:,} in tables; "
            f"about {self.total_steps} steps, {start}; {self.strategy.device}, {torch.get_num_threads()} threads, "
            f"matrix product peak {peak / 1e9:.0f} GFLOP/s"
        )


def _added(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([p[key] for p in parts]).sum(0) for key in parts[0]}
