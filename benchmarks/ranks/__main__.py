"""Faults while ranks agree: real processes, a gloo group, one fault a run.

No run may end with two outcomes, and no rank may wait for longer than the deadline plus 2 s.

    python benchmarks/ranks [--minutes 30] [--most 1000] [--jobs 3] [--backend gloo] [--json FILE]
        [--scenario "all hit"]

With `--backend nccl` each rank has a GPU of its own, and runs have as many ranks as there are GPUs
at most. `--train` times training under DDP instead; see `ddp_train.py`:

    python benchmarks/ranks --train [--only resnet50:64 bert:8x128] [--skip TEXT] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

SIZES = (2, 4, 8)


def main() -> int:
    """Runs the scenarios in turn until the time or the number of runs is used up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--backend", choices=("gloo", "nccl"))
    parser.add_argument("--scenario", help="the only one to run; by default all in turn")
    parser.add_argument("--train", action="store_true", help="time training under DDP")
    parser.add_argument("--only", nargs="+", default=["resnet50:64", "bert:8x128"])
    parser.add_argument("--skip", nargs="*", default=[], help="options to leave out")
    parser.add_argument("--gpus", type=int, help="number of GPUs; by default all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    asked = parser.parse_args()
    if asked.train:
        import ddp_train

        backend = asked.backend or "nccl"
        return ddp_train.launch(asked.only, asked.skip, backend, asked.gpus, asked.out)
    backend, sizes = asked.backend or "gloo", SIZES
    if backend == "nccl":
        sizes = tuple(size for size in SIZES if size <= _gpus())
        if not sizes:
            print("--backend nccl needs two GPUs", file=sys.stderr)
            return 3
        asked.jobs = 1
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # before PyTorch is imported
    end = time.monotonic() + 60 * asked.minutes
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            get_context("fork").Process(
                target=_work,
                args=(job, asked, end, Path(folder), backend, sizes),
            )
            for job in range(asked.jobs)
        ]
        for each in jobs:
            each.start()
        for each in jobs:
            each.join()
        lines = [
            json.loads(line)
            for path in sorted(Path(folder).glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
    if any(each.exitcode for each in jobs):
        print("a job of the benchmark failed", file=sys.stderr)
    result = {"backend": backend, **_summary(lines)}
    print("\n".join(_table(result)))
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["wrong"] or not lines or any(each.exitcode for each in jobs) else 0


def _gpus() -> int:
    """Number of GPUs, counted in another process: one that uses CUDA must not be forked."""
    import subprocess

    count = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", count], capture_output=True).stdout or 0)


def _work(
    job: int,
    asked: argparse.Namespace,
    end: float,
    folder: Path,
    backend: str,
    sizes: tuple[int, ...],
) -> None:
    import logging

    import fault_runs
    import torch

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    names = [asked.scenario] if asked.scenario else list(fault_runs.SCENARIOS)
    cases = [(name, size) for name in names for size in sizes]
    with (folder / f"{job}.jsonl").open("a") as file:
        for index in range(job, asked.most, asked.jobs):
            if time.monotonic() > end:
                return
            name, size = cases[index % len(cases)]
            with tempfile.TemporaryDirectory() as own:
                found = fault_runs.run(name, size, index // len(cases), Path(own), backend)
            file.write(json.dumps(found) + "\n")
            file.flush()


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    from fault_runs import DEADLINE_S, STALLED_S

    groups: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["scenario"], line["size"]].append(line)
    rows = []
    for (name, size), found in sorted(groups.items()):
        kinds = [_kind(line["outcomes"][-1]) for line in found]
        rows.append(
            {
                "scenario": name,
                "ranks": size,
                "runs": len(found),
                "outcomes": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
                "longest_wait_s": max(line["longest_wait_s"] for line in found),
                "median_total_wait_s": statistics.median(line["total_wait_s"] for line in found),
                "longest_total_wait_s": max(line["total_wait_s"] for line in found),
            }
        )
    return {
        "runs": len(lines),
        "cores": psutil.cpu_count(),
        "load": os.getloadavg(),
        "python": sys.version.split()[0],
        "deadline_s": DEADLINE_S,
        "stall_limit_s": STALLED_S,
        "stalled": sum(line["stall_s"] >= STALLED_S for line in lines),
        "past_deadline_s": max(
            (line["longest_wait_s"] - DEADLINE_S for line in lines if line["stall_s"] < STALLED_S),
            default=0.0,
        ),
        "rows": rows,
        "wrong": [line for line in lines if line["wrong"]],
    }


def _kind(outcomes: list[str]) -> str:
    kinds = sorted({text.split()[0] for text in outcomes})
    return " and ".join(kinds) or "none left"


def _table(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['runs']} runs, {len(result['wrong'])} wrong",
        f"{result['stalled']} with a process stalled for {result['stall_limit_s']:g} s or more; "
        f"without these, the longest wait was {result['past_deadline_s']:.2f} s past the deadline",
        f"{'scenario':<16} ranks runs  longest wait  median total  outcomes",
    ]
    for row in result["rows"]:
        outcomes = ", ".join(f"{count} {kind}" for kind, count in row["outcomes"].items())
        lines.append(
            f"{row['scenario']:<16} {row['ranks']:>5} {row['runs']:>4} "
            f"{row['longest_wait_s']:>11.3f} s {row['median_total_wait_s']:>11.3f} s  {outcomes}"
        )
    lines += [json.dumps(line) for line in result["wrong"][:20]]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
