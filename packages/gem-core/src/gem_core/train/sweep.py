"""A search over a recipe's options by optuna: every trial is a run, and the validation split alone chooses.

The folder `sweep` in the run's keeps optuna's journal and a run's folder per set of values; the same command goes on
where it stopped, in the middle of a trial too. The test split is not looked at.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from gem_core.errors import ConfigError, GemError
from gem_core.plugins import Registry
from gem_core.recipe import Recipe, load, resolve
from gem_core.train.folder import locked, write_whole
from gem_core.train.strategy import world_size
from gem_core.train.trainer import train

TRIALS = 20
"""Trials where there is a range and no number is given."""


@dataclass(frozen=True)
class Choice:
    """One of several values, each as YAML."""

    key: str
    values: tuple[str, ...]

    def suggest(self, trial: Any) -> str:
        """The value that a trial takes."""
        return str(trial.suggest_categorical(self.key, self.values))


@dataclass(frozen=True)
class Range:
    """A number between two (included), an integer if both are; with `log`, alike in every decade."""

    key: str
    low: float
    high: float
    log: bool = False

    def suggest(self, trial: Any) -> str:
        """The value that a trial takes."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return str(trial.suggest_int(self.key, self.low, self.high, log=self.log))
        return repr(float(trial.suggest_float(self.key, self.low, self.high, log=self.log)))


@dataclass(frozen=True)
class Trial:
    """A set of values, the watched metric at its best evaluation (None: the trial failed), and its run."""

    values: dict[str, str]
    metric: float | None
    step: int
    folder: str
    fault: str = ""


@dataclass(frozen=True)
class Sweep:
    """Trials, best first. `metric` names what was watched; lower is better."""

    metric: str
    trials: list[Trial]
    folder: Path
    status: str

    def table(self) -> str:
        """A line per trial."""
        keys = list(self.trials[0].values) if self.trials else []
        rows = [[self.metric, *keys, "step", "run"]]
        for t in self.trials:
            shown = t.fault or "failed" if t.metric is None else f"{t.metric:.6f}"
            rows.append([shown, *t.values.values(), str(t.step), t.folder])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def split_space(texts: Sequence[str]) -> tuple[list[str], list[Choice | Range]]:
    """Overrides apart from what is searched: `key=[a, b]` a choice, `key={low: 1, high: 9, log: true}` a range.

    Raises:
        ConfigError: nothing is searched, or a range is none.
    """
    fixed: list[str] = []
    space: list[Choice | Range] = []
    for text in texts:
        key, _, raw = text.partition("=")
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError:
            value = None  # `load` says what is wrong with it
        if isinstance(value, list):
            if not value:
                raise ConfigError(f'sweep "{text}": expected at least one value')
            flow = (yaml.safe_dump(v, default_flow_style=True).replace("\n...", "").strip() for v in value)
            space.append(Choice(key, tuple(dict.fromkeys(flow))))
        elif isinstance(value, dict) and {"low", "high"} <= value.keys():
            space.append(_range(key, value, text))
        else:
            fixed.append(text)
    if not space:
        raise ConfigError("sweep: nothing to search: give key=[a, b, ...] or key={low: a, high: b, log: true}")
    return fixed, space


def _range(key: str, value: dict[str, Any], text: str) -> Range:
    numbers = [value["low"], value["high"]]
    if value.keys() - {"low", "high", "log"} or not all(type(n) in (int, float) for n in numbers):
        raise ConfigError(f'sweep "{text}": expected numbers low and high, and log: true or nothing (1.0e-3, not 1e-3)')
    log = bool(value.get("log"))
    if not numbers[0] < numbers[1] or (log and numbers[0] <= 0):
        raise ConfigError(f'sweep "{text}": expected low < high' + (", and above 0 with log" if log else ""))
    return Range(key, value["low"], value["high"], log)


