"""What recording a training step buys, beside the same steps by hand.

    python benchmarks/step_graphs.py --only resnet50:64 resnet50:8

All options of a workload live in one process and are timed in blocks, in random order. The rows of
steadytorch are fixed candidates, not found by a search: `rivals --train` times what searches find.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent / "rivals"))

import train

from steadytorch import __version__, transforms
from steadytorch.device.facts import load_facts
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms.base import applied_in_order
from steadytorch.workload.workload import Workload

CANDIDATES = {
    "steadytorch: graph(step), eager code": (
        "channels_last",
        "autocast",
        "optimizer",
        "step_graph",
    ),
    "steadytorch: graph(step), compiled": (
        *("channels_last", "compile", "autocast", "optimizer", "step_graph"),
    ),
}
BY_HAND = (
    "eager bf16 channels_last fused",
    "compile",
    "whole-step graph over compile",
)


def ours(made: train.Setting, names: tuple[str, ...], stack: ExitStack) -> Any:
    """The step of a candidate, as a search would time it."""
    optimizer = made.optimizer(made.model.parameters())
    workload = Workload.training(
        made.model, made.inputs, made.loss, optimizer, targets=made.targets
    )
    parts = [transforms.create(TransformSpec(name, ())) for name in names]
    return stack.enter_context(applied_in_order(parts, workload)).step_function()


def run(name: str, steps: int) -> list[dict[str, Any]]:
    """The rows of one workload."""
    rows: dict[str, dict[str, Any]] = {}
    live: dict[str, Any] = {}
    with ExitStack() as stack:
        for option in (*BY_HAND, *CANDIDATES):
            made = train.setting(name)
            torch.manual_seed(1)
            began = time.perf_counter()
            if option in CANDIDATES:
                step = ours(made, CANDIDATES[option], stack)
            else:
                step = train.BY_HAND[option](made)
            for _ in range(train.LOSS_AFTER):
                loss = step()
            rows[option] = {"loss": float(loss), "set_up_s": time.perf_counter() - began}
            live[option] = step
            print(f"{name}: {option} ready after {rows[option]['set_up_s']:.0f} s", flush=True)
        rng = Random(1)
        for _ in range(-(-steps // train.BLOCK)):
            for option in rng.sample(list(live), len(live)):
                times, host = train.time_block(live[option], train.BLOCK)
                rows[option].setdefault("samples_ms", []).extend(round(t, 5) for t in times)
                rows[option].setdefault("hosts_ms", []).append(host)
        live.clear()
    return [train.finished(option, row) for option, row in rows.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=["resnet50:64", "resnet50:8"])
    parser.add_argument("--steps", type=int, default=1000, help="timed, of each option")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    facts = load_facts("cuda")
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    document: dict[str, Any] = {
        "schema": 1,
        "created": created,
        "environment": {**msgspec.to_builtins(facts), "steadytorch": __version__},
        "workloads": {},
    }
    device = (facts.name or "unknown").lower().replace("nvidia ", "").split()[0]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"step-graphs_{device}_{created[:10]}.json"
    for name in args.only:
        document["workloads"][name] = run(name, args.steps)
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n")
        lines = ["| workload | option | ms a step | p99/median | host ms | loss |"]
        lines.append("|---|---|---|---|---|---|")
        for workload, rows in document["workloads"].items():
            lines += [
                f"| {workload} | {row['option']} | {row['median_ms']:.2f} | "
                f"{row['p99_over_median']:.3f} | {row['host_ms']:.2f} | {row['loss']:.3f} |"
                for row in rows
            ]
        path.with_suffix(".md").write_text("\n".join(lines) + "\n")
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
