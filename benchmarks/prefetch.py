"""Gain of prefetching on a loader whose batches come from pageable memory.

In the caller's loop: each option runs over the same batches with the same model, in random order. A
run is timed from its first batch until the device is idle. `compute` is the model alone on a batch
that is already on the device: the lower bound for any option.

As a transform: steps of a workload that carries the loader, untouched and with `prefetch`. They are
timed as by `steady compare`, in fresh pairs of processes.

    python benchmarks/prefetch.py [--runs 70] [--processes 3]
                                  [--out benchmarks/results/prefetch_h200_DATE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import steadytorch as steady
from steadytorch.bench.compare import compare_live
from steadytorch.device.facts import load_facts
from steadytorch.transforms.prefetch import Prefetch
from steadytorch.workload.loading import load_workload
from steadytorch.workload.workload import Workload

BATCH = 64
BATCHES = 12
SOURCES = 8
"""Distinct batches in host memory, 38.5 MB each: together larger than any cache."""


class Loader:
    """Batches in pageable memory, each a new tensor, as from a data loader."""

    def __init__(self) -> None:
        self._sources = [torch.randn(BATCH, 3, 224, 224) for _ in range(SOURCES)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(BATCHES):
            yield self._sources[index % SOURCES]


class Model(nn.Module):
    """ResNet-50 in float16 and channels last, for float32 batches."""

    def __init__(self) -> None:
        super().__init__()
        inner: Any = load_workload("resnet50", batch=1).model.half()
        self.inner = inner.to(memory_format=torch.channels_last)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.inner(batch.half().to(memory_format=torch.channels_last))


def options(loader: Loader) -> dict[str, Callable[[], Any]]:
    there = torch.randn(BATCH, 3, 224, 224, device="cuda")
    return {
        "compute": lambda: [there] * BATCHES,
        "to(device)": lambda: (batch.to("cuda") for batch in loader),
        "pin_memory, non_blocking": lambda: (
            batch.pin_memory().to("cuda", non_blocking=True) for batch in loader
        ),
        "steadytorch.prefetch": lambda: steady.prefetch(loader),
    }


def seconds(batches: Callable[[], Any], model: Any, waits: bool) -> float:
    """Time one run over all batches; if `waits`, the consumer reads each result, like a loss."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for batch in batches():
        output = model(batch)
        if waits:
            output.sum().item()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measured(runs: int, waits: bool, model: Any) -> dict[str, Any]:
    arms = options(Loader())
    times: dict[str, list[int]] = {name: [] for name in arms}
    draw = random.Random(0)
    for run in range(runs + 2):
        for name in draw.sample(list(arms), len(arms)):
            took = seconds(arms[name], model, waits)
            if run >= 2:  # the first runs fill the allocators' caches
                times[name].append(round(took / BATCHES * 1e9))
    rows = []
    for name, samples in times.items():
        found = steady.summarize(samples)
        pairs = list(zip(times["to(device)"], samples, strict=True))
        rows.append(
            {
                "option": name,
                "median_ns": found.median_ns,
                "median_ci_ns": found.median_ci_ns,
                "against_to": msgspec.to_builtins(steady.judge(pairs)),
                "samples_ns": samples,
            }
        )
    return {"consumer": "waits for each result" if waits else "runs ahead", "rows": rows}


def as_transform(metric: str, processes: int) -> dict[str, Any]:
    """Compare steps with and without the transform."""
    workload = Workload.from_loader(Model().eval(), Loader())
    sides = (workload, (), "untouched"), (workload, (Prefetch().spec,), "prefetch")
    taken = compare_live(*sides, metric=metric, processes=processes, device="cuda")
    return {
        "metric": metric,
        "untouched_ns": taken.a.median_ns,
        "prefetch_ns": taken.b.median_ns,
        "effect": msgspec.to_builtins(taken.effect),
        "samples_ns": msgspec.to_builtins(taken.samples),
        "failed": taken.failed,
    }


def interval(effect: dict[str, Any]) -> str:
    """Format an effect on time with its interval, if any."""
    if effect["low"] is None:
        return f"{effect['estimate']:+.1%}"
    return f"{effect['estimate']:+.1%} ({effect['low']:+.1%} to {effect['high']:+.1%})"


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"{found['device']}, torch {found['torch']}, {found['date']}: {found['workload']}.",
        "",
    ]
    for case in found["cases"]:
        lines += [f"**The consumer {case['consumer']}**", ""]
        lines += ["| option | ms a batch | against to(device) |", "|---|---|---|"]
        for each in case["rows"]:
            effect = "" if each["option"] == "to(device)" else interval(each["against_to"])
            lines.append(f"| {each['option']} | {each['median_ns'] / 1e6:.2f} | {effect} |")
        lines.append("")
    lines += ["**The transform `prefetch`, a step of the workload**", ""]
    lines += ["| metric | untouched, ms | prefetch, ms | effect on time | claim |"]
    lines += ["|---|---|---|---|---|"]
    for each in found["transform"]:
        times = f"{each['untouched_ns'] / 1e6:.2f} | {each['prefetch_ns'] / 1e6:.2f}"
        effect = each["effect"]
        lines.append(f"| {each['metric']} | {times} | {interval(effect)} | {effect['claim']} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=70)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    facts = load_facts("cuda")
    found: dict[str, Any] = {
        "device": facts.name,
        "torch": facts.torch,
        "date": datetime.date.today().isoformat(),
        "workload": f"ResNet-50 in float16, {BATCH} images of float32 a batch",
    }
    model = Model().cuda().eval()
    with torch.no_grad():
        found["cases"] = [measured(given.runs, waits, model) for waits in (False, True)]
    found["transform"] = [as_transform(m, given.processes) for m in ("period", "latency")]
    print(markdown(found))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        given.out.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
    main()
