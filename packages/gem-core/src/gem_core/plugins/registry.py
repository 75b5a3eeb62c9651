"""The registry: finds plugins, loads them one by one, resolves names to components of each kind.

Importing and listing needs neither torch nor pydantic: targets are "module:attribute" strings, loaded when used.
"""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Any

import pluggy

from gem_core.errors import ConfigError, GemError, nearest
from gem_core.plugins import hooks

if TYPE_CHECKING:
    from torch import Tensor

    from gem_core.ops import OpBackend, OpSpec, Saved
    from gem_core.validation import Loc

PREFIX = "gem_register_"
KINDS = tuple(n.removeprefix(PREFIX) for n in vars(hooks) if n.startswith(PREFIX))

BUILTIN = "gem_core.plugins.builtin"

PLUGIN_PRIORITY = 100
"""Of a plugin's op backend: above every built-in one."""

GIVEN_BY = {
    "op": {"triton": "gem-kernels[triton]", "cpu": "gem-kernels", "mx": "gem-kernels"},
    "precision": {"mxfp8": "gem-kernels"},
    "embedding": {"sharded": "gem-parallel", "torchrec": "gem-parallel[torchrec]"},
    "strategy": {"fsdp": "gem-parallel", "hsdp": "gem-parallel", "five-axis": "gem-parallel"},
    "store": {"lmdb": "gem-serve[lmdb]", "redis": "gem-serve[redis]"},
    "transfer": {"kd": "gem-distill", "loopfm": "gem-distill", "solaris": "gem-distill", "adapter": "gem-distill"},
    "command": {
        "kernels": "gem-kernels",
        "topology": "gem-parallel",
        "plan": "gem-parallel",
        "distill": "gem-distill",
        "serve": "gem-serve",
        "replay": "gem-serve",
    },
}
"""Which package gives a part that is not installed; of ops by backend, of commands by the first word."""

_WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_NAME = {
    "op": (rf"{_WORD}:{_WORD}", '"<op>:<backend>"'),
    "command": (rf"{_WORD}( {_WORD})*", "words with single spaces"),
}
_PLAIN_NAME = (_WORD, "letters, digits, dots, dashes")


@dataclass(frozen=True)
class Entry:
    """A registered component: `target` is "module:attribute" or the object."""

    kind: str
    name: str
    target: object
    plugin: str
    help: str = ""

    def load(self) -> Any:
        """The object; an import that fails says whose component it is."""
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:
            raise GemError(
                f'{self.kind} "{self.name}" of plugin {self.plugin} cannot be loaded from {self.target}: '
                f"{_one_line(error)}"
            ) from error

    def load_component(self) -> Any:
        """The class, checked to have its protocol's methods and a `Config`."""
        from gem_core import protocols

        cls = self.load()
        protocol = getattr(protocols, self.kind.capitalize())
        wanted = [n for n, member in vars(protocol).items() if callable(member) and not n.startswith("_")]
        missing = [n for n in ["Config", *wanted] if not hasattr(cls, n)]
        if missing:
            raise GemError(
                f'{self.kind} "{self.name}" of plugin {self.plugin} is not a {protocol.__name__} '
                f"(gem_core.protocols): it lacks {', '.join(missing)}"
            )
        return cls


