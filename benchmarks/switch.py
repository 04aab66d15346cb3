"""cuDNN's benchmark switch against engines chosen in advance: first calls, period, memory, shapes.

    python benchmarks/switch.py --shapes --out benchmarks/results

Every variant runs in a fresh process. `off` and `on` set `torch.backends.cudnn.benchmark`. Engines
are chosen before, in another process, whose time is reported separately. The first call is timed
alone, from a model on its device to a finished output, including the start-up of cuDNN. Periods are
timed block by block, with the processes in random order.

`--shapes` adds calls of ten input sizes in random order. There, engines are served as for a user: a
stored plan for each size, all with the same choices, replayed by `optimize`. `--device cpu` only
tests the script: it chooses no engines and records no graphs.
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
from torch import nn

from cold_start import kept_unmeasured
from steadytorch import __version__, load_workload, optimize
from steadytorch.bench.bench_worker import WorkloadHandler, own_errors, save_payload
from steadytorch.device.facts import load_facts
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.transforms import ambient, order
from steadytorch.tune.conv import choose_engines
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.workload.workload import Workload

HANDLER = "switch:SwitchHandler"
"""Workers import this file from the folder of the main script."""
PATIENCE_S, COUNT = 300, 12
SIZES = list(range(160, 305, 16))
SHAPES_BATCH = 8
TOLERANCE = 1e-2
"""Maximum relative L2 error that the package accepts in fp16."""
GRAPH = TransformSpec("cuda_graph")
TYPES = {"fp16": torch.float16, "fp32": torch.float32}


class SwitchHandler(WorkloadHandler):
    """Runs one variant in a process of its own."""

    def memory(self) -> dict[str, Any]:
        """Peak device memory allocated and reserved by PyTorch's allocator, in bytes."""
        cuda = torch.cuda if self.workload.device.type == "cuda" else None
        return {
            "peak_allocated_bytes": cuda and cuda.max_memory_allocated(),
            "peak_reserved_bytes": cuda and cuda.max_memory_reserved(),
        }

    @own_errors()
    def serve(self, sizes: list[int], store: str, outputs: str) -> dict[str, Any]:
        """Call the model with images of these sizes and return the seconds of each call.

        Args:
            sizes: image size of each call.
            store: folder of the plans to replay; empty for the untouched model.
            outputs: file for the results, in the worker's directory.
        """
        device, (given,) = self.workload.device, self.workload.inputs
        pictures = {size: images(len(given), size, given.dtype, device) for size in set(sizes)}
        model, following, results = self.workload.model, iter(sizes), list[torch.Tensor]()
        if store:
            model = optimize(model, store=store, canary=False)
        with torch.no_grad():
            taken_ns = self.sampler.latencies(
                lambda: results.append(model(pictures[next(following)])), len(sizes)
            )
        torch.save([result.float().cpu() for result in results], self.directory / outputs)
        served = model.report() if store else None
        return {
            "seconds": (1e-9 * taken_ns).tolist(),
            "served_by_plans": 0 if served is None else served.hits,
            "report": "" if served is None else str(served),
            **self.memory(),
        }


class AllSizes(nn.Module):
    """A network on images of several sizes, as one workload with all their convolutions."""

    def __init__(self, network: nn.Module, count: int) -> None:
        super().__init__()
        self.network, self.count = network, count

    def forward(self, pictures: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.network(pictures[place]) for place in range(self.count)]


def images(batch: int, size: int, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
    """Make seeded images; channels last in 16 bits."""
    drawn = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(size))
    layout = torch.contiguous_format if dtype == torch.float32 else torch.channels_last
    return drawn.to(device, dtype).contiguous(memory_format=layout)


def network(name: str, dtype: torch.dtype) -> nn.Module:
    """Build a network with seeded weights and realistic batch norm statistics."""
    torch.manual_seed(0)
    model = load_workload(name).model
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    layout = torch.contiguous_format if dtype == torch.float32 else torch.channels_last
    return model.to(dtype=dtype, memory_format=layout)


def chosen(workload: Workload, device: str, deadline_s: float) -> tuple[str, dict[str, Any]]:
    """Choose engines in a separate process; return the choices and their cost."""
    if device == "cpu":
        return "", {"choosing_s": 0.0, "problems": 0, "problems_measured": 0}
    start = time.perf_counter()
    report = choose_engines(workload, device=device, deadline_s=deadline_s)
    return report.choices, {
        "choosing_s": time.perf_counter() - start,
        "of_that_in_the_worker_s": report.seconds,
        "problems": len(report.layers),
        "problems_measured": sum(layer.reason is None for layer in report.layers),
    }


