"""Chosen cuDNN engines against PyTorch's own options, timed interleaved in one run.

    python benchmarks/convolutions.py resnet50:64 resnet50:1 vgg16_bn:64 mobilenet_v3_large:64 \\
        densenet121:64 unet:4 --out benchmarks/results
    python benchmarks/convolutions.py resnet50:64 --repeat 10 --replay --no-arms --out ...

For each network, engines are chosen in a separate process. Then every option is set up in a fresh
process and timed block by block in random order. All options get the same input: fp16, channels
last, on the device. Results are written after each network.

--repeat chooses engines several times in fresh processes, each starting from the first choices.
--replay times fresh processes from a built model to its first result, with the chosen engines and
with plain PyTorch.
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

from engine_runs import repeat_lines, repeats, replay_lines, replays
from steadytorch import __version__, load_workload
from steadytorch.bench.bench_worker import save_payload
from steadytorch.device.facts import load_facts
from steadytorch.measure.race import judge
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import ambient, order
from steadytorch.tune.conv import choose_engines
from steadytorch.tune.trial import HANDLER
from steadytorch.workload.workload import Workload

SETUP_S = 300
COUNT = 12
BENCHMARK = "benchmark + graph"
RIVALS = ("untouched", "graph", BENCHMARK, "compiled, frozen + graph")


def spec(name: str, **parameters: Any) -> TransformSpec:
    return TransformSpec(name, tuple(parameters.items()))


GRAPH = spec("cuda_graph")
FROZEN = spec("compile", mode="default", freezing=True)
FOLD = spec("fold_batch_norm")


LOWER = (spec("cast_weights", dtype="fp16"), spec("channels_last"))


def candidates(choices: str, lower: bool) -> dict[str, tuple[TransformSpec, ...]]:
    """All options; with `lower`, for a float32 network that is converted at each call."""
    engines, first = spec("cudnn_engines", choices=choices), spec("cudnn_engines", choices="")
    base, ours = (LOWER, (FOLD, *LOWER)) if lower else ((), ())
    return {
        "untouched": base,
        "graph": order((*base, GRAPH)),
        BENCHMARK: order((*base, spec("cudnn_benchmark", limit=10), GRAPH)),
        "compiled, frozen + graph": order((*base, FROZEN, GRAPH)),
        "engines, heuristic + graph": order((*ours, first, GRAPH)),
        "engines + graph": order((*ours, engines, GRAPH)),
        "engines, compiled, frozen + graph": order((*ours, engines, FROZEN, GRAPH)),
    }


def network(name: str, batch: int, lower: bool) -> Workload:
    """Build a network with seeded weights, in fp16 and channels last unless `lower`."""
    torch.manual_seed(0)
    try:
        workload = load_workload(name, batch=batch)
    except Exception:
        import torchvision

        model = getattr(torchvision.models, name)().eval()
        workload = Workload(model, torch.randn(batch, 3, 224, 224), name=name)
    for module in workload.model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    if lower:
        return Workload(workload.model, workload.inputs, name=f"{name} b{batch} fp32 to fp16")
    model = workload.model.half().to(memory_format=torch.channels_last)
    (x,) = workload.inputs
    x = x.half().contiguous(memory_format=torch.channels_last)
    return Workload(model, x, name=f"{name} b{batch} fp16")


def set_up(arms: dict[str, Any], directory: Path, live: dict[str, Any]) -> None:
    """Start and verify every arm against float64 of the same weights; fill `live`."""
    reference = Worker(HANDLER, directory, "reference")
    reference.send("load", device="cuda", ambient=ambient())
    for number, (name, candidate) in enumerate(arms.items()):
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(directory / f"cache-{number}")}
        worker = Worker(HANDLER, directory, f"arm-{number}", cache)
        worker.send("load", device="cuda", ambient=ambient())
        live[name] = {"worker": worker, "candidate": candidate, "blocks": []}
    for name, arm in live.items():
        arm["worker"].receive(SETUP_S)
        if name != BENCHMARK:
            arm["worker"].send("set_up", candidate=msgspec.to_builtins(arm["candidate"]))
    reference.receive(SETUP_S)
    own = reference.call("reference", SETUP_S, seed=0)["error"]["relative_l2"]
    reference.close()
    for name, arm in sorted(live.items(), key=lambda item: item[0] == BENCHMARK):
        try:
            if name == BENCHMARK:  # chooses by timing, so it runs last, with the device to itself
                arm["worker"].send("set_up", candidate=msgspec.to_builtins(arm["candidate"]))
            found = arm["worker"].receive(SETUP_S)
            arm["setup_s"], arm["peak_memory_bytes"] = found["setup_s"], found["peak_memory_bytes"]
            checked = arm["worker"].call("verify", SETUP_S)
            arm["error"], arm["own_error"] = checked["error"], own
            arm["fault"] = checked["fault"]
        except WorkerFault as fault:
            arm["failed"], arm["worker"] = f"{fault.reason}\n{fault.detail[-1500:]}", None


def time_all(live: dict[str, Any], rounds: int) -> None:
    running, rng = [n for n in live if live[n]["worker"] is not None], Random(0)
    for _ in range(rounds):
        for name in rng.sample(running, len(running)):
            times = live[name]["worker"].call("block", 60, metric="period", count=COUNT)
            live[name]["blocks"].append(float(np.median(times)))


def decided(live: dict[str, Any]) -> dict[str, Any]:
    """PyTorch's best option, the best with engines, and the one that a search would use."""
    medians = {
        name: np.median(arm["blocks"])
        for name, arm in live.items()
        if arm["blocks"] and arm["fault"] is None
    }
    theirs = min((name for name in medians if name in RIVALS), key=medians.__getitem__)
    with_engines = [name for name in medians if name not in RIVALS]
    if not with_engines:
        return {"pytorch": theirs, "engines": None, "search_takes": theirs}
    ours = min(with_engines, key=medians.__getitem__)
    pairs = list(zip(live[theirs]["blocks"], live[ours]["blocks"], strict=True))
    verdict = judge(pairs, looks=(len(pairs),))
    return {
        "pytorch": theirs,
        "engines": ours,
        "engines_against_pytorch": msgspec.to_builtins(verdict),
        "search_takes": ours if verdict.verdict == "faster" else theirs,
    }