class _LazyBackend:
    """An `OpBackend` that is imported at its first call, so that one that cannot be is named with its owner."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    @cached_property
    def _backend(self) -> OpBackend:
        target = self._entry.load()
        backend: OpBackend = target() if isinstance(target, type) else target
        return backend

    def supports(self, spec: OpSpec) -> str | None:
        return self._backend.supports(spec)

    def forward(self, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        return self._backend.forward(*tensors, **options)

    def backward(self, saved: Saved, grad: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return self._backend.backward(saved, grad, **options)


@dataclass(frozen=True)
class Plugin:
    """A plugin found: `error` is None for a working one, else what went wrong (`details`: the traceback)."""

    name: str
    distribution: str
    version: str
    error: str | None = None
    details: str = ""


@dataclass
class Registry:
    """Names to components. Build one with `discover`; tests register objects by `register_plugin`."""

    entries: dict[str, dict[str, Entry]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    plugins: list[Plugin] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks)

    # ---- registration ------------------------------------------------------------------------------------------

    def register_plugin(self, plugin: object, name: str, distribution: str = "", version: str = "") -> None:
        """Take a plugin's registrations, all or none.

        Raises:
            ConfigError: a name that another plugin has (both owners named), a malformed name or target, an unknown
                hook, another contract.
        """
        if self._manager.has_plugin(name):
            earlier = next(p for p in self.plugins if p.name == name and p.error is None)
            owners = " and ".join(o or "an unnamed distribution" for o in (earlier.distribution, distribution))
            raise ConfigError(f"the plugin name {name} is used by both {owners}; uninstall one")
        _check_hooks(plugin)
        try:
            self._manager.register(plugin, name)
            self._check_contract(plugin)
            taken: dict[tuple[str, str], Entry] = {}
            others = [p for p in self._manager.get_plugins() if p is not plugin]
            for kind in KINDS:
                self._manager.subset_hook_caller(PREFIX + kind, others)(register=self._collector(kind, name, taken))
        except (Exception, SystemExit):
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            raise
        for entry in taken.values():
            self.entries[entry.kind][entry.name] = entry
        self.plugins.append(Plugin(name, distribution, version))

    def unregister_plugin(self, name: str) -> None:
        """Forget a plugin and all that it registered."""
        self._manager.unregister(name=name)
        self.plugins = [p for p in self.plugins if p.name != name]
        for kind, entries in self.entries.items():
            self.entries[kind] = {k: e for k, e in entries.items() if e.plugin != name}

    def _check_contract(self, plugin: object) -> None:
        others = [p for p in self._manager.get_plugins() if p is not plugin]
        for contract in self._manager.subset_hook_caller("gem_contract", others)():
            if contract != hooks.CONTRACT_VERSION:
                raise ConfigError(
                    f"written for hook contract {contract}, this gem-core has {hooks.CONTRACT_VERSION}: "
                    f"install a release of the plugin for contract {hooks.CONTRACT_VERSION}"
                )

    def _collector(self, kind: str, plugin: str, taken: dict[tuple[str, str], Entry]) -> hooks.Register:
        pattern, meaning = _NAME.get(kind, _PLAIN_NAME)

        def register(name: object, target: object, help: str = "") -> None:
            if not isinstance(name, str) or re.fullmatch(pattern, name) is None:
                raise ConfigError(f"{kind} {name!r}: expected a name of the form {meaning}")
            if isinstance(target, str) and re.fullmatch(r"[\w.]+:\w+", target) is None:
                raise ConfigError(f'{kind} "{name}": target {target!r} is not "module:attribute"')
            for other, entry in [*self.entries[kind].items(), *((n, e) for (k, n), e in taken.items() if k == kind)]:
                if other == name:
                    owners = f"twice by {plugin}" if entry.plugin == plugin else f"by both {entry.plugin} and {plugin}"
                    raise ConfigError(f'{kind} "{name}" is registered {owners}; uninstall or rename one')
                if kind == "command" and (other.startswith(name + " ") or name.startswith(other + " ")):
                    raise ConfigError(
                        f'command "{name}" of {plugin} and "{other}" of {entry.plugin}: one is the other\'s group'
                    )
            taken[kind, name] = Entry(kind, name, target, plugin, help)

        return register

    # ---- use ---------------------------------------------------------------------------------------------------

    def require_sound(self) -> None:
        """Raise the first broken plugin's fault (`--strict-plugins`)."""
        for plugin in self.plugins:
            if plugin.error:
                raise ConfigError(f"plugin {plugin.name} ({plugin.distribution}): {plugin.error}")

    def get(self, kind: str, name: str) -> Entry:
        """The entry, or an error with the nearest name or the package that gives it."""
        entries = self.entries[kind]
        if name in entries:
            return entries[name]
        what, part = f'{kind} "{name}"', name
        if kind == "op":
            op, _, part = name.partition(":")
            what = f'backend "{part}" of op {op}'
        first = part.partition(" ")[0]
        package = GIVEN_BY.get(kind, {}).get(first)
        broken = [p.name for p in self.plugins if p.error]
        note = f" (plugins that failed to load: {', '.join(broken)}; see gem plugins)" if broken else ""
        if package is None or any(other.startswith(f"{first} ") for other in entries):
            raise ConfigError(f"{what} is not known{nearest(name, entries)}{note}")
        installed = _version(package.partition("[")[0])
        if installed and "[" not in package:
            raise ConfigError(
                f"{what} is not in {package} {installed}, which is installed: pip install -U {package}{note}"
            )
        raise ConfigError(f"{what} is not installed: pip install {package}{note}")

    def install_ops(self) -> None:
        """Offer the plugins' op backends to gem_core.ops: asked before the built-in ones. Twice is as good as once."""
        from gem_core import ops

        for name, entry in self.entries["op"].items():
            op, _, backend = name.partition(":")
            if backend in ops.registered().get(op, ()):
                continue
            try:
                ops.register_backend(op, backend, _LazyBackend(entry), priority=PLUGIN_PRIORITY)
            except ConfigError as error:
                raise ConfigError(f"plugin {entry.plugin}: {error}") from error

    def config(
        self,
        kind: str,
        name: str,
        options: Mapping[str, Any],
        where: str,
        path: Loc = (),
        overrides: Mapping[Loc, str] | None = None,
    ) -> Any:
        """A component's options, validated by its `Config`.

        What messages name: `where`, the file; `path`, the keys that lead to the component in it; `overrides`, see
        `gem_core.validation.explain`.
        """
        from pydantic import ValidationError

        from gem_core.validation import blame, explain

        try:
            entry = self.get(kind, name)
        except ConfigError as error:
            place = ".".join(map(str, path))
            raise ConfigError(f"{blame(path, where, overrides)}: {place + ': ' if place else ''}{error}") from error
        cls = entry.load_component()
        try:
            return cls.Config.model_validate(dict(options))
        except ValidationError as error:
            raise ConfigError(explain(error, cls.Config, where, path, f'{kind} "{name}"', overrides)) from error

    def create(self, kind: str, name: str, options: Mapping[str, Any], where: str, **context: Any) -> Any:
        """Load a component, validate its options by its `Config`, and construct it: `cls(config, **context)`."""
        config = self.config(kind, name, options, where)
        return self.get(kind, name).load()(config, **context)


