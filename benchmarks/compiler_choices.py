"""What the compiler choices of a plan do for its replays: kernels, first result, time per step.

    python benchmarks/compiler_choices.py --only transformers:bert:8x128 --processes 3
    python benchmarks/compiler_choices.py --budget 75s --out benchmarks/results

For each workload, one search makes a plan. Fresh processes set it up one after the other, in turns
with its choices and without them, each with an empty compiler cache and nothing beside it. Then all
are timed in blocks, in random order.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from budgets import save
from devices import CASES, HANDLER, Case, chosen
from steadytorch import transforms
from steadytorch.bench.bench_worker import save_payload
from steadytorch.compiled import compiler_choices
from steadytorch.device.facts import resolve_device
from steadytorch.plan.record import CompilerChoices
from steadytorch.process.worker import Worker
from steadytorch.quantities import parse_duration
from steadytorch.results.candidate import Candidate, describe
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session

WAYS = ("with", "without")
SET_UP_S, BLOCK_S = 300.0, 60.0
ROUNDS, BLOCK = 15, 20


class Replay:
    """A process with the plan set up.

    Args:
        folder: holds the workload, and the choices if they are to be used.
        number: of the process.
        candidate: the plan's.
        device: where to run.
    """

    def __init__(self, folder: Path, number: int, candidate: Candidate, device: str) -> None:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"cache-{number}",
            "TRITON_CACHE_DIR": f"code-{number}",
        }
        where = {name: str(folder / place) for name, place in caches.items()}
        self._worker = Worker(HANDLER, folder, f"replay-{number}", where)
        self._worker.call("load", SET_UP_S, device=device, ambient=transforms.ambient())
        began = time.monotonic()
        self._worker.call("set_up", SET_UP_S, candidate=msgspec.to_builtins(candidate))
        self.set_up_s = time.monotonic() - began
        found = self._worker.call("compiler_choices", SET_UP_S)
        self.kernels = msgspec.convert(found, CompilerChoices).kernels
        self.medians_ms: list[float] = []

    def block(self) -> None:
        times = self._worker.call("block", BLOCK_S, metric="period", count=BLOCK)
        self.medians_ms.append(float(np.median(times)) / 1e6)

    def end(self) -> None:
        self._worker.kill()


def same(made: dict[str, Any], found: dict[str, Any]) -> int:
    """How many kernels are configured as they were measured; seconds of tuning are left out."""

    def shape(choice: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in choice.items() if key != "time_taken_ms"}

    return sum(name in made and shape(made[name]) == shape(found[name]) for name in found)


def run(case: Case, device: str, budget_s: float, processes: int, rng: Random) -> dict[str, Any]:
    """A search, and its plan in so many processes of each kind."""
    workload = case.load()
    options = SearchOptions(precision=case.precision, budget_s=budget_s)
    with tempfile.TemporaryDirectory(prefix="choices-") as name:
        folders = {way: Path(name) / way for way in WAYS}
        result = Session(workload, options, device, Path(name) / "store").search()
        for folder in folders.values():
            folder.mkdir()
            save_payload(workload, folder)
        compiler_choices.put(folders["with"], result.compiler)
        replays: list[tuple[str, Replay]] = []
        try:
            for number in range(processes):
                for way in rng.sample(WAYS, 2):
                    made = Replay(folders[way], number, result.chosen, device)
                    replays.append((way, made))
            for _ in range(ROUNDS):
                for _, each in rng.sample(replays, len(replays)):
                    each.block()
        finally:
            for _, each in replays:
                each.end()
    kernels = result.compiler.kernels
    return {
        "precision": case.precision,
        "plan": describe(result.chosen),
        "search_s": result.seconds,
        "search_ms": None if result.winner is None else result.winner.median_ns / 1e6,
        "kernels": len(kernels),
        "padded": result.compiler.padded,
        "replays": [
            {
                "choices": way,
                "kernels": len(each.kernels),
                "as_measured": same(kernels, each.kernels),
                "set_up_s": each.set_up_s,
                "period_ms": float(np.median(each.medians_ms)),
                "block_medians_ms": each.medians_ms,
            }
            for way, each in replays
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cuda or cuda:1")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="e.g. resnet50:64, SPEC:SIZE")
    parser.add_argument("--precision", help="of the searches; default: by workload")
    parser.add_argument("--budget", default="3m", help="of each search")
    parser.add_argument("--processes", type=int, default=2, help="of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, rng, rows = resolve_device(args.device), Random(args.seed), {}
    for case in chosen(CASES["cuda"], args.only or [], args.precision):
        row = run(case, device, parse_duration(args.budget), args.processes, rng)
        rows[case.name] = row
        print(f"{case.name}: {row['plan']}, {row['search_ms']:.4f} ms in the search", flush=True)
        for each in row["replays"]:
            print(
                f"  {each['choices']:7}  {each['as_measured']} of {each['kernels']} kernels, "
                f"{each['set_up_s']:.1f} s, {each['period_ms']:.4f} ms",
                flush=True,
            )
        if args.out is not None:
            save(args.out, "compiler-choices", device, rows)


if __name__ == "__main__":
    main()
