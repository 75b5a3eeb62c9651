"""Recipes: parsing, `base`, overrides, messages, defaults of components, and the round trip through YAML."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from gem_core.errors import ConfigError, GemError
from gem_core.plugins import Registry, hookimpl
from gem_core.protocols import ComponentConfig
from gem_core.recipe import check_overridden, load, parse, resolve
from gem_core.schema import Schema

pytestmark = pytest.mark.light

SMALL: dict[str, Any] = {"data": {"reader": "csv"}, "model": "kunlun"}


def write(folder: Path, name: str, value: object) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value, sort_keys=False))
    return path


def test_bare_names_are_components_without_options() -> None:
    recipe = parse({**SMALL, "metrics": ["ranking", {"name": "mine", "k": 3}], "loss": {"name": "bce", "smooth": 0.1}})
    assert (recipe.model.name, recipe.model.options) == ("kunlun", {})
    assert (recipe.loss.name, recipe.loss.options) == ("bce", {"smooth": 0.1})
    assert [(m.name, m.options) for m in recipe.metrics] == [("ranking", {}), ("mine", {"k": 3})]


def test_an_option_may_be_called_options() -> None:
    assert parse({**SMALL, "model": {"name": "m", "options": {"a": 1}}}).model.options == {"options": {"a": 1}}


def test_folder_takes_name_and_seed() -> None:
    assert parse({**SMALL, "name": "a", "seed": 3, "output": "runs/{name}-{seed}"}).folder == Path("runs/a-3")
    assert parse(SMALL).folder == Path("runs/run")


# ---- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": "din"}, 'recipe: unknown key "modle"; did you mean "model"?'),
        ({"data": {"reader": "csv", "batch_row": 5}}, 'unknown key "data.batch_row"; did you mean "batch_rows"?'),
        ({"data": {"reader": "csv", "shema": "s.yaml"}}, 'unknown key "data.shema"; did you mean "schema"?'),
        ({"optimizer": {"dense": {"Lr": 1}}}, 'unknown key "optimizer.dense.Lr"; did you mean "lr"?'),
        (
            {"trainer": {"early_stop": {"patiense": 1}}},
            'unknown key "trainer.early_stop.patiense"; did you mean "patience"?',
        ),
        ({"trainer": {"qqq": 1}}, 'unknown key "trainer.qqq"; valid: accumulate, '),
        ({"trainer": {"epochs": "many"}}, "recipe: trainer.epochs: expected a valid integer, found 'many'"),
        ({"trainer": {"epochs": 0}}, "trainer.epochs: expected a value greater than or equal to 1, found 0"),
        ({"trainer": {"max_steps": 1.5}}, "trainer.max_steps: expected a valid integer"),
        (
            {"optimizer": {"schedule": "cosin"}},
            "optimizer.schedule: expected 'constant', 'cosine' or 'linear', found 'cosin'",
        ),
        ({"optimizer": {"clip_norm": -1}}, "optimizer.clip_norm: expected a value greater than 0, found -1"),
        (
            {"data": {"reader": "csv", "schema": 3}},
            "data.schema: expected a mapping of options or a valid string, found 3",
        ),
        ({"data": {}}, 'missing key "data.reader"'),
        ({"data": None}, "data: expected a mapping of options, found None"),
        ({"model": {"dim": 3}}, 'missing key "model.name"'),
        ({"model": 3}, "model: expected a mapping of options, found 3"),
        ({"metrics": "ranking"}, "metrics: expected a valid list, found 'ranking'"),
        ({"metrics": [{"nam": "x"}]}, 'missing key "metrics.0.name"'),
        ({"task_weights": {"click": "high"}}, "task_weights.click: expected a valid number, found 'high'"),
        (
            {"output": "runs/{nam}"},
            "output: expected no placeholders but {name} and {seed}, found 'runs/{nam}'",
        ),
        ({"output": "runs/{0}"}, "output: expected no placeholders"),
        ({"recipe_version": 2}, "recipe_version: expected 1, found 2"),
        ({True: 1}, "keys should be strings, found True"),
        ({"seed": "x" * 200}, "seed: expected a valid integer, found '" + "x" * 76 + "..."),
    ],
    ids=str,
)
def test_message(change: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**SMALL, **change})
    assert message in str(caught.value)
    assert str(caught.value).count("\n") == 0, "one fault, one line"
    assert caught.value.exit_code == 2


def test_each_fault_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**SMALL, "sead": 1, "trainer": {"epochs": 0}})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not valid YAML: line 1, column 6: expected ',' or ']'"),
        ("- 1", "expected a mapping of options, found list"),
        ("", "expected a mapping of options, found nothing"),
        ("seed: 1\nname: a\nseed: 2", 'not valid YAML: line 3, column 1: key "seed" is given twice'),
        ("data: {reader: csv, reader: memory}", 'key "reader" is given twice'),
        ("a: \x00", "not valid YAML"),
        ("base: 3", "base: expected the path of a recipe, found 3"),
        ("base: r.yaml", "`base` leads back to itself"),
        ("base: elsewhere.yaml", "elsewhere.yaml: cannot be read: No such file or directory"),
    ],
)
def test_file_that_is_not_a_recipe(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"recipe {tmp_path}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_bytes_that_are_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recipe .*none.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(tmp_path / "b.yaml")


# ---- base and overrides --------------------------------------------------------------------------------------------


def test_base_is_merged_key_by_key(tmp_path: Path) -> None:
    write(
        tmp_path,
        "lib/base.yaml",
        {
            "data": {"reader": {"name": "csv", "path": "x"}, "schema": "s.yaml"},
            "model": {"name": "kunlun", "layers": 3, "dim": 64},
            "precision": "bf16",
            "trainer": {"epochs": 3, "log_every": 5},
        },
    )
    over = write(
        tmp_path,
        "mine.yaml",
        {"base": "lib/base.yaml", "model": {"layers": 2}, "precision": {"scale": 2}, "trainer": {"epochs": 1}},
    )
    recipe = load(over)
    assert recipe.model.options == {"layers": 2, "dim": 64}
    assert (recipe.precision.name, recipe.precision.options) == ("bf16", {"scale": 2})
    assert (recipe.trainer.epochs, recipe.trainer.log_every) == (1, 5)
    assert recipe.data.schema_ == str(tmp_path / "lib" / "s.yaml"), "relative to the file that says it"


def test_another_component_replaces_the_bases_options(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", {**SMALL, "model": {"name": "kunlun", "layers": 3}})
    assert load(write(tmp_path, "a.yaml", "base: base.yaml\nmodel: {name: din, dim: 8}")).model.options == {"dim": 8}
    assert load(write(tmp_path, "b.yaml", "base: base.yaml\nmodel: din")).model.options == {}


def test_inline_schema_replaces_a_path_of_the_base(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", {**SMALL, "data": {"reader": "csv", "schema": "s.yaml"}})
    recipe = load(write(tmp_path, "a.yaml", "base: base.yaml\ndata: {schema: {user: u}}"))
    assert recipe.data.schema_ == {"user": "u"}


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", {**SMALL, "trainer": {"epochs": 3}, "model": "kunlun"})
    recipe = load(
        path,
        [
            "trainer.epochs=5",
            "optimizer.dense.lr=1e-4",
            "model.layers=2",
            "model.towers={click: {width: 8}}",
            "trackers=[console]",
            "data.schema=mine.yaml",
            "trainer.max_steps=null",
            "name=a=b",
        ],
    )
    assert recipe.trainer.epochs == 5
    assert recipe.optimizer.dense.lr == 1e-4
    assert (recipe.model.name, recipe.model.options) == ("kunlun", {"layers": 2, "towers": {"click": {"width": 8}}})
    assert [t.name for t in recipe.trackers] == ["console"]
    assert recipe.data.schema_ == "mine.yaml"
    assert recipe.trainer.max_steps is None
    assert recipe.name == "a=b"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("epochs", 'override "epochs": expected key.path=value'),
        ("=3", 'override "=3": expected key.path=value'),
        ("trainer..epochs=3", 'override "trainer..epochs=3": expected key.path=value'),
        ("model.towers=[1", 'override "model.towers=[1": the value is not valid YAML'),
        ("seed.x=3", 'override "seed.x=3": "seed" is not a mapping in the recipe: give it whole'),
        ("trackers.0=console", '"trackers" is not a mapping in the recipe: give it whole'),
        ("data.schema.user=u", '"schema" is not a mapping in the recipe: give it whole'),
        ("trainr.epochs=3", 'override "trainr.epochs=3": unknown key "trainr"; did you mean "trainer"?'),
        ("trainer.epoch=3", 'override "trainer.epoch=3": unknown key "trainer.epoch"; did you mean "epochs"?'),
        ("trainer.epochs=x", "override \"trainer.epochs=x\": trainer.epochs: expected a valid integer, found 'x'"),
        (
            "trainer={epochs: x}",
            "override \"trainer={epochs: x}\": trainer.epochs: expected a valid integer, found 'x'",
        ),
    ],
)
def test_bad_override_is_what_the_message_names(override: str, message: str, tmp_path: Path) -> None:
    path = write(
        tmp_path, "r.yaml", {**SMALL, "seed": 1, "trackers": ["jsonl"], "data": {"reader": "csv", "schema": "s"}}
    )
    with pytest.raises(ConfigError) as caught:
        load(path, ["name=fine", override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fault_of_the_file_is_not_blamed_on_an_override(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", {**SMALL, "sead": 1})
    with pytest.raises(ConfigError, match=r'^recipe .*r.yaml: unknown key "sead"'):
        load(path, ["seed=3"])


# ---- Python --------------------------------------------------------------------------------------------------------


def test_python_recipe_is_the_same_object(tmp_path: Path) -> None:
    text = "def recipe():\n    return {'data': {'reader': 'csv'}, 'model': {'name': 'din', 'dim': 2 ** 4}}\n"
    recipe = load(write(tmp_path, "r.py", text), ["model.depth=1"])
    assert recipe.model.options == {"dim": 16, "depth": 1}
    text = f"from gem_core.recipe import parse\ndef recipe():\n    return parse({SMALL})\n"
    assert load(write(tmp_path, "o.py", text)) == parse(SMALL)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"r.py: expected a function recipe\(\) that returns a Recipe or a dict"),
        ("def recipe(): return 3", "expected a function"),
        ("1 / 0", "r.py: ZeroDivisionError: division by zero"),
        ("def recipe(:", "r.py: SyntaxError"),
    ],
)
def test_python_recipe_that_gives_none(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(GemError, match=message):
        load(write(tmp_path, "r.py", text))
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.py")


# ---- components' defaults ------------------------------------------------------------------------------------------


class Tower(ComponentConfig):
    width: int = Field(8, ge=1)


class Thing:
    """Stands for any component."""

    class Config(ComponentConfig):
        layers: int = 2
        rate: float = 0.5
        kind: str | None = None
        towers: dict[str, Tower] = Field(default_factory=dict)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Every component that SMALL names is a `Thing`."""
    module = types.ModuleType("things")
    names = {
        "reader": "csv",
        "model": "kunlun",
        "batcher": "in-order",
        "precision": "fp32",
        "embedding": "torch",
        "loss": "bce",
        "metric": "ranking",
        "strategy": "single",
        "callback": "watch",
    }

    def offer(kind: str, *given: str) -> Any:
        def hook(register: Any) -> None:
            for name in given:
                register(name, Thing)

        return hookimpl(hook)

    for kind, name in names.items():
        setattr(module, f"gem_register_{kind}", offer(kind, name))
    module.gem_register_tracker = offer("tracker", "console", "jsonl")  # type: ignore[attr-defined]
    registry = Registry()
    registry.register_plugin(module, "things")
    # A Thing has a Config and none of the protocols' methods.
    monkeypatch.setattr("gem_core.plugins.registry.Entry.load_component", lambda entry: entry.load())
    return registry


