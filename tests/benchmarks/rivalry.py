"""Documents and models for the tests of benchmarks/rivals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from steadytorch.bench.series import Series
from steadytorch.device.recording import Recording

ENVIRONMENT = {
    "device": "cuda",
    "name": "NVIDIA H200",
    "torch": "2.11.0",
    "cudnn": "9.19.0",
    "driver": "580.1",
    "cores_logical": 16,
}


def series(durations_ns: list[int], failed: str | None = None, **seen: Any) -> Series:
    """Samples one after another from time zero on, and what was seen beside them on a CPU."""
    recording = Recording(device="cpu", interval_ns=0, **seen)
    stretches = [(0, len(durations_ns))]
    return Series(durations_ns, stretches, [], 0.0, 1, False, recording, failed)


def judgement(estimate: float, verdict: str = "faster") -> dict[str, Any]:
    return {
        "estimate": estimate,
        "low": estimate - 0.01,
        "high": estimate + 0.01,
        "verdict": verdict,
        "pairs": 60,
        "mde": 0.001,
    }


def row(workload: str, option: str, period_ms: float, **others: Any) -> dict[str, Any]:
    return {
        "workload": workload,
        "option": option,
        "period_ms": period_ms,
        "p99_over_median": 1.004,
        "cv": 0.002,
        "latency_ms": 1.05 * period_ms,
        "setup_s": 12.5,
        "peak_mb": 391.0,
        "error": 6.4e-4,
        "failed": None,
        "period_ci_ms": [period_ms, period_ms + 0.001],
        **others,
    }


def document(*rows: dict[str, Any], **entry: Any) -> dict[str, Any]:
    names = dict.fromkeys(each["workload"] for each in rows)
    known = {
        "precision": "fp16",
        "plan": "cuda_graph",
        "search_s": 55.0,
        "environment": ENVIRONMENT,
        "created": "2026-11-21T10:00:00+00:00",
        **entry,
    }
    return {
        "schema": 1,
        "kind": "rivals",
        "created": "2026-11-21T10:00:00+00:00",
        "environment": ENVIRONMENT,
        "rows": list(rows),
        "workloads": {name: dict(known) for name in names},
    }


def one_workload(name: str, against_best: float, tail: float = 1.004) -> list[dict[str, Any]]:
    """Ours, eager and two others, of which the graph is the best and autotuning never ended."""
    both = {m: judgement(against_best) for m in ("period", "latency")}
    far = {m: judgement(-0.9) for m in ("period", "latency")}
    failed = dict.fromkeys(
        ("period_ms", "p99_over_median", "cv", "latency_ms", "setup_s", "peak_mb", "error")
    )
    return [
        row(name, "steadytorch", 0.3, p99_over_median=tail),
        row(name, "eager TF32", 3.0, ours_against_it=far),
        row(name, "fp16 compile freezing, CUDA graph", 0.4, ours_against_it=both),
        {
            "workload": name,
            "option": "fp16 compile max-autotune, freezing, CUDA graph",
            **failed,
            "failed": "> 90 s, not ready",
            "detail": "",
        },
    ]


class Nested(nn.Module):
    """Takes indices and images, and nests its results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.pixels = nn.Embedding(11, 4), nn.Conv2d(3, 4, 3)

    def forward(self, ids: Tensor, image: Tensor) -> dict[str, Any]:
        mixed = self.words(ids).mean(1) + self.pixels(image).mean((2, 3))
        return {"scores": mixed, "rest": (2 * mixed, ids + 1)}


def nested_inputs(seed: int) -> tuple[Tensor, Tensor]:
    """Arguments of `Nested`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (2, 5), generator=generator)
    return ids, torch.randn(2, 3, 8, 8, generator=generator)
