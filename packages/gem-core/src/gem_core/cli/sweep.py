"""`gem sweep`: search a recipe's options."""

from __future__ import annotations

from pathlib import Path

import click

from gem_core.cli.output import results


@click.command(short_help="Search a recipe's options; chosen on the validation split.")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("options", nargs=-1, metavar="[KEY=VALUE | KEY=[...] | KEY={low: ..., high: ...}]...")
@click.option("--trials", type=click.IntRange(min=1), help="Runs in all [default: every combination; 20 with a range].")
@click.option("--json", "machine", is_flag=True, help="Write all trials as JSON; progress goes to stderr.")
@click.pass_context
def sweep(context: click.Context, recipe: Path, options: tuple[str, ...], trials: int | None, machine: bool) -> None:
    """Train a recipe with several values of its options, and rank them by the validation split's joint/ne (or the metric of
    trainer.early_stop). The test split is not looked at.

    KEY=[a, b] tries these values, KEY={low: 1.0e-4, high: 1.0e-2, log: true} numbers in between, by optuna's TPE; a plain
    KEY=VALUE holds for all runs.

    Everything is in the folder "sweep" of the recipe's output; the same command goes on where an interrupted one stopped.
    """
    from gem_core.plugins import default_registry
    from gem_core.train.sweep import sweep as run

    with results(machine) as show:
        found = run(recipe, options, default_registry(), trials)
        text = f"{found.table()}\n{found.status}: {len(found.trials)} trials in {found.folder}"
        if found.trials and found.trials[0].metric is not None:
            best = " ".join(f"'{key}={value}'" for key, value in found.trials[0].values.items())
            text += f"\nbest: gem train {recipe} {best}"
        show(found, text)
    context.exit(0 if found.status == "finished" else 1)
