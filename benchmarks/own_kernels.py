"""Fused kernels against eager, Inductor and the bandwidth floor; a matrix product in steps.

All options of a case run in one process, with their blocks interleaved in random order. Each is
timed twice: called from Python, and in a CUDA graph, where only the device counts. The floor is a
copy of as many bytes, timed alongside. Inputs that fit the L2 cache stay there for every option.

    python benchmarks/own_kernels.py [--only KIND ...] [--rounds 100] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.nn import functional as F

import steadytorch as steady
import tiled_matmul
from steadytorch.device.facts import load_facts
from steadytorch.device.roofline import copy_bandwidth
from steadytorch.kernels.activated_linear import activated_linear
from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.bias_add_relu import bias_add_relu
from steadytorch.kernels.conv_relu_max_pool import conv_relu_max_pool2d
from steadytorch.kernels.depthwise_conv import channels_innermost, depthwise_conv2d
from steadytorch.kernels.pointwise_conv import pointwise_conv2d
from steadytorch.kernels.relu_max_pool import relu_max_pool2d
from steadytorch.kernels.small_channel_conv import thin_conv2d
from steadytorch.measure.sampler import CudaSampler, grouped, warm_up

Call = Callable[[], Any]
SAMPLES = 5
DROPPED = 2
"""First samples of each block, dropped because the previous option affects the caches."""
SMALL_BYTES = 64 << 20
"""Below this, a graph records 20 calls, so that its launch is negligible."""
LAST, FIRST = torch.channels_last, torch.contiguous_format
MATMUL_SIDE = 2048


class Case(NamedTuple):
    """A computation and the bytes that it must move; `others` are further variants, by name."""

    name: str
    eager: Callable[..., Any]
    ours: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    bytes: int
    others: dict[str, Callable[..., Any]] = {}  # noqa: RUF012 - never written to


def made(shape: tuple[int, ...], dtype: torch.dtype, layout: Any = FIRST) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype).to(memory_format=layout)


def pooling(shape: tuple[int, ...], dtype: torch.dtype, layout: Any, *window: int) -> Case:
    x = made(shape, dtype, layout)
    y = relu_max_pool2d(x, *window)
    assert torch.equal(y, F.max_pool2d(x.relu(), *window))
    return Case(
        f"ReLU + max-pool {window}, {list(shape)} {_kind(x)}",
        lambda x: F.max_pool2d(x.relu(), *window),
        lambda x: relu_max_pool2d(x, *window),
        (x,),
        x.nbytes + y.nbytes,
    )


def epilogue(shape: tuple[int, ...], dtype: torch.dtype, layout: Any) -> Case:
    x, other = made(shape, dtype, layout), made(shape, dtype, layout)
    bias = torch.randn(shape[1], device="cuda").to(dtype)

    def eager(x: torch.Tensor, other: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (x + bias[:, None, None] + other).relu()

    exact = eager(x.double(), other.double(), bias.double())
    torch.testing.assert_close(bias_add_relu(x, other, bias).double(), exact, rtol=1e-3, atol=1e-6)
    name = f"bias + residual + ReLU, {list(shape)} {_kind(x)}"
    return Case(name, eager, bias_add_relu, (x, other, bias), 3 * x.nbytes)


def stem(batch: int, dtype: torch.dtype, layout: Any, side: int) -> Case:
    """A convolution to 64 channels with stride 2, ReLU and pooling."""
    x, weight = made((batch, 3, 224, 224), dtype, layout), made((64, 3, side, side), dtype, layout)
    weight *= (3 * side * side) ** -0.5
    bias, padding = torch.randn(64, device="cuda").to(dtype), side // 2
    sizes: Any = (2, padding, 3, 2, 1, False)

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.conv2d(x, weight, bias, 2, padding).relu(), 3, 2, 1)

    def halves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return relu_max_pool2d(F.conv2d(x, weight, bias, 2, padding), 3, 2, 1)

    def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return conv_relu_max_pool2d(x, weight, bias, *sizes)

    y, exact = ours(x, weight, bias), eager(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)
    name = f"convolution {side}x{side} + ReLU + max-pool, {list(x.shape)} {_kind(x)}"
    moved = x.nbytes + weight.nbytes + y.nbytes
    others: dict[str, Callable[..., Any]] = {
        "convolution alone": lambda x, w, b: F.conv2d(x, w, b, 2, padding),
        "convolution, relu_max_pool2d": halves,
    }
    return Case(name, eager, ours, (x, weight, bias), moved, others)


def pointwise(shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> Case:
    """The end of a block of EfficientNet or MobileNetV3: gate, convolution, bias and residual."""
    batch, channels, *sides = shape
    x, other = made(shape, dtype, LAST), made((batch, outputs, *sides), dtype, LAST)
    weight, bias = made((outputs, channels, 1, 1), dtype), made((outputs,), dtype)
    weight, gate = weight * channels**-0.5, made((batch, channels, 1, 1), dtype).sigmoid()

    def eager(x: Any, weight: Any, bias: Any, gate: Any, other: Any) -> torch.Tensor:
        return F.conv2d(x * gate, weight, bias) + other

    def ours(x: Any, weight: Any, bias: Any, gate: Any, other: Any) -> torch.Tensor:
        return pointwise_conv2d(x, weight, bias, "", gate, other)

    inputs = (x, weight, bias, gate, other)
    y, exact = ours(*inputs), eager(*(t.double() for t in inputs))
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)
    name = f"gate + pointwise convolution + residual, {list(shape)} to {outputs}, {_kind(x)}"
    moved = sum(t.nbytes for t in (*inputs, y))
    return Case(name, eager, ours, inputs, moved)


def depthwise(shape: tuple[int, ...], side: int, stride: int) -> Case:
    """Depthwise convolution with bias and hardswish; our weight is laid out in advance."""
    x, weight = made(shape, torch.float16, LAST), made((shape[1], 1, side, side), torch.float16)
    bias, padding, inner = (
        torch.randn(shape[1]).cuda().half(),
        side // 2,
        channels_innermost(weight),
    )

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.hardswish(F.conv2d(x, weight, bias, stride, padding, groups=shape[1]))

    def ours(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return depthwise_conv2d(x, inner, bias, stride, padding, activation="hardswish")

    y, exact = ours(x, weight, bias), eager(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-4)
    name = f"depthwise convolution {side}x{side} / {stride} + hardswish, {list(shape)} {_kind(x)}"
    alone = {"convolution alone": lambda x, w, b: F.conv2d(x, w, b, stride, padding, 1, shape[1])}
    moved = x.nbytes + weight.nbytes + y.nbytes
    return Case(name, eager, ours, (x, weight, bias), moved, alone)


def linear(shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> Case:
    """First Linear of a ConvNeXt block, with innermost channels and GELU."""
    x, weight, bias = made(shape, dtype), made((outputs, shape[-1]), dtype), made((outputs,), dtype)
    weight = weight * shape[-1] ** -0.5

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, weight, bias))

    def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return activated_linear(x, weight, bias, "gelu")

    y, exact = ours(x, weight, bias), eager(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)
    name = f"Linear + GELU, {list(shape)} to {outputs}, {str(dtype).removeprefix('torch.')}"
    moved = x.nbytes + weight.nbytes + bias.nbytes + y.nbytes
    return Case(name, eager, ours, (x, weight, bias), moved, {"Linear alone": F.linear})


def thin(batch: int, outputs: int, dtype: torch.dtype, layout: Any, activation: str) -> Case:
    """The first convolution of EfficientNet or MobileNetV3, 3x3 with stride 2, bias, activation."""
    x, weight = made((batch, 3, 224, 224), dtype, layout), made((outputs, 3, 3, 3), dtype, layout)
    weight, bias = weight * 27**-0.5, torch.randn(outputs, device="cuda").to(dtype)

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[activation](F.conv2d(x, weight, bias, 2, 1))

    def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return thin_conv2d(x, weight, bias, 2, 1, activation=activation)

    y, exact = ours(x, weight, bias), eager(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)
    name = f"convolution 3x3 / 2 + {activation}, {list(x.shape)} to {outputs}, {_kind(x)}"
    alone = {"convolution alone": lambda x, w, b: F.conv2d(x, w, b, 2, 1)}
    moved = x.nbytes + weight.nbytes + y.nbytes
    return Case(name, eager, ours, (x, weight, bias), moved, alone)


def _kind(x: torch.Tensor) -> str:
    layout = "NCHW" if x.is_contiguous() else "NHWC"
    return f"{str(x.dtype).removeprefix('torch.')} {layout}"


def cases() -> list[tuple[str, Callable[[], Case]]]:
    """Factories of cases by kind, to make one at a time: large ones need gigabytes."""
    single, half = torch.float32, torch.float16
    return [
        ("pooling", lambda: pooling((64, 64, 256, 256), single, FIRST, 2)),
        ("pooling", lambda: pooling((1, 64, 256, 256), single, FIRST, 2)),
        ("pooling", lambda: pooling((64, 64, 112, 112), half, LAST, 3, 2, 1)),
        ("pooling", lambda: pooling((64, 64, 112, 112), single, FIRST, 3, 2, 1)),
        ("pooling", lambda: pooling((64, 64, 112, 112), half, FIRST, 3, 2, 1)),
        ("pooling", lambda: pooling((1, 64, 112, 112), half, LAST, 3, 2, 1)),
        ("sum", lambda: epilogue((64, 256, 56, 56), half, LAST)),
        ("sum", lambda: epilogue((64, 256, 56, 56), single, FIRST)),
        ("sum", lambda: epilogue((1, 256, 56, 56), half, LAST)),
        ("stem", lambda: stem(64, half, LAST, 7)),
        ("stem", lambda: stem(1, half, LAST, 7)),
        ("stem", lambda: stem(64, torch.bfloat16, LAST, 7)),
        ("stem", lambda: stem(64, half, LAST, 3)),
        ("stem", lambda: stem(64, half, FIRST, 7)),
        ("stem", lambda: stem(64, single, LAST, 7)),
        ("pointwise", lambda: pointwise((64, 96, 56, 56), 24, half)),
        ("pointwise", lambda: pointwise((1, 672, 7, 7), 160, half)),
        ("depthwise", lambda: depthwise((64, 144, 56, 56), 5, 2)),
        ("depthwise", lambda: depthwise((64, 480, 14, 14), 5, 1)),
        ("depthwise", lambda: depthwise((1, 672, 14, 14), 3, 1)),
        ("depthwise", lambda: depthwise((32, 96, 56, 56), 7, 1)),
        ("linear", lambda: linear((32, 56, 56, 96), 384, half)),
        ("linear", lambda: linear((32, 28, 28, 192), 768, half)),
        ("thin", lambda: thin(64, 32, torch.bfloat16, LAST, "silu")),
        ("thin", lambda: thin(64, 32, torch.bfloat16, FIRST, "silu")),
        ("thin", lambda: thin(1, 16, half, LAST, "hardswish")),
    ]


KINDS = ("pooling", "sum", "stem", "pointwise", "depthwise", "linear", "thin", "matmul")


def recorded(call: Call, repeats: int) -> Call:
    """Record `repeats` calls in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph.replay


