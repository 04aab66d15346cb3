"""`steady report`: a saved result as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from steadytorch.cli import options


@click.command()
@click.argument("result", metavar="RESULT", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="The page to write.  [default: RESULT with the ending .html]",
)
@options.quiet
def report(result: Path, output: Path | None, quiet: bool) -> None:
    """Turns RESULT, which --json has saved, into one HTML page that opens anywhere, offline.

    RESULT is a file of steady measure, explain, tune, compare, conv or doctor.
    """
    from steadytorch.quantities import size
    from steadytorch.report.html import report as written
    from steadytorch.report.text import plain

    page = written(result, output)
    if not quiet:
        click.echo(f"{plain(page)}, {size(page.stat().st_size)}")
