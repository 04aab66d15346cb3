"""Whether `steady run` names the cause of slow or uneven steps, and accuses no clean script.

Runs `training.py` with one fault at a time, and without any. A cause counts as named if it is the
first or second finding. The models, optimizers and batch sizes of the runs are drawn from the seed.
Clean runs load their batches in the training process: a worker would take one of its cores. Where
other programs take as much of a core as the rule for contention reports, contention is no false
finding; other findings are. Every second run has glibc's usual allocator, which gives memory back
to the system: there, `allocation-in-loop` is no false finding. Every tenth is a job of two ranks.

    python benchmarks/causes [--only FAULT ...] [--clean 20] [--seed 0] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch

from steadytorch.device.facts import load_facts
from steadytorch.rules.cpu_contention import LEAST_LATE

SCRIPT = Path(__file__).with_name("training.py")
CAUSES: dict[str, tuple[str, str]] = {
    "slow storage": ("input-pipeline", ""),
    "decoding": ("input-pipeline", ""),
    "cold reads": ("input-pipeline", ""),
    "generator": ("script-work", "read_shards"),
    "respawned workers": ("input-pipeline", ""),
    "checkpoints": ("script-work", "save_checkpoint"),
    "metrics": ("script-work", "count_hits"),
    "histograms": ("script-work", "log_weights"),
    "deep copies": ("script-work", "average_weights"),
    "validation": ("evaluation", ""),
    "subprocesses": ("script-work", "ask_machine"),
    "values read back": ("script-work", "read_values"),
    "growing list": ("script-work", "mean_loss"),
    "kept graphs": ("memory-growth", ""),
    "kept outputs": ("memory-growth", ""),
    "cycles": ("gc-pause", ""),
    "explicit collection": ("gc-pause", ""),
    "neighbours": ("cpu-contention", ""),
    "oversubscribed": ("cpu-contention", ""),
    "page faults": ("allocation-in-loop", ""),
    "background thread": ("interpreter-lock", "refresh_cache"),
    "one thread": ("idle-cores", ""),
    "shapes": ("recompilation", ""),
    "anomaly detection": ("debug-mode", "anomaly"),
    "profiler": ("debug-mode", "profiler"),
    "unfused optimizer": ("unfused-optimizer", "Adam"),
    "update in Python": ("unfused-optimizer", "Plain"),
    "late rank": ("late-rank", "rank 1"),
}
"""Fault to the finding that names it, and a word that its title must have."""

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": "268435456",
}
"""Let glibc keep its memory: by default, page faults take 5 to 15 % of these steps on a CPU, and
would come before the cause."""

RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Let glibc take each larger tensor from the system, and give it back."""


def watched(
    fault: str, draw: random.Random, ranks: int = 1, allocator: dict[str, str] = ALLOCATOR
) -> dict[str, Any]:
    """The result of one run under `steady run`, with what was drawn for it."""
    drawn = [
        f"--model={draw.choice(('mlp', 'cnn', 'tokens'))}",
        f"--optimizer={draw.choice(('sgd', 'adam', 'adamw'))}",
        f"--batch={draw.choice((96, 128, 192))}",
        f"--clip={draw.choice((0, 1))}",
        f"--seed={draw.randrange(1000)}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "run.json"
        steady = ["steady", "run", "--quiet", "--json", str(result), str(SCRIPT), fault, *drawn]
        start = [str(Path(sys.executable).with_name("steady")), *steady[1:]]
        if ranks > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--no-python"]
            start = [sys.executable, *torchrun, f"--nproc-per-node={ranks}", *start]
        before = others_s()
        done = subprocess.run(
            start, capture_output=True, text=True, env={**os.environ, **allocator}
        )
        others = [after - found for after, found in zip(others_s(), before, strict=True)]
        if done.returncode:
            raise RuntimeError(f"{fault}: exit code {done.returncode}: {done.stderr[-2000:]}")
        found = json.loads(result.read_bytes())
    return {
        "drawn": drawn,
        "median_ns": found["measured"]["median_ns"],
        "overhead_share": found["overhead_share"],
        "others_share": others[0] / others[1],
        "findings": [{"id": each["id"], "title": each["title"]} for each in found["findings"]],
    }


def others_s() -> tuple[float, float]:
    """CPU time of everything but this process and its children so far, and the time, in s.

    Time stolen by other virtual machines counts ("/proc/stat" in proc(5)).
    """
    machine, children = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
    return busy - children.ru_utime - children.ru_stime - time.process_time(), time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=list(CAUSES))
    parser.add_argument("--clean", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    causes, clean = [], []
    for fault in asked.only if asked.only is not None else CAUSES:
        cause, word = CAUSES[fault]
        ranks = 2 if fault == "late rank" else 1
        allocator = RETURNING if fault == "page faults" else ALLOCATOR
        result = watched(fault, draw, ranks, allocator)
        found = result["findings"]
        named = any(each["id"] == cause and word in each["title"] for each in found[:2])
        causes.append({"fault": fault, "cause": cause, "named": named, **result})
        print(f"{'named ' if named else 'MISSED'} {fault}: {result['median_ns'] / 1e6:.1f} ms")
        for each in found:
            print(f"         {each['id']}: {each['title']}")
    while len(clean) < asked.clean:
        ranks = 2 if len(clean) % 10 == 9 else 1
        usual = len(clean) % 2 == 1
        fault = "ranks" if ranks > 1 else "clean"
        result = watched(fault, draw, ranks, {} if usual else ALLOCATOR)
        result["allocator"] = "usual" if usual else "keeps its memory"
        # Two ranks fill two cores, and the threads of gloo need some of them: that is contention.
        crowded = ranks > 1 and (os.cpu_count() or 1) <= ranks
        # Less than nothing: the host took cores without telling.
        result["contended"] = crowded or not 0 <= result["others_share"] < LEAST_LATE
        excused = {"cpu-contention"} if result["contended"] else set()
        excused |= {"allocation-in-loop"} if usual else set()
        result["accused"] = any(each["id"] not in excused for each in result["findings"])
        clean.append(result)
        verdict = "ACCUSED" if result["accused"] else "clean  "
        others = f"others {result['others_share']:.1%}"
        print(f"{verdict} {result['drawn']}, {result['allocator']}, {others}", flush=True)
        for each in result["findings"]:
            print(f"         {each['id']}: {each['title']}")
    named = sum(each["named"] for each in causes)
    accused = sum(each["accused"] for each in clean)
    print(f"{named} of {len(causes)} causes named first or second")
    contended = sum(each["contended"] for each in clean)
    print(f"{accused} of {len(clean)} clean runs accused; {contended} contended")
    if asked.out:
        device = load_facts("cpu").name
        summary = {"named": named, "accused": accused, "seed": asked.seed, "device": device,
                   "python": platform.python_version(), "torch": torch.__version__,
                   "causes": causes, "clean": clean}  # fmt: skip
        name = f"causes_{'-'.join(device.lower().split()[:2])}_{date.today()}.json"
        (asked.out / name).write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