def started(directory: Path, device: str, benchmarks: dict[str, bool]) -> dict[str, Worker]:
    """Start a fresh process for each variant, load the workload and set the switch."""
    live = {}
    for number, (name, benchmark) in enumerate(benchmarks.items()):
        worker = live[name] = Worker(HANDLER, directory, f"way-{number}")
        settings = ambient() | {"cudnn.benchmark": str(benchmark)}
        worker.send("load", device=device, ambient=settings)
    for worker in live.values():
        worker.receive(PATIENCE_S)
    return live


def candidates(choices: str, device: str) -> dict[str, tuple[bool, Candidate]]:
    """All variants: the state of PyTorch's switch, and the transforms."""
    engines = TransformSpec("cudnn_engines", (("choices", choices),))
    ways = {
        "off": (False, ()),
        "on": (True, ()),
        "on, CUDA graph": (True, (GRAPH,)),
        "engines": (False, (engines,)),
        "engines, CUDA graph": (False, order((engines, GRAPH))),
    }
    return {n: way for n, way in ways.items() if device != "cpu" or GRAPH not in way[1]}


def attempted(live: dict[str, Worker], name: str, method: str, **arguments: Any) -> dict[str, Any]:
    """Call a process; one that fails is dropped, and the others go on."""
    try:
        return live[name].call(method, PATIENCE_S, **arguments)
    except WorkerFault as fault:
        live.pop(name).kill()
        return {"failed": f"{fault.reason}\n{fault.detail[-1500:]}"}