def test_resolve_fills_in_every_components_defaults(registry: Registry) -> None:
    recipe = parse({**SMALL, "model": {"name": "kunlun", "layers": 4, "towers": {"click": {}}}, "callbacks": ["watch"]})
    resolved = resolve(recipe, registry)
    filled: dict[str, Any] = {"layers": 2, "rate": 0.5, "kind": None, "towers": {}}
    assert resolved.model.options == {"layers": 4, "rate": 0.5, "kind": None, "towers": {"click": {"width": 8}}}
    for part in [resolved.data.reader, resolved.data.batcher, resolved.precision, resolved.embedding, resolved.loss]:
        assert part.options == filled
    for part in [*resolved.metrics, *resolved.trackers, *resolved.callbacks, resolved.parallel.strategy]:
        assert part.options == filled
    assert resolve(resolved, registry) == resolved
    assert parse(yaml.safe_load(resolved.to_yaml())) == resolved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": {"name": "kunlun", "layer": 1}},
            'recipe r: unknown key "model.layer" of model "kunlun"; did you mean "layers"?',
        ),
        (
            {"model": {"name": "kunlun", "towers": {"click": {"widht": 1}}}},
            'unknown key "model.towers.click.widht" of model "kunlun"; did you mean "width"?',
        ),
        ({"data": {"reader": {"name": "csv", "rate": "x"}}}, "recipe r: data.reader.rate: expected a valid number"),
        ({"trackers": ["console", {"name": "jsonl", "x": 1}]}, 'unknown key "trackers.1.x" of tracker "jsonl"'),
        ({"loss": "bec"}, 'recipe r: loss: loss "bec" is not known; did you mean "bce"?'),
        (
            {"parallel": {"strategy": "singel"}},
            'recipe r: parallel.strategy: strategy "singel" is not known; did you mean "single"?',
        ),
    ],
)
def test_resolve_names_the_place(change: dict[str, Any], message: str, registry: Registry) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(parse({**SMALL, **change}), registry, "recipe r")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "place", "name"),
    [
        ("parallel.strategy.device=cuda", "parallel.strategy", "single"),
        ("embedding.init_std=0.1", "embedding", "torch"),
        ("data.batcher.size=2", "data.batcher", "in-order"),
    ],
)
def test_options_of_a_part_that_is_not_named_are_the_defaults(
    override: str, place: str, name: str, tmp_path: Path
) -> None:
    part: Any = load(write(tmp_path, "r.yaml", SMALL), [override])
    for key in place.split("."):
        part = getattr(part, key)
    path, _, text = override.partition("=")
    key = path.rpartition(".")[2]
    assert (part.name, part.options) == (name, {key: yaml.safe_load(text)})


