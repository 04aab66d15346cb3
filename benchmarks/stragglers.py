"""Is the late rank of a job named, with the right slice, and none in a job without one?

Runs `straggler_job.py` under torchrun on four ranks, profiles it, and compares the traces as
`steady explain` does. The promise: the late rank is named with the right slice in 20 of 20 runs of
each kind, and none in 20 clean runs.

    python benchmarks/stragglers.py [--runs 20] [--only sleep clean] [--out benchmarks/results]

Other work on the machine makes ranks late in earnest. The load before each run is in the result.
`core` needs five cores for ranks and the busy processes; with fewer, ranks share the other cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dispatch import device_name, short
from steadytorch import __version__
from steadytorch.explain.session import explain
from straggler_job import LATE

JOB = Path(__file__).with_name("straggler_job.py")
RANKS = 4
WORK = ("cpu_compute", "cpu_elementwise", "cpu_operator", "cpu_copy", "cpu_python")
RIGHT = {"clean": (), "sleep": ("unknown",), "loader": ("cpu_data_wait",), "core": WORK}
"""The slices that are right, by kind of run; on a busy core all work takes longer."""
LONGEST_S = 300


def run_once(kind: str, folder: Path) -> dict[str, Any]:
    """One job, and what its traces say.

    Args:
        kind: one of `RIGHT`.
        folder: an empty folder for the traces.
    """
    load = os.getloadavg()[0]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    subprocess.run(
        [sys.executable, *torchrun, str(JOB), kind],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=LONGEST_S,
        check=True,
    )
    found = explain([folder / f"rank{rank}.json" for rank in range(RANKS)])
    late = [(each.rank, each.slice) for each in found.late]
    right = not late if kind == "clean" else [r for r, _ in late] == [LATE]
    return {
        "late": [
            {"rank": each.rank, "slice": each.slice, "late_ms": each.late_ns / 1e6}
            for each in found.late
        ],
        "step_ms": found.step_ns / 1e6,
        "right_rank": right,
        "right": right and all(name in RIGHT[kind] for _, name in late),
        "load": load,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=RIGHT, default=list(RIGHT))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in asked.only}
    for number in range(asked.runs):  # kinds take turns, so that drift meets all of them
        for kind in asked.only:
            with TemporaryDirectory() as folder:
                runs[kind].append(run_once(kind, Path(folder)))
            print(number, kind, json.dumps(runs[kind][-1]), flush=True)
        if asked.out is not None:
            _keep(runs, asked.out)
    for kind, found in runs.items():
        print(f"{kind}: right in {sum(run['right'] for run in found)} of {len(found)}")


def _keep(runs: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Writes the runs so far."""
    device, today = device_name("cpu"), datetime.datetime.now(datetime.UTC).date()
    document = {
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "steadytorch": __version__,
        "ranks": RANKS,
        "runs": runs,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"stragglers_{short(device)}_{today}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
