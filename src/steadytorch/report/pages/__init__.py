"""The pages, one file for each kind of result. `KINDS` is the only list of them.

To add a page: a file with a function from a saved result to the variables of a template, a template
with the name of the kind, and a line here.
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
