"""`steady report`: turn saved results into an HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from steadytorch.cli import options


def _kept_for_page(
    ctx: click.Context, parameter: click.Parameter, path: Path | None
) -> Path | None:
    """Reserves standard output for the page if `path` is `-`; other paths are checked on write."""
    return options.check_writable(ctx, parameter, path) if path == options.STANDARD_OUTPUT else path


@click.command()
@click.argument("result", metavar="RESULT", type=click.Path(path_type=Path))
@click.argument("other", metavar="[OTHER]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    callback=_kept_for_page,
    help="The page to write; - for standard output.  [default: RESULT.html or RESULT-OTHER.html]",
)
@click.option("--embed", is_flag=True, help="Put Plotly into the page, not beside it: 2 MB more.")
@options.quiet
def report(result: Path, other: Path | None, output: Path | None, embed: bool, quiet: bool) -> None:
    """Turn RESULT into an HTML page that opens offline.

    RESULT is a file that --json of measure, run, explain, tune, compare, conv, gate, track or
    doctor wrote. OTHER, of the same kind, is shown to its right.

    Charts need the file plotly-VERSION.min.js, which is written beside the page once for all pages
    of a folder. Standard output gets a page with Plotly in it.
    """
    from steadytorch.quantities import size
    from steadytorch.report.html import write_report
    from steadytorch.report.text import plain

    if output is not None and output == options.STANDARD_OUTPUT:
        with options.file_for("--output", output) as page:
            write_report(result, page, other=other, embed=True)
        return
    page, *shared = write_report(result, output, other=other, embed=embed)
    if quiet:
        return
    click.echo(f"{plain(page)}, {size(page.stat().st_size)}")
    for file in shared:
        click.echo(f"{plain(file)}, {size(file.stat().st_size)}: charts need it beside the page")
