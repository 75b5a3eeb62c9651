"""The recipe: one validated YAML file (or Python dict) that fixes a whole run. Importing this module needs no torch.

Parts that plugins give are `{name: ..., option: ...}`; a bare name is short for it without options. `load` reads a
file, `resolve` fills in its parts' own defaults; a resolved recipe says all that a run depends on but the data.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import to_jsonable_python

from gem_core.errors import ConfigError, GemError, looked_for
from gem_core.plugins import KINDS
from gem_core.validation import Loc, explain, read_yaml

if TYPE_CHECKING:
    from gem_core.plugins import Registry


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    @model_validator(mode="before")
    @classmethod
    def _default_names(cls, value: object) -> object:
        """Options of a component without its name are those of the default one."""
        if not isinstance(value, dict):
            return value
        out = dict(value)
        for key, field in cls.model_fields.items():
            default, given = field.get_default(call_default_factory=True), out.get(key)
            if isinstance(default, _Component) and isinstance(given, dict):
                out[key] = {"name": default.name, **given}
        return out


def _bare_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class _Component(BaseModel):
    """A plugin part; its options are validated by the component's own Config when it is loaded."""

    model_config = ConfigDict(frozen=True, extra="allow", ser_json_inf_nan="constants")
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


Component = Annotated[_Component, BeforeValidator(_bare_name)]


def _component(name: str) -> Any:
    return Field(default_factory=lambda: _Component(name=name))


class Data(_Section):
    """`reader` gives batches of about `batch_rows` rows (whole requests); `workers` processes read ahead."""

    reader: Component
    schema_: dict[str, Any] | str | None = Field(None, alias="schema")
    batch_rows: int = Field(2048, ge=1)
    workers: int = Field(1, ge=0, le=64)
    batcher: Component = _component("in-order")


class Dense(_Section):
    """AdamW of the dense parameters."""

    lr: float = Field(2e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)


