"""Plugins: hooks (the contract), registry (finding and resolving them), builtin (gem-core's own registrations)."""

from gem_core.plugins.hooks import CONTRACT_VERSION, Register, hookimpl
from gem_core.plugins.registry import KINDS, Entry, Plugin, Registry, default_registry, discover

__all__ = [
    "CONTRACT_VERSION",
    "KINDS",
    "Entry",
    "Plugin",
    "Register",
    "Registry",
    "default_registry",
    "discover",
    "hookimpl",
]
