"""Training under DistributedDataParallel: a plan's step beside what engineers write by hand.

    python benchmarks/ranks --train --only resnet50:64 bert:8x128 --out benchmarks/results

torchrun starts one process per GPU. Each option trains the same weights; batches differ from
rank to rank. After 200 steps the parameters of all ranks are compared bit by bit. Then all
options are timed in blocks, in the same random order on all ranks. At last each is profiled, and
its ranks are compared as by `steady explain`; once more with a rank that sleeps in each step of the
first option. Options: DDP in bf16 autocast with channels last and a fused optimizer; that compiled;
the whole step as one CUDA graph over it, as PyTorch's notes on CUDA graphs show it; and `plan.step`
with fixed transforms, without a search.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "rivals"))

STEPS = 200
BLOCK, BLOCKS = 25, 5
WARM_UP = 12
PROFILED = 12
LATE, SLEEP_S = 1, 0.02
"""The rank that sleeps, and for how long in each step."""
DEADLINE = "STEADYTORCH_RANKS_DEADLINE"
OURS = "steadytorch: graph(step), compiled"
OURS_EAGER = "steadytorch: graph(step), eager code"
CANDIDATES = {
    OURS_EAGER: ("channels_last", "autocast", "optimizer", "step_graph"),
    OURS: ("channels_last", "compile", "autocast", "optimizer", "step_graph"),
}


def launch(only: list[str], skip: list[str], backend: str, gpus: int | None, out: Path) -> int:
    """Starts one process per GPU; returns the exit status.

    Args:
        only: names of workloads in `benchmarks/rivals/train.py`.
        skip: texts; options that contain one are left out.
        backend: of the process group.
        gpus: number of GPUs; None for all.
        out: folder of the result.
    """
    import torch

    count = gpus or torch.cuda.device_count()
    if count < 2:
        print(f"needs two GPUs, found {count}", file=sys.stderr)
        return 3
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
    environment = {"OMP_NUM_THREADS": "4", DEADLINE: "180", **os.environ}
    words = [sys.executable, *torchrun, __file__, "--backend", backend, "--out", str(out)]
    words += ["--only", *only, "--skip", *skip]
    return subprocess.run(words, env=environment, check=False).returncode


# -- options ------------------------------------------------------------------------------------


def _ddp(model: Any) -> Any:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    device = torch.cuda.current_device()
    return DistributedDataParallel(model, device_ids=[device])


def _loop(made: Any, model: Any, optimizer: Any, cache: bool = True) -> Callable[[], Any]:
    import torch

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=cache):
            output = model(made.inputs)
        loss = made.loss(output, made.targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _prepared(made: Any, compiled: bool) -> tuple[Any, Any]:
    import torch

    if made.images:
        made.model.to(memory_format=torch.channels_last)
        made = made._replace(inputs=made.inputs.contiguous(memory_format=torch.channels_last))
    return made, torch.compile(made.model, dynamic=False) if compiled else made.model


def plain(made: Any) -> Callable[[], Any]:
    made, model = _prepared(made, compiled=False)
    return _loop(made, _ddp(model), made.optimizer(made.model.parameters(), fused=True))


def compiled(made: Any) -> Callable[[], Any]:
    import torch

    made, model = _prepared(made, compiled=False)
    optimizer = made.optimizer(made.model.parameters(), fused=True)
    return _loop(made, torch.compile(_ddp(model), dynamic=False), optimizer)


def whole_graph(made: Any) -> Callable[[], Any]:
    import torch

    made, model = _prepared(made, compiled=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ddp = _ddp(model)
    optimizer = made.optimizer(made.model.parameters(), fused=True)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device="cuda")
        if "capturable" in group:
            group["capturable"] = True
    step = _loop(made, ddp, optimizer, cache=False)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        loss = step()
    fresh, targets = made.inputs.clone(), made.targets.clone()

    def replay(_keep: Any = step) -> Any:  # the graph uses DDP's buckets and the optimizer's state
        made.inputs.copy_(fresh)  # a loop copies each batch to where the graph reads it
        made.targets.copy_(targets)
        graph.replay()
        return loss.clone()

    return replay


def ours(made: Any, names: tuple[str, ...]) -> tuple[Callable[[], Any], Any]:
    import msgspec

    import steadytorch as steady
    from steadytorch import transforms
    from steadytorch.results.candidate import TransformSpec
    from steadytorch.tune.select import SearchOptions
    from steadytorch.tune.session import Session

    optimizer = made.optimizer(made.model.parameters())
    workload = steady.Workload.training(
        made.model, made.inputs, made.loss, optimizer, targets=made.targets
    )
    session = Session(workload, SearchOptions(precision="bf16"), store="unused")
    parts = [TransformSpec(name) for name in names if name != "channels_last" or made.images]
    specs = [transforms.create(spec).spec for spec in parts]
    plan = msgspec.structs.replace(
        session.untouched("made by hand"), candidate=transforms.order(specs)
    )
    tuned = plan.step(_ddp(made.model), optimizer, made.loss)
    return (lambda: tuned(made.inputs, made.targets)), tuned


BY_HAND: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "DDP: bf16, channels last, fused": plain,
    "DDP: the same, compiled": compiled,
    "DDP: whole-step graph over compile": whole_graph,
}


# -- one rank -----------------------------------------------------------------------------------


def _equal(model: Any) -> bool:
    """Whether the parameters of all ranks are equal bit by bit."""
    import torch
    import torch.distributed as dist

    mine = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    same = torch.tensor(int(torch.equal(mine.view(torch.int32), first.view(torch.int32))))
    same = same.cuda()
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def _all_ready(error: str | None) -> str | None:
    """The first error of any rank, so that no rank times an option that another lacks."""
    import torch.distributed as dist

    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), None)


def _stragglers(step: Callable[[], Any], rank: int, sleep_s: float = 0.0) -> dict[str, Any] | None:
    """What `steady explain` says of the ranks over profiled steps; None on ranks other than 0."""
    import torch.distributed as dist
    from torch.profiler import profile, schedule

    import steadytorch as steady

    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(folder[0])
    steps = schedule(wait=2, warmup=2, active=PROFILED, repeat=1)

    def keep(profiler: Any) -> None:
        profiler.export_chrome_trace(str(path / f"rank{rank}.json"))

    with profile(schedule=steps, on_trace_ready=keep) as profiler:
        for _ in range(4 + PROFILED):
            if rank == LATE:
                time.sleep(sleep_s)
            step()
            profiler.step()
    dist.barrier()
    found = None
    if rank == 0:
        try:
            compared: Any = steady.explain(sorted(path.glob("rank*.json")))
            found = {
                "late": [(each.rank, each.slice, each.late_ns) for each in compared.late],
                "variance_shares": compared.variance_shares,
                "why_no_variance_shares": compared.why_no_variance_shares,
                "waiting_ns": [each.waiting_ns for each in compared.ranks],
                "transfer_ns": [each.transfer_ns for each in compared.ranks],
                "step_ns": [each.step_ns for each in compared.ranks],
                "remarks": compared.remarks,
            }
        except Exception as failure:
            found = {"failed": f"{type(failure).__name__}: {failure}"[:400]}
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    return found


def _add_stragglers(
    steps: dict[str, Callable[[], Any]], rows: dict[str, dict[str, Any]], rank: int
) -> None:
    for option, step in steps.items():
        rows[option]["stragglers"] = _stragglers(step, rank)
    first = next(iter(BY_HAND))
    if first in steps:
        rows[first]["with_a_late_rank"] = _stragglers(steps[first], rank, SLEEP_S)


def _setting(name: str) -> Any:
    """The workload of `rivals`; without torchvision or transformers, one of the same size."""
    import torch
    import train as rivals

    try:
        return rivals.setting(name)
    except (ImportError, KeyError):  # or another size
        kind, _, size = name.partition(":")
    if kind == "resnet50":
        from steadytorch import load_workload

        torch.manual_seed(0)
        model = load_workload("resnet50", batch=1).model
        made = rivals._images(lambda: model, int(size))
    elif kind == "bert":
        torch.manual_seed(0)
        batch, length = map(int, size.split("x"))
        ids = torch.randint(30522, (batch, length))
        loss, optimizer = rivals._token_loss, rivals._adamw
        made = rivals.Setting(_encoder(), ids, ids.clone(), loss, optimizer, False)
    else:
        raise ValueError(f"{name} needs torchvision or transformers")
    return made._replace(
        model=made.model.cuda().train(), inputs=made.inputs.cuda(), targets=made.targets.cuda()
    )


def _encoder() -> Any:
    """An encoder of BERT's base size, with dropout."""
    from torch import nn

    layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.1, "gelu", batch_first=True)
    body = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(30522, 768), nn.Dropout(0.1), body, nn.Linear(768, 30522))


