"""Time from a built model to its first tuned result, in fresh processes.

    python benchmarks/cold_start.py --name amd-epyc --out benchmarks/results
    python benchmarks/cold_start.py --device cuda --batch 1 64 --seconds 220 --name h200 --out ...
    python benchmarks/cold_start.py --plan "channels_last + compile(max-autotune, freezing)"
    python benchmarks/cold_start.py --plan "openvino(f32)" --name openvino_amd-epyc --out ...

Four variants, whose processes alternate:

- the untouched model;
- a stored plan with an empty compiler cache;
- the same plan with its bundle and an empty compiler cache, or with its artefact if it has one;
- `torch.compile` with the same options, by hand, with a warm compiler cache.

The plan is given, not searched for. Time starts when the model, with random weights, is on its
device, and ends with the first result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = {
    "untouched": "untouched",
    "plan": "plan alone",
    "bundle": "plan with its bundle or artefact",
    "compile": "torch.compile, warm cache",
}
COMPILES = ("plan", "compile")
"""Variants that trace or compile, and take seconds."""
PLANS = {
    "cpu": "compile(default, freezing)",
    "cuda": "fold_batch_norm + cast_weights(fp16) + channels_last + compile(default, freezing) "
    "+ cuda_graph",
}
"""Plans that searches over ResNet-50 at batch 1 have chosen."""


def candidate_of(text: str, device: str) -> tuple[Any, str]:
    """Parse transforms, and find the precision that they need."""
    from steadytorch import transforms
    from steadytorch.device.facts import load_facts
    from steadytorch.transforms.precision import precision_of

    candidate = transforms.parse(text, load_facts(device))
    return candidate, precision_of(candidate)


def built(device: str, workload: str, batch: int) -> tuple[Any, Any]:
    """Build the model and its input on the device."""
    import torch

    from steadytorch import load_workload

    loaded = load_workload(workload, batch=batch).to(device)
    loaded.model(*loaded.inputs)  # excludes the start-up of CUDA and cuDNN
    if device == "cuda":
        torch.cuda.synchronize()
    return loaded.model, loaded.inputs[0]


def kept_unmeasured(session: Any, candidate: Any) -> Any:
    """Store a candidate as the plan of a session, without a search."""
    from steadytorch.measure.measurement import summarize
    from steadytorch.plan.record import Speedup
    from steadytorch.tune.result import TuneResult

    unmeasured = summarize([1] * 20, "latency")
    result = TuneResult(
        baseline=unmeasured,
        winner=unmeasured,
        chosen=candidate,
        regime="unclassified",
        candidates=(),
        not_applicable={},
        not_tried={},
        speedup=Speedup(1.0, None, None, "process", "tie", 0),
        break_even_calls=None,
        reference="none",
        seconds=0.0,
    )
    return session.keep(result)


def store_plan(text: str, device: str, workload: str, batch: int, folder: Path) -> dict[str, Any]:
    """Store the plan under the key that `optimize` looks up; make its bundle and artefact."""
    from steadytorch import load_workload
    from steadytorch.compiled import bundle
    from steadytorch.tune.select import SearchOptions
    from steadytorch.tune.session import Session

    candidate, precision = candidate_of(text, device)
    session = Session(
        load_workload(workload, batch=batch), SearchOptions(precision=precision), device, folder
    )
    plan = kept_unmeasured(session, candidate)
    start = time.perf_counter()
    reason = session.keep_bundle(plan)
    converted = keep_artefact(session.workload, plan, folder)
    path = bundle.path_of(plan)
    assert path is not None
    packaged = path.with_suffix(bundle.PACKAGE)
    return {
        "device": session.facts.name or session.facts.device,
        "plan": " + ".join(map(str, plan.candidate)),
        "bundle_made_s": time.perf_counter() - start,
        "bundle_bytes": path.stat().st_size if reason is None else None,
        "package_bytes": packaged.stat().st_size if packaged.exists() else None,
        "bundle_fault": reason,
        "artefact_bytes": None if converted is None else converted.stat().st_size,
    }


def keep_artefact(workload: Any, plan: Any, folder: Path) -> Path | None:
    """Convert the model as a search does, and store it beside the plan; None if nothing is."""
    from steadytorch import transforms
    from steadytorch.compiled import artefact
    from steadytorch.transforms.base import applied_in_order

    applied = [transforms.create(spec) for spec in plan.candidate]
    with artefact.supplied(artefact.within(folder)), applied_in_order(applied, workload):
        converted = artefact.held(folder, transforms.artefacts(plan.candidate))
    if converted is None:
        return None
    converted.keep_beside(plan.path)
    return Path(plan.path).with_suffix(artefact.SUFFIX)


def tuned(way: str, text: str, device: str, model: Any, folder: Path) -> Any:
    """Apply a variant to the model."""
    import torch

    import steadytorch as steady

    if way == "untouched":
        return model
    if way in ("plan", "bundle"):
        _, precision = candidate_of(text, device)
        return steady.optimize(
            model, store=folder, precision=precision, canary=False, bundle=way == "bundle"
        )
    import torch._inductor.config as inductor

    inductor.freezing = "freezing" in text
    if "channels_last" in text:
        model = model.to(memory_format=torch.channels_last)
    if "cast_weights" in text:
        half = torch.compile(model.half())
        return lambda x: half(x.half()).float()
    return torch.compile(model)


def timed(
    way: str, text: str, device: str, workload: str, batch: int, folder: Path
) -> dict[str, Any]:
    """Measure the seconds to the first result in this process, and the compiler's cache hits."""
    import torch

    with torch.no_grad():
        model, x = built(device, workload, batch)
        start = time.perf_counter()
        fast = tuned(way, text, device, model, folder)
        fast(x)
        if device == "cuda":
            torch.cuda.synchronize()
        found = {"first_s": time.perf_counter() - start}
    if way in ("plan", "bundle") and not fast.report().hits:
        raise SystemExit(f"not served tuned: {fast.report()}")
    return {**found, "caches": caches()}


