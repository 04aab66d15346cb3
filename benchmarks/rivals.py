"""A tuned plan beside every option that engineers try by hand, timed interleaved in one run.

    python benchmarks/rivals.py resnet50 --batch 64 --precision fp16 --out benchmarks/results

First `tune` searches within its budget; then the plan and the hand-written options of
`rival_options.py` are set up anew, each in a process of its own, and timed block by block in random
order. The figure of the plan is therefore not the one it was chosen by.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console

import rival_options
from steadytorch import __version__, load_workload
from steadytorch.device.facts import load_facts
from steadytorch.device.telemetry import snapshot
from steadytorch.measure.measurement import summarize
from steadytorch.measure.race import judge
from steadytorch.measure.sampler import sampler_for, warm_up
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.quantities import parse_duration
from steadytorch.report.progress import Progress
from steadytorch.report.tune import render_left_out, render_plan, render_trials
from steadytorch.transforms import ambient
from steadytorch.trial.worker import DISCARD, PAYLOAD, save_payload
from steadytorch.tune.moves import describe
from steadytorch.tune.select import Options
from steadytorch.tune.session import Session
from steadytorch.tune.trial import HANDLER
from steadytorch.workload import travel

PLAN = "steadytorch plan"
METRICS = ("latency", "period")
COUNT = 10
SETUP_S = 240
SIDE_BY_SIDE = 6
PERIOD_EVERY = 4
"""The period is taken in every fourth round of blocks: latency is what the plan was tuned for."""


class RivalHandler:
    """Runs one hand-written option in a worker process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def set_up(self, name: str) -> dict[str, Any]:
        workload = travel.load(self._directory / PAYLOAD).to("cuda")
        (x,) = workload.inputs
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        call = rival_options.OPTIONS[name](workload.model, x)
        self._step = lambda: call(x)
        self._step()
        torch.cuda.synchronize()
        setup_s = time.perf_counter() - start
        self._sampler = sampler_for("cuda")
        warm_up(self._step, self._sampler)
        peak_memory_bytes = (
            torch.cuda.max_memory_allocated()
        )  # before the reference below takes more
        with torch.no_grad():
            reference = copy.deepcopy(workload.model).double()(x.double())
        error = float((call(x).double() - reference).norm() / reference.norm())
        return {
            "setup_s": setup_s,
            "peak_memory_bytes": peak_memory_bytes,
            "error": error,
        }

    def block(self, metric: str, count: int) -> list[int]:
        if metric == "latency":
            times = self._sampler.latencies(self._step, count + DISCARD)
        else:
            times, _ = self._sampler.periods(self._step, count + DISCARD)
        return times[DISCARD:].tolist()


def start_all(names: list[str], workload: Any, result: Any, directory: Path) -> dict[str, Any]:
    """Sets every arm up, a few at a time; those that cannot run are reported, not dropped."""
    arms: dict[str, Any] = {}
    waiting, live = [PLAN, *names], {}
    while waiting or live:
        while waiting and len(live) < SIDE_BY_SIDE:
            name = waiting.pop(0)
            handler = HANDLER if name == PLAN else "rivals:RivalHandler"
            cache = {"TORCHINDUCTOR_CACHE_DIR": str(directory / f"cache-{len(arms) + len(live)}")}
            worker = Worker(handler, directory, f"arm-{len(arms) + len(live)}", cache)
            if name == PLAN:
                worker.call("load", SETUP_S, device="cuda", ambient=ambient())
                worker.send("set_up", candidate=msgspec.to_builtins(result.chosen))
            else:
                worker.send("set_up", name=name)
            live[name] = worker
        name, worker = next(iter(live.items()))
        try:
            facts = worker.receive(SETUP_S)
            arms[name] = {"worker": worker, "setup": facts, "latency": [], "period": []}
        except WorkerFault as fault:
            arms[name] = {"worker": None, "failed": fault.reason, "detail": fault.detail[-1500:]}
        del live[name]
    return arms


def time_all(arms: dict[str, Any], blocks: int, count: int, seed: int) -> None:
    running = [name for name, arm in arms.items() if arm["worker"] is not None]
    rng = Random(seed)
    for block in range(blocks):
        for metric in METRICS if block % PERIOD_EVERY == 0 else METRICS[:1]:
            for name in rng.sample(running, len(running)):
                times = arms[name]["worker"].call("block", 120, metric=metric, count=count)
                arms[name][metric].append(times)