def _set_up(name: str, option: str, rank: int) -> tuple[Callable[[], Any], Any, Any]:
    import torch

    made = _setting(name)
    torch.manual_seed(100 + rank)
    if made.inputs.is_floating_point():
        made = made._replace(inputs=torch.randn_like(made.inputs))
    else:
        made = made._replace(inputs=torch.randint_like(made.inputs, 1000))
    if option in CANDIDATES:
        step, tuned = ours(made, CANDIDATES[option])
    else:
        step, tuned = BY_HAND[option](made), None
    return step, tuned, made.model


def run(name: str, skip: list[str], rank: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """All options of one workload on this rank; the rows of this rank."""
    import msgspec
    import numpy as np
    import torch
    import torch.distributed as dist
    import train as rivals

    rows: dict[str, dict[str, Any]] = {}
    live: dict[str, Any] = {}
    for option in (*BY_HAND, *CANDIDATES):
        if any(text in option for text in skip):
            continue
        row: dict[str, Any] = {"option": option}
        rows[option] = row
        began, error, step, tuned, model = time.perf_counter(), None, None, None, None
        try:
            step, tuned, model = _set_up(name, option, rank)
            for _ in range(STEPS):
                loss = step()
            row["loss"] = float(loss)  # pyright: ignore[reportPossiblyUnboundVariable]
            row["set_up_and_200_steps_s"] = time.perf_counter() - began
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:400]
        if (failed := _all_ready(error)) is not None:
            row["failed"] = failed
            tell(f"{name}: {option} failed: {failed}")
            continue
        row["parameters_equal"] = _equal(model)
        live[option] = (step, tuned)
        tell(f"{name}: {option} ready after {row['set_up_and_200_steps_s']:.0f} s")
    rng = Random(1)
    samples: dict[str, list[float]] = {option: [] for option in live}
    for _ in range(BLOCKS):
        for option in rng.sample(list(live), len(live)):
            dist.barrier()
            samples[option] += rivals.time_block(live[option][0], BLOCK)[0]
    for option, (_, tuned) in live.items():
        median = float(np.median(samples[option]))
        rows[option] |= {
            "median_ms": median,
            "p99_over_median": float(np.quantile(samples[option], 0.99)) / median,
            "samples_ms": [round(each, 4) for each in samples[option]],
        }
        if tuned is not None:
            rows[option]["report"] = msgspec.to_builtins(tuned.report())
    torch.cuda.synchronize()
    _add_stragglers({option: step for option, (step, _) in live.items()}, rows, rank)
    return list(rows.values())


