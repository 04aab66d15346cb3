"""The HTML page of a machine check-up."""

from __future__ import annotations

from typing import Any

from steadytorch.report import doctor
from steadytorch.report.plots import table
from steadytorch.results.saved import Saved


def contents(saved: Saved) -> dict[str, Any]:
    """Template variables for the page of a machine check-up."""
    found = saved.result
    facts = saved.head.environment
    hidden = [
        (", ".join(names), why, " ".join(f"{remedy}." for remedy in remedies))
        for names, why, remedies in doctor.hidden(found)
    ]
    return {
        "title": facts.name or facts.device,
        "headline": "the machine, and what cannot be observed",
        "sections": [
            (section.title, table(["", ""], section.rows, (0, 1)), section.said)
            for section in doctor.sections(found)
        ],
        "hidden_title": doctor.HIDDEN,
        "hidden": table(["what", "why", "to do"], hidden, (0, 1, 2)),
    }
