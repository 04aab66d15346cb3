"""How often `steady gate` fails on equal revisions, and how often it finds an injected slowdown.

    python benchmarks/gate.py --same 200 --slower 60 --jobs 2      # real processes, 80 minutes
    python benchmarks/gate.py --simulate 1000                      # simulated processes and series

`same` compares a commit with a working tree of equal code. In `slower`, a busy wait makes the step
of the working tree take a share longer. Each gate runs in full: worktrees, fresh processes,
interleaved blocks; by default with five processes, the fewest that may be judged. Results are
written after each gate, so that an interrupted run keeps them.

A gate of more processes is then replayed from each gate on: its processes are those recorded one
after another from there, and it is judged as `steady gate` would. So replayed gates meet the drift
and the neighbours that the machine really had, but share processes with each other.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from steadytorch import __version__
from steadytorch.bench import gate as bench_gate
from steadytorch.bench.gate import PROCESS_LOOKS, PROCESSES, THRESHOLD, gate
from steadytorch.device.facts import load_facts
from steadytorch.measure.changes import find_changes
from steadytorch.measure.race import ALPHA, judge, machine_claim

CORES = len(os.sched_getaffinity(0))
SPREADS = (0.005, 0.01, 0.02, 0.05)
"""Scatter of the logarithms of simulated processes."""
WORK = """
import time

import torch
from torch import nn

torch.set_num_threads({threads})
SHARE = {share}


class Work(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])

    def forward(self, x):
        began = time.perf_counter_ns()
        for _ in range({repeats}):
            x = self.layers(x)
        end = time.perf_counter_ns()
        wait = end + SHARE * (end - began)
        while time.perf_counter_ns() < wait:
            pass
        return x


def factory():
    return Work().eval(), torch.ones(32, 256)