def one_shape(asked: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Measure first call, period and memory of every variant, for one network and dtype."""
    workload = Workload(network(asked.workload, TYPES[kind]), images(asked.batch, 224, TYPES[kind]))
    choices, choosing = chosen(workload, asked.device, asked.deadline)
    ways = candidates(choices, asked.device)
    with tempfile.TemporaryDirectory() as folder:
        save_payload(workload, Path(folder))
        live = started(Path(folder), asked.device, {n: way[0] for n, way in ways.items()})
        rows: dict[str, dict[str, Any]] = {}
        for name in ways:  # one after another, so that each has the machine to itself
            candidate = msgspec.to_builtins(ways[name][1])
            rows[name] = attempted(live, name, "set_up", candidate=candidate)
        blocks, rng = {name: list[float]() for name in live}, Random(0)
        for _ in range(asked.rounds):
            for name in rng.sample(list(live), len(live)):
                times = live[name].call("block", PATIENCE_S, metric="period", count=COUNT)
                blocks[name].append(float(np.median(times)))
        for name, worker in live.items():
            rows[name] |= worker.call("memory", PATIENCE_S)
            rows[name]["median_ns"] = float(np.median(blocks[name]))
            rows[name]["spread"] = float(np.std(blocks[name]) / np.mean(blocks[name]))
            rows[name]["blocks_ns"] = blocks[name]
            worker.close()
    return {"network": f"{asked.workload} b{asked.batch} {kind}", **choosing, "ways": rows}


def store_plans(model: nn.Module, pictures: list[Any], candidate: Candidate, asked: Any) -> str:
    """Make a store with a plan for each image size; empty path without transforms."""
    if not candidate:
        return ""
    folder = tempfile.mkdtemp(prefix="plans-", dir=asked.scratch)
    for picture in pictures:
        session = Session(Workload(model, picture), SearchOptions(), asked.device, folder)
        kept_unmeasured(session, candidate)
    return folder


def many_shapes(asked: argparse.Namespace) -> dict[str, Any]:
    """Time calls of several sizes in random order, for every variant."""
    model, dtype = network(asked.workload, TYPES["fp16"]), TYPES["fp16"]
    pictures = [images(SHAPES_BATCH, size, dtype) for size in asked.sizes]
    together = Workload(AllSizes(model, len(pictures)).eval(), (pictures,))
    choices, choosing = chosen(together, asked.device, 2 * asked.deadline)
    ways = candidates(choices, asked.device)
    ways.pop("on, CUDA graph", None)  # plans are keyed by the switch, which was off
    sizes = Random(0).choices(asked.sizes, k=asked.calls)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        asked.scratch = folder
        save_payload(Workload(model, pictures[0]), Path(folder))
        stores = {n: store_plans(model, pictures, way[1], asked) for n, way in ways.items()}
        live = started(Path(folder), asked.device, {n: way[0] for n, way in ways.items()})
        for number, name in enumerate(ways):
            outputs, given = Path(folder) / f"{number}.pt", {"sizes": sizes, "store": stores[name]}
            row = rows[name] = attempted(live, name, "serve", outputs=outputs.name, **given)
            if name in live:
                error = difference(outputs, Path(folder) / "0.pt")
                row |= {
                    **summary(sizes, row["seconds"]),
                    "error": error,
                    "equal": error <= TOLERANCE,
                }
                live[name].close()
    title = f"{asked.workload} b{SHAPES_BATCH} fp16, {len(sizes)} calls of {len(set(sizes))} sizes"
    return {"network": title, "sizes": sizes, **choosing, "ways": rows}


def summary(sizes: list[int], seconds: list[float]) -> dict[str, Any]:
    """Summarise: total, slowest, first call of each size, and later calls."""
    seen = [size in sizes[:place] for place, size in enumerate(sizes)]
    return {
        "total_s": sum(seconds),
        "slowest_s": max(seconds),
        "first_calls_s": [s for s, again in zip(seconds, seen, strict=True) if not again],
        "later_calls_s": [s for s, again in zip(seconds, seen, strict=True) if again],
    }


def difference(found: Path, expected: Path) -> float:
    """Largest relative L2 error between the results of two runs, over their calls."""
    pairs = zip(torch.load(found), torch.load(expected), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def mebibytes(count: int | None) -> str:
    """Format bytes in MiB; empty for None."""
    return "" if count is None else f"{count / 2**20:.0f}"


MEMORY = {
    "peak MiB": lambda way, off: mebibytes(way["peak_allocated_bytes"]),
    "reserved MiB": lambda way, off: mebibytes(way["peak_reserved_bytes"]),
}
ONE_SHAPE = {
    "first call s": lambda way, off: f"{way['setup_s']:.2f}",
    "ms": lambda way, off: f"{way['median_ns'] * 1e-6:.3f}",
    "spread": lambda way, off: f"{way['spread']:.2%}",
    "of off": lambda way, off: f"{way['median_ns'] / off['median_ns']:.3f}",
    **MEMORY,
}
MANY_SHAPES = {
    "total s": lambda way, off: f"{way['total_s']:.2f}",
    "slowest ms": lambda way, off: f"{1e3 * way['slowest_s']:.1f}",
    "first call of a size ms": lambda way, off: f"{1e3 * np.median(way['first_calls_s']):.1f}",
    "later calls ms": lambda way, off: f"{1e3 * np.median(way['later_calls_s']):.2f}",
    "error to off": lambda way, off: f"{way['error']:.1e}{'' if way['equal'] else ' (too much)'}",
    "calls by plans": lambda way, off: str(way["served_by_plans"]),
    **MEMORY,
}


def table(found: dict[str, Any]) -> str:
    """Format the figures as Markdown."""
    columns, off = MANY_SHAPES if "sizes" in found else ONE_SHAPE, found["ways"]["off"]
    rows = [["way", *columns], ["---"] * (1 + len(columns))]
    for name, way in found["ways"].items():
        failed = [f"failed: {way['failed'].splitlines()[0]}"] if "failed" in way else None
        rows.append([name, *(failed or (shown(way, off) for shown in columns.values()))])
    head = [
        f"### {found['network']}",
        "",
        f"Engines chosen beforehand in {found['choosing_s']:.1f} s, a new process included; "
        f"{found['problems_measured']} of {found['problems']} distinct convolutions were reached.",
        "",
    ]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def write(folder: Path, facts: Any, asked: argparse.Namespace, results: list[Any]) -> None:
    """Write the results so far as JSON and Markdown."""
    now, left_out = datetime.datetime.now(datetime.UTC), ("out", "scratch")
    document = {
        "created": now.isoformat(timespec="seconds"),
        "version": __version__,
        "facts": msgspec.to_builtins(facts),
        "configuration": {k: v for k, v in vars(asked).items() if k not in left_out},
        "settings": ambient(),
        "results": results,
    }
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"switch_{(facts.name or asked.device).split()[-1].lower()}_{now.date().isoformat()}"
    (folder / f"{stem}.json").write_text(json.dumps(document, indent=1) + "\n")
    title = (
        f"# cuDNN's benchmark switch on {facts.name}\n\nsteadytorch {__version__}, torch "
        f"{facts.torch}, cuDNN {facts.cudnn}, Python {facts.python}, {now.date().isoformat()}.\n"
    )
    body = "\n\n".join(map(table, results))
    (folder / f"{stem}.md").write_text(f"{title}\n{body}\n")


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--workload", default="resnet50")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--types", nargs="*", default=list(TYPES), choices=tuple(TYPES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--deadline", type=float, default=25.0, help="seconds to choose; --shapes: x2"
    )
    parser.add_argument("--shapes", action="store_true", help="also time calls of many sizes")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    facts, results = load_facts(asked.device), []
    parts = [lambda kind=kind: one_shape(asked, kind) for kind in asked.types]
    for part in [*parts, *([lambda: many_shapes(asked)] if asked.shapes else [])]:
        try:
            found = part()
        except WorkerFault as fault:  # continue with the other parts
            print(f"failed: {fault.reason}\n{fault.detail[-1500:]}", flush=True)
            continue
        results.append(found)
        print(table(found), flush=True)
        if asked.out is not None:
            write(asked.out, facts, asked, results)


if __name__ == "__main__":
    main()