class Optimizer(_Section):
    """Dense AdamW; tables are stepped by the embedding with `sparse_lr`. `schedule` applies to both, after warm-up."""

    dense: Dense = Dense()
    sparse_lr: float = Field(0.01, gt=0)
    warmup_steps: int = Field(100, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    final_lr: float = Field(0.05, ge=0, le=1, description="share of lr at the last step of a cosine or linear schedule")
    clip_norm: float | None = Field(1.0, gt=0)


class EarlyStop(_Section):
    """Stop after `patience` evaluations without a better `metric` (lower is better), and keep the best checkpoint."""

    metric: str = "joint/ne"
    patience: int = Field(3, ge=1)
    min_delta: float = Field(0.0, ge=0)


class Trainer(_Section):
    """`max_steps` ends a run early; `accumulate` batches make one optimiser step."""

    epochs: int = Field(1, ge=1)
    max_steps: int | None = Field(None, ge=1)
    accumulate: int = Field(1, ge=1)
    threads: int | None = Field(None, ge=1)
    log_every: int = Field(20, ge=1)
    evaluate_every: int | None = Field(None, ge=1, description="steps; None: at the end of each epoch")
    checkpoint_every: int | None = Field(None, ge=1, description="steps; None: at each evaluation")
    keep_checkpoints: int = Field(2, ge=1, description="the newest; the best one is kept beside them")
    async_checkpoints: bool = Field(True, description="copy the state and write it while training goes on")
    early_stop: EarlyStop | None = None
    nan_policy: Literal["stop", "skip"] = "stop"
    max_skipped: int = Field(10, ge=0)
    explode_factor: float | None = Field(None, gt=1, description="a loss this many times its running mean is a fault")
    deterministic: bool = False
    compile: bool = Field(False, description="compile the model by torch.compile")
    warm_start: str | None = Field(
        None,
        description="run or checkpoint that a new run takes table rows (by id) and dense parameters (by name) from",
    )


class Follow(_Section):
    """After its epochs, a run goes on with files that arrive in `folder`: each is a window of the log, in order of name,
    evaluated (progressive validation) and then trained on once. Put a file there by renaming it. The run ends `idle_s`
    seconds after the last window (None: never), or when there is a file called as `stop_file` says."""

    folder: str
    pattern: str = Field("*.parquet", min_length=1)
    poll_s: float = Field(10.0, gt=0, description="seconds between looks")
    idle_s: float | None = Field(None, ge=0)
    stop_file: str = "STOP"


class Calibration(_Section):
    """A map of each task's logits, fitted on the validation split at each evaluation and kept in the checkpoint: evaluations
    and predictions are made with it. "temperature" scales, "platt" scales and shifts, "isotonic" is any non-decreasing
    map. `per_surface`: one for each surface."""

    method: Literal["temperature", "platt", "isotonic"] = "platt"
    per_surface: bool = False


class Parallel(_Section):
    """`strategy` is the dense side's; `plan` is the file that a planner wrote."""

    strategy: Component = _component("single")
    plan: str | None = None


class Recipe(_Section):
    """The whole run. `output` is the run's folder: checkpoints, logs, metrics."""

    recipe_version: Literal[1] = 1
    name: str = Field("run", min_length=1)
    seed: int = Field(0, ge=0)
    output: str = "runs/{name}"
    data: Data
    model: Component
    ops: dict[str, str] = Field(default_factory=dict, description='op -> backend; "all" for every op')
    precision: Component = _component("fp32")
    embedding: Component = _component("torch")
    optimizer: Optimizer = Optimizer()
    loss: Component = _component("bce")
    task_weights: dict[str, float] = {}
    metrics: list[Component] = [_Component(name="ranking")]
    calibration: Calibration | None = None
    trainer: Trainer = Trainer()
    follow: Follow | None = None
    parallel: Parallel = Parallel()
    trackers: list[Component] = [_Component(name="console"), _Component(name="jsonl")]
    callbacks: list[Component] = []

    @field_validator("output")
    @classmethod
    def _known_placeholders(cls, value: str) -> str:
        try:
            value.format(name="", seed=0)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"expected no placeholders but {{name}} and {{seed}}, found {value!r}") from error
        return value

    @model_validator(mode="after")
    def _nothing_to_wait_for(self) -> Self:
        if self.follow is not None and self.trainer.early_stop is not None:
            raise ValueError("follow: give trainer.early_stop up; it would end a run that is to go on")
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output.format(name=self.name, seed=self.seed))

    def dump(self) -> dict[str, Any]:
        """The resolved recipe as plain data; `parse(dump())` is the same recipe, unless it holds data in memory: of a
        table or frame among a reader's options only the type is given."""
        out: dict[str, Any] = to_jsonable_python(self, by_alias=True, fallback=_type_name)
        return out

    def to_yaml(self) -> str:
        """The resolved recipe as YAML."""
        return yaml.safe_dump(self.dump(), sort_keys=False)  # escaped: PyYAML reads some bare characters back wrong