def row(name: str, arm: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    if arm["worker"] is None:
        return {"name": name, "failed": arm["failed"], "detail": arm["detail"]}
    found: dict[str, Any] = {"name": name}
    for metric in METRICS:
        summary = summarize([t for block in arm[metric] for t in block], metric)
        shown = msgspec.to_builtins(summary)
        del shown["samples_ns"]
        pairs = [
            (float(np.median(a)), float(np.median(b)))
            for a, b in zip(arm[metric], plan[metric], strict=True)
        ]
        found[metric] = {**shown, "samples": len(summary.samples_ns), "blocks_ns": arm[metric]}
        if name != PLAN:
            found[metric]["plan_against_it"] = msgspec.to_builtins(judge(pairs))
    facts = arm["setup"]
    found |= {k: facts.get(k) for k in ("setup_s", "peak_memory_bytes", "error")}
    return found


def markdown(document: dict[str, Any]) -> str:
    lines = [
        f"# {document['workload']}, batch {document['batch']}, precision {document['precision']}",
        "",
        f"{document['environment']['name']}, torch {document['environment']['torch']}, "
        f"cuDNN {document['environment']['cudnn']}, driver {document['environment']['driver']}; "
        f"{document['created']}. Search {document['search_s']:.0f} s.",
        "",
        f"Plan: `{document['plan']}`. Every arm in a process of its own, "
        f"{document['blocks']} blocks of {document['count']} iterations in random order.",
        "",
        "| option | latency ms (95 %) | p99/median | period ms | plan's time against it | error "
        "| set-up s | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in document["rows"]:
        if "failed" in r:
            lines.append(f"| {r['name']} | failed: {r['failed']} | | | | | | |")
            continue
        latency, period = r["latency"], r["period"]
        ci = latency["median_ci_ns"]
        within = f" ({ci[0] / 1e6:.3f} to {ci[1] / 1e6:.3f})" if ci else ""
        tail = latency["p99_over_median"]
        versus = latency.get("plan_against_it")
        verdict = ""
        if versus and versus["low"] is not None:
            verdict = f"{100 * versus['estimate']:+.1f} % ({100 * versus['low']:+.1f} to "
            verdict += f"{100 * versus['high']:+.1f}), {versus['verdict']}"
        error = "" if r["error"] is None else f"{r['error']:.1e}"
        lines.append(
            f"| {r['name']} | {latency['median_ns'] / 1e6:.3f}{within} "
            f"| {'' if tail is None else f'{tail:.3f}'} | {period['median_ns'] / 1e6:.3f} "
            f"| {verdict} | {error} | {r['setup_s']:.1f} "
            f"| {'' if r['peak_memory_bytes'] is None else r['peak_memory_bytes'] >> 20} |"
        )
    lines += ["", *document.get("notes", [])]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precision", default="same")
    parser.add_argument("--budget", default="120s")
    parser.add_argument("--blocks", type=int, default=110)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    console = Console(width=100)
    workload = load_workload(args.workload, batch=args.batch)
    options = Options(precision=args.precision, budget_s=parse_duration(args.budget))
    with tempfile.TemporaryDirectory() as folder:
        session = Session(workload, options, "cuda", Path(folder) / "store")
        with Progress(console, options.budget_s) as progress:
            result = session.search(progress)
        plan = session.keep(result)
        render_trials(console, result.candidates, result.chosen)
        render_left_out(console, plan.evidence)
        render_plan(console, plan, "Plan")
        directory = Path(folder)
        save_payload(workload, directory)
        before = snapshot("cuda")
        arms = start_all(list(rival_options.OPTIONS), workload, result, directory)
        try:
            time_all(arms, args.blocks, COUNT, seed=1)
        finally:
            for arm in arms.values():
                if arm["worker"] is not None:
                    arm["worker"].kill()
    chosen = next(t for t in result.candidates if t.transforms == result.chosen)
    arms[PLAN]["setup"] = {
        "setup_s": chosen.setup_s,
        "peak_memory_bytes": chosen.peak_memory_bytes,
        "error": chosen.error,
    }
    rows = [row(name, arm, arms[PLAN]) for name, arm in arms.items()]
    created = datetime.datetime.now(datetime.UTC)
    facts = load_facts("cuda")
    document = {
        "workload": args.workload,
        "batch": args.batch,
        "precision": args.precision,
        "plan": describe(result.chosen),
        "budget_s": options.budget_s,
        "search_s": result.seconds,
        "speedup": msgspec.to_builtins(result.speedup),
        "blocks": args.blocks,
        "count": COUNT,
        "rows": rows,
        "trials": msgspec.to_builtins(result.candidates),
        "steadytorch": __version__,
        "environment": msgspec.to_builtins(facts),
        "state_before": msgspec.to_builtins(before),
        "created": created.isoformat(timespec="seconds"),
    }
    device = (facts.name or "cuda").lower().replace("nvidia ", "").replace(" ", "-")
    name = f"rivals-{args.workload}-b{args.batch}-{args.precision}_{device}_{created:%Y-%m-%d}"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(document) + "\n")
    text = markdown(document)
    (args.out / f"{name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
