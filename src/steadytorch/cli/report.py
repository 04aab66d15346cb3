"""`steady report`: a saved result as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from steadytorch.cli import options


def _kept_for_page(
    ctx: click.Context, parameter: click.Parameter, path: Path | None
) -> Path | None:
    """Checks standard output alone; `report.html` checks files when it writes them."""
    return options.check_writable(ctx, parameter, path) if path == options.STANDARD_OUTPUT else path


@click.command()
@click.argument("result", metavar="RESULT", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    callback=_kept_for_page,
    help="The page to write; - for standard output.  [default: RESULT with the ending .html]",
)
@options.quiet
def report(result: Path, output: Path | None, quiet: bool) -> None:
    """Turn RESULT into one HTML page that opens anywhere, offline.

    RESULT is a file that --json of measure, run, explain, tune, compare, conv, gate, track or
    doctor wrote.
    """
    from steadytorch.quantities import size
    from steadytorch.report.html import report as written
    from steadytorch.report.text import plain

    if output is not None and output == options.STANDARD_OUTPUT:
        with options.file_for("--output", output) as page:
            written(result, page)
        return
    page = written(result, output)
    if not quiet:
        click.echo(f"{plain(page)}, {size(page.stat().st_size)}")
