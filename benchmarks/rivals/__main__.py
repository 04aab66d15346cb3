"""steadytorch against every option that engineers try by hand, workload by workload.

    python benchmarks/rivals --seconds 560                      # as many as fit
    python benchmarks/rivals --seconds 560 --only vit_b_16 bert # more workloads, same files
    python benchmarks/rivals --within 60s 30s                   # further searches, timed beside
    python benchmarks/rivals --device cpu
    python benchmarks/rivals --device cpu --processes 5         # verdict over fresh processes
    python benchmarks/rivals --device cpu --beside              # beside a busy process
    python benchmarks/rivals --train --only resnet50:64         # training steps, see train.py
    python benchmarks/rivals --quick                            # five minutes, see quick.py

For each workload:

1. `tune` searches within its budget.
2. Its plan and the options of `rival_options` are set up in fresh processes, in parallel.
3. They are timed block by block in random order, one process at a time. The plan's figure is
   therefore independent of its choice.
4. With `--processes N`, the plan and the best option by hand are set up and timed N more times.

Results go to `rivals_DEVICE_DATE.json` and `.md`, with the day on which the run began. New results
of a workload replace its old ones; others stay. Each of several GPUs can run its own part of the
list (CUDA_VISIBLE_DEVICES, and `taskset` for a part of the cores).
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import quick
import torch
from rival_arms import OURS, start_all, within
from rival_cases import CASES, Case, chosen
from rival_options import options_of
from rival_power import power_of, recorded
from rival_processes import anew, close, over_processes
from rival_results import (
    CV_LIMIT,
    Document,
    Row,
    alone,
    best_of,
    failed_row,
    merge,
    read,
    rounded_clocks,
    row_of,
)
from rival_tables import markdown
from rival_timing import ALONE_S, EXPLAINED_S, clocks, time_all, time_alone
from rival_worker import SETTLING_NS
from timeline import Timeline

from steadytorch import __version__
from steadytorch.bench.bench_worker import save_payload
from steadytorch.bench.ramp import RAMP_NS
from steadytorch.device.facts import load_facts, resolve_device
from steadytorch.device.telemetry import snapshot
from steadytorch.measure.race import LEAST_PROCESSES
from steadytorch.process.neighbour import Neighbour
from steadytorch.process.worker import WorkerFault
from steadytorch.quantities import parse_duration
from steadytorch.results.candidate import describe
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.workload.workload import Workload

RESULTS = Path(__file__).parents[1] / "results"
METRICS = {"cuda": ("period", "latency"), "cpu": ("period",)}
BEYOND = 1.06
"""Cap on autotuned set-ups, as a multiple of the search time."""
START_S = 40.0
"""Time per workload to load it and to start processes, beyond search, set-ups and timing."""
PROTOCOL = {
    "dropped_ms": (RAMP_NS + SETTLING_NS) / 1e6,
    "alone_s": ALONE_S,
    "explained_s": EXPLAINED_S,
    "cv_limit": CV_LIMIT,
}
"""Timing parameters, stored with each workload so that old results stay described correctly."""


def searched(
    case: Case, workload: Workload, args: argparse.Namespace, store: Path, budget_s: float
) -> tuple[dict[str, Any], str | None]:
    """Search; return a record of the findings, and the plan's file or None if it failed."""
    options = SearchOptions(
        objective="contended" if args.beside else "auto",
        precision=case.precision,
        budget_s=budget_s,
    )
    timeline = Timeline()
    try:
        session = Session(workload, options, args.device, store)
        result = session.search(timeline)
        plan = session.keep(result)
    except Exception as error:  # time the rivals anyway
        reason = f"{type(error).__name__}: {error}"[:500]
        return {"search_failed": reason, "timeline": timeline.events}, None
    found = {
        "plan": describe(result.chosen),
        "regime": result.regime,
        "search_s": result.seconds,
        "speedup": msgspec.to_builtins(result.speedup),
        "trials": msgspec.to_builtins(result.candidates),
        "not_tried": result.not_tried,
        "timeline": timeline.events,
    }
    return found, plan.path


