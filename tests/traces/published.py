"""Traces published with figures; not part of the repository."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "shared" / "traces"
needs_published = pytest.mark.skipif(
    not (FOLDER / "oracle.json").is_file(), reason="the published traces are not here"
)


@cache
def trace(name: str) -> Any:
    """One of these traces, read."""
    from steadytorch.traces.reader import read_trace

    return read_trace(FOLDER / f"{name}.json.gz")


def oracle(name: str) -> dict[str, Any]:
    """Figures published with a trace."""
    return json.loads((FOLDER / "oracle.json").read_text())[name]