def race_arms(arms: dict[str, Any], directory: Path, rounds: int) -> dict[str, Any]:
    live: dict[str, Any] = {}
    try:
        set_up(arms, directory, live)
        time_all(live, rounds)
    finally:
        for arm in live.values():
            if (worker := arm.pop("worker")) is not None:
                worker.kill()
    best = decided(live)
    rows = {}
    for name, arm in live.items():
        blocks = arm.pop("blocks")
        del arm["candidate"]
        if blocks:
            arm["median_ms"] = float(np.median(blocks)) * 1e-6
            arm["spread"] = float(np.std(blocks) / np.mean(blocks))
        rows[name] = arm
    return {"arms": rows, "best": best}


def one(entry: str, asked: argparse.Namespace) -> dict[str, Any]:
    name, batch, *rest = entry.split(":")
    lower = rest == ["fp32"]
    workload = network(name, int(batch), lower)
    prefix = (FOLD, *LOWER) if lower else ()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_payload(workload, directory)
        start = time.perf_counter()
        how = {"prefix": prefix, "deadline_s": asked.deadline}
        report = choose_engines(workload, **how)
        chose_s = time.perf_counter() - start
        found = {
            "network": workload.name,
            "choosing_s": chose_s,
            "of_that_in_the_worker_s": report.seconds,
            "cold": report.cold,
            "layers": [layer_row(layer) for layer in report.layers],
            "choices": json.loads(report.choices or "{}"),
        }
        if asked.repeat > 1:
            found["repeat"] = repeats(workload, report, asked.repeat, chose_s, **how)
        if asked.replay:
            ours = order((*prefix, spec("cudnn_engines", choices=report.choices)))
            found["replay"] = replays(directory, ours, LOWER if lower else ())
        if not asked.no_arms:
            found |= race_arms(candidates(report.choices, lower), directory, asked.rounds)
    return found


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
    if "failed" in found:
        return f"### {found['network']}\n\nFailed: {found['failed'].splitlines()[0]}"
    lines = [
        f"### {found['network']}",
        "",
        f"Engines chosen in {found['choosing_s']:.1f} s, a new process included.",
        "",
        *repeat_lines(found.get("repeat")),
        *replay_lines(found.get("replay")),
        *arm_lines(found),
    ]
    return "\n".join(lines).rstrip()


