"""`gem train`: train a model from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from gem_core.cli.output import metrics_table, results
from gem_core.errors import main_process

if TYPE_CHECKING:
    from gem_core.train import Result


@click.command(short_help="Train a model from a recipe.")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--print-config", is_flag=True, help="Print the resolved recipe, defaults included, and stop.")
@click.option("--summary", is_flag=True, help="Print the model's parameters, tables and FLOPs per row, and stop.")
@click.option(
    "--resume",
    type=click.Choice(["auto", "never", "must"]),
    default="auto",
    show_default=True,
    help="Go on from the newest checkpoint: if there is one; never (deletes them); or fail without one.",
)
@click.option("--json", "machine", is_flag=True, help="Write the result as JSON; progress goes to stderr.")
@click.pass_context
def train(
    context: click.Context,
    recipe: Path,
    overrides: tuple[str, ...],
    print_config: bool,
    summary: bool,
    resume: Literal["auto", "never", "must"],
    machine: bool,
) -> None:
    """Train a model from a recipe, evaluate the best checkpoint on the test split.

    RECIPE is a YAML file (or a .py file with a function recipe()). KEY=VALUE overrides a key of it, as in
    trainer.epochs=2 or model=din; values are YAML.

    --summary reads no data: a vocabulary that is still to be learned counts at its largest (max_vocabulary), and FLOPs are
    those of a row alone in its request with histories as long as they may be.

    The first SIGTERM or Ctrl-C saves a checkpoint and ends with exit code 1; the same command then goes on from there.
    """
    from gem_core.plugins import default_registry
    from gem_core.recipe import load, resolve

    registry = default_registry()
    resolved = resolve(load(recipe, overrides), registry, f"recipe {recipe}", overrides)
    if print_config:
        click.echo(resolved.to_yaml(), nl=False)
        return
    if summary:
        from gem_core.model.summary import summarise

        counts = summarise(resolved, registry)
        with results(machine) as show:
            show(counts, str(counts))
        return
    from gem_core.train import train as run

    with results(machine) as show:
        result = run(resolved, registry, resume)
        if main_process():
            show(result, _outcome(result))
    context.exit(result.exit_code)


def _outcome(result: Result) -> str:
    best = f", best at step {result.best_step}" if result.best_step is not None else ""
    lines = [f"{result.status} at step {result.step}{best}; checkpoint {result.checkpoint}"]
    if result.validation or result.test:
        lines.append(metrics_table({"validation": result.validation, "test": result.test}))
    return "\n".join(lines)