def run(case: Case, args: argparse.Namespace, tell: Callable[[str], None]) -> Document:
    """Measure one workload; return its rows and metadata."""
    began, environment = time.monotonic(), {**msgspec.to_builtins(load_facts(args.device))}
    entry: dict[str, Any] = {
        "spec": case.spec,
        "size": case.size,
        "precision": case.precision,
        "budget_s": case.budget_s,
        "processes": args.processes,
        "beside": args.beside,
        "timing_s": args.timing,
        "threads": torch.get_num_threads(),
        "protocol": PROTOCOL,
        "environment": {**environment, "steadytorch": __version__},
        "created": now(),
    }
    try:
        with tempfile.TemporaryDirectory(prefix="rivals-") as folder:
            rows = _rows(case, args, entry, Path(folder), tell)
    except Exception as error:  # continue with the other workloads
        reason = error.reason if isinstance(error, WorkerFault) else str(error)
        tell(f"failed: {reason}")
        rows = [failed_row(case.name, OURS, f"{type(error).__name__}: {reason}"[:500])]
    entry["seconds"] = time.monotonic() - began
    return {
        "created": entry["created"],
        "environment": entry["environment"],
        "rows": rows,
        "workloads": {case.name: entry},
    }


def _rows(
    case: Case,
    args: argparse.Namespace,
    entry: dict[str, Any],
    folder: Path,
    tell: Callable[[str], None],
) -> list[Row]:
    workload, kind = case.load(), args.device.partition(":")[0]
    save_payload(workload, folder)
    entry["state_before"] = msgspec.to_builtins(snapshot(args.device))
    tell(f"searching for {entry['budget_s']:.0f} s")
    found, plan = searched(case, workload, args, folder / "store", case.budget_s)
    entry |= found
    plans, entry["budgets"] = {OURS: plan}, list[dict[str, Any]]()
    for budget_s in args.within:
        tell(f"searching for {budget_s:.0f} s")
        store = folder / f"store-{budget_s:.0f}"
        further, plans[within(budget_s)] = searched(case, workload, args, store, budget_s)
        entry["budgets"].append({"budget_s": budget_s, **further})
    plans = {name: path for name, path in plans.items() if path is not None}
    entry["cap_s"] = args.cap or BEYOND * found.get("search_s", entry["budget_s"])
    tell(found.get("plan") or found["search_failed"])
    del workload
    by_hand = case.options or options_of(kind, case.precision)
    options = [name for name in by_hand if not any(text in name for text in args.skip)]
    began = time.monotonic()
    arms = start_all(plans, options, args.device, folder, entry["cap_s"], tell)
    entry["set_ups_s"] = time.monotonic() - began
    try:
        tell("timing")
        began = time.monotonic()
        rng = Random(args.seed)
        with closing(Neighbour(args.beside)) as neighbour, neighbour:
            timed = partial(time_all, arms, METRICS[kind], args.timing, rng)
            recording = recorded(args.device, timed)
        ours = next((arm for arm in arms if arm.option == OURS), None)
        rows = [row_of(case.name, arm, ours) for arm in arms]
        best = best_of(rows, "period_ms")
        counted = [] if ours is None else clocks(ours)
        if not args.beside:
            time_alone(arms, [OURS, *([best["option"]] if best else [])], METRICS[kind], rng)
        for row, arm in zip(rows, arms, strict=True):
            row |= {"alone": alone(arm.alone)} if arm.alone.keys() == set(METRICS[kind]) else {}
        entry["timing_took_s"] = time.monotonic() - began
    finally:
        for arm in arms:
            arm.worker.kill()
    if ours is not None and ours.is_live and args.processes:
        best_ones, began = close(rows), time.monotonic()
        tell(f"{args.processes} times in fresh processes: {', '.join(best_ones)}")
        started = partial(
            start_all, {OURS: plan}, best_ones, args.device, folder, entry["cap_s"], tell
        )
        with closing(Neighbour(args.beside)) as neighbour, neighbour:
            made = anew(started, args.processes, METRICS[kind], args.timing, rng, tell)
        over_processes(rows, made)
        entry["processes_took_s"] = time.monotonic() - began
    if ours is None:
        rows.insert(0, failed_row(case.name, OURS, found["search_failed"]))
    else:
        entry["clocks_mhz"] = rounded_clocks(counted)
        entry["power"] = power_of(recording, ours.spans, ours.blocks.get("period", []), counted)
    return rows


