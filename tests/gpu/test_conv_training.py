"""Engines for training on a GPU: they are chosen for all three passes, and train as eager does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("cudnn", reason="needs the extra steadytorch[cudnn]")

from steadytorch.conv import executables
from steadytorch.conv.aten_fallback import aten_conv_grad
from steadytorch.conv.choices import read_choices
from steadytorch.conv.choose import ChoiceOptions, choose
from steadytorch.conv.problem import parse
from steadytorch.device.facts import load_facts
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import ambient, create, set_ambient
from steadytorch.transforms.base import Applicable, applied_in_order
from steadytorch.tune.conv import choose_engines
from steadytorch.workload.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda", 0)
HALF, SINGLE = torch.float16, torch.float32
STEPS = 3
TOLERANCES = {HALF: 6e-2, SINGLE: 1e-4}
"""Twice how far fp16 is from float64 after three steps, and a hundred times for float32."""
IEEE: dict[str, str] = dict.fromkeys(
    ("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"), "ieee"
)
AUTOCAST = TransformSpec("autocast", (("dtype", "bf16"),))
GRADIENTS = (
    "dgrad/none/fp16/last/i8x64x28x28/w64x64x3x3/s1x1/p1x1/d1x1/g1",
    "dgrad/none/bf16/last/i8x64x28x28/w128x64x3x3/s2x2/p1x1/d1x1/g1",
    "wgrad/none/fp16/last/i8x64x28x28/w64x64x3x3/s1x1/p1x1/d1x1/g1",
    "wgrad/none/tf32/first/i8x64x28x28/w64x64x3x3/s1x1/p1x1/d1x1/g1",
    "wgrad/none/fp32/first/i8x32x14x14/w32x32x3x3/s1x1/p2x2/d2x2/g1",
)


def net() -> nn.Sequential:
    """A stem, a stride, groups, a dilation and a 1x1, with a bias and without."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, 3, padding=1, groups=8),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, 3, padding=2, dilation=2, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 32, 1),
    )


def loss(output: torch.Tensor) -> torch.Tensor:
    """Large enough for gradients that fp16 can hold."""
    return 1000 * output.float().square().mean()


def workload(dtype: torch.dtype, layout: torch.memory_format) -> Workload:
    torch.manual_seed(0)
    model: Any = net().to(DEVICE, dtype)
    model.to(memory_format=layout)
    x = torch.randn(8, 3, 32, 32, device=DEVICE, dtype=dtype).contiguous(memory_format=layout)
    return Workload.training(model, x, torch.Tensor.sum, torch.optim.SGD)


@pytest.fixture(autouse=True)
def no_misses():
    executables.MISSES.clear()


@pytest.fixture
def ieee() -> Iterator[None]:
    """float32 that is float32, here and in the worker that chooses."""
    found = ambient()
    set_ambient(IEEE)
    yield
    set_ambient(found)


def steps(model: Any, parameters: list[nn.Parameter], x: torch.Tensor) -> list[list[torch.Tensor]]:
    """The gradients of a few optimiser steps, the weights after them at the end."""
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model(x)).backward()
        found.append([p.grad.clone() for p in parameters if p.grad is not None])
        optimizer.step()
    return [*found, [p.detach().clone() for p in parameters]]


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def chosen(given: Workload, prefix: tuple[TransformSpec, ...] = ()) -> TransformSpec:
    report = choose_engines(given, prefix=prefix, device="cuda", deadline_s=40)
    return TransformSpec("cudnn_engines", (("choices", report.choices),))


