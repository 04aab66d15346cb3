"""`steady doctor`: show the machine, its noise floor and its limits."""

from __future__ import annotations

from pathlib import Path

import click

from steadytorch.cli import options


@click.command()
@options.device
@click.option("--plugins", is_flag=True, help="Also check each installed plug-in.")
@options.json_file
@options.quiet
def doctor(device: str, plugins: bool, json_path: Path | None, quiet: bool) -> None:
    """Show the machine, its noise floor, cuDNN's benchmark mode, and what cannot be observed."""
    from steadytorch.doctor import doctor as look
    from steadytorch.report.doctor import render_doctor
    from steadytorch.results.saved import to_json

    found = look(device, plugins)
    render_doctor(options.console(quiet), found)
    options.write_json(json_path, to_json(found, "", found.environment))
