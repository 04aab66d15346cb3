"""What prefetching gains on a loader whose batches come from pageable memory and are really copied.

Each option runs over the same batches with the same model; a run is timed from its first batch to
the device's end. Options take turns in random order. `compute` is the model alone on a batch that
is there already: the least that any option can take.

    python benchmarks/prefetch.py [--runs 70] [--out benchmarks/results/prefetch_h200_DATE]
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

import steadytorch as steady
from steadytorch.device.facts import load_facts
from steadytorch.runtime.prefetch import prefetch
from steadytorch.workload.loading import load_workload

BATCH = 64
BATCHES = 12
SOURCES = 8
"""Distinct batches in host memory: 38.5 MB each, more than any cache holds together."""


class Loader:
    """Batches out of pageable memory, each a fresh tensor as a data loader's are."""

    def __init__(self) -> None:
        self._sources = [torch.randn(BATCH, 3, 224, 224) for _ in range(SOURCES)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(BATCHES):
            yield self._sources[index % SOURCES]


def options(loader: Loader) -> dict[str, Callable[[], Any]]:
    there = torch.randn(BATCH, 3, 224, 224, device="cuda")
    return {
        "compute": lambda: [there] * BATCHES,
        "to(device)": lambda: (batch.to("cuda") for batch in loader),
        "pin_memory, non_blocking": lambda: (
            batch.pin_memory().to("cuda", non_blocking=True) for batch in loader
        ),
        "steadytorch.prefetch": lambda: prefetch(loader),
    }


def seconds(batches: Callable[[], Any], model: Any, waits: bool) -> float:
    """Of one run over all batches; a consumer that waits looks at each result, as a loss is."""
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
            if run >= 2:  # the first fill the allocators' caches
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


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"{found['device']}, torch {found['torch']}, {found['date']}: {found['workload']}.",
        "",
    ]
    for case in found["cases"]:
        lines += [f"**The consumer {case['consumer']}**", ""]
        lines += ["| option | ms a batch | against to(device) |", "|---|---|---|"]
        for each in case["rows"]:
            found_here = each["against_to"]
            effect = ""
            if each["option"] != "to(device)":
                low, high = found_here["low"], found_here["high"]
                effect = f"{found_here['estimate']:+.1%} ({low:+.1%} to {high:+.1%})"
            lines.append(f"| {each['option']} | {each['median_ns'] / 1e6:.2f} | {effect} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=70)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    facts = load_facts("cuda")
    model: Any = load_workload("resnet50", batch=1).model.cuda().half()
    model = model.to(memory_format=torch.channels_last)

    def run(batch: torch.Tensor) -> torch.Tensor:
        return model(batch.half().to(memory_format=torch.channels_last))

    found: dict[str, Any] = {
        "device": facts.name,
        "torch": facts.torch,
        "date": datetime.date.today().isoformat(),
        "workload": f"ResNet-50 in float16, {BATCH} images of float32 a batch",
    }
    with torch.no_grad():
        found["cases"] = [measured(given.runs, waits, run) for waits in (False, True)]
    print(markdown(found))
    if given.out is not None:
        given.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        given.out.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
    main()
