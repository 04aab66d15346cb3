"""Host time that a tuned module adds to a call, compared with calling the executor directly.

Four parts:

- **Dispatch.** The executor is trivially cheap. Compiled and interpreted dispatch are timed in
  short alternating blocks, and medians over blocks are compared.
- **Untuned calls**, in CPU time of the thread: known signatures with arguments of several kinds,
  and new signatures for models of several sizes. The store has no plan for the model (`bare`) or
  one for another signature (`stored`), or such a plan is applied (`applied`). The models return at
  once.
- **Weight check** of a ResNet-50, which executors with their own weights need after each call.
- **CUDA graph** of a ResNet-50 at batch 1: tuned module against raw replay. Raw replay copies
  neither input nor output, so the added time includes both copies. Times are latencies, with the
  device idle before and after. A graph of one kernel shows the cost of launching and waiting alone.

Inputs of the graph are: the same tensor at each call; two alternating tensors; one of sixteen at
random, so that addresses are unpredictable; the static input itself. `host_us` splits the host time
of a call, by medians of timestamps, each of which costs about 0.1 us.

    python benchmarks/dispatch.py [--device cuda] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import date
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from cold_start import kept_unmeasured
from steadytorch.native.host import begin, load
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.weights import Weights
from steadytorch.transforms import cuda_graph
from steadytorch.tune.optimize import optimize
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.workload.loading import load_workload
from steadytorch.workload.workload import Workload

LIMITS_US = {1: 3.0, 4: 6.0}
GRAPH_LIMIT_US = 10.0
UNTUNED_LIMIT_US = {"known": 5.0, "new": 200.0}


def interleaved(
    calls: dict[str, Any],
    blocks: int,
    count: int,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, float]:
    """Median time of one call over blocks, in us; the blocks of all calls alternate."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(blocks):
        for name, call in calls.items():
            start = clock()
            for _ in range(count):
                call()
            times[name].append((clock() - start) / count / 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


class Small(nn.Module):
    """One layer with a weight and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs[0])


def serving(model: nn.Module, candidate: tuple[TransformSpec, ...], *inputs: Any) -> TunedModule:
    """Make a tuned module and run its first calls."""
    tuned = TunedModule(model.eval(), lambda context: Resolution(candidate))
    for _ in range(3):
        tuned(*inputs)
    assert tuned.report().hits == 3, str(tuned.report())
    return tuned


@contextmanager
def interpreted() -> Iterator[None]:
    """Make modules created within use interpreted dispatch, even if compiled code is available."""
    nothing = (None, "to be compared")
    with (
        patch("steadytorch.runtime.weights.load", lambda: nothing),
        patch("steadytorch.runtime.module.load", lambda: nothing),
    ):
        yield


def dispatch(number: int, frozen: bool, device: str, blocks: int) -> dict[str, float]:
    """Added time for `number` tensors, in us, compiled and interpreted."""
    inputs = [torch.zeros(2, 4, device=device) for _ in range(number)]
    answer = torch.zeros(1)

    def executor(*inputs: torch.Tensor) -> torch.Tensor:
        return answer

    def tuned() -> Any:
        made = serving(Small().to(device), (TransformSpec("inference_mode"),), *inputs)
        (entry,) = made._found.values()
        entry.outdated = made._entries.weights.changed if frozen else None
        entry.call = executor
        return lambda: made(*inputs)

    calls = {"direct": lambda: executor(*inputs), "compiled": tuned()}
    with interpreted():
        calls["interpreted"] = tuned()
    found = interleaved(calls, 20 * blocks, 50)
    direct = found.pop("direct")
    return {"direct_us": direct, **{f"{way}_adds_us": took - direct for way, took in found.items()}}


class Silent(nn.Module):
    """A model that returns at once for any arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


def untuned_ways(model: nn.Module, folder: Path) -> dict[str, Callable[[], TunedModule]]:
    """Factories of tuned modules without a plan for the later calls."""
    workload = Workload(model, (torch.zeros(7, 7),))
    session = Session(workload, SearchOptions(), None, folder / "stored")
    plan = kept_unmeasured(session, (TransformSpec("inference_mode"),))
    return {
        "bare": lambda: optimize(model, store=folder / "bare"),
        "stored": lambda: optimize(model, store=folder / "stored"),
        "applied": lambda: plan.apply(model),
    }


def known_calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of calls, by kind."""
    x = torch.zeros(2, 8)
    return {
        "tensor": (x,),
        "float": (x, 1.5),
        "custom object": (x, object()),
        "nested dict": ({"a": x, "b": {"c": x, "d": [x, 1.5]}},),
        "50 tensors": ([x] * 50,),
        "negative": (torch.zeros(2, 8, dtype=torch.complex64).conj().imag,),
    }


def of_known_signatures(blocks: int, folder: Path) -> dict[str, dict[str, float]]:
    """Time that an untuned call of a known signature adds, in us."""
    model = Silent(nn.Linear(8, 8)).eval()
    found = {}
    for way, make in untuned_ways(model, folder).items():
        for name, args in known_calls().items():
            tuned = make()
            for _ in range(2):
                tuned(*args)
            calls = {"direct": lambda a=args: model(*a), "tuned": lambda a=args, t=tuned: t(*a)}
            took = interleaved(calls, blocks, 50, time.thread_time_ns)
            found.setdefault(way, {})[name] = took["tuned"] - took["direct"]
    return found


def of_new_shapes(count: int, folder: Path) -> dict[str, dict[str, float]]:
    """Time of the first call of a shape, in us, by size of the model."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    models: dict[str, nn.Module] = {
        "MLP": nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        "resnet18": load_workload("resnet18").model,
        "transformer, 12 layers": nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
    }
    found: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        silent = Silent(model).eval()
        for way, make in untuned_ways(silent, folder / name).items():
            tuned, times = make(), []
            tuned(torch.zeros(1, 8))
            for size in range(2, count):
                x = torch.zeros(size, 8)
                start = time.thread_time_ns()
                tuned(x)
                times.append((time.thread_time_ns() - start) / 1e3)
            found.setdefault(way, {})[name] = statistics.median(times)
    return found