def sweep(path: Path, texts: Sequence[str], registry: Registry, trials: int | None = None) -> Sweep:
    """Run the trials that are still to be run, and rank all of them.

    Args:
        path: a recipe's file.
        texts: overrides of it, and what is searched; see `split_space`.
        trials: how many in all; None: every combination of choices, 20 where there is a range.

    Raises:
        ConfigError: optuna is not installed, a wrong option, or the folder holds a search over other options.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise ConfigError("gem sweep needs optuna, which is not installed: pip install gem-core[sweep]") from error
    if world_size() > 1:
        raise ConfigError("gem sweep runs its trials one by one in one process: start it without torchrun")
    fixed, space = split_space(texts)
    base = _recipe(path, fixed, registry)
    folder = base.folder / "sweep"
    grid = _combinations(space)
    for values in grid or [{part.key: str(part.low) for part in space if isinstance(part, Range)}]:
        _recipe(path, [*fixed, *_overrides(values)], registry)  # a wrong key or value is found before the first trial
    with locked(folder):
        _check_same(folder, space)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / "journal.log"))),
            study_name="sweep",
            sampler=optuna.samplers.TPESampler(seed=base.seed),
            load_if_exists=True,
        )
        for cut in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(cut.number, state=optuna.trial.TrialState.FAIL)
            study.enqueue_trial(cut.params)
        for values in grid:
            study.enqueue_trial(values, skip_if_exists=True)
        wanted, status = trials or len(grid) or TRIALS, "finished"
        while len(_done(study)) < wanted and status == "finished":
            trial = study.ask()
            values = {part.key: part.suggest(trial) for part in space}
            run = folder / f"trial-{hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]}"
            recipe = _recipe(path, [*fixed, *_overrides(values), f"output={run}"], registry)
            status = _run(study, trial, values, recipe, registry)
            found = Sweep(_watched(base), _ranked(study), folder, status)
            write_whole(folder / "sweep.json", json.dumps(asdict(found), default=str, indent=1))
        return Sweep(_watched(base), _ranked(study), folder, status)


def _run(study: Any, trial: Any, values: dict[str, str], recipe: Recipe, registry: Registry) -> str:
    """Carry one trial out; how its run ended. Of an interrupted one nothing is noted: it is run on another time."""
    metric, step, fault = None, 0, ""
    try:
        result = train(recipe, registry, test=False)
    except GemError as error:
        if type(error) is not GemError:  # wrong options or data are no trial's alone; a loss that explodes is
            raise
        fault = str(error)
    else:
        if result.status == "interrupted":
            return result.status
        metric, step = result.validation.get(_watched(recipe)), result.step
        if metric is None:
            raise ConfigError(
                f"sweep: there is no {_watched(recipe)} to choose by; the recipe needs a validation split"
            )
    outcome = Trial(values, metric, step, str(recipe.folder), fault)
    trial.set_user_attr("outcome", asdict(outcome))
    study.tell(trial, metric) if metric is not None else study.tell(trial, state=_fail())
    return "finished"


def _fail() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL


def _recipe(path: Path, overrides: Sequence[str], registry: Registry) -> Recipe:
    return resolve(load(path, overrides), registry, f"recipe {path}", overrides)


def _overrides(values: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def _watched(recipe: Recipe) -> str:
    """The metric that the trainer watches."""
    return recipe.trainer.early_stop.metric if recipe.trainer.early_stop else "joint/ne"


def _combinations(space: Sequence[Choice | Range]) -> list[dict[str, str]]:
    """Every combination of choices; none where there is a range."""
    choices = [part.values for part in space if isinstance(part, Choice)]
    if len(choices) < len(space):
        return []
    return [dict(zip([part.key for part in space], values, strict=True)) for values in itertools.product(*choices)]


def _check_same(folder: Path, space: Sequence[Choice | Range]) -> None:
    """Refuse to mix two searches in one folder."""
    path, text = folder / "space.json", json.dumps([asdict(part) for part in space], indent=1)
    if path.is_file() and path.read_text() != text:
        raise ConfigError(f"{folder} holds a search over other options (space.json): choose another output")
    write_whole(path, text)


def _done(study: Any) -> list[Trial]:
    """Trials that ran to their end, or failed by themselves."""
    return [Trial(**t.user_attrs["outcome"]) for t in study.get_trials(deepcopy=False) if "outcome" in t.user_attrs]


def _ranked(study: Any) -> list[Trial]:
    return sorted(_done(study), key=lambda t: math.inf if t.metric is None else t.metric)