def processes(text: str) -> int:
    """Parse a number of processes for `argparse`."""
    if not text.isdecimal() or 0 < int(text) < LEAST_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text!r}: give {LEAST_PROCESSES} or more, or 0 for none")
    return int(text)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def stem(device_name: str | None, begun: str, beside: bool = False) -> str:
    """File name for a device and a day, such as `rivals_h200_2026-11-21`."""
    words = (device_name or "unknown").lower().replace("nvidia ", "")
    short = re.sub(r"[^a-z0-9]+", "-", words).strip("-")
    return f"rivals{'-beside' if beside else ''}_{short}_{begun[:10]}"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder, so that only one process writes to it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="e.g. resnet50, gpt2:4x256, SPEC:BATCH",
    )
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="TEXT", help="skip options with TEXT"
    )
    parser.add_argument("--precision", help="of the searches; default: by workload")
    parser.add_argument(
        "--budget", type=parse_duration, help="of each search; default: that of steady.tune"
    )
    parser.add_argument(
        "--within",
        nargs="+",
        type=parse_duration,
        default=[],
        metavar="BUDGET",
        help="of further searches, timed beside",
    )
    parser.add_argument(
        "--cap", type=parse_duration, help="of autotuned set-ups; default: 1.06 x search time"
    )
    parser.add_argument("--timing", type=parse_duration, default=25.0, help="time per workload")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="start no workload that would end after this time",
    )
    parser.add_argument(
        "--processes", type=processes, default=0, help="further processes of ours and of the best"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the block order")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--beside", action="store_true", help="beside a process that keeps a core busy; CPU only"
    )
    parser.add_argument("--train", action="store_true", help="training steps, see train.py")
    parser.add_argument("--steps", type=int, default=1000, help="timed, of each option of --train")
    parser.add_argument(
        "--quick", action="store_true", help="few workloads, beside published results"
    )
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(**quick.DEFAULTS)
        args = parser.parse_args()
    return args


def main() -> None:
    began, begun, args = time.monotonic(), now(), arguments()
    if args.beside and (args.train or args.quick):
        raise SystemExit("--beside holds for neither --train nor --quick: leave it out")
    if args.train:
        import train

        train.main(args)
        return
    args.device = resolve_device(args.device)
    kind = args.device.partition(":")[0]
    if args.beside and kind != "cpu":
        raise SystemExit("--beside shares CPU cores: use it with --device cpu")
    known, published = CASES[kind], None
    if args.quick:
        published = quick.closest(msgspec.to_builtins(load_facts(args.device)), RESULTS)
        known = quick.cases(known, kind, published)
    waiting = chosen(known, args.only, args.precision, args.budget)
    order, names, done = [c.name for c in known], [c.name for c in waiting], list[Document]()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.quick:
        with suppress(quick.OutOfTime), quick.limit(args.seconds):
            measure_all(waiting, order, args, began, begun, done)
        print(f"\n{quick.report(done, names, published, args.seconds)}", flush=True)
        return
    measure_all(waiting, order, args, began, begun, done)
    if waiting:
        print("not begun:", " ".join(case.name for case in waiting), flush=True)


def measure_all(
    waiting: list[Case],
    order: Sequence[str],
    args: argparse.Namespace,
    began: float,
    begun: str,
    done: list[Document],
) -> None:
    """Measure workloads while they fit into the time, and write each result at once.

    Args:
        waiting: workloads; those that are begun are removed.
        order: names of workloads in display order.
        args: options of the command line.
        began: start on the monotonic clock in seconds.
        begun: start as a date.
        done: receives the results of each workload.
    """
    longest = 0.0
    while waiting:
        start, budget_s = time.monotonic(), waiting[0].budget_s
        once_s = (args.cap or BEYOND * budget_s) + args.timing
        expected = START_S + budget_s + sum(args.within) + once_s * (1 + args.processes)
        fits = start - began + max(longest, expected) <= args.seconds
        if not (fits or args.quick):  # a quick run is ended by its limit
            break
        case = waiting.pop(0)
        fresh = run(case, args, partial(_tell, case.name, began))
        path = args.out / f"{stem(fresh['environment']['name'], begun, args.beside)}.json"
        with alone_in(args.out):
            document = merge(read(path), fresh, order)
            path.write_text(json.dumps(document, separators=(",", ":")) + "\n")
            path.with_suffix(".md").write_text(markdown(document))
        done.append(fresh)
        if not args.quick:
            print(markdown({**document, **fresh}), flush=True)
        longest = max(longest, time.monotonic() - start)


def _tell(name: str, began: float, message: str) -> None:
    print(f"{time.monotonic() - began:6.0f} s  {name}: {message}", flush=True)


if __name__ == "__main__":
    main()
