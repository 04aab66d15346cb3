"""What a search makes of a budget: its time, its plan, and how the plans compare side by side.

    python benchmarks/budgets.py --device cpu --only resnet18:1 mobilenet_v3_large
    python benchmarks/budgets.py --budgets 30s 60s 3m --out benchmarks/results

For each workload, one search per budget runs, in random order, with a store of its own. Then the
untouched workload and all plans are set up in fresh processes. They are timed in blocks, in random
order. The regret of a plan is its period over that of the plan with the largest budget.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from devices import CASES, Case, chosen, searched, workers_of
from steadytorch import __version__
from steadytorch.device.facts import load_facts, resolve_device
from steadytorch.errors import UsageError
from steadytorch.measure.race import compare
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.quantities import parse_duration
from steadytorch.results.candidate import Candidate
from steadytorch.tune.devices import Devices

DEFAULT = {
    "cpu": (
        "resnet18:1",
        "resnet50:1",
        "mobilenet_v3_large:1",
        "transformers:bert:1x128",
        "torchvision:fcn_resnet50:1x3x128x128",
    ),
    "cuda": tuple(case.name for case in CASES["cuda"]),
}
UNTOUCHED = "untouched"
BLOCK_S = 0.1
"""Expected seconds of a block, of five iterations at least."""


def side_by_side(
    workload: Any, plans: dict[str, Candidate], device: str, seconds: float, rng: Random
) -> dict[str, Any]:
    """Each plan beside the last one, in pairs of blocks; equal plans are timed once.

    Args:
        plans: by budget, the largest last.
        seconds: for all pairs of one comparison.
    """
    arms: dict[Candidate, str] = {}
    for label, candidate in {UNTOUCHED: (), **plans}.items():
        arms.setdefault(candidate, label)
    candidates = {label: candidate for candidate, label in arms.items()}
    best = arms[list(plans.values())[-1]]
    with workers_of(workload, candidates, device) as workers:
        blocks = {label: _block(worker) for label, worker in workers.items()}
        found: dict[str, Any] = {}
        for label in rng.sample(list(blocks), len(blocks)):
            if label != best:
                end = time.monotonic() + seconds
                judgement, pairs = compare(
                    blocks[best],
                    blocks[label],
                    rng=rng,
                    stop=lambda end=end: time.monotonic() > end,
                )
                found[label] = {
                    "period_ms": float(np.median([other for _, other in pairs])) / 1e6,
                    "best_ms": float(np.median([own for own, _ in pairs])) / 1e6,
                    "beyond_best": msgspec.to_builtins(judgement),
                }
    return {label: found.get(arms[candidate]) for label, candidate in plans.items()} | {
        UNTOUCHED: found.get(UNTOUCHED)
    }


def _block(worker: Worker) -> Callable[[], float]:
    """Times a block and returns its median in ns; five iterations before let clocks settle."""

    def timed(count: int) -> float:
        return float(np.median(worker.call("block", 120.0, metric="period", count=count)))

    count = max(5, min(50, int(BLOCK_S * 1e9 // timed(5))))
    return lambda: timed(count)


def run(case: Case, device: str, budgets: list[str], seconds: float, rng: Random) -> dict[str, Any]:
    """All searches of one workload, and the comparison of their plans."""
    workload = case.load()
    found: dict[str, Any] = {}
    for budget in rng.sample(budgets, len(budgets)):
        one = Devices((device,), {}, ())
        try:
            entry = searched(case, workload, one, parse_duration(budget))
        except UsageError as error:  # too small for this workload on this machine
            found[budget] = {"refused": str(error)}
            print(f"{case.name}, {budget}: {error}", flush=True)
            continue
        found[budget] = entry
        print(
            f"{case.name}, {budget}: {entry['search_s']:.0f} s, "
            f"{entry['candidates_timed']} timed, {entry['winner']}",
            flush=True,
        )
    plans = {b: found[b].pop("candidate") for b in budgets if "candidate" in found[b]}
    if not plans:
        return {"precision": case.precision, "searches": found, "side_by_side": {}}
    try:
        beside = side_by_side(workload, plans, device, seconds, rng)
    except WorkerFault as fault:
        beside = {"failed": fault.reason}
    print(f"{case.name}: {json.dumps(beside)}", flush=True)
    return {"precision": case.precision, "searches": found, "side_by_side": beside}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="e.g. resnet50:1, SPEC:SIZE")
    parser.add_argument("--budgets", nargs="+", default=["30s", "60s", "3m"], help="ascending")
    parser.add_argument("--pairs", default="8s", help="time per comparison of two plans")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = resolve_device(args.device)
    kind = device.partition(":")[0]
    rng, rows = Random(args.seed), {}
    for case in chosen(CASES[kind], args.only or DEFAULT[kind]):
        rows[case.name] = run(case, device, args.budgets, parse_duration(args.pairs), rng)
        if args.out is not None:
            save(args.out, "budgets", device, rows, budgets=args.budgets)


def save(folder: Path, kind: str, device: str, rows: dict[str, Any], **more: Any) -> None:
    """Write results of a device as JSON, in a file named by kind, device and day."""
    facts = load_facts(device)
    words = re.sub(r"nvidia|\(r\)|processor", " ", (facts.name or device).lower())
    name = re.sub(r"[^a-z0-9]+", "-", words).strip("-")
    document = {
        "schema": 1,
        "kind": kind,
        "environment": {**msgspec.to_builtins(facts), "steadytorch": __version__},
        **more,
        "results": rows,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}_{name}_{datetime.date.today().isoformat()}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
