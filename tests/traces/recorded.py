"""Real traces: one of this PyTorch on the CPU, and those kept beside the repository."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[3] / "shared" / "traces"


@functools.cache
def on_cpu() -> bytes:
    """Three steps of a tiny training loop, recorded by this PyTorch: about 200 KB."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
            on_trace_ready=lambda ready: ready.export_chrome_trace(str(path)),
            record_shapes=True,
            profile_memory=True,
            acc_events=True,
        ) as running:
            for _ in range(4):
                model(torch.ones(4, 8)).sum().backward()
                running.step()
        return path.read_bytes()


def kept(name: str) -> Path:
    """A trace kept beside the repository; skips the test if it is missing."""
    path = KEPT / name
    if not path.is_file():
        pytest.skip(f"no {name} beside the repository")
    return path