def main() -> None:
    """One rank, started by torchrun."""
    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", required=True)
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda", local) if args.backend == "nccl" else None
    dist.init_process_group(args.backend, device_id=device)
    rank, size = dist.get_rank(), dist.get_world_size()

    def tell(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    document, path = _document(args, size)
    for name in args.only:
        rows = run(name, args.skip, rank, tell)
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, rows)
        document["workloads"][name] = {"ranks": gathered}
        if rank == 0:
            path.write_text(json.dumps(document, indent=1) + "\n")
            print("\n".join(_table(name, rows)), flush=True)
    tell(str(path))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # graphs that hold NCCL's work need not be taken apart


def _document(args: argparse.Namespace, size: int) -> tuple[dict[str, Any], Path]:
    import msgspec

    from steadytorch import __version__
    from steadytorch.device.facts import load_facts

    facts = load_facts("cuda")
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    device = (facts.name or "unknown").lower().replace("nvidia ", "").split()[0]
    args.out.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": 1,
        "created": created,
        "environment": {**msgspec.to_builtins(facts), "steadytorch": __version__},
        "backend": args.backend,
        "ranks": size,
        "steps": STEPS,
        "workloads": {},
    }
    return document, args.out / f"ranks-train_{device}-x{size}_{created[:10]}.json"


def _table(name: str, rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| workload | option | ms a step | p99/median | equal | loss | late rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "median_ms" not in row:
            lines.append(f"| {name} | {row['option']} | {row['failed'][:120]} | | | | |")
            continue
        lines.append(
            f"| {name} | {row['option']} | {row['median_ms']:.2f} | {row['p99_over_median']:.3f} | "
            f"{row['parameters_equal']} | {row['loss']:.3f} | {_late(row['stragglers'])} |"
        )
        if "with_a_late_rank" in row:
            lines.append(
                f"| {name} | the same, rank {LATE} sleeps {1e3 * SLEEP_S:.0f} ms a step | | | | | "
                f"{_late(row['with_a_late_rank'])} |"
            )
    return lines


def _late(found: dict[str, Any] | None) -> str:
    if found is None or "failed" in found:
        return (found or {}).get("failed", "")[:80]
    late = [f"{rank} by {ns / 1e6:.1f} ms, {where}" for rank, where, ns in found["late"]]
    return "; ".join(late) or "none"


if __name__ == "__main__":
    main()
