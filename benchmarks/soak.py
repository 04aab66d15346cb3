"""Soak test: many calls with random shapes from several threads; checks results and memory.

Shapes come from a fixed set. A third of them has plans that call the model itself, a third has
plans with converted weights, the rest has none. Every result is compared with the untouched
model's. Memory is sampled after the first tenth of the calls.

    python benchmarks/soak.py [--calls 1000000] [--shapes 200] [--threads 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.dispatch import CallContext, Resolution
from steadytorch.runtime.module import TunedModule

LIVE = (TransformSpec("inference_mode"),)
COPIED = (TransformSpec("fold_batch_norm"), TransformSpec("inference_mode"))
MOST_GROWTH = 0.02
"""Maximum relative growth of memory after the first tenth of the calls, plus 8 MiB."""


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU()).eval()
    nn.init.uniform_(model[1].running_mean, -1, 1)
    return model


def serve(context: CallContext) -> Resolution:
    width = context.args[0].shape[-1]
    return Resolution((LIVE, COPIED, None)[width % 3])


def soak(calls: int, shapes: int, threads: int, device: str = "cpu") -> dict[str, Any]:
    """Run the calls and return the findings; `wrong` lists the first results that differ."""
    model = network().to(device)
    tuned = TunedModule(model, serve)
    inputs = [torch.randn(1, 1, 2 + i // 20, 1 + i % 20, device=device) for i in range(shapes)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    for x in inputs:
        tuned(x)
    wrong: list[str] = []
    done = [0] * threads

    def work(index: int) -> None:
        draw = random.Random(index)
        try:
            for _ in range(calls // threads):
                i = draw.randrange(shapes)
                with torch.no_grad():
                    found = tuned(inputs[i])
                if not torch.allclose(found, expected[i], rtol=1e-5, atol=1e-6):
                    wrong.append(f"shape {tuple(inputs[i].shape)}")
                    return
                done[index] += 1
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}")

    start = time.monotonic()
    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    memory = _watch(workers, done, calls)
    report = tuned.report()
    return {
        "calls": sum(done),
        "shapes": shapes,
        "threads": threads,
        "seconds": time.monotonic() - start,
        "wrong": wrong[:10],
        "report": report.calls,
        "memory_bytes": memory,
        "growth_bytes": memory[-1] - memory[0],
        "is_flat": memory[-1] - memory[0] <= MOST_GROWTH * memory[0] + (8 << 20),
    }


def _watch(workers: list[threading.Thread], done: list[int], calls: int) -> list[int]:
    """Sample resident memory at each tenth of the calls."""
    process, memory = psutil.Process(), []
    while any(worker.is_alive() for worker in workers):
        if sum(done) >= (len(memory) + 1) * calls // 10:
            memory.append(process.memory_info().rss)
        time.sleep(0.02)
    return [*memory, process.memory_info().rss]


def main() -> None:
    """Soak, print and store; fail if a result differs or memory grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = soak(options.calls, options.shapes, options.threads, options.device)
    text = json.dumps(found, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    raise SystemExit(1 if found["wrong"] or not found["is_flat"] else 0)


if __name__ == "__main__":
    main()
