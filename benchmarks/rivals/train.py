"""Training steps: steadytorch beside what engineers write by hand, workload after workload.

    python benchmarks/rivals --train --budget 60s --only resnet50:64 bert:8x128
    python benchmarks/rivals --train --device cpu --steps 100

Per workload `tune` searches within its budget. Then its plan and each option written by hand are
set up in fresh processes: all at once on a GPU, one by one on a CPU. They are timed block by block
in random order, one process at a time. Every option trains the same weights on the same batch, from
the same seed.

Hand-written options: eager in bf16 autocast, channels last, fused optimizer; that compiled; that
compiled with Inductor's CUDA graphs; `make_graphed_callables` over the eager model; and the whole
step as one CUDA graph over the compiled model, as PyTorch's notes on CUDA graphs show it.

On a CPU a workload has one precision, float32 or bf16 autocast, for the search and for all options:
eager, with a fused optimizer, with channels last, and compiled.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import resource
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

OURS = "steadytorch"
BLOCK, CPU_BLOCK = 25, 5
SETTLING = 5
"""Steps of each block that are not kept: the GPU was idle before."""
LOSS_AFTER = 50


class Setting(NamedTuple):
    model: nn.Module
    inputs: Any
    targets: Tensor
    loss: Callable[..., Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    images: bool
    precision: str = "bf16"

    @property
    def device(self) -> str:
        """Of the inputs: cpu or cuda."""
        return self.inputs.device.type


def _images(make: Callable[[], nn.Module], batch: int) -> Setting:
    x, y = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    sgd = lambda p, **k: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=1e-4, **k)  # noqa: E731
    return Setting(make(), x, y, functional.cross_entropy, sgd, True)


def _adamw(parameters: Any, **switches: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, **switches)


def _torchvision(name: str, batch: int) -> Setting:
    import torchvision

    return _images(getattr(torchvision.models, name), batch)


def _unet(batch: int) -> Setting:
    from steadytorch.workload.bundled.unet import UNet

    x, y = torch.randn(batch, 1, 572, 572), torch.randint(2, (batch, 388, 388))
    return Setting(UNet(), x, y, functional.cross_entropy, _adamw, True)


class _Tokens(nn.Module):
    """A transformer of the library `transformers` as a function of token ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, return_dict=False)[0]


def _token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), targets.flatten())


def _gpt2(batch: int, length: int, layers: int = 12) -> Setting:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    ids = torch.randint(config.vocab_size, (batch, length))
    return Setting(
        _Tokens(GPT2LMHeadModel(config)), ids, ids.roll(-1, 1), _token_loss, _adamw, False
    )


def _bert(batch: int, length: int) -> Setting:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig()
    ids = torch.randint(config.vocab_size, (batch, length))
    return Setting(_Tokens(BertForMaskedLM(config)), ids, ids.clone(), _token_loss, _adamw, False)


CASES: dict[str, Callable[[], Setting]] = {
    "resnet50:8": lambda: _torchvision("resnet50", 8),
    "resnet50:64": lambda: _torchvision("resnet50", 64),
    "mobilenet_v3_large:64": lambda: _torchvision("mobilenet_v3_large", 64),
    "vit_b_16:32": lambda: _torchvision("vit_b_16", 32),
    "convnext_tiny:32": lambda: _torchvision("convnext_tiny", 32),
    "gpt2:4x256": lambda: _gpt2(4, 256),
    "bert:8x128": lambda: _bert(8, 128),
    "unet:4": lambda: _unet(4),
}


CPU_CASES: dict[str, Callable[[], Setting]] = {
    "resnet18:16": lambda: _torchvision("resnet18", 16)._replace(precision="same"),
    "resnet18:16 bf16": lambda: _torchvision("resnet18", 16),
    "gpt2 (2 layers):2x64": lambda: _gpt2(2, 64, 2)._replace(precision="same"),
    "gpt2 (2 layers):2x64 bf16": lambda: _gpt2(2, 64, 2),
}


def setting(name: str) -> Setting:
    torch.manual_seed(0)
    device = "cpu" if name in CPU_CASES else "cuda"
    made = {**CASES, **CPU_CASES}[name]()
    model = made.model.to(device).train()
    return made._replace(
        model=model, inputs=made.inputs.to(device), targets=made.targets.to(device)
    )