def interleaved(calls: dict[str, tuple[Call, int]], rounds: int) -> dict[str, list[int]]:
    """Median period of each round and option, in ns per call; `calls` gives (call, calls in it)."""
    sampler, draw = CudaSampler(), random.Random(0)
    groups = {
        name: warm_up(call, sampler, min_ns=20_000_000).group for name, (call, _) in calls.items()
    }
    times: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in draw.sample(list(calls), len(calls)):
            call, repeats = calls[name]
            periods, _ = sampler.periods(grouped(call, groups[name]), SAMPLES)
            period = float(np.median(periods[DROPPED:])) / groups[name] / repeats
            times[name].append(round(period))
    return times


def row(option: str, samples: list[int], ours: list[int] | None, moved: int) -> dict[str, Any]:
    found = steady.summarize(samples)
    verdict = None
    if ours is not None and ours is not samples:
        verdict = msgspec.to_builtins(steady.judge(list(zip(samples, ours, strict=True))))
    return {
        "option": option,
        "median_ns": found.median_ns,
        "median_ci_ns": found.median_ci_ns,
        "why_no_ci": found.why_no_ci,
        "bytes_per_s": moved / found.median_ns * 1e9,
        "ours_against_it": verdict,
        "samples_ns": samples,
    }


def measured(case: Case, rounds: int) -> dict[str, Any]:
    torch._dynamo.reset()
    compiled = torch.compile(case.eager, dynamic=False)
    options = {"eager": case.eager, "Inductor": compiled, **case.others, "steadytorch": case.ours}
    source = torch.empty(case.bytes // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    repeats = 20 if case.bytes < SMALL_BYTES else 1

    def copy() -> Any:
        return target.copy_(source)

    # A large copy is slower as part of a graph; the floor is the faster of the two.
    calls: dict[str, tuple[Call, int]] = {
        "copy": (recorded(copy, repeats), repeats) if repeats > 1 else (copy, 1)
    }
    for name, option in options.items():

        def call(option: Callable[..., Any] = option) -> Any:
            return option(*case.inputs)

        calls[name] = (call, 1)
        calls[f"{name}, graph"] = (recorded(call, repeats), repeats)
    times = interleaved(calls, rounds)
    rows = []
    for name, samples in times.items():
        ours = times["steadytorch" + ", graph" * ("graph" in name)] if name != "copy" else None
        rows.append(row(name, samples, ours, case.bytes))
    return {"case": case.name, "bytes": case.bytes, "rows": rows}


def matmul(rounds: int) -> dict[str, Any]:
    a, b = (
        torch.randn(MATMUL_SIDE, MATMUL_SIDE, device="cuda", dtype=torch.float16) for _ in range(2)
    )
    calls = {name: (step, 1) for name, step in tiled_matmul.steps(a, b).items()}
    for step, _ in calls.values():
        torch.testing.assert_close(step(), a @ b, rtol=1e-2, atol=1e-1)
    operations = 2 * MATMUL_SIDE**3
    rows = []
    for name, samples in interleaved(calls, rounds).items():
        found = row(name, samples, None, operations)
        rows.append({**found, "operations_per_s": found.pop("bytes_per_s")})
    return {"case": f"matrix product, {MATMUL_SIDE} cubed, float16", "rows": rows}


def interval(row: dict[str, Any]) -> str:
    if row["median_ci_ns"] is None:
        return "none claimed"
    low, high = row["median_ci_ns"]
    return f"{low / 1e3:.2f} to {high / 1e3:.2f}"


def effect(row: dict[str, Any]) -> str:
    """Effect on time from our pairs with this option."""
    if (found := row["ours_against_it"]) is None:
        return ""
    return f"{found['estimate']:+.1%}, {found['verdict']}"


def markdown(found: dict[str, Any]) -> str:
    """Format the tables, with 95 % intervals of the median where the series allows one."""
    lines = [f"{found['device']}, {found['software']}, {found['date']}.", ""]
    copied = found["copy_bytes_per_s"] / 1e12
    lines += [f"Copy of far more than the L2 cache holds: {copied:.2f} TB/s.", ""]
    for case in found["cases"]:
        floor = next((r["median_ns"] for r in case["rows"] if r["option"] == "copy"), None)
        lines += [f"**{case['case']}**", ""]
        if floor is None:
            lines += ["| step | us | interval | TFLOP/s |", "|---|---|---|---|"]
        else:
            lines += [
                "| option | us | interval | of the copy's rate | steadytorch against it |",
                "|---|---|---|---|---|",
            ]
        for each in case["rows"]:
            shown = f"| {each['option']} | {each['median_ns'] / 1e3:.2f} | {interval(each)} |"
            if floor is None:
                lines.append(f"{shown} {each['operations_per_s'] / 1e12:.1f} |")
            else:
                lines.append(f"{shown} {floor / each['median_ns']:.3f} | {effect(each)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    facts = load_facts("cuda")
    found: dict[str, Any] = {
        "device": facts.name,
        "software": f"torch {facts.torch}, Triton {facts.triton}, driver {facts.driver}",
        "date": datetime.date.today().isoformat(),
        "rounds": options.rounds,
        "copy_bytes_per_s": copy_bandwidth("cuda"),
    }
    with torch.no_grad():
        asked = [make for kind, make in cases() if kind in options.only]
        found["cases"] = [measured(make(), options.rounds) for make in asked]
        if "matmul" in options.only:
            found["cases"].append(matmul(options.rounds))
    print(markdown(found))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        some = "" if tuple(options.only) == KINDS else f"-{'-'.join(options.only)}"
        device = (facts.name or "gpu").split()[-1].lower()
        path = options.out / f"kernels{some}_{device}_{found['date']}"
        path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
    main()