def caches() -> dict[str, int]:
    """Count the hits and bypasses of the compiler's caches in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = {} if dynamo is None else dynamo.counters
    return {
        name: count
        for room in ("aot_autograd", "inductor")
        for name, count in counters.get(room, {}).items()
        if "cache" in name
    }


def in_process(arguments: list[str], cache: Path) -> dict[str, Any]:
    """Run this file in a fresh process with its own compiler cache."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def rounds(options: argparse.Namespace, batch: int, folder: Path, until: float) -> dict[str, Any]:
    """Measure one batch size: make the plan and its bundle, then alternate the variants."""
    common = ["--device", options.device, "--workload", options.workload, "--batch", str(batch)]
    common += ["--plan", options.plan]
    store, alone, warm = folder / "plans", folder / "alone", folder / "warm"
    facts = in_process([*common, "--child", "store", "--folder", str(store)], folder / "unused")
    shutil.copytree(store, alone, ignore=shutil.ignore_patterns("*.artefact"))

    def run(way: str, cache: Path) -> dict[str, Any]:
        plans = alone if way == "plan" else store
        found = in_process([*common, "--child", way, "--folder", str(plans)], cache)
        print(f"batch {batch}: {WAYS[way]}: {found['first_s']:.2f} s", file=sys.stderr, flush=True)
        return found

    run("compile", warm)
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(options.repeats):
        order = list(WAYS)[number % len(WAYS) :] + list(WAYS)[: number % len(WAYS)]
        for way in order:
            most = options.cold_repeats if way in COMPILES else options.repeats
            if taken[way] and (time.monotonic() > until or len(taken[way]) >= most):
                continue
            cache = warm if way == "compile" else folder / f"cache-{way}-{number}"
            taken[way].append(run(way, cache))
            if way != "compile":
                shutil.rmtree(cache, ignore_errors=True)
    return {
        "batch": batch,
        **facts,
        "load_average": os.getloadavg(),
        "first_s": {way: [each["first_s"] for each in found] for way, found in taken.items()},
        "caches": {way: found[0]["caches"] for way, found in taken.items()},
    }


def table(found: dict[str, Any]) -> str:
    """Format the figures as Markdown."""
    lines = [
        f"# First result in a fresh process: {found['workload']}, {found['device']}",
        "",
        f"torch {found['torch']}, Python {found['python']}; {found['created']}. Median seconds "
        "from a built model to its first result; in brackets the least and the most, and the "
        "number of processes. Without a canary. " + found["note"],
        "",
    ]
    for each in found["batches"]:
        size = f"{(each['bundle_bytes'] or 0) / 1e6:.1f} MB and package "
        size += (
            f"{(each['package_bytes'] or 0) / 1e6:.1f} MB, made in {each['bundle_made_s']:.0f} s"
        )
        kept = f"bundle {each['bundle_fault'] or size}"
        if each["artefact_bytes"] is not None:
            kept = f"artefact {each['artefact_bytes'] / 1e6:.1f} MB"
        lines += [
            f"Batch {each['batch']}: `{each['plan']}`; {kept}; load "
            f"average {each['load_average'][0]:.1f} on {found['cores']} cores.",
            "",
            "| way | first result, s |",
            "|---|---|",
        ]
        for way, text in WAYS.items():
            first = each["first_s"][way]
            lines.append(
                f"| {text} | {statistics.median(first):.2f} ({min(first):.2f} to {max(first):.2f}, "
                f"{len(first)}) |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=tuple(PLANS))
    parser.add_argument("--plan", help="transforms; default: chosen by earlier searches")
    parser.add_argument("--workload", default="resnet50")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--cold-repeats", type=int, help="for compiling variants; default: --repeats"
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no repeat after this time"
    )
    parser.add_argument("--note", default="", help="note on this run")
    parser.add_argument("--name", default="here", help="name of the machine in file names")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.cold_repeats = options.cold_repeats or options.repeats
    options.plan = options.plan or PLANS[options.device]
    if options.child is not None:
        given = (
            *(options.plan, options.device, options.workload),
            *(options.batch[0], options.folder),
        )
        child = store_plan(*given) if options.child == "store" else timed(options.child, *given)
        print(json.dumps(child))
        return
    import torch

    found: dict[str, Any] = {
        "workload": options.workload,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "note": options.note,
        "batches": [],
    }
    began = time.monotonic()
    for number, batch in enumerate(options.batch, 1):
        until = began + options.seconds * number / len(options.batch)
        with tempfile.TemporaryDirectory(prefix="cold-start-") as folder:
            found["batches"].append(rounds(options, batch, Path(folder), until))
        found["device"] = found["batches"][0]["device"]
        text = table(found)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            stem = options.out / f"cold-start_{options.name}_{found['created'][:10]}"
            stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
            stem.with_suffix(".md").write_text(text)
    print(table(found))


if __name__ == "__main__":
    main()
