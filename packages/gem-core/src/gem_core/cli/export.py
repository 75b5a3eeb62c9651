"""`gem export`: a run's model as a program that needs none of its code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gem_core.cli.output import results

if TYPE_CHECKING:
    from gem_core.export import Written


@click.command(short_help="Write a run's model as a program for other processes.")
@click.argument("run", metavar="RUN_OR_CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--to", metavar="FOLDER", type=click.Path(path_type=Path), help="Default: export/STEP in the run's folder."
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    default=["torch-export"],
    show_default=True,
    type=click.Choice(["torch-export", "aoti", "safetensors"]),
    help="torch-export: a graph that torch runs; aoti: compiled for this kind of processor (needs a C++ compiler); "
    "safetensors: the weights alone; repeatable.",
)
@click.option(
    "--tolerance", type=click.FloatRange(min=0), default=1e-4, show_default=True, help="Largest difference allowed."
)
@click.option("--json", "machine", is_flag=True, help="Write folder, files and differences as JSON.")
def export(
    run: Path, overrides: tuple[str, ...], to: Path | None, formats: tuple[str, ...], tolerance: float, machine: bool
) -> None:
    """Export a run (its best checkpoint, else its newest) or a checkpoint: model, tables and schema in one folder.

    Each program is loaded again in a fresh process and compared with the model on batches of the run's data of several sizes; if a
    logit or a probability differs, or a key is missing, nothing is written and the exit code is 1.

    KEY=VALUE overrides a key of its recipe, as in data.reader.test=other.csv.
    """
    from gem_core.export import export as write

    with results(machine) as show:
        written = write(run, to, formats, overrides, tolerance=tolerance)
        show(written, _outcome(written))


def _outcome(written: Written) -> str:
    lines = []
    for form, batches in written.parity.items():
        lines.append(f"{form}: largest difference from the model")
        lines.append(f"{'rows':>8} {'requests':>9} {'events':>9} {'logit':>9} {'probability':>12}")
        lines += [
            f"{b.rows:>8} {b.requests:>9} {b.events:>9} {b.logits:>9.1e} {b.probabilities:>12.1e}" for b in batches
        ]
    lines.append(f"{', '.join(f'{name} ({size:,} bytes)' for name, size in written.files.items())}")
    lines.append(f"exported to {written.folder}")
    return "\n".join(lines)
