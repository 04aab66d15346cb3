"""Rate of false verdicts on identical workloads, and of found verdicts with an injected delay.

    python benchmarks/false_verdicts.py resnet18 --batch 1 --comparisons 100 --delay 0.03

Each comparison runs the package's `compare` on blocks of a live worker. `same` compares the worker
with itself. `delayed` compares it with itself after a busy wait of the given share of its median.
`--neighbour` runs another process that multiplies matrices on one core.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from steadytorch import __version__, load_workload
from steadytorch.bench.bench_worker import WorkloadHandler, save_payload
from steadytorch.bench.measure import start
from steadytorch.device.facts import DeviceFacts, load_facts
from steadytorch.measure.race import Judgement, compare
from steadytorch.process.worker import Worker
from steadytorch.transforms import parse

COUNT = 7
METRIC = "latency"
_NEIGHBOUR = """
import os, torch
torch.set_num_threads(1)
a, parent = torch.randn(512, 512), os.getppid()
while os.getppid() == parent:  # it ends with whoever started it, however that ends
    a @ a
"""


class DelayedHandler(WorkloadHandler):
    """A workload with and without a busy wait; for latencies only."""

    def delayed_block(self, metric: str, count: int, delay_ns: int) -> list[int]:
        plain = self.step

        def slower() -> None:
            # Before the step: after it, the wait would overlap with work of the GPU.
            end = time.perf_counter_ns() + delay_ns
            while time.perf_counter_ns() < end:
                pass
            plain()

        self.step = slower
        try:
            return self.block(metric, count)
        finally:
            self.step = plain


def run(
    worker: Worker,
    comparisons: int,
    delay: float,
    rng: Random,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Run both kinds of comparison alternately; report the results after each."""

    def block() -> float:
        return float(np.median(worker.call("block", 120, metric=METRIC, count=COUNT)))

    typical = float(np.median([block() for _ in range(10)]))
    delay_ns = round(delay * typical)

    def delayed() -> float:
        times = worker.call("delayed_block", 120, metric=METRIC, count=COUNT, delay_ns=delay_ns)
        return float(np.median(times))

    judged: dict[str, list[Judgement]] = {"same": [], "delayed": []}
    for number in range(1, comparisons + 1):
        for name, other in (("same", block), ("delayed", delayed)):
            judged[name].append(compare(block, other, rng=rng)[0])
        found = {name: _summary(judgements) for name, judgements in judged.items()}
        verdicts = ", ".join(f"{name} {found[name]['verdicts']}" for name in found)
        print(f"{number} of {comparisons}: {verdicts}", flush=True)
        keep({"median_ns": typical, "delay_ns": delay_ns, **found})


def _summary(judgements: list[Judgement]) -> dict[str, Any]:
    return {
        "verdicts": dict(Counter(j.verdict for j in judgements)),
        "median_pairs": float(np.median([j.pairs for j in judgements])),
        "judgements": msgspec.to_builtins(judgements),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--with", dest="settings", default="")
    parser.add_argument("--comparisons", type=int, default=100)
    parser.add_argument("--delay", type=float, default=0.03)
    parser.add_argument("--neighbour", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    workload = load_workload(args.workload, batch=args.batch)
    facts = load_facts(args.device)
    neighbour = None
    if args.neighbour:
        neighbour = subprocess.Popen([sys.executable, "-c", _NEIGHBOUR])
    try:
        with tempfile.TemporaryDirectory() as folder:
            save_payload(workload, Path(folder))
            worker = Worker("false_verdicts:DelayedHandler", Path(folder), "aa")
            try:
                start(worker, args.device, parse(args.settings, facts) if args.settings else ())
                run(worker, args.comparisons, args.delay, Random(0), partial(_keep, args, facts))
            finally:
                worker.kill()
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()


def _keep(args: argparse.Namespace, facts: DeviceFacts, found: dict[str, Any]) -> None:
    created = datetime.datetime.now(datetime.UTC)
    document = {
        **{k: v for k, v in vars(args).items() if k != "out"},
        **found,
        "environment": msgspec.to_builtins(facts),
        "steadytorch": __version__,
        "created": created.isoformat(timespec="seconds"),
    }
    device = (facts.name or args.device).lower().replace("nvidia ", "").replace(" ", "-")
    beside = "-neighbour" if args.neighbour else ""
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"false-verdicts-{args.workload}-b{args.batch}{beside}_{device}_{created:%Y-%m-%d}.json"
    (args.out / name).write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
