"""What watching a training loop costs, with and without keeping slow steps.

Blocks of the same steps run plain and watched, in random order, in one process. Each pair is judged
as `steady compare` does: a tie within the promised share means that the promise is kept. The CPU
time of the whole process, threads of the watch included, is judged too: it shows the added work on
a machine that others use. What the watch says of its own cost stands beside both. `process_s` has
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
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from torch import nn

from dispatch import device_name, short
from steadytorch import __version__
from steadytorch.measure.race import LOOKS, judge
from steadytorch.watching.watch import Watch
from steadytorch.workload.loading import load_workload

PROMISES = {"watch": 0.005, "keep_slow": 0.02}
"""Most overhead, as a share of the time, by mode."""
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


def block_ns(step: Step, steps: int, first: int, seen: Watch[Any] | None) -> tuple[int, int]:
    """Time and CPU time of one block's steps; starting and ending a watch is left out.

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
    began, cpu = time.perf_counter_ns(), time.process_time_ns()
    for _ in range(steps):
        step()
    took = time.perf_counter_ns() - began, time.process_time_ns() - cpu
    if seen is not None:
        seen.stop()
    return took


def overhead(step: Step, mode: str, rng: Random, say: Callable[[str], None]) -> dict[str, Any]:
    """Pairs of a plain and a watched block until the planned looks decide."""
    for _ in range(3):
        step()
    began = time.perf_counter_ns()
    step()
    one = time.perf_counter_ns() - began
    steps = max(LEAST_STEPS, round(BLOCK_S * 1e9 / one))
    first = min(FIRST_STEPS, max(2, steps // 4))
    pairs: list[tuple[tuple[int, int], tuple[int, int]]] = []
    stated: list[float] = []
    found: list[Any] = []
    with TemporaryDirectory() as folder:
        for look in LOOKS:
            while len(pairs) < look:
                seen: Watch[Any] = Watch(
                    live=False, keep_slow=KEPT if mode == "keep_slow" else 0, traces=folder
                )
                order = [None, seen] if rng.random() < 0.5 else [seen, None]
                took = {each is seen: block_ns(step, steps, first, each) for each in order}
                pairs.append((took[False], took[True]))
                stated.append(seen.result.overhead_share)
            found = [judge([(a[i], b[i]) for a, b in pairs], tie=PROMISES[mode]) for i in (0, 1)]
            say(f"{mode}, {look} pairs: {found}")
            if all(each.verdict != "undecided" for each in found):
                break
    return {
        "promise": PROMISES[mode],
        "judgement": msgspec.to_builtins(found[0]),
        "judgement_cpu": msgspec.to_builtins(found[1]),
        "stated": statistics.median(stated),
        "steps": steps,
        "pairs_ms": _in_ms(pairs, steps, 0),
        "pairs_cpu_ms": _in_ms(pairs, steps, 1),
    }


def _in_ms(pairs: list[Any], steps: int, clock: int) -> list[list[float]]:
    return [[round(each[clock] / steps / 1e6, 4) for each in pair] for pair in pairs]


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
        modes = {mode: overhead(step, mode, Random(0), say) for mode in PROMISES}
        plain = [a for mode in modes.values() for a, _ in mode["pairs_ms"]]
        found[name] = {"step_ms": statistics.median(plain), **modes}
    document = {
        "schema": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "steadytorch": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": device_name("cpu"),
        "threads": options.threads,
        "load_average": [*load, os.getloadavg()[0]],
        "protocol": "blocks of one second, plain and watched, in random order in one process; "
        "99 % intervals over pairs",
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
