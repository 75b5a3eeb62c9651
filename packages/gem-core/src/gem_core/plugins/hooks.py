"""The hook contract: one narrow hook per kind, all of one shape. A plugin implements those that it needs:

    import pluggy
    hookimpl = pluggy.HookimplMarker("gem")

    @hookimpl
    def gem_register_model(register):
        register("my-model", "my_package.model:MyModel")   # loaded when used

and names its module in the entry-point group "gem":  [project.entry-points.gem]  my-plugin = "my_package.plugin"
"""

from __future__ import annotations

from typing import Protocol

import pluggy

CONTRACT_VERSION = 1
"""Goes up when a protocol or a hook changes incompatibly; a plugin states its own by gem_contract."""

PROJECT = "gem"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Register(Protocol):
    """`register(name, target, help)`, which every hook gets."""

    def __call__(self, name: str, target: object, help: str = "") -> None:
        """Offer a component.

        Args:
            name: how recipes and the command line call it.
            target: "module:attribute", imported when first used, or the object itself.
            help: one line for listings; `gem --help` shows a command's without importing it.
        """


@hookspec
def gem_contract() -> int:  # type: ignore[empty-body]
    """Contract version that the plugin was written for (without this hook: the current one)."""


@hookspec
def gem_register_reader(register: Register) -> None:
    """Readers: `gem_core.protocols.Reader`."""


@hookspec
def gem_register_model(register: Register) -> None:
    """Models: `gem_core.protocols.Model`."""


@hookspec
def gem_register_op(register: Register) -> None:
    """Op backends, named "<op>:<backend>": `gem_core.ops.OpBackend`."""


@hookspec
def gem_register_precision(register: Register) -> None:
    """Precisions: `gem_core.protocols.Precision`."""


@hookspec
def gem_register_embedding(register: Register) -> None:
    """Sparse sides: `gem_core.protocols.Embedding`."""


@hookspec
def gem_register_strategy(register: Register) -> None:
    """Dense parallel strategies: `gem_core.protocols.Strategy`."""


@hookspec
def gem_register_planner(register: Register) -> None:
    """Planners: `gem_core.protocols.Planner`."""


@hookspec
def gem_register_batcher(register: Register) -> None:
    """Batchers: `gem_core.protocols.Batcher`."""


@hookspec
def gem_register_loss(register: Register) -> None:
    """Losses: `gem_core.protocols.Loss`."""


@hookspec
def gem_register_metric(register: Register) -> None:
    """Metrics: `gem_core.protocols.Metric`."""


@hookspec
def gem_register_transfer(register: Register) -> None:
    """Arms of the distillation report: `gem_core.protocols.Transfer`."""


@hookspec
def gem_register_store(register: Register) -> None:
    """Representation stores: `gem_core.protocols.Store`."""


@hookspec
def gem_register_tracker(register: Register) -> None:
    """Trackers: `gem_core.protocols.Tracker`."""


@hookspec
def gem_register_callback(register: Register) -> None:
    """Trainer callbacks: `gem_core.protocols.Callback`."""


@hookspec
def gem_register_command(register: Register) -> None:
    """Commands of `gem`: click commands, loaded when called; "data profile" is `profile` of the group `data`."""