# -- options by hand ------------------------------------------------------------------------------


def _by_hand(made: Setting, mode: str | None) -> tuple[Setting, torch.optim.Optimizer, Any]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if made.images:
        made.model.to(memory_format=torch.channels_last)
        made = made._replace(inputs=made.inputs.contiguous(memory_format=torch.channels_last))
    model = made.model if mode is None else torch.compile(made.model, mode=mode, dynamic=False)
    return made, made.optimizer(made.model.parameters(), fused=True), model


def _loop(made: Setting, optimizer: torch.optim.Optimizer, model: Any) -> Callable[[], Tensor]:
    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(made.device, torch.bfloat16, made.precision == "bf16"):
            output = model(made.inputs)
        loss = made.loss(output, made.targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def plain(made: Setting) -> Callable[[], Tensor]:
    return _loop(made, made.optimizer(made.model.parameters()), made.model)


def fused(made: Setting) -> Callable[[], Tensor]:
    return _loop(made, made.optimizer(made.model.parameters(), fused=True), made.model)


def fused_compiled(made: Setting) -> Callable[[], Tensor]:
    model = torch.compile(made.model, dynamic=False)
    return _loop(made, made.optimizer(made.model.parameters(), fused=True), model)


def eager(made: Setting) -> Callable[[], Tensor]:
    return _loop(*_by_hand(made, None))


def compiled(made: Setting) -> Callable[[], Tensor]:
    return _loop(*_by_hand(made, "default"))


def reduce_overhead(made: Setting) -> Callable[[], Tensor]:
    made, optimizer, model = _by_hand(made, "reduce-overhead")
    step = _loop(made, optimizer, model)

    def marked() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return step().clone()

    return marked


def graphed_callables(made: Setting) -> Callable[[], Tensor]:
    made, optimizer, model = _by_hand(made, None)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        model = torch.cuda.make_graphed_callables(model, (made.inputs,))
    return _loop(made, optimizer, model)


def whole_graph_and_loss(made: Setting) -> Callable[[], Tensor]:
    return whole_graph(made._replace(loss=torch.compile(made.loss, dynamic=False)))


def whole_graph(made: Setting) -> Callable[[], Tensor]:
    made, _, model = _by_hand(made, "default")
    rate = torch.tensor(1e-3 if made.images else 1e-4, device="cuda")
    optimizer = made.optimizer(made.model.parameters(), fused=True)
    for group in optimizer.param_groups:
        group["lr"] = rate
        if "capturable" in group:
            group["capturable"] = True

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            output = model(made.inputs)
        loss = made.loss(output, made.targets)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # On another stream than the warm-up's, sums of gradients can go wrong: BERT diverged to NaN.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        loss = step().detach()
    fresh = made.inputs.clone()  # a loop copies each batch to where the graph reads it
    targets = made.targets.clone()

    def replay(_keep: Any = step) -> Tensor:  # the graph uses the optimizer's state
        made.inputs.copy_(fresh)
        made.targets.copy_(targets)
        graph.replay()
        return loss.clone()

    return replay


BY_HAND: dict[str, Callable[[Setting], Callable[[], Tensor]]] = {
    "eager bf16 channels_last fused": eager,
    "compile": compiled,
    "compile(reduce-overhead)": reduce_overhead,
    "make_graphed_callables": graphed_callables,
    "whole-step graph over compile": whole_graph,
    "whole-step graph over compile, loss too": whole_graph_and_loss,
}
ON_CPU: dict[str, Callable[[Setting], Callable[[], Tensor]]] = {
    "eager": plain,
    "eager, fused optimizer": fused,
    "eager channels_last fused": eager,
    "compile": fused_compiled,
    "compile channels_last": compiled,
}


def ours(made: Setting, plan: str) -> tuple[Callable[[], Tensor], Any]:
    import steadytorch as steady

    optimizer = made.optimizer(made.model.parameters())
    tuned = steady.load_plan(plan).step(made.model, optimizer, made.loss)
    return (lambda: tuned(made.inputs, made.targets)), tuned


# -- one option in a process ----------------------------------------------------------------------


def serve(pipe: Any, name: str, option: str, plan: str) -> None:
    """Sets an option up, then times blocks on demand until it is told to end."""
    try:
        made, report = setting(name), None
        torch.manual_seed(1)
        began = time.perf_counter()
        if option == OURS:
            step, report = ours(made, plan)
        else:
            step = (ON_CPU if made.device == "cpu" else BY_HAND)[option](made)
        step()
        _synchronize()
        set_up = time.perf_counter() - began
        for _ in range(LOSS_AFTER - 1):
            loss = step()
        pipe.send({"setup_s": set_up, "loss": float(loss), "peak_mb": _peak_mb()})
        while (count := pipe.recv()) is not None:
            pipe.send(time_block(step, count))
        pipe.send({"report": None if report is None else msgspec.to_builtins(report.report())})
    except Exception as error:  # the others are worth timing
        pipe.send({"failed": f"{type(error).__name__}: {error}"[:500]})


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _peak_mb() -> float:
    """Peak memory in MB: of the process on a CPU, of PyTorch's tensors on a GPU."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def time_block(step: Callable[[], Tensor], count: int) -> tuple[list[float], float]:
    """Milliseconds of each step on the device, and of the host for enqueueing one."""
    if not torch.cuda.is_initialized():
        stamps = [time.perf_counter()]
        for _ in range(count):
            step()
            stamps.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(stamps)], 1e3 * (stamps[-1] - stamps[0]) / count
    for _ in range(SETTLING):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    began = time.perf_counter()
    for event in events[1:]:
        step()
        event.record()
    host = (time.perf_counter() - began) / count * 1e3
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)], host


# -- the benchmark --------------------------------------------------------------------------------


def search(name: str, budget: str, store: str) -> dict[str, Any]:
    """The plan of a search in this process's workers, and what it tried."""
    from timeline import Timeline

    import steadytorch as steady
    from steadytorch.quantities import parse_duration
    from steadytorch.results.candidate import describe
    from steadytorch.tune.select import SearchOptions
    from steadytorch.tune.session import Session

    made = setting(name)
    optimizer = made.optimizer(made.model.parameters())
    workload = steady.Workload.training(
        made.model, made.inputs, made.loss, optimizer, targets=made.targets, name=name
    )
    began = time.perf_counter()
    options = SearchOptions(precision=made.precision, budget_s=parse_duration(budget))
    timeline = Timeline()
    plan = Session(workload, options, store=store).search_and_keep(timeline)
    return {
        "search_s": time.perf_counter() - began,
        "path": plan.path,
        "plan": describe(plan.candidate),
        "speedup": msgspec.to_builtins(plan.evidence.speedup),
        "reference": plan.evidence.reference,
        "not_applicable": plan.evidence.not_applicable,
        "not_tried": plan.evidence.not_tried,
        "timeline": timeline.events,
        "trials": [
            {
                "candidate": describe(trial.transforms),
                "status": trial.status,
                "reason": trial.reason,
                "setup_s": trial.setup_s,
                "median_ms": None if trial.median_ns is None else trial.median_ns / 1e6,
                "error": trial.error,
            }
            for trial in plan.evidence.trials
        ],
    }


def run(name: str, budget: str, steps: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """One workload: the search, then all options timed in turns."""
    context = mp.get_context("spawn")
    entry: dict[str, Any] = {"budget": budget, "rows": []}
    with tempfile.TemporaryDirectory(prefix="rivals-train-") as store:
        plan = ""
        try:
            entry["search"] = search(name, budget, store)
            plan = entry["search"].pop("path")
            tell(f"{entry['search']['plan']} after {entry['search']['search_s']:.0f} s")
        except Exception as error:
            entry["search"] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            tell(entry["search"]["failed"])
        arms = []
        by_hand = ON_CPU if name in CPU_CASES else BY_HAND
        for option in [*([OURS] if plan else []), *by_hand]:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, name, option, plan), daemon=True)
            process.start()
            arms.append((option, process, here))
            if name in CPU_CASES:  # threads that wait for each other at barriers need their cores
                _await(process, here)
        rows = {option: _first(option, process, pipe) for option, process, pipe in arms}
        tell("timing")
        live = [arm for arm in arms if "failed" not in rows[arm[0]]]
        rng = Random(1)
        block = CPU_BLOCK if name in CPU_CASES else BLOCK
        for _ in range(-(-steps // block)):
            for option, _, pipe in rng.sample(live, len(live)):
                pipe.send(block)
                times, host = pipe.recv()
                rows[option].setdefault("samples_ms", []).extend(round(t, 5) for t in times)
                rows[option].setdefault("hosts_ms", []).append(host)
        for option, process, pipe in live:
            pipe.send(None)
            rows[option] |= pipe.recv()
            process.join(10)
        for _, process, _ in arms:
            process.kill()
    entry["rows"] = [finished(option, row) for option, row in rows.items()]
    return entry


def _first(option: str, process: Any, pipe: Any) -> dict[str, Any]:
    if not _await(process, pipe):
        return {"failed": f"its process ended with code {process.exitcode}"}
    return pipe.recv()


def _await(process: Any, pipe: Any) -> bool:
    """Waits for a first message; False if the process ends without one."""
    while not pipe.poll(1.0):
        if not process.is_alive():
            return pipe.poll(0)
    return True


def finished(option: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row with its figures."""
    if "samples_ms" not in row:
        return {"option": option, **row}
    samples = np.asarray(row["samples_ms"])
    return {
        "option": option,
        "median_ms": float(np.median(samples)),
        "p99_over_median": float(np.quantile(samples, 0.99) / np.median(samples)),
        "host_ms": float(np.median(row.pop("hosts_ms"))),
        **row,
    }


def table(document: dict[str, Any]) -> str:
    """Markdown: a row per option."""
    lines = [
        "| workload | option | ms a step | p99/median | host ms | peak MB | set-up s | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in document["workloads"].items():
        for row in entry["rows"]:
            if "median_ms" not in row:
                failed = " ".join(row["failed"].split())[:80]
                lines.append(f"| {name} | {row['option']} | {failed} | | | | | |")
                continue
            option = row["option"]
            if option == OURS:
                option += f": {entry['search']['plan']}"
            lines.append(
                f"| {name} | {option} | {row['median_ms']:.2f} | {row['p99_over_median']:.3f} | "
                f"{row['host_ms']:.2f} | {row['peak_mb']:.0f} | {row['setup_s']:.1f} | "
                f"{row['loss']:.3f} |"
            )
    return "\n".join(lines) + "\n"


def main(args: argparse.Namespace) -> None:
    """Runs the workloads asked for, and writes each result as it comes."""
    import datetime

    from steadytorch import __version__
    from steadytorch.device.facts import load_facts, resolve_device

    kind = resolve_device(args.device).partition(":")[0]
    cases = CPU_CASES if kind == "cpu" else CASES
    if unknown := [name for name in args.only if name not in cases]:
        raise SystemExit(f"unknown workload {unknown[0]!r}: choose from {', '.join(cases)}")
    began = time.monotonic()
    facts = load_facts(kind)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    words = (facts.name or "unknown").lower().replace("nvidia ", "").split()
    device = "-".join(words[: 1 if kind == "cuda" else 2])
    path = args.out / f"rivals-train_{device}_{created[:10]}.json"
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    document |= {
        "schema": 1,
        "created": created,
        "environment": {**msgspec.to_builtins(facts), "steadytorch": __version__},
    }
    document.setdefault("workloads", {})
    longest = 0.0
    for name in args.only or cases:
        start = time.monotonic()
        if start - began + longest > args.seconds:
            print("not begun:", name, flush=True)
            continue
        tell = lambda text, name=name: print(  # noqa: E731
            f"{time.monotonic() - began:6.0f} s  {name}: {text}", flush=True
        )
        document["workloads"][name] = run(name, f"{args.budget or 180}s", args.steps, tell)
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n")
        path.with_suffix(".md").write_text(table(document))
        print(table({"workloads": {name: document["workloads"][name]}}), flush=True)
        longest = max(longest, time.monotonic() - start)
