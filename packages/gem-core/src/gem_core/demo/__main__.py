"""`python -m gem_core.demo [--quick] [--out DIR] [--households N]`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gem_core.errors import GemError


@click.command()
@click.option("--quick", is_flag=True, help="A small sample and one epoch: two minutes in place of ten.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Folder of the runs and the report. [default: runs/demo, or runs/demo-quick]",
)
@click.option("--households", type=click.IntRange(min=20), help="Households in the sample, of 2,469 in the log.")
def main(quick: bool, out: Path | None, households: int | None) -> None:
    """Train GEM (Kunlun), DIN, DCNv2 and LightGBM on the Complete Journey log, compare them, and write a report.

    The same command goes on where an earlier one stopped, and does not train again what is finished.
    """
    from gem_core.demo.main import run, size_of

    run(size_of(quick, households), out or Path("runs/demo-quick" if quick else "runs/demo"))


if __name__ == "__main__":
    try:
        main()
    except GemError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
