"""Sweeps with real searches: several processes against one, and workers that are killed.

    python benchmarks/sweeps.py --budget 20s --json FILE
    python benchmarks/sweeps.py --part kills --kills 20

Part `time` tunes a list with one process, then the same list with several, each with stores of its
own. Part `kills` tunes it with several processes, of which one is killed by SIGKILL and replaced at
random times. Each process keeps to one core, so that two of them do not share a device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psutil

MODELS = """
import torch
from torch import nn

def linear(batch):
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return layers.eval(), torch.ones(batch, 64)

def conv(batch):
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    return layers.eval(), torch.ones(batch, 3, 16, 16)

def norm(batch):
    layers = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())
    return layers.eval(), torch.ones(batch, 64)
"""
LEASE_S = 10


class Sweep:
    """One sweep in a folder of its own.

    Args:
        folder: where the models, the list, the store and the caches are.
        count: number of workloads.
        budget: of each search.
    """

    def __init__(self, folder: Path, count: int, budget: str) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "models.py").write_text(MODELS)
        names = ("linear", "conv", "norm")
        lines = (f"models.py:{names[n % 3]} --batch {1 + n // 3}" for n in range(count))
        (folder / "list.txt").write_text("\n".join(lines) + "\n")
        self._words = ["--list", "list.txt", "--store", "plans", "--budget", budget]
        self._log = (folder / "log.txt").open("w")

    def start(self, rank: int, size: int) -> subprocess.Popen[bytes]:
        """Starts a worker on one core."""
        own = sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]
        return subprocess.Popen(
            [sys.executable, "-m", "steadytorch", "tune", *self._words],
            cwd=self.folder,
            stdout=self._log,
            stderr=self._log,
            preexec_fn=partial(os.sched_setaffinity, 0, {own}),
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "XDG_CACHE_HOME": str(self.folder / "caches"),
                "STEADYTORCH_SWEEP_LEASE": str(LEASE_S),
            },
        )

    def rows(self) -> list[dict[str, Any]]:
        """The table at the end."""
        words = [*self._words, "--status", "--json", "out.json", "--quiet"]
        command = [sys.executable, "-m", "steadytorch", "tune", *words]
        subprocess.run(command, cwd=self.folder, check=False)
        return json.loads((self.folder / "out.json").read_text())["rows"]


def ended(sweep: Sweep) -> dict[str, Any]:
    """What the table says: statuses, and plans that are missing or there twice."""
    rows = sweep.rows()
    plans = Counter(row["plan"]["id"] for row in rows if row["plan"])
    return {
        "rows": len(rows),
        "workloads": len({row["workload"] for row in rows}),
        "statuses": dict(Counter(row["status"] for row in rows)),
        "distinct_plans": len(plans),
        "plan_files": sum(Path(row["plan"]["path"]).is_file() for row in rows if row["plan"]),
        "by_worker": sorted(Counter(row["worker"] for row in rows).values(), reverse=True),
        "reasons": sorted({row["reason"] for row in rows if row["reason"]}),
    }


def timed(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """The time of one process, and of several."""
    found: dict[str, Any] = {}
    for name, size in (("serial", 1), ("shared", asked.workers)):
        sweep = Sweep(folder / name, asked.count, asked.budget)
        began = time.monotonic()
        workers = [sweep.start(rank, size) for rank in range(size)]
        for worker in workers:
            worker.wait()
        seconds = time.monotonic() - began
        found[name] = {"workers": size, "seconds": seconds, **ended(sweep)}
        print(f"{name}: {seconds:.0f} s, {found[name]['statuses']}", flush=True)
    found["ratio"] = found["shared"]["seconds"] / found["serial"]["seconds"]
    print(f"ratio {found['ratio']:.2f}")
    return found


def killed(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """A sweep whose workers are killed at random times and replaced."""
    chance = random.Random(asked.seed)
    sweep = Sweep(folder / "killed", asked.count, asked.budget)
    began = time.monotonic()
    workers = [sweep.start(rank, asked.workers) for rank in range(asked.workers)]
    times_s, idle = [], 0
    for _ in range(asked.kills):
        time.sleep(chance.uniform(1, asked.every))
        victim = chance.randrange(asked.workers)
        idle += workers[victim].poll() is not None
        workers[victim].send_signal(signal.SIGKILL)
        workers[victim].wait()
        times_s.append(round(time.monotonic() - began, 1))
        workers[victim] = sweep.start(victim, asked.workers)
    codes = [worker.wait() for worker in workers]
    found = {"workers": asked.workers, "seconds": time.monotonic() - began, **ended(sweep)}
    found |= {"kills": asked.kills, "kills_at_s": times_s, "kills_of_none": idle, "codes": codes}
    print(f"killed {asked.kills} times: {found['statuses']}, {found['seconds']:.0f} s", flush=True)
    return found


def main() -> int:
    """Runs the parts; returns 1 if a plan is missing or a row is there twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["time", "kills", "both"], default="both")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--budget", default="20s")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=20.0, help="longest pause, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    from steadytorch.device.facts import load_facts

    name = load_facts("cpu").name or platform.machine()
    result: dict[str, Any] = {
        "processor": name,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": psutil.getloadavg(),
        "budget": asked.budget,
        "count": asked.count,
    }
    with tempfile.TemporaryDirectory() as folder:
        if asked.part != "time":
            result["kills"] = killed(Path(folder), asked)
        if asked.part != "kills":
            result["time"] = timed(Path(folder), asked)
    result["load_after"] = psutil.getloadavg()
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    ends = [result["kills"]] if "kills" in result else []
    ends += [result["time"][name] for name in ("serial", "shared")] if "time" in result else []
    whole = all(each["distinct_plans"] == each["rows"] == asked.count for each in ends)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