def test_an_override_is_blamed_for_the_section_that_it_made(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", {k: v for k, v in SMALL.items() if k != "model"})
    with pytest.raises(ConfigError, match=r'^override "model.dim=8": missing key "model.name"$'):
        load(path, ["model.dim=8"])


def test_only_overridden_parts_are_checked_again(registry: Registry) -> None:
    recipe = parse({**SMALL, "trackers": [{"name": "not-installed-here"}], "loss": {"name": "bce", "x": 1}})
    check_overridden(recipe, registry, "recipe r", ["seed=3"])
    with pytest.raises(ConfigError, match=r'^override "loss.x=1": unknown key "loss.x" of loss "bce"'):
        check_overridden(recipe, registry, "recipe r", ["loss.x=1"])


def test_resolve_puts_the_schema_in(registry: Registry, tmp_path: Path) -> None:
    schema = {"user": "u", "time": "t", "objectives": ["click"], "dense": {"price": {"transform": "log1p"}}}
    write(tmp_path, "s.yaml", schema)
    path = write(tmp_path, "r.yaml", {**SMALL, "data": {"reader": "csv", "schema": "s.yaml"}})
    inline = resolve(load(path), registry).data.schema_
    assert isinstance(inline, dict)
    assert Schema.parse(inline) == Schema.parse(schema)


def test_resolve_blames_the_override(registry: Registry, tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", SMALL)
    with pytest.raises(ConfigError) as caught:
        resolve(load(path, ["model=kunlum"]), registry, f"recipe {path}", ["model=kunlum"])
    assert str(caught.value) == 'override "model=kunlum": model: model "kunlum" is not known; did you mean "kunlun"?'
    for override in ["model.layer=3", "model={name: kunlun, layer: 3}"]:
        with pytest.raises(ConfigError) as caught:
            resolve(load(path, [override]), registry, f"recipe {path}", [override])
        assert str(caught.value).startswith(f'override "{override}": unknown key "model.layer" of model "kunlun"')


# ---- round trip ----------------------------------------------------------------------------------------------------

texts = st.text(min_size=1, max_size=12)
words = st.from_regex(r"[a-z][a-z0-9_-]{0,9}", fullmatch=True)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
options = st.dictionaries(words.filter(lambda w: w != "name"), plain, max_size=4)
components = st.builds(lambda name, more: {"name": name, **more}, words, options) | words
recipes = st.fixed_dictionaries(
    {"data": st.fixed_dictionaries({"reader": components}, optional={"schema": texts | options}), "model": components},
    optional={
        "name": words,
        "seed": st.integers(0, 2**31),
        "ops": st.dictionaries(words, words, max_size=3),
        "task_weights": st.dictionaries(texts, st.floats(0, 10), max_size=3),
        "optimizer": st.fixed_dictionaries({}, optional={"sparse_lr": st.floats(1e-9, 10), "clip_norm": st.none()}),
        "trainer": st.fixed_dictionaries(
            {"epochs": st.integers(1, 9)},
            optional={"early_stop": st.just({"patience": 2}), "max_steps": st.integers(1)},
        ),
        "metrics": st.lists(components, max_size=2),
        "callbacks": st.lists(components, max_size=2),
    },
)


@settings(deadline=None, max_examples=30)
@given(recipes)
def test_dump_and_parse_are_inverse(value: dict[str, Any]) -> None:
    recipe = parse(value)
    assert parse(recipe.dump()) == recipe
    assert parse(yaml.safe_load(recipe.to_yaml())) == recipe
