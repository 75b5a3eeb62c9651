"""`gem plugins`: what is registered, by whom, and which plugins are broken."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from gem_core.cli.app import DEBUG
from gem_core.plugins import CONTRACT_VERSION, Plugin, Registry, default_registry


def _owner(plugin: Plugin) -> str:
    return f"{plugin.name} ({plugin.distribution} {plugin.version})".replace(" )", ")").replace(" ()", "")


def as_json(registry: Registry) -> dict[str, object]:
    """The registry as plain data."""
    return {
        "contract": CONTRACT_VERSION,
        "plugins": [asdict(plugin) for plugin in registry.plugins],
        "components": [
            {"kind": kind, "name": name, "plugin": entry.plugin, "target": str(entry.target), "help": entry.help}
            for kind, entries in registry.entries.items()
            for name, entry in sorted(entries.items())
        ],
    }


@click.command(short_help="List what is installed: kinds, names, owners, broken plugins.")
@click.option("--json", "machine", is_flag=True, help="Write JSON.")
def plugins(machine: bool) -> None:
    """List the components of every kind with the plugin that gives each, and the plugins that failed to load.

    Nothing heavy is imported: a component is loaded when it is used.
    """
    registry = default_registry()
    if machine:
        click.echo(json.dumps(as_json(registry), indent=1))
        return
    for kind, entries in registry.entries.items():
        for name, entry in sorted(entries.items()):
            click.echo(f"{kind:<10} {name:<28} {entry.plugin}")
        if not entries:
            click.echo(f"{kind:<10} -")
    click.echo()
    for plugin in registry.plugins:
        click.echo(f"plugin     {_owner(plugin)}" + (f": broken, skipped: {plugin.error}" if plugin.error else ""))
        if plugin.error and DEBUG in click.get_current_context().meta:
            click.echo(plugin.details)
