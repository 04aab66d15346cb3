"""What watching a training loop costs, with and without keeping slow steps.

Watching adds probes to each step and threads beside it. The probes are judged by short slices of
the same steps in random order, with and without them: a core of a shared machine changes its speed
within a second. A pair has the median steps of 3 s of slices each. The threads' CPU time is
measured. The promise is kept if the interval lies below it less the threads' share: even if the
threads delayed the steps by all of their time.

Keeping slow steps is judged by whole watches: blocks of one second, plain and watched. Intervals
are those of `steady compare`. What the watch says of its own cost stands beside. `process_s` has
whole runs of a script that takes one second: what starting and reporting add.

    python benchmarks/watching.py [--only resnet18 small] [--threads 1] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from torch import nn

from dispatch import device_name, short
from steadytorch import __version__
from steadytorch.measure.race import ALPHA, LOOKS, Judgement, judge
from steadytorch.watching.clock import StepClock
from steadytorch.watching.probes import Probes
from steadytorch.watching.process import OURS
from steadytorch.watching.watch import Watch
from steadytorch.workload.loading import load_workload

PROMISES = {"watch": 0.005, "keep_slow": 0.02}
"""Most overhead, as a share of the time, by mode."""
SLICE_S, SLICES_S = 0.1, 3.0
"""Time of a slice of steps with or without probes, and of such slices in one half of a pair."""
FIRST_OF_SLICE = 4
"""Most steps at the start of a slice that are not timed: Python specialises changed code."""
SETTLE_S, THREADS_S = 5.0, 20.0
"""Time for free samples, before the threads' CPU time is taken, and time that is taken."""
PROBE_LOOKS = (*LOOKS, 90, 135, 200)
"""Numbers of pairs at which the probes are judged. Where the speed of a core varies by a tenth, 60
pairs give an interval as wide as the promise."""
KEPT = 10
BLOCK_S = 1.0
FIRST_STEPS = 60
"""Most steps before a timed block: by then the recorder has its first limit."""
LEAST_STEPS = 3
SCRIPT = """
import time, torch
model = torch.nn.Linear(64, 64)
chosen = torch.optim.SGD(model.parameters(), 0.01)
ends = time.perf_counter() + 1
while time.perf_counter() < ends:
    model(torch.ones(8, 64)).sum().backward()
    chosen.step()
"""

Step = Callable[[], None]


def training(model: nn.Module, x: torch.Tensor) -> Step:
    """One step of a model: forward, backward, SGD with momentum."""
    model.train()
    chosen = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)

    def step() -> None:
        chosen.zero_grad()
        model(x).float().square().mean().backward()
        chosen.step()

    return step


def resnet18() -> Step:
    """ResNet-18 at batch 4."""
    workload = load_workload("resnet18", batch=4)
    return training(workload.model, workload.inputs[0])


def transformer() -> Step:
    """An encoder of six layers, 4 sequences of 64 tokens."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return training(model, torch.randn(4, 64, 256))


def small() -> Step:
    """Four layers of a perceptron: a step of about 2 ms."""
    layers = [each for _ in range(4) for each in (nn.Linear(256, 256), nn.ReLU())]
    return training(nn.Sequential(*layers), torch.randn(128, 256))


WORKLOADS: dict[str, Callable[[], Step]] = {
    "resnet18": resnet18,
    "transformer": transformer,
    "small": small,
}


def block_ns(step: Step, steps: int, first: int, seen: Watch[Any] | None) -> int:
    """Time of one block's steps; starting and ending a watch is left out.

    Args:
        step: the step.
        steps: number of timed steps.
        first: number of steps before them.
        seen: watches them; None for a plain loop.
    """
    if seen is not None:
        seen.start()
    for _ in range(first):
        step()
    took = sum(_times_ns(step, steps))
    if seen is not None:
        seen.stop()
    return took


def of_watch(step: Step, rng: Random, say: Callable[[str], None]) -> dict[str, Any]:
    """Overhead of watching: probes by pairs of slices, threads by their CPU time."""
    threads, stated = _of_threads(step)
    left = PROMISES["watch"] - threads
    say(f"watch: threads take {threads:.3%}, so probes may take {left:.3%}")
    steps = max(1, round(SLICE_S * 1e9 / _once_ns(step)))
    first = min(FIRST_OF_SLICE, steps // 2)
    probes = Probes(StepClock())
    pairs: list[tuple[float, float]] = []
    verdict = None
    for look in PROBE_LOOKS:
        while len(pairs) < look:
            times: dict[bool, list[int]] = {False: [], True: []}
            while sum(times[False]) < SLICES_S * 1e9:
                for probed in rng.sample((False, True), 2):
                    if probed:
                        probes.install()
                    times[probed] += _times_ns(step, steps + first)[first:]
                    probes.remove()
            pairs.append((statistics.median(times[False]), statistics.median(times[True])))
        verdict = judge(pairs, looks=(look,), alpha=ALPHA / len(PROBE_LOOKS))
        say(f"probes, {look} pairs: {verdict}")
        if kept(verdict, left) is not None:
            break
    return {
        "promise": PROMISES["watch"],
        "threads": threads,
        "kept": kept(verdict, left),
        "judgement": msgspec.to_builtins(verdict),
        "stated": stated,
        "pairs_ms": [[round(each / 1e6, 4) for each in pair] for pair in pairs],
    }


def kept(verdict: Judgement | None, most: float) -> bool | None:
    """Whether the interval lies below the most that is promised; None if neither below nor above.

    Args:
        verdict: of pairs (plain, watched).
        most: a share of the time.
    """
    if verdict is None or verdict.low is None or verdict.high is None:
        return None
    return None if verdict.low <= most < verdict.high else verdict.high <= most


def _of_threads(step: Step) -> tuple[float, float]:
    """CPU time of the watch's threads over the time; and the overhead that the watch states."""
    seen: Watch[Any] = Watch(live=False)
    seen.start()
    _run_for(step, SETTLE_S)
    began, spent = time.perf_counter(), _spent_s()
    _run_for(step, THREADS_S)
    share = (_spent_s() - spent) / (time.perf_counter() - began)
    seen.stop()
    return share, seen.result.overhead_share