@pytest.mark.parametrize(
    ("dtype", "layout", "prefix"),
    [
        (HALF, torch.channels_last, ()),
        (SINGLE, torch.contiguous_format, ()),
        (SINGLE, torch.channels_last, (AUTOCAST,)),
    ],
    ids=["fp16", "fp32", "autocast"],
)
def test_steps_by_chosen_engines_are_as_exact_as_those_of_eager(dtype, layout, prefix, ieee):
    """Both are held against float64: their roundings differ, and grow from step to step."""
    given = workload(dtype, layout)
    own, exact = copy.deepcopy(given.model), copy.deepcopy(given.model).double()
    x = given.inputs[0]
    engines = chosen(given, prefix)
    reference = steps(exact, list(exact.parameters()), x.double())
    with torch.autocast("cuda", dtype=torch.bfloat16) if prefix else nullcontext():
        expected = steps(own, list(own.parameters()), x)
    with applied_in_order([create(spec) for spec in (engines, *prefix)], given) as applied:
        found = steps(applied.model, list(given.model.parameters()), x)
    for by_engines, by_eager, right in zip(found, expected, reference, strict=True):
        assert worst(by_engines, right) <= 2 * worst(by_eager, right) + 1e-6
    assert executables.MISSES == {}


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_without_choices_cudnns_first_suggestion_trains(dtype, ieee):
    given = workload(dtype, torch.channels_last)
    spec = create(TransformSpec("cudnn_engines"))
    assert isinstance(spec.applies_to(given, load_facts("cuda")), Applicable)
    own, x = copy.deepcopy(given.model), given.inputs[0]
    expected = steps(own, list(own.parameters()), x)
    with applied_in_order([spec], given) as applied:
        found = steps(applied.model, list(given.model.parameters()), x)
    assert max(map(worst, found, expected)) < TOLERANCES[dtype]


@pytest.mark.parametrize("key", GRADIENTS)
def test_an_engine_of_a_gradient_is_verified_beside_pytorchs_own(key):
    found = choose(parse(key), DEVICE, ChoiceOptions(seconds=4))
    best = next(e for e in found.engines if e.choice == found.choice)
    assert best.excluded is None
    assert best.error is not None
    assert best.median_ns is not None
    own = next(e for e in found.engines if e.choice == "aten")
    assert own.error is not None
    assert best.error <= 2 * own.error
    assert found.default_ns is not None
    assert found.benchmark_ns is not None
    assert any(e.choice.startswith("eng") and e.median_ns for e in found.engines)


def test_the_engines_of_a_training_workload_are_of_all_three_operations():
    given = workload(HALF, torch.channels_last)
    report = choose_engines(given, device="cuda", deadline_s=20)
    problems = [parse(key) for key in read_choices(report.choices)]
    counts = {name: sum(p.operation == name for p in problems) for name in ("fprop", "dgrad")}
    assert counts == {"fprop": 5, "dgrad": 4}  # the image needs no gradient
    assert sum(problem.operation == "wgrad" for problem in problems) == 5
    assert {(p.number, p.layout) for p in problems} == {("fp16", "last")}
    assert not any(text.channels or text.number for text in read_choices(report.choices).values())


@pytest.mark.parametrize("layout", ["last", "first"])
@pytest.mark.parametrize("side", [1, 3])
@pytest.mark.parametrize("operation", ["dgrad", "wgrad"])
def test_pytorchs_own_gradient_runs_the_kernels_that_it_runs_in_training(operation, side, layout):
    memory = torch.channels_last if layout == "last" else torch.contiguous_format
    shapes = ((8, 64, 28, 28), (128, 64, side, side))
    x, weight = (torch.randn(s, device=DEVICE, dtype=HALF) for s in shapes)
    x, weight = x.to(memory_format=memory), weight.to(memory_format=memory)
    geometry = ((1, 1), (side // 2,) * 2, (1, 1), 1)
    wanted = (x if operation == "dgrad" else weight).requires_grad_()
    y = nn.functional.conv2d(x, weight, None, *geometry)
    dy = torch.randn_like(y)
    operands = (dy, weight.detach()) if operation == "dgrad" else (x.detach(), dy)

    def kernels(call: Any) -> list[str]:
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            call()
            torch.cuda.synchronize()
        return sorted(event.key for event in seen.key_averages() if event.device_time_total)

    trained = kernels(lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True))
    assert (
        kernels(lambda: aten_conv_grad(*operands, shapes, geometry, operation, layout)) == trained
    )
    assert trained