"""


def _git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def one_gate(kind: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run a gate in a fresh repository."""
    began_at = datetime.datetime.now(datetime.UTC)
    fill = partial(WORK.format, threads=max(1, CORES // args.jobs), repeats=args.repeats)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _git(folder, "init", "--quiet")
        (folder / "work.py").write_text(fill(share=0.0))
        _git(folder, "add", ".")
        _git(folder, "commit", "--quiet", "--message", "base")
        (folder / "work.py").write_text(fill(share=args.effect if kind == "slower" else 0.0))
        began = time.monotonic()
        result = gate(
            ["work.py:factory"],
            base="HEAD",
            folder=folder,
            device=args.device,
            threshold=args.threshold,
            processes=args.processes,
            seed=seed,
        )
        if result.interrupted:
            raise KeyboardInterrupt
        (row,) = result.rows
        taken = msgspec.to_builtins(msgspec.structs.replace(row, samples=()))
        return taken | {
            "kind": kind,
            "began": began_at.isoformat(timespec="milliseconds"),
            "seconds": round(time.monotonic() - began, 1),
            "failed": result.gate_failed,
            "estimates": [judge(each, looks=(len(each),)).estimate for each in row.samples],
        }


def replayed(rows: list[dict[str, Any]], threshold: float) -> list[dict[str, Any]]:
    """Gates with the default number of processes, one from each recorded gate on.

    At the end the recording goes on at its beginning.
    """
    looks = bench_gate._looks(PROCESSES)
    recorded = [
        (each, row["seconds"] / len(row["estimates"])) for row in rows for each in row["estimates"]
    ]
    starts = np.cumsum([0, *[len(row["estimates"]) for row in rows[:-1]]])
    gates = []
    for start in starts if len(recorded) >= looks[-1] else ():
        taken = [recorded[(start + i) % len(recorded)] for i in range(looks[-1])]
        verdict, used = _judged(np.array([each for each, _ in taken]), looks, threshold)
        seconds = sum(took for _, took in taken[:used])
        gates.append({"verdict": verdict, "processes": used, "seconds": round(seconds, 1)})
    return gates


def _judged(
    estimates: np.ndarray, looks: tuple[int, ...], threshold: float, level: float | None = None
) -> tuple[str, int]:
    """The verdict on a workload's processes, and how many it took."""
    level = ALPHA / len(looks) if level is None else level
    for look in looks:
        claim = machine_claim(estimates[:look].tolist(), alpha=level, tie=threshold)
        verdict = bench_gate._verdict(claim.low, claim.high, threshold)
        if verdict != "undecided":
            return verdict, look
    return "undecided", looks[-1]


def simulated_gates(count: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rates of false and found slowdowns for processes that differ by normal or heavy noise."""
    rng = np.random.default_rng(0)
    looks = bench_gate._looks(PROCESSES)
    cells = []
    for kind, spread, workloads, effect in product(
        ("normal", "heavy", "two levels"), SPREADS, (1, 5), (0.0, args.effect)
    ):
        level = ALPHA / (workloads * len(looks))
        draw = partial(_simulated, rng, kind, spread, effect, looks, level, args.threshold)
        gates = [[draw() for _ in range(workloads)] for _ in range(count)]
        cells.append(
            {
                "noise": kind,
                "spread": spread,
                "workloads": workloads,
                "effect": effect,
                "first_failed": sum(first == "slower" for (first, _), *_ in gates) / count,
                "any_failed": sum(any(v == "slower" for v, _ in row) for row in gates) / count,
                "any_faster": sum(any(v == "faster" for v, _ in row) for row in gates) / count,
                "processes": float(np.mean([used for row in gates for _, used in row])),
            }
        )
        print(json.dumps(cells[-1]), flush=True)
    return cells


def _simulated(
    rng: np.random.Generator,
    kind: str,
    spread: float,
    effect: float,
    looks: tuple[int, ...],
    level: float,
    threshold: float,
) -> tuple[str, int]:
    draws = {
        "normal": lambda: rng.standard_normal(looks[-1]),
        "heavy": lambda: rng.standard_t(2, looks[-1]) / 2,
        "two levels": lambda: np.where(rng.random(looks[-1]) < 0.2, 3.0, -0.3),
    }
    # Both sides of a process draw from the same noise, as in an A/A comparison.
    noise = np.clip(spread * (draws[kind]() - draws[kind]()) / np.sqrt(2), -1, 1)
    return _judged(np.expm1(np.log1p(effect) + noise), looks, threshold, level)


def simulated_series(count: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rates of series of 200 commits with a false change, and of a 2 % step found in five."""
    cells = []
    for kind in ("normal", "heavy", "skewed", "AR(0.3)"):
        rng = np.random.default_rng(1)
        draw = {
            "normal": lambda n, rng=rng: rng.standard_normal(n),
            "heavy": lambda n, rng=rng: rng.standard_t(2, n) / 2,
            "skewed": lambda n, rng=rng: rng.exponential(size=n) - 1,
            "AR(0.3)": lambda n, rng=rng: _correlated(rng, n),
        }[kind]
        false = sum(bool(find_changes(args.spread * draw(200))) for _ in range(count))
        found, covered, described = 0, 0, 0
        for _ in range(count):
            values = args.spread * draw(105)
            values[100:] += 0.02
            changes = [each for each in find_changes(values) if each.index >= 95]
            found += bool(changes)
            for each in changes[:1]:
                described += 1
                covered += each.low <= 0.02 <= each.high
        cell = {"noise": kind, "spread": args.spread, "false_in_200": false / count}
        cell |= {"found_in_5": found / count}
        cells.append(cell | {"coverage": covered / described if described else None})
        print(json.dumps(cells[-1]), flush=True)
    return cells


def _correlated(rng: np.random.Generator, count: int) -> np.ndarray:
    values = rng.standard_normal(count)
    for i in range(1, count):
        values[i] = 0.3 * values[i - 1] + np.sqrt(1 - 0.09) * values[i]
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--same", type=int, default=0, help="gates of equal revisions")
    parser.add_argument("--slower", type=int, default=0, help="gates of an injected slowdown")
    parser.add_argument("--simulate", type=int, default=0, help="simulated gates and series a cell")
    parser.add_argument("--effect", type=float, default=0.03, help="injected slowdown")
    parser.add_argument("--spread", type=float, default=0.005, help="spread of simulated series")
    parser.add_argument("--threshold", type=float, default=THRESHOLD)
    parser.add_argument("--jobs", type=int, default=1, help="gates at a time, sharing the cores")
    parser.add_argument("--processes", type=int, default=PROCESS_LOOKS[0])
    parser.add_argument("--repeats", type=int, default=4, help="length of the workload")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    facts = load_facts(args.device)
    created = datetime.datetime.now(datetime.UTC)
    name = re.sub(r"[^a-z0-9]+", "-", (facts.name or args.device).lower()).strip("-")
    kind = "gate" if args.same or args.slower else "gate-simulation"
    target = args.out / f"{kind}_{name}_{created:%Y-%m-%d}.json"
    document: dict[str, Any] = {
        "options": {k: v for k, v in vars(args).items() if k != "out"},
        "environment": msgspec.to_builtins(facts),
        "steadytorch": __version__,
        "created": created.isoformat(timespec="seconds"),
    }
    if args.simulate:
        document["simulated_gates"] = simulated_gates(args.simulate, args)
        document["simulated_series"] = simulated_series(args.simulate, args)
    gates: dict[str, list[dict[str, Any]]] = {"same": [], "slower": []}
    args.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.jobs) as pool:
        running = [pool.submit(one_gate, kind, seed, args) for kind, seed in _planned(args)]
        for done in as_completed(running):
            row = done.result()
            gates[row["kind"]].append(row)
            document["gates"] = gates = {
                kind: sorted(rows, key=lambda row: row["began"]) for kind, rows in gates.items()
            }
            document["replayed"] = {
                kind: replayed(rows, args.threshold) for kind, rows in gates.items()
            }
            document["summary"] = {
                "gates": {kind: _summary(rows) for kind, rows in gates.items()},
                "replayed": {k: _summary(rows) for k, rows in document["replayed"].items()},
            }
            target.write_text(json.dumps(document, indent=1) + "\n")
            print(json.dumps(document["summary"]), flush=True)
    target.write_text(json.dumps(document, indent=1) + "\n")
    print(target)


def _planned(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Kind and seed of each gate; both kinds are spread evenly over the run."""
    counts = {"same": args.same, "slower": args.slower}
    places = [((n + 1) / count, kind, n) for kind, count in counts.items() for n in range(count)]
    return [(kind, number) for _, kind, number in sorted(places)]


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    if not rows:
        return {"gates": 0}
    taken = [row["seconds"] for row in rows]
    return {
        "gates": len(rows),
        "verdicts": dict(Counter(row["verdict"] or row["status"] for row in rows)),
        "median_seconds": float(np.median(taken)),
        "longest_seconds": max(taken),
    }


if __name__ == "__main__":
    main()
