"""Chosen cuDNN engines beside PyTorch's own options, timed interleaved in one run.

    python benchmarks/convolutions.py resnet50:64 resnet50:1 --out benchmarks/results

For each network engines are chosen anew, in a process of their own; then every option is set up in
a fresh process and timed block by block in random order. The input is fp16, channels last, on the
device, for all alike.
"""

from __future__ import annotations

import argparse
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

from steadytorch import __version__, load_workload
from steadytorch.device.facts import load_facts
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.transforms import ambient, order
from steadytorch.transforms.base import TransformSpec
from steadytorch.trial.worker import save_payload
from steadytorch.tune.conv import choose_engines
from steadytorch.tune.trial import HANDLER
from steadytorch.workload.workload import Workload

SETUP_S = 300
COUNT = 12
RIVALS = ("graph", "benchmark + graph", "compiled, frozen + graph")


def spec(name: str, **parameters: Any) -> TransformSpec:
    return TransformSpec(name, tuple(parameters.items()))


GRAPH = spec("cuda_graph")
FROZEN = spec("compile", mode="default", freezing=True)
FOLD = spec("fold_batch_norm")


LOWER = (spec("cast_weights", dtype="fp16"), spec("channels_last"))


def candidates(choices: str, lower: bool) -> dict[str, tuple[TransformSpec, ...]]:
    """Every option; with `lower` from a network in float32, converted at each call."""
    engines, first = spec("cudnn_engines", choices=choices), spec("cudnn_engines", choices="")
    base, ours = (LOWER, (FOLD, *LOWER)) if lower else ((), ())
    return {
        "untouched": base,
        "graph": order((*base, GRAPH)),
        "benchmark + graph": order((*base, spec("cudnn_benchmark", limit=10), GRAPH)),
        "compiled, frozen + graph": order((*base, FROZEN, GRAPH)),
        "engines, heuristic + graph": order((*ours, first, GRAPH)),
        "engines + graph": order((*ours, engines, GRAPH)),
        "engines, compiled, frozen + graph": order((*ours, engines, FROZEN, GRAPH)),
    }


def network(name: str, batch: int, lower: bool) -> Workload:
    """Weights drawn with a seed; in fp16 and channels last unless these are to be made of it."""
    torch.manual_seed(0)
    try:
        workload = load_workload(name, batch=batch)
    except Exception:
        import torchvision

        model = getattr(torchvision.models, name)().eval()
        workload = Workload(model, torch.randn(batch, 3, 224, 224), name=name)
    for module in workload.model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    if lower:
        return Workload(workload.model, workload.inputs, name=f"{name} b{batch} fp32 to fp16")
    model = workload.model.half().to(memory_format=torch.channels_last)
    (x,) = workload.inputs
    x = x.half().contiguous(memory_format=torch.channels_last)
    return Workload(model, x, name=f"{name} b{batch} fp16")


