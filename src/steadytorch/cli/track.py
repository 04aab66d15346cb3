"""`steady track`: find changes of level in results over commits."""

from __future__ import annotations

from pathlib import Path

import click

from steadytorch.cli import options


@click.command()
@click.argument("paths", metavar="FILE|FOLDER...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--html",
    "html_path",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    callback=options.check_writable,
    help="Write an offline HTML page, with Plotly beside it; - for standard output.",
)
@options.json_file
@options.quiet
def track(
    paths: tuple[str, ...], html_path: Path | None, json_path: Path | None, quiet: bool
) -> None:
    """Find changes of level in results that gate or measure saved with --json.

    A folder stands for its *.json files. Results are ordered by the time at which they were
    written. At most 1 % of series without a change show one.
    """
    from steadytorch.bench.track import track_files
    from steadytorch.report.files import share_plotly, stands_alone
    from steadytorch.report.html import page
    from steadytorch.report.track import render_track
    from steadytorch.results.saved import to_json

    result, facts = track_files(paths)
    document = to_json(result, result.workload, facts)
    render_track(options.console(quiet), result)
    options.write_json(json_path, document)
    if html_path is not None:
        source, alone = json_path or Path("track.json"), stands_alone(html_path)
        made = page(source, document, embed=alone)
        options.write("--html", html_path, made.encode())
        share_plotly(made, html_path)