def _spent_s() -> float:
    """CPU time of the watch's threads so far, in s ("Scheduler Statistics" of Linux)."""
    ours = [each for each in threading.enumerate() if each.name.startswith(OURS)]
    files = [Path(f"/proc/self/task/{each.native_id}/schedstat") for each in ours]
    return sum(int(file.read_text().split()[0]) for file in files) * 1e-9


def _run_for(step: Step, seconds: float) -> None:
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        step()


def _times_ns(step: Step, steps: int) -> list[int]:
    stamps = [time.perf_counter_ns()]
    for _ in range(steps):
        step()
        stamps.append(time.perf_counter_ns())
    return [end - start for start, end in pairwise(stamps)]


def _once_ns(step: Step) -> float:
    return statistics.median(_times_ns(step, 5))


def of_keeping(step: Step, rng: Random, say: Callable[[str], None]) -> dict[str, Any]:
    """Pairs of a plain block and one whose slow steps are kept, until the planned looks decide."""
    steps = max(LEAST_STEPS, round(BLOCK_S * 1e9 / _once_ns(step)))
    first = min(FIRST_STEPS, max(2, steps // 4))
    pairs: list[tuple[int, int]] = []
    stated: list[float] = []
    verdict = None
    with TemporaryDirectory() as folder:
        for look in LOOKS:
            while len(pairs) < look:
                seen: Watch[Any] = Watch(live=False, keep_slow=KEPT, traces=folder)
                order = [None, seen] if rng.random() < 0.5 else [seen, None]
                took = {each is seen: block_ns(step, steps, first, each) for each in order}
                pairs.append((took[False], took[True]))
                stated.append(seen.result.overhead_share)
            verdict = judge(pairs, looks=(look,), alpha=ALPHA / len(LOOKS))
            say(f"keep_slow, {look} pairs: {verdict}")
            if kept(verdict, PROMISES["keep_slow"]) is not None:
                break
    return {
        "promise": PROMISES["keep_slow"],
        "kept": kept(verdict, PROMISES["keep_slow"]),
        "judgement": msgspec.to_builtins(verdict),
        "stated": statistics.median(stated),
        "steps": steps,
        "pairs_ms": [[round(each / steps / 1e6, 4) for each in pair] for pair in pairs],
    }


def processes(rounds: int) -> dict[str, float]:
    """Median time of a whole process in s, plain and by `steady run`."""
    with TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        run = [sys.executable, "-m", "steadytorch", "run", "--quiet"]
        lines = {
            "plain": [sys.executable, str(script)],
            "watch": [*run, str(script)],
            "keep_slow": [*run, "--keep-slow", str(KEPT), "--traces", folder, str(script)],
        }
        times: dict[str, list[float]] = {name: [] for name in lines}
        for _ in range(rounds):
            for name, line in lines.items():
                began = time.perf_counter()
                subprocess.run(line, check=True)
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(took) for name, took in times.items()}


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found: dict[str, Any] = {}
    load = [os.getloadavg()[0]]
    for name in options.only:
        say(name)
        step = WORKLOADS[name]()
        for _ in range(3):
            step()
        watch, keeping = of_watch(step, Random(0), say), of_keeping(step, Random(0), say)
        plain = statistics.median(a for a, _ in watch["pairs_ms"])
        found[name] = {"step_ms": plain, "watch": watch, "keep_slow": keeping}
    document = {
        "schema": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "steadytorch": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": device_name("cpu"),
        "threads": options.threads,
        "load_average": [*load, os.getloadavg()[0]],
        "protocol": f"watch: probes by slices of {SLICE_S} s, {SLICES_S:g} s of them in half a "
        f"pair, threads by their CPU time; keep_slow: blocks of {BLOCK_S:g} s; random order in one "
        "process, 99 % intervals over pairs",
        "workloads": found,
        "process_s": processes(options.rounds),
    }
    text = json.dumps(document, indent=1)
    print(text)
    if options.out is not None:
        name = f"watching_{short(document['device'])}_{datetime.date.today()}.json"
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / name).write_text(text + "\n")


if __name__ == "__main__":
    main()
