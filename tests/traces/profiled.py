"""Inputs of operators as this PyTorch's profiler records them, on the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from steadytorch.traces.events import Trace
from steadytorch.traces.reader import read_trace


def trace_of(run: Callable[[], Any]) -> Trace:
    """A trace of one call, with shapes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            run()
        profiler.export_chrome_trace(str(path))
        return read_trace(path)


def inputs_of(run: Callable[[], Any], name: str) -> dict[str, Any]:
    """The recorded inputs of the first operator of this name that the call runs."""
    trace = trace_of(run)
    rows = [row for row in range(len(trace.events)) if trace.name_of(row) == name]
    assert rows, f"{name} did not run"
    found = trace.inputs_of(rows[0])
    assert found is not None
    return found
