"""Every built-in target loads and is what its kind asks for; the ops listed are those that gem_core.ops offers."""

from __future__ import annotations

import click
import pytest

from gem_core import ops
from gem_core.plugins import KINDS, default_registry
from gem_core.protocols import ComponentConfig

CORE = [e for kind in KINDS for e in default_registry().entries[kind].values() if e.plugin == "core"]
COMPONENTS = [e for e in CORE if e.kind not in ("op", "command")]


@pytest.mark.parametrize("entry", COMPONENTS, ids=lambda e: f"{e.kind}-{e.name}")
def test_component(entry: object) -> None:
    cls = entry.load_component()  # type: ignore[attr-defined]
    assert issubclass(cls.Config, ComponentConfig)
    assert cls.Config.model_config["frozen"] and cls.Config.model_config["extra"] == "forbid"
    assert "name" not in cls.Config.model_fields, "`name` is the component's in a recipe"
    assert cls.__doc__, "shown in the reference"


@pytest.mark.parametrize("entry", [e for e in CORE if e.kind == "command"], ids=lambda e: e.name)
def test_command_has_the_help_that_is_listed(entry: object) -> None:
    command = entry.load()  # type: ignore[attr-defined]
    assert isinstance(command, click.Command)
    assert entry.help == command.get_short_help_str(limit=200)  # type: ignore[attr-defined]
    assert len(entry.help) <= 70  # type: ignore[attr-defined]


def test_ops_listed_are_those_offered() -> None:
    listed = {e.name for e in CORE if e.kind == "op"}
    offered = {f"{op}:{backend}" for op, backends in ops.registered().items() for backend in backends}
    plugins = {name for name, e in default_registry().entries["op"].items() if e.plugin != "core"}
    assert listed == offered - plugins