def set_up(arms: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Starts every arm, verified against float64 of the same weights."""
    live, reference = {}, Worker(HANDLER, directory, "reference")
    reference.call("load", SETUP_S, device="cuda", ambient=ambient())
    own = reference.call("reference", SETUP_S, seed=0)["error"]["relative_l2"]
    reference.close()
    for number, (name, candidate) in enumerate(arms.items()):
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(directory / f"cache-{number}")}
        worker = Worker(HANDLER, directory, f"arm-{number}", cache)
        worker.send("load", device="cuda", ambient=ambient())
        live[name] = {"worker": worker, "candidate": candidate, "blocks": []}
    for arm in live.values():
        arm["worker"].receive(SETUP_S)
        arm["worker"].send("set_up", candidate=msgspec.to_builtins(arm["candidate"]))
    for arm in live.values():
        try:
            found = arm["worker"].receive(SETUP_S)
            arm["setup_s"], arm["peak_memory_bytes"] = found["setup_s"], found["peak_memory_bytes"]
            checked = arm["worker"].call("verify", SETUP_S)
            arm["error"], arm["own_error"] = checked["error"], own
            arm["fault"] = checked["fault"]
        except WorkerFault as fault:
            arm["failed"], arm["worker"] = f"{fault.reason}\n{fault.detail[-1500:]}", None
    return live


def time_all(live: dict[str, Any], rounds: int) -> None:
    running, rng = [n for n in live if live[n]["worker"] is not None], Random(0)
    for _ in range(rounds):
        for name in rng.sample(running, len(running)):
            times = live[name]["worker"].call("block", 60, metric="period", count=COUNT)
            live[name]["blocks"].append(float(np.median(times)))


def one(name: str, batch: int, lower: bool, rounds: int, deadline_s: float) -> dict[str, Any]:
    workload = network(name, batch, lower)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_payload(workload, directory)
        start = time.perf_counter()
        prefix = (FOLD, *LOWER) if lower else ()
        report = choose_engines(workload, prefix=prefix, deadline_s=deadline_s, directory=directory)
        chose_s = time.perf_counter() - start
        live = set_up(candidates(report.choices, lower), directory)
        time_all(live, rounds)
        rows = {}
        for arm_name, arm in live.items():
            worker = arm.pop("worker")
            arm.pop("candidate")
            if worker is not None:
                worker.close()
                arm["median_ms"] = float(np.median(arm["blocks"])) * 1e-6
                spread = np.std(arm["blocks"]) / np.mean(arm["blocks"])
                arm["spread"] = float(spread)
            arm.pop("blocks")
            rows[arm_name] = arm
    return {
        "network": workload.name,
        "choosing_s": chose_s,
        "of_that_in_the_worker_s": report.seconds,
        "cold": report.cold,
        "arms": rows,
        "layers": [layer_row(layer) for layer in report.layers],
        "choices": json.loads(report.choices or "{}"),
    }


def layer_row(layer: Any) -> dict[str, Any]:
    outcome = layer.outcome
    row = {"problem": layer.problem, "count": len(layer.names)}
    if outcome is None:
        return row
    excluded: dict[str, int] = {}
    for engine in outcome.engines:
        if engine.excluded is not None:
            excluded[engine.excluded] = excluded.get(engine.excluded, 0) + 1
    timed = [e for e in outcome.engines if e.excluded is None]
    return row | {
        "choice": outcome.choice,
        "chosen_us": (outcome.chosen_ns or 0) * 1e-3,
        "default_us": (outcome.default_ns or 0) * 1e-3,
        "benchmark_us": (outcome.benchmark_ns or 0) * 1e-3,
        "field": len(timed),
        "first": [[e.choice, (e.median_ns or 0) * 1e-3, e.spread] for e in timed[:3]],
        "excluded": excluded,
        "seconds": outcome.seconds,
    }


def table(found: dict[str, Any]) -> str:
    lines = [
        f"### {found['network']}",
        "",
        f"Engines chosen in {found['choosing_s']:.1f} s, a new process included.",
        "",
        "| option | ms | spread | of PyTorch's best | relative error | set-up s | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    rivals = [found["arms"][n].get("median_ms", np.inf) for n in ("untouched", *RIVALS)]
    for name, arm in found["arms"].items():
        if "median_ms" not in arm:
            lines.append(f"| {name} | failed: {arm['failed'].splitlines()[0]} | | | | | |")
            continue
        error = f"{arm['error']['relative_l2']:.1e}" if arm["error"] else arm["fault"]
        lines.append(
            f"| {name} | {arm['median_ms']:.3f} | {arm['spread']:.2%} | "
            f"{arm['median_ms'] / min(rivals):.3f} | {error} | {arm['setup_s']:.1f} | "
            f"{arm['peak_memory_bytes'] / 2**20:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "networks", nargs="+", help="NAME:BATCH, or NAME:BATCH:fp32 to convert at each call"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--deadline", type=float, default=40.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    facts = load_facts("cuda")
    results = []
    for entry in asked.networks:
        name, batch, *rest = entry.split(":")
        found = one(name, int(batch), rest == ["fp32"], asked.rounds, asked.deadline)
        results.append(found)
        print(table(found), flush=True)
        if asked.out is not None:  # after each: what was measured is kept if the next one fails
            write(asked.out, facts, asked.rounds, results)


def write(folder: Path, facts: Any, rounds: int, results: list[dict[str, Any]]) -> None:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    document = {
        "date": date,
        "version": __version__,
        "facts": msgspec.to_builtins(facts),
        "rounds": rounds,
        "results": results,
    }
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"convolutions_{(facts.name or 'gpu').split()[-1].lower()}_{date}"
    (folder / f"{stem}.json").write_text(json.dumps(document, indent=1) + "\n")
    title = f"# Convolutions on {facts.name}\n\ntorch {facts.torch}, cuDNN {facts.cudnn}, {date}.\n"
    body = "\n\n".join(map(table, results))
    (folder / f"{stem}.md").write_text(f"{title}\n{body}\n")


if __name__ == "__main__":
    main()