def untuned(blocks: int) -> dict[str, Any]:
    """Measure untuned calls."""
    logging.getLogger("steadytorch").setLevel(logging.ERROR)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        found: dict[str, Any] = {"limits_us": UNTUNED_LIMIT_US}
        for way, context in (("compiled", nullcontext), ("interpreted", interpreted)):
            with context():
                found[way] = {
                    "known_us": of_known_signatures(blocks, root / way / "known"),
                    "new_us": of_new_shapes(5 * blocks, root / way / "new"),
                }
    return found


def weights(blocks: int) -> dict[str, Any]:
    """Time to check the weights of a ResNet-50, in us: alone, and after the model has run."""
    workload = load_workload("resnet50", batch=1)
    model = workload.model
    ways = {"compiled": Weights(model), "interpreted": Weights(model)}
    ways["compiled"].remember()
    with interpreted():
        ways["interpreted"].remember()
    found = interleaved({name: way.changed for name, way in ways.items()}, 5 * blocks, 5)
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for _ in range(blocks):
            for name, way in ways.items():
                model(*workload.inputs)  # on the host, where it evicts the caches
                start = time.perf_counter_ns()
                way.changed()
                times[name].append((time.perf_counter_ns() - start) / 1e3)
    return {
        "us": found,
        "after_a_call_us": {name: statistics.median(took) for name, took in times.items()},
        "tensors": len([*model.parameters(), *model.buffers()]),
        "modules": len([*model.modules()]),
    }


def waited(call: Any) -> Any:
    """Wrap a call so that it waits for the device."""

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def cases(tuned: Any, x: torch.Tensor, buffer: torch.Tensor) -> dict[str, Any]:
    """Calls by kind of input; `buffer` is the static input."""
    two = itertools.cycle([x, x.clone()])
    many = [x.clone() for _ in range(16)]
    drawn = itertools.cycle(Random(0).choices(many, k=4096))
    return {
        "same": lambda: tuned(x),
        "two_in_turn": lambda: tuned(next(two)),
        "any_of_16": lambda: tuned(next(drawn)),
        "zero_copy": lambda: tuned(buffer),
    }


def raw_replay(model: nn.Module, x: torch.Tensor) -> torch.cuda.CUDAGraph:
    """Record the model by hand."""
    raw, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            model(x)
        with torch.cuda.graph(raw, stream=stream):
            model(x)
    return raw


