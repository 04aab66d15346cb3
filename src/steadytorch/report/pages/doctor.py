"""The page of a machine's check-up: tables."""

from __future__ import annotations

from typing import Any

import msgspec

from steadytorch.device.probes import Observation
from steadytorch.device.telemetry import Snapshot
from steadytorch.measure.noise import NoiseFloor
from steadytorch.report import doctor
from steadytorch.report.pages.document import Document
from steadytorch.report.plots import table


class SwitchState(msgspec.Struct, frozen=True, kw_only=True):
    """cuDNN's benchmark mode as a new process finds it."""

    benchmark: bool
    benchmark_limit: int | None
    deterministic: bool
    fp32_precision: str
    environment: dict[str, str]
    no_effect: str
    traps: tuple[str, ...]


class DoctorDocument(Document, frozen=True, kw_only=True):
    """What the page needs of a check-up."""

    state: Snapshot
    observability: tuple[Observation, ...]
    noise_floor: NoiseFloor
    benchmark_mode: SwitchState


def contents(document: DoctorDocument) -> dict[str, Any]:
    """What the template shows of a check-up."""
    facts = document.environment
    hidden = [
        (", ".join(names), why, " ".join(f"{remedy}." for remedy in remedies))
        for names, why, remedies in doctor.hidden(document)
    ]
    return {
        "title": facts.name or facts.device,
        "headline": "the machine, and what cannot be observed on it",
        "sections": [
            (section.title, table(["", ""], section.rows, (0, 1)), section.said)
            for section in doctor.sections(document)
        ],
        "hidden_title": doctor.HIDDEN,
        "hidden": table(["what", "why", "to do"], hidden, (0, 1, 2)),
    }