def arm_lines(found: dict[str, Any]) -> list[str]:
    if "arms" not in found:
        return []
    arms, best = found["arms"], found["best"]
    plain = arms["untouched"].get("error")
    lines = [
        "| option | ms | spread | of PyTorch's best | relative error | of plain fp16's | set-up s "
        "| peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in arms.items():
        if "median_ms" not in arm:
            lines.append(f"| {name} | failed: {arm['failed'].splitlines()[0]} | | | | | | |")
            continue
        error = f"{arm['error']['relative_l2']:.1e}" if arm["error"] else arm["fault"]
        ratio = arm["error"]["relative_l2"] / plain["relative_l2"] if arm["error"] and plain else 0
        lines.append(
            f"| {name} | {arm['median_ms']:.3f} | {arm['spread']:.2%} | "
            f"{arm['median_ms'] / arms[best['pytorch']]['median_ms']:.3f} | {error} | "
            f"{f'{ratio:.1f}' if ratio else ''} | {arm['setup_s']:.1f} | "
            f"{arm['peak_memory_bytes'] / 2**20:.0f} |"
        )
    if best["engines"] is None:
        return [*lines, ""]
    against = best["engines_against_pytorch"]
    low, high = (1 + (against[end] or 0) for end in ("low", "high"))
    return [
        *lines,
        "",
        f"{best['engines']} takes {1 + against['estimate']:.3f} ({low:.3f} to {high:.3f}, 99 %) of "
        f"the time of {best['pytorch']}, PyTorch's best; a search would take "
        f"{best['search_takes']}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "networks", nargs="+", help="NAME:BATCH, or NAME:BATCH:fp32 to convert at each call"
    )
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--deadline", type=float, default=40.0, help="seconds for choosing")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="choose N times")
    parser.add_argument("--replay", action="store_true", help="time replay in fresh processes")
    parser.add_argument("--no-arms", action="store_true", help="skip timing the options")
    parser.add_argument("--name", default="", help="suffix of file names")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    facts = load_facts("cuda")
    results: list[dict[str, Any]] = []
    for entry in asked.networks:
        start = time.perf_counter()
        try:
            results.append(one(entry, asked))
        except Exception as error:  # continue with the other networks
            results.append({"network": entry, "failed": f"{type(error).__name__}: {error}"})
        results[-1]["seconds"] = time.perf_counter() - start
        print(table(results[-1]), f"\n\n{results[-1]['seconds']:.0f} s in all\n", flush=True)
        if asked.out is not None:  # after each network, so that a later failure loses nothing
            write(asked.out, asked.name, facts, asked.rounds, results)


def write(folder: Path, name: str, facts: Any, rounds: int, results: list[dict[str, Any]]) -> None:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    document = {
        "date": date,
        "version": __version__,
        "facts": msgspec.to_builtins(facts),
        "rounds": rounds,
        "results": results,
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = f"-{name}" if name else ""
    stem = f"convolutions{name}_{(facts.name or 'gpu').split()[-1].lower()}_{date}"
    (folder / f"{stem}.json").write_text(json.dumps(document, indent=1) + "\n")
    title = f"# Convolutions on {facts.name}\n\ntorch {facts.torch}, cuDNN {facts.cudnn}, {date}.\n"
    body = "\n\n".join(map(table, results))
    (folder / f"{stem}.md").write_text(f"{title}\n{body}\n")


if __name__ == "__main__":
    main()
