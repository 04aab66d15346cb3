"""HTML pages, one module for each kind of result. `KINDS` lists all pages.

To add a page, write a module with a function that maps a saved result to template variables, and a
template named after the kind. Then add the kind to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steadytorch.report.pages import (
    compare,
    conv,
    doctor,
    explain,
    gate,
    measure,
    ranks,
    run,
    sweep,
    track,
    tune,
)
from steadytorch.results.saved import Saved

KINDS: dict[str, Callable[[Saved], dict[str, Any]]] = {
    "measure": measure.contents,
    "explain": explain.contents,
    "tune": tune.contents,
    "compare": compare.contents,
    "conv": conv.contents,
    "doctor": doctor.contents,
    "run": run.contents,
    "gate": gate.contents,
    "track": track.contents,
    "ranks": ranks.contents,
    "sweep": sweep.contents,
}
"""Kind of result to the variables of its template."""