def _type_name(value: object) -> str:
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def parse(value: Mapping[str, Any], where: str = "recipe", overrides: Mapping[Loc, str] | None = None) -> Recipe:
    """Validate a mapping; errors name the place in it (or the override that set it) and the nearest valid name."""
    try:
        return Recipe.model_validate(value)
    except ValidationError as error:
        raise ConfigError(explain(error, Recipe, where, overrides=overrides)) from error


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `key.path=value` overrides (values are YAML).

    A recipe may start from another: `base: other.yaml`, a path from its own folder, as that of `data.schema` is (one in
    an override is from the working directory). A `.py` file defines `recipe()`, which returns a `Recipe` or a mapping.
    """
    path = Path(path)
    value = _run(path) if path.suffix == ".py" else _read(path, ())
    given: dict[Loc, str] = {}
    for text in overrides:
        given |= {_override(value, text): text, _split(text)[0]: text}
    return parse(value, f"recipe {path}", given)


def resolve(recipe: Recipe, registry: Registry, where: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """The recipe with every component's options validated by its `Config`, defaults filled in, and the schema inline.

    `where` and `overrides` are what messages blame: the file, and the overrides that `load` applied to it.
    """
    given: dict[Loc, str] = {_split(text)[0]: text for text in overrides}
    value = recipe.dump()
    if isinstance(recipe.data.schema_, str):
        from gem_core.schema import Schema

        value["data"]["schema"] = Schema.load(recipe.data.schema_).model_dump(mode="json", exclude_defaults=True)
    for path, component in _components(recipe):
        config = registry.config(_kind(path), component.name, component.options, where, path, given)
        node: Any = value
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = {"name": component.name, **_plain(config)}
    return parse(value, where)


def check_overridden(recipe: Recipe, registry: Registry, where: str, overrides: Sequence[str]) -> None:
    """Raise for a wrong option among the `overrides` of components; those that they leave alone may be absent here."""
    given: dict[Loc, str] = {_split(text)[0]: text for text in overrides}
    for path, component in _components(recipe):
        if any(key[: len(path)] == path or path[: len(key)] == key for key in given):
            registry.config(_kind(path), component.name, component.options, where, path, given)


def _plain(config: BaseModel) -> dict[str, Any]:
    """Options as `dump` would give them, but data in memory stays itself."""
    held: dict[str, object] = {}

    def hold(value: object) -> str:
        key = f"\0{len(held)}"
        held[key] = value
        return key

    def put_back(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: put_back(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [put_back(inner) for inner in value]
        return held.get(value, value) if isinstance(value, str) else value

    out: dict[str, Any] = put_back(to_jsonable_python(config, by_alias=True, fallback=hold))
    return out


def _components(recipe: Recipe) -> Iterator[tuple[Loc, _Component]]:
    """Each component with the keys that lead to it."""

    def walk(section: BaseModel, path: Loc) -> Iterator[tuple[Loc, _Component]]:
        for name in type(section).model_fields:
            value = getattr(section, name)
            for at, part in enumerate(value) if isinstance(value, list) else [(None, value)]:
                here = (*path, name) if at is None else (*path, name, at)
                if isinstance(part, _Component):
                    yield here, part
                elif isinstance(part, _Section):
                    yield from walk(part, here)

    return walk(recipe, ())


def _kind(path: Loc) -> str:
    """The plugin kind of the component at a place: `data.reader` is a reader, `trackers.0` a tracker."""
    key = next(step for step in reversed(path) if isinstance(step, str))
    return key if key in KINDS else key.removesuffix("s")


def _run(path: Path) -> dict[str, Any]:
    try:
        make: Callable[[], object] | None = runpy.run_path(str(path)).get("recipe")
        value = make() if callable(make) else None
    except OSError as error:
        raise ConfigError(f"recipe {path}: cannot be read: {error.strerror}{looked_for(path)}") from error
    except Exception as error:
        raise GemError(f"recipe {path}: {type(error).__name__}: {error}") from error
    if isinstance(value, Recipe):
        return value.model_dump(by_alias=True)
    if not isinstance(value, dict):
        raise ConfigError(f"recipe {path}: expected a function recipe() that returns a Recipe or a dict")
    return value


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"recipe {path}: `base` leads back to itself")
    value = read_yaml(path, f"recipe {path}")
    schema = value["data"].get("schema") if isinstance(value.get("data"), dict) else None
    if isinstance(schema, str):
        value["data"]["schema"] = str(path.parent / schema)
    base = value.pop("base", None)
    if base is None:
        return value
    if not isinstance(base, str):
        raise ConfigError(f"recipe {path}: base: expected the path of a recipe, found {base!r}")
    return _merge(_read(path.parent / base, (*seen, path.resolve())), value)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings merge key by key; a component with another name replaces the base's whole."""
    out = dict(base)
    for key, value in over.items():
        old = _expand(key, out.get(key)) if isinstance(value, dict) else out.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and value.get("name", old.get("name")) == old.get("name"):
            out[key] = _merge(old, value)
        else:
            out[key] = value
    return out


def _expand(key: str, value: object) -> object:
    """A component's bare name in its long form, to which options can be added; only `schema` is a path if a string."""
    return {"name": value} if isinstance(value, str) and key != "schema" else value


def _split(text: str) -> tuple[tuple[str, ...], str]:
    key, equals, raw = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError(f'override "{text}": expected key.path=value')
    return path, raw


def _override(value: dict[str, Any], text: str) -> Loc:
    """Set one key; the keys that lead to what this made: the key itself, or a section that was not there."""
    path, raw = _split(text)
    try:
        parsed = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise ConfigError(f'override "{text}": the value is not valid YAML: {" ".join(str(error).split())}') from error
    node: Any = value
    made = path
    for i, step in enumerate(path[:-1]):
        if node.get(step) is None:
            node[step], made = {}, min(made, path[: i + 1], key=len)
        node[step] = _expand(step, node[step])
        node = node[step]
        if not isinstance(node, dict):
            raise ConfigError(f'override "{text}": "{step}" is not a mapping in the recipe: give it whole')
    node[path[-1]] = parsed
    return made
