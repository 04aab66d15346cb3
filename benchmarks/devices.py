"""One search on one GPU and on several: time to the plan, and both winners side by side.

    python benchmarks/devices.py --only resnet50:16 bert:8x128 --budget 40s
    python benchmarks/devices.py --devices cuda:0,cuda:1 --out benchmarks/results

Both searches have the same budget, seed and precision, stores and compiler caches of their own, and
run one after the other, in random order. Then the untouched workload and the two winners are set up
in fresh processes on the first GPU and timed in blocks, in random order.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "rivals"))

from rival_cases import CASES, Case, chosen

from steadytorch import __version__, transforms
from steadytorch.bench.bench_worker import WorkloadHandler, save_payload
from steadytorch.device.facts import load_facts
from steadytorch.measure.race import compare
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.quantities import parse_duration
from steadytorch.results.candidate import Candidate, describe
from steadytorch.tune.devices import Devices, choose_devices
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.tune.setup_scheduler import NullListener
from steadytorch.workload.workload import Workload

HANDLER = f"{WorkloadHandler.__module__}:{WorkloadHandler.__name__}"
DEFAULT = ("resnet50:16", "transformers:bert:8x128", "torchvision:convnext_tiny:16")
SHORT = {"bert": "transformers:bert:8x128", "convnext_tiny": "torchvision:convnext_tiny"}
"""Names that `--only` accepts beside those of `rivals`; a batch or shape may follow."""
BLOCK = 10
SET_UP_S = 180.0
COMPARE_S = 8.0
"""Seconds for the pairs of both winners."""


class Timeline(NullListener):
    """Records when candidates were timed first, and phases, in seconds since the start."""

    def __init__(self) -> None:
        self.phases: list[tuple[float, str]] = []
        self.timed_s: dict[str, float] = {}
        self._began = time.monotonic()

    def phase(self, message: str) -> None:
        self.phases.append((round(time.monotonic() - self._began, 1), message))

    def timed(self, label: str, median_ns: float) -> None:
        self.timed_s.setdefault(label, round(time.monotonic() - self._began, 1))


def searched(case: Case, workload: Workload, devices: Devices, budget_s: float) -> dict[str, Any]:
    """One search on these devices, with a store of its own."""
    options = SearchOptions(precision=case.precision, budget_s=budget_s)
    timeline = Timeline()
    with tempfile.TemporaryDirectory(prefix="devices-") as folder:
        result = Session(workload, options, store=folder, devices=devices).search(timeline)
    timed = [trial for trial in result.candidates if trial.samples]
    return {
        "devices": result.devices,
        "devices_left_out": result.devices_left_out,
        "search_s": result.seconds,
        "winner": describe(result.chosen),
        "winner_first_timed_s": timeline.timed_s.get(describe(result.chosen)),
        "candidates_timed": len(timed),
        "ended": result.ended,
        "speedup": msgspec.to_builtins(result.speedup),
        "not_tried": len(result.not_tried),
        "phases": timeline.phases,
        "candidate": result.chosen,
    }


@contextmanager
def workers_of(
    workload: Workload, candidates: dict[str, Candidate], device: str
) -> Iterator[dict[str, Worker]]:
    """Fresh processes with these candidates set up, all at once."""
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as name:
        folder = Path(name)
        save_payload(workload, folder)
        workers = {label: Worker(HANDLER, folder, f"arm-{label}") for label in candidates}
        try:
            for worker in workers.values():
                worker.send("load", device=device, ambient=transforms.ambient())
            for worker in workers.values():
                worker.receive(SET_UP_S)
            for label, worker in workers.items():
                worker.send("set_up", candidate=msgspec.to_builtins(candidates[label]))
            for worker in workers.values():
                worker.receive(SET_UP_S)
            yield workers
        finally:
            for worker in workers.values():
                worker.kill()


def side_by_side(
    workload: Workload, candidates: dict[str, Candidate], device: str
) -> dict[str, dict[str, Any]]:
    """The period of each candidate on one device, in blocks taken in random order."""
    with workers_of(workload, candidates, device) as workers:
        return _timed(workers, Random(1))


def _timed(workers: dict[str, Worker], rng: Random) -> dict[str, dict[str, Any]]:
    times: dict[str, list[float]] = {label: [] for label in workers}

    def block(label: str) -> float:
        taken = workers[label].call("block", 60.0, metric="period", count=BLOCK)
        times[label].append(float(np.median(taken)))
        return times[label][-1]

    for label in rng.sample(list(workers), len(workers)):  # lets clocks settle
        block(label)
        times[label].clear()
    end = time.monotonic() + COMPARE_S
    one, other = (lambda: block("one")), (lambda: block("several"))
    judgement, _ = compare(one, other, rng=rng, stop=lambda: time.monotonic() > end)
    for _ in range(6):
        block("untouched")
    rows: dict[str, dict[str, Any]] = {
        label: {"period_ms": float(np.median(found)) / 1e6, "blocks": len(found)}
        for label, found in times.items()
    }
    rows["several against one"] = msgspec.to_builtins(judgement)
    return rows


def run(case: Case, devices: Devices, budget_s: float, rng: Random) -> dict[str, Any]:
    """Both searches of one workload and the comparison of their winners."""
    workload = case.load()
    alone = Devices(devices.names[:1], {}, ())
    arms = {"one": alone, "several": devices}
    found: dict[str, Any] = {}
    for label in rng.sample(list(arms), 2):
        found[label] = searched(case, workload, arms[label], budget_s)
        print(
            f"{case.name}: {len(arms[label].names)} GPU(s): {found[label]['search_s']:.0f} s, "
            f"{found[label]['candidates_timed']} timed, {found[label]['winner']}",
            flush=True,
        )
    candidates = {"untouched": (), **{label: found[label].pop("candidate") for label in arms}}
    try:
        found["side_by_side"] = side_by_side(workload, candidates, devices.names[0])
        print(f"{case.name}: {json.dumps(found['side_by_side'])}", flush=True)
    except WorkerFault as fault:
        found["side_by_side"] = {"failed": fault.reason}
    return {"precision": case.precision, "budget_s": budget_s, **found}


def cases(only: Sequence[str], precision: str | None) -> list[Case]:
    """The workloads that `--only` names."""
    texts: list[str] = []
    for text in only:
        name, _, size = text.partition(":")
        spec = SHORT.get(name)
        texts.append(
            text if spec is None else f"{spec}:{size}" if size and name != "bert" else spec
        )
    exact = {case.name: case for case in CASES["cuda"]}
    found = [exact[text] if text in exact else chosen([], [text])[0] for text in texts]
    return [case._replace(precision=precision or "fp16") for case in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=DEFAULT, metavar="SPEC:SIZE")
    parser.add_argument("--devices", default="all")
    parser.add_argument("--budget", default="40s", help="of each search")
    parser.add_argument("--precision", help="lowest precision allowed; by default fp16")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the searches")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    devices = choose_devices(args.devices, None, "cuda:0")
    if len(devices.names) < 2:
        sys.exit(f"one device only: {devices.left_out or devices.names}")
    facts = load_facts(devices.names[0])
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    device = (facts.name or "unknown").lower().replace("nvidia ", "").split()[0]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"devices_{device}-x{len(devices.names)}_{created[:10]}.json"
    document: dict[str, Any] = {
        "schema": 1,
        "created": created,
        "environment": {**msgspec.to_builtins(facts), "steadytorch": __version__},
        "devices": devices.names,
        "workloads": {},
    }
    rng = Random(args.seed)
    budget_s = parse_duration(args.budget)
    for case in cases(args.only, args.precision):
        began = time.monotonic()
        try:
            entry = run(case, devices, budget_s, rng)
        except Exception as error:  # continue with the other workloads
            entry = {"failed": f"{type(error).__name__}: {error}"[:500]}
            print(f"{case.name}: {entry['failed']}", flush=True)
        document["workloads"][case.name] = {**entry, "seconds": time.monotonic() - began}
        path.write_text(json.dumps(document, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