def graph(blocks: int) -> dict[str, Any]:
    """Recorded ResNet-50 at batch 1, in us: latency of raw replay, and the time that calls add."""
    workload = load_workload("resnet50", batch=1, device="cuda")
    (x,) = workload.inputs
    raw, least = raw_replay(workload.model, x), raw_replay(nn.ReLU(), x[0, 0, 0, :1])
    tuned = serving(workload.model, (TransformSpec("cuda_graph"),), x)
    (entry,) = tuned._found.values()
    (buffer,), _ = tuned.static_inputs(x)
    served = {"executor alone": lambda: entry.call(x), **cases(tuned, x, buffer)}
    # Replays that choose an input like the calls, but do not use it.
    replays = {
        f"replay, {name}": call for name, call in cases(lambda _: raw.replay(), x, x).items()
    }
    calls = {"replay": lambda: raw.replay(), **replays, **served}
    calls["one kernel"] = lambda: least.replay()
    latency = interleaved({name: waited(call) for name, call in calls.items()}, blocks, 25)
    replay = latency["replay"]
    added = {name: latency[name] - latency.get(f"replay, {name}", replay) for name in served}
    host = {"replay": spent(raw.replay, []), **stamped(workload.model, x)}
    floor = latency["one kernel"]
    return {"replay_us": replay, "one_kernel_us": floor, "added_us": added, "host_us": host}


def stamped(model: nn.Module, x: torch.Tensor) -> dict[str, dict[str, float]]:
    """Host time of a call by section, in us, by kind of input."""
    stamps: list[int] = []
    make = cuda_graph._exact_replayer

    def with_stamps(recorded: Any, collect: Any) -> Any:
        return make(recorded._replace(replay=stamping(recorded.replay, stamps)), collect)

    with patch.object(cuda_graph, "_exact_replayer", with_stamps):
        tuned = serving(model, (TransformSpec("cuda_graph"),), x)
    (entry,) = tuned._found.values()
    entry.call = stamping(entry.call, stamps)
    (buffer,), _ = tuned.static_inputs(x)
    return {case: spent(call, stamps) for case, call in cases(tuned, x, buffer).items()}


def stamping(call: Any, stamps: list[int]) -> Any:
    """Wrap a call so that it appends timestamps of its start and end."""

    def run(*args: Any) -> Any:
        stamps.append(time.perf_counter_ns())
        result = call(*args)
        stamps.append(time.perf_counter_ns())
        return result

    return run


def spent(call: Any, stamps: list[int], count: int = 200) -> dict[str, float]:
    """Medians of the times between a call's timestamps, in us."""
    rows = []
    for _ in range(count):
        stamps.clear()
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        end = time.perf_counter_ns()
        marks = [start, *stamps, end]
        rows.append([(b - a) / 1e3 for a, b in itertools.pairwise(marks)])
    names = ("look_up", "staging", "launch", "outputs", "weights_and_counts")
    medians = map(statistics.median, zip(*rows, strict=True))
    return dict(zip(names if stamps else ("launch",), medians, strict=True))


def device_name(device: str) -> str:
    """Name of the GPU or the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def short(name: str) -> str:
    """Short device name for file names, such as h200 or amd-epyc."""
    words = [word.lower() for word in name.replace("(R)", "").split() if word != "NVIDIA"]
    return "-".join(words[:1] if name.startswith("NVIDIA") else words[:2])


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if (making := begin()) is not None:
        making.finish(120.0)
    compiled, reason = load()
    if compiled is None:
        sys.exit(f"nothing to compare: {reason}")
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device_name(options.device),
        "limits_us": {str(number): limit for number, limit in LIMITS_US.items()},
        "dispatch": {
            f"{number} tensors, {kind}": dispatch(
                number, kind == "own weights", options.device, options.blocks
            )
            for number in LIMITS_US
            for kind in ("model's weights", "own weights")
        },
        "untuned": untuned(options.blocks),
        "resnet50": weights(options.blocks),
    }
    if options.device == "cuda":
        found["graph_limit_us"] = GRAPH_LIMIT_US
        found["graph_resnet50_batch1"] = graph(options.blocks)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        name = f"dispatch_{short(found['device'])}_{date.today()}.json"
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / name).write_text(text + "\n")


if __name__ == "__main__":
    main()
