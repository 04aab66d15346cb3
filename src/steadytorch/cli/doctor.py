"""`steady doctor`: the machine, and what cannot be observed on it."""

from __future__ import annotations

from pathlib import Path

import click

from steadytorch.cli import options


@click.command()
@options.device
@options.json_file
@options.quiet
def doctor(device: str, json_path: Path | None, quiet: bool) -> None:
    """Shows the machine, its noise floor, cuDNN's switch, and what cannot be observed and why."""
    from steadytorch.device.facts import load_facts, resolve_device
    from steadytorch.device.probes import observability
    from steadytorch.device.telemetry import snapshot
    from steadytorch.measure.noise import noise_floor
    from steadytorch.report.doctor import render_doctor
    from steadytorch.report.documents import doctor_document
    from steadytorch.runtime.switch import read_switch

    resolved = resolve_device(device)
    facts, state, observations = load_facts(resolved), snapshot(resolved), observability()
    switch, noise = read_switch(), noise_floor(resolved)
    render_doctor(options.console(quiet), facts, state, observations, noise, switch)
    options.write_json(json_path, doctor_document(facts, state, observations, noise, switch))
