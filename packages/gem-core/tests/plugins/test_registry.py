"""Discovery, registration and look-up: conflicts, broken plugins, contracts, names, missing packages."""

from __future__ import annotations

import subprocess
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pluggy
import pytest

from gem_core.errors import ConfigError, GemError
from gem_core.plugins import CONTRACT_VERSION, KINDS, Plugin, Registry, default_registry, discover, hookimpl
from gem_core.plugins import registry as registry_module
from gem_core.protocols import ComponentConfig

pytestmark = pytest.mark.light


def plugin(**hooks: Any) -> types.ModuleType:
    """A module with these functions as marked hooks."""
    module = types.ModuleType("made_up")
    vars(module).update({name: hookimpl(function) for name, function in hooks.items()})
    return module


def offers(kind: str, name: str, target: object = "some.module:Thing") -> types.ModuleType:
    def hook(register: Any) -> None:
        register(name, target)

    return plugin(**{f"gem_register_{kind}": hook})


@pytest.fixture
def registry() -> Registry:
    return Registry()


def entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, source: str) -> EntryPoint:
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return EntryPoint(name, name, "gem")


CORE = EntryPoint("core", "gem_core.plugins.builtin", "gem")
WORKS = """
from gem_core.plugins import hookimpl

@hookimpl
def gem_register_reader(register):
    register("mine", "nowhere:Reader", "My log.")
"""
BROKEN = {
    "import error": (
        "import no_such_module_anywhere",
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
    ),
    "exits on import": ("raise SystemExit('bye')", "SystemExit: bye"),
    "syntax error": ("def :", "SyntaxError"),
    "bad signature": (WORKS.replace("(register):", "(registrar):"), "Argument(s) {'registrar'} are declared"),
    "mistyped hook": (
        WORKS.replace("_reader(", "_raeder("),
        'unknown hook "gem_register_raeder"; did you mean "gem_register_reader"?',
    ),
    "no marker": (WORKS.replace("@hookimpl", ""), '"gem_register_reader" lacks its marker: put @hookimpl'),
    "no hook": ("x = 1", "no hook found"),
    "wrong contract": (
        WORKS + "\n@hookimpl\ndef gem_contract():\n    return 99\n",
        "written for hook contract 99, this gem-core has 1",
    ),
    "hook raises": (WORKS.replace("register(", "raise KeyError("), "KeyError"),
    "built-in name": (WORKS.replace('"mine"', '"csv"'), 'reader "csv" is registered by both core and'),
    "name of another kind's form": (WORKS.replace('"mine"', '"a b"'), "reader 'a b': expected a name of the form"),
    "name not text": (WORKS.replace('"mine"', "3"), "reader 3: expected a name of the form"),
    "bad target": (
        WORKS.replace("nowhere:Reader", "nowhere.Reader"),
        "target 'nowhere.Reader' is not \"module:attribute\"",
    ),
    "same name twice": (WORKS + '    register("mine", "elsewhere:Reader")\n', 'reader "mine" is registered twice by'),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_plugin_is_reported_and_skipped(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, message = BROKEN[case]
    bad = entry_point(monkeypatch, tmp_path, "aaa_bad_plugin", source)
    good = entry_point(monkeypatch, tmp_path, "good_plugin", WORKS)
    registry = discover([bad, good, CORE])
    reported = {p.name: p for p in registry.plugins}
    assert message in (reported["aaa_bad_plugin"].error or "")
    assert "\n" not in (reported["aaa_bad_plugin"].error or "")
    assert "Traceback" in reported["aaa_bad_plugin"].details
    assert reported["core"].error is None and reported["good_plugin"].error is None
    assert registry.get("reader", "mine").plugin == "good_plugin"
    assert registry.get("reader", "csv").plugin == "core"
    assert "aaa_bad_plugin" not in {e.plugin for entries in registry.entries.values() for e in entries.values()}
    with pytest.raises(ConfigError, match="plugin aaa_bad_plugin"):
        registry.require_sound()


def test_sound_plugins_pass_the_strict_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = discover([CORE, entry_point(monkeypatch, tmp_path, "good_plugin", WORKS)])
    registry.require_sound()
    assert [p.name for p in registry.plugins] == ["core", "good_plugin"]
    assert registry.get("reader", "mine").help == "My log."


def test_conflict_names_both_owners_and_takes_nothing_of_the_second(registry: Registry) -> None:
    def both(register: Any) -> None:
        register("new", "b:New")
        register("taken", "b:Taken")

    registry.register_plugin(offers("model", "taken"), "first")
    with pytest.raises(
        ConfigError, match='model "taken" is registered by both first and second; uninstall or rename one'
    ):
        registry.register_plugin(plugin(gem_register_model=both), "second")
    assert list(registry.entries["model"]) == ["taken"]
    registry.register_plugin(offers("model", "new"), "second")  # the refused plugin left no trace
    assert registry.get("model", "new").plugin == "second"


def test_two_plugins_of_one_name_are_in_conflict(registry: Registry) -> None:
    registry.register_plugin(offers("model", "a"), "same", "dist-one")
    with pytest.raises(ConfigError, match="plugin name same is used by both dist-one and dist-two"):
        registry.register_plugin(offers("model", "b"), "same", "dist-two")


def test_command_cannot_be_a_command_and_a_group(registry: Registry) -> None:
    registry.register_plugin(offers("command", "data profile"), "first")
    with pytest.raises(ConfigError, match="one is the other's group"):
        registry.register_plugin(offers("command", "data"), "second")


def test_unregister_forgets_everything(registry: Registry) -> None:
    registry.register_plugin(offers("model", "a"), "one")
    registry.register_plugin(offers("model", "b"), "two")
    registry.unregister_plugin("one")
    assert list(registry.entries["model"]) == ["b"]
    assert [p.name for p in registry.plugins] == ["two"]
    registry.register_plugin(offers("model", "a"), "one")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_registers_by_the_same_shape(kind: str, registry: Registry) -> None:
    name = {"op": "gdpa:mine", "command": "mine do"}.get(kind, "mine")
    target = object()
    registry.register_plugin(offers(kind, name, target), "me")
    assert registry.get(kind, name).load() is target


def test_hook_without_arguments_is_legal_and_registers_nothing(registry: Registry) -> None:
    registry.register_plugin(plugin(gem_register_model=lambda: None, gem_contract=lambda: CONTRACT_VERSION), "quiet")
    assert registry.entries["model"] == {}


def test_op_is_named_by_op_and_backend(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"op 'triton': expected a name of the form \"<op>:<backend>\""):
        registry.register_plugin(offers("op", "triton"), "me")


# ---- look-up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("model", "kunlum", 'model "kunlum" is not known; did you mean "kunlun"?'),
        ("model", "zzz", 'model "zzz" is not known; valid: dcnv2, din, hstu, interformer, kunlun, wukong'),
        (
            "op",
            "seed_attention:triton",
            r'backend "triton" of op seed_attention is not installed: pip install gem-kernels\[triton\]',
        ),
        ("command", "kernels list", 'command "kernels list" is not installed: pip install gem-kernels'),
        ("planner", "auto", 'planner "auto" is not known$'),
    ],
)
def test_unknown_name(kind: str, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_version", lambda _: None)
    with pytest.raises(ConfigError, match=message):
        discover([CORE]).get(kind, name)


def test_missing_part_of_an_installed_package_asks_for_its_newer_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_version", lambda _: "0.1.0")
    with pytest.raises(ConfigError, match=r"not in gem-serve 0\.1\.0, which is installed: pip install -U gem-serve"):
        discover([CORE]).get("command", "serve")


def test_mistyped_command_of_an_installed_group(registry: Registry) -> None:
    registry.register_plugin(offers("command", "kernels list"), "kernels")
    with pytest.raises(ConfigError, match='command "kernels lst" is not known; did you mean "kernels list"'):
        registry.get("command", "kernels lst")


def test_unknown_name_mentions_plugins_that_failed(registry: Registry) -> None:
    registry.plugins.append(Plugin("sick", "sick-dist", "1", "ImportError: no"))
    with pytest.raises(
        ConfigError, match=r'model "x" is not known \(plugins that failed to load: sick; see gem plugins\)'
    ):
        registry.get("model", "x")


@pytest.mark.parametrize("target", ["no_such_module_anywhere:Thing", "gem_core.errors:Nothing"])
def test_target_that_does_not_load_names_its_owner(target: str, registry: Registry) -> None:
    registry.register_plugin(offers("model", "bad", target), "owner")
    with pytest.raises(
        GemError, match=f'model "bad" of plugin owner cannot be loaded from {target}: .*Error'
    ) as caught:
        registry.get("model", "bad").load()
    assert caught.value.exit_code == 1


class Batcher:
    """A component in full."""

    class Config(ComponentConfig):
        size: int = 3

    made: ClassVar[list[Any]] = []

    def __init__(self, config: Config, **context: Any) -> None:
        self.config, self.context = config, context

    def __call__(self, batches: Any) -> Any:
        return batches


class HalfAReader:
    """Has a Config, lacks `iterate`."""

    class Config(ComponentConfig):
        pass

    def state(self) -> dict[str, Any]:
        return {}


def test_create_validates_options_and_passes_the_context(registry: Registry) -> None:
    registry.register_plugin(offers("batcher", "mine", Batcher), "me")
    made = registry.create("batcher", "mine", {"size": 5}, "recipe r.yaml", seed=7)
    assert (made.config.size, made.context) == (5, {"seed": 7})
    with pytest.raises(
        ConfigError, match=r'^recipe r.yaml: unknown key "sise" of batcher "mine"; did you mean "size"\?'
    ):
        registry.create("batcher", "mine", {"sise": 5}, "recipe r.yaml")


def test_component_that_lacks_its_protocols_methods_is_refused(registry: Registry) -> None:
    registry.register_plugin(offers("reader", "half", HalfAReader), "me")
    registry.register_plugin(offers("model", "bare", object), "me too")
    with pytest.raises(
        GemError, match=r'reader "half" of plugin me is not a Reader \(gem_core.protocols\): it lacks splits, iterate$'
    ):
        registry.create("reader", "half", {}, "recipe")
    with pytest.raises(GemError, match=r"it lacks Config, flops$"):
        registry.create("model", "bare", {}, "recipe")


# ---- the installed plugins -----------------------------------------------------------------------------------------


def test_gem_core_is_found_by_its_entry_point() -> None:
    registry = default_registry()
    core = next(p for p in registry.plugins if p.name == "core")
    assert (core.distribution, core.error) == ("gem-core", None)
    assert default_registry() is registry
    assert registry.get("model", "kunlun").plugin == "core"


def test_a_plugin_may_use_pluggys_own_marker(registry: Registry) -> None:
    class Plain:
        @pluggy.HookimplMarker("gem")
        def gem_register_store(self, register: Any) -> None:
            register("a", "b:c")

    registry.register_plugin(Plain(), "plain")
    assert registry.get("store", "a").plugin == "plain"


def test_discovery_and_listing_import_neither_torch_nor_pydantic() -> None:
    program = (
        "import sys; from gem_core.plugins import discover; names = [list(e) for e in discover().entries.values()]; "
        "heavy = {'torch', 'numpy', 'pyarrow', 'pydantic', 'yaml'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