def _check_hooks(plugin: object) -> None:
    """Refuse what pluggy would pass over in silence: a mistyped hook, or one without its marker."""
    found = [n for n in dir(plugin) if n.startswith("gem_") and callable(getattr(plugin, n))]
    known = [n for n in vars(hooks) if n == "gem_contract" or n.startswith(PREFIX)]
    for name in found:
        if name not in known and (name.startswith(PREFIX) or hasattr(getattr(plugin, name), "gem_impl")):
            raise ConfigError(f'unknown hook "{name}"{nearest(name, known)}')
        if name in known and not hasattr(getattr(plugin, name), "gem_impl"):
            raise ConfigError(f'"{name}" lacks its marker: put @hookimpl (pluggy.HookimplMarker("gem")) before it')
    if not any(n.startswith(PREFIX) for n in found):
        raise ConfigError("no hook found: the entry point must name a module or object with gem_register_* functions")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, GemError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def discover(points: Iterable[EntryPoint] | None = None) -> Registry:
    """Load every plugin of the entry-point group "gem"; a broken one is skipped and reported in `plugins`."""
    registry = Registry()
    found = entry_points(group=hooks.PROJECT) if points is None else points
    # gem-core first: a stranger that takes a built-in name is the one in conflict.
    for point in sorted(found, key=lambda p: (p.value != BUILTIN, p.name)):
        distribution, release = (point.dist.name, point.dist.version) if point.dist else (point.value, "")
        try:
            registry.register_plugin(point.load(), point.name, distribution, release)
        except (Exception, SystemExit) as error:
            registry.plugins.append(Plugin(point.name, distribution, release, _one_line(error), traceback.format_exc()))
    return registry


@cache
def default_registry() -> Registry:
    """The registry of the installed plugins, discovered once."""
    return discover()
