"""Engines on a GPU: they run, are chosen, are recorded in CUDA graphs, and fall back."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("cudnn", reason="needs the extra steadytorch[cudnn]")

from steadytorch.conv import executables
from steadytorch.conv.check import addresses, operands, verify
from steadytorch.conv.choices import Choice, read_choice, write_choices
from steadytorch.conv.choose import ChoiceOptions, choose
from steadytorch.conv.engines import OUTPUT, Filters, Graph, list_engines
from steadytorch.conv.executables import EngineExecutable
from steadytorch.conv.handles import handle, target
from steadytorch.conv.operator import conv_engine
from steadytorch.conv.problem import parse
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import create
from steadytorch.transforms.base import applied_in_order
from steadytorch.workload.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROBLEMS = (
    "fprop/none/fp16/last/i4x64x14x14/w64x64x3x3/s1x1/p1x1/d1x1/g1",
    "fprop/bias_relu/bf16/last/i4x64x14x14/w128x64x1x1/s2x2/p0x0/d1x1/g1",
    "fprop/add_bias_relu/fp16/last/i4x64x14x14/w128x64x1x1/s1x1/p0x0/d1x1/g1",
    "fprop/add_bias/fp16/first/i4x64x14x14/w64x64x3x3/s1x1/p1x1/d1x1/g1",
    "fprop/bias/fp32/last/i2x32x14x14/w32x32x3x3/s1x1/p2x2/d2x2/g1",
    "fprop/bias_relu/fp16/last/i4x64x14x14/w64x1x3x3/s1x1/p1x1/d1x1/g64",
    "fprop/bias/fp16/first/i4x16x100/w32x16x5/s1/p2/d1/g1",
    "fprop/bias_relu/fp16/last/i2x16x8x8x8/w32x16x3x3x3/s1x1x1/p1x1x1/d1x1x1/g1",
    "dgrad/none/fp16/last/i4x64x14x14/w64x64x3x3/s1x1/p1x1/d1x1/g1",
    "wgrad/none/fp16/last/i4x64x14x14/w64x64x3x3/s1x1/p1x1/d1x1/g1",
    "wgrad/none/tf32/first/i4x64x14x14/w64x64x3x3/s1x1/p1x1/d1x1/g1",
)
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_misses():
    """None noted, and no convolution known to be one."""
    executables.MISSES.clear()
    executables.RUNNERS.known.clear()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The problems that engines were called for, call by call."""
    found: list[str] = []
    execute = Graph.execute

    def noted(graph: Graph, *given: Any) -> None:
        execute(graph, *given)
        found.append(graph.problem.key)

    monkeypatch.setattr(Graph, "execute", noted)
    return found


@pytest.mark.parametrize("key", PROBLEMS)
def test_engines_compute_what_pytorch_computes(key):
    problem = parse(key)
    given = operands(problem, DEVICE)
    bound = 3 * given.error_of(given.by_pytorch()) + 1e-6
    usable = [e for e in list_engines(problem, target(DEVICE)) if e.excluded is None]
    assert usable
    reasons = [
        verify(EngineExecutable(problem, e.name, DEVICE), given, bound).fault for e in usable[:6]
    ]
    assert None in reasons, reasons


def arguments(dtype: torch.dtype = torch.float16) -> tuple[Any, ...]:
    torch.manual_seed(0)
    shapes = ((4, 32, 14, 14), (64, 32, 3, 3), (64,), (4, 64, 14, 14))
    made = [torch.randn(s, device="cuda", dtype=dtype) * 0.1 for s in shapes]
    for i in (0, 1, 3):
        made[i] = made[i].contiguous(memory_format=torch.channels_last)
    return (*made, [1, 1], [1, 1], [1, 1], 1, True)


def expected() -> torch.Tensor:
    x, w, b, z, *_ = (a.double() if isinstance(a, torch.Tensor) else a for a in arguments())
    return torch.relu(torch.conv2d(x, w, b, padding=1) + z)


def error(result: torch.Tensor) -> float:
    wide = expected()
    return float((result.double() - wide).norm() / wide.norm())


def test_the_heuristics_engine_runs():
    assert error(conv_engine(*arguments(), "", "", "")) < 1e-3
    assert executables.MISSES == {}


def test_a_name_that_is_gone_falls_back_and_is_noted():
    assert error(conv_engine(*arguments(), "eng999_k1=1", "", "")) < 1e-3
    assert "eng999_k1=1" in next(iter(executables.MISSES.values()))


def test_an_address_that_is_not_aligned_falls_back():
    x, *rest = arguments()
    memory = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)
    shifted = memory[1:].as_strided(x.shape, x.stride()).copy_(x)
    assert error(conv_engine(shifted, *rest, "", "", "")) < 1e-3
    assert "multiple of 16 bytes" in next(iter(executables.MISSES.values()))


def test_an_engine_that_cudnn_refuses_to_run_falls_back_and_is_noted(monkeypatch, caplog):
    def refuse(graph: Graph, *given: Any) -> None:
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    with monkeypatch.context() as refusing:
        refusing.setattr(Graph, "execute", refuse)
        found = [conv_engine(*arguments(), "", "", "") for _ in range(2)]
    assert max(map(error, found)) < 1e-3
    assert [key.split("/")[1] for key in executables.MISSES] == ["add_bias_relu"]
    assert "CUDNN_STATUS_EXECUTION_FAILED" in next(iter(executables.MISSES.values()))
    assert len([r for r in caplog.records if "in place of" in r.getMessage()]) == 1


def test_float64_is_run_by_pytorch_and_noted(ran):
    found = conv_engine(*arguments(torch.float64), "", "", "")
    x, w, b, z, *_ = arguments(torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.relu(torch.conv2d(x, w, b, padding=1) + z))
    assert ran == []
    assert "torch.float64" in next(iter(executables.MISSES.values()))


def test_an_add_without_a_bias_is_run_by_pytorch_and_noted(ran):
    x, w, _, z, *geometry = arguments()
    found = conv_engine(x, w, None, z, *geometry, "", "", "")
    wide = torch.relu(torch.conv2d(x.double(), w.double(), padding=1) + z.double())
    assert float((found.double() - wide).norm() / wide.norm()) < 1e-3
    assert ran == []
    assert "bias False, add True" in next(iter(executables.MISSES.values()))


def test_a_recorded_call_replays_bit_for_bit():
    given = arguments()
    eager = conv_engine(*given, "", "", "")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = conv_engine(*given, "", "", "")
    recorded.zero_()
    graph.replay()
    assert torch.equal(recorded, eager)


def test_each_thread_and_stream_has_its_own_handle():
    given, found = arguments(), []
    torch.cuda.synchronize()

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(conv_engine(*given, "", "", ""))
            torch.cuda.current_stream().synchronize()

    threads = [Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert max(map(error, found)) < 1e-3


def test_gradients_by_engines_are_those_of_pytorch():
    leaves = [t.detach().requires_grad_() for t in arguments()[:4]]
    geometry = arguments()[4:]
    own = [t.detach().double().requires_grad_() for t in leaves]
    conv_engine(*leaves, *geometry, "", "", "").float().sum().backward()
    torch.relu(torch.conv2d(own[0], own[1], own[2], padding=1) + own[3]).sum().backward()
    for mine, wide in zip(leaves, own, strict=True):
        assert float((mine.grad.double() - wide.grad).norm() / wide.grad.norm()) < 5e-3
    assert executables.MISSES == {}


@pytest.mark.filterwarnings("ignore")
def test_the_operator_passes_through_the_compiler_whole():
    given = arguments()
    compiled = torch.compile(
        lambda x: torch.sigmoid(conv_engine(x, *given[1:], "", "", "")), fullgraph=True
    )
    with torch.no_grad():
        found = compiled(given[0])
    assert float((found.double() - expected().sigmoid()).abs().max()) < 2e-3


def test_a_choice_is_fast_verified_and_kept():
    problem = parse(PROBLEMS[2])
    first = choose(problem, DEVICE, ChoiceOptions(seconds=5))
    chosen = next(e for e in first.engines if e.choice == first.choice)
    assert chosen.excluded is None
    timed = [e for e in first.engines if e.median_ns is not None]
    assert {"aten", "aten, benchmark mode"} <= {e.choice for e in timed}
    again = choose(problem, DEVICE, ChoiceOptions(seconds=5, seed=1), read_choice(first.choice))
    assert again.choice == first.choice


@pytest.mark.parametrize("key", PROBLEMS[:3])
def test_a_plan_made_by_itself_is_the_one_of_the_list(key):
    problem, where = parse(key), target(DEVICE)
    given = operands(problem, DEVICE)
    offered = list_engines(problem, where, Filters(deterministic=True))
    for name in [engine.name for engine in offered if engine.excluded is None][:6]:
        results = []
        for graph in (Graph(problem, where), Graph(problem, where, name)):
            index = graph.names.index(name)
            scratch = torch.empty(graph.build(index), dtype=torch.uint8, device=DEVICE)
            shape, dtype = tuple(given.reference.shape), executables.DTYPES[problem.number]
            result = executables.empty(shape, dtype, DEVICE, problem.layout)
            pointers = addresses(given) | {OUTPUT: result.data_ptr()}
            graph.execute(index, pointers, scratch.data_ptr(), handle(DEVICE).on_current_stream())
            results.append(result)
        assert torch.equal(*results), name


def test_an_earlier_choice_that_is_far_behind_leaves():
    problem = parse(PROBLEMS[2])
    first = choose(problem, DEVICE, ChoiceOptions(seconds=5))
    timed = [e for e in first.engines if e.median_ns and not e.choice.startswith("aten")]
    slowest = max(timed, key=lambda e: e.median_ns or 0.0)
    again = choose(problem, DEVICE, ChoiceOptions(seconds=5), read_choice(slowest.choice))
    kept = (slowest.median_ns or 0.0) < 1.1 * (first.chosen_ns or 0.0)
    assert kept or again.choice != slowest.choice


def test_fp16_in_place_of_bf16_is_as_exact_and_runs_in_a_network():
    key = "fprop/bias_relu/bf16/last/i8x3x64x64/w64x3x7x7/s2x2/p3x3/d1x1/g1"
    found = choose(parse(key), DEVICE, ChoiceOptions(seconds=5, other_half=True))
    errors = {e.choice: e.error or 0.0 for e in found.engines if e.median_ns}
    halves = [name for name in errors if "fp16:" in name]
    assert halves
    assert max(errors[name] for name in halves) <= 2 * errors["aten"]
    workload = Workload(Block().eval().cuda(), torch.randn(8, 3, 64, 64, device="cuda"))
    with torch.no_grad():
        wide = workload.model.double()(workload.inputs[0].double())
        workload.model.float()
    specs = [
        TransformSpec("fold_batch_norm"),
        TransformSpec("cast_weights", (("dtype", "bf16"),)),
        TransformSpec("channels_last"),
        TransformSpec("cudnn_engines", (("choices", f'{{"{key}":"{halves[0]}"}}'),)),
    ]
    with applied_in_order([create(spec) for spec in specs], workload) as made, torch.no_grad():
        result = made.model(*workload.inputs)
    assert float((result.double() - wide).norm() / wide.norm()) < 2e-2
    assert executables.MISSES == {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64))
        self.branch = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.stem(x))
        return torch.relu(self.branch(y) + y)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_the_transform_serves_a_network(pad, graph):
    workload = Workload(Block().eval().cuda(), torch.randn(8, 3, 64, 64, device="cuda"))
    with torch.no_grad():
        wide = workload.model.double()(workload.inputs[0].double())
        workload.model.float()
    key = "fprop/bias_relu/fp16/last/i8x3x64x64/w64x3x7x7/s2x2/p3x3/d1x1/g1"
    choices = write_choices({key: Choice("eng48", 4)}) if pad else ""
    specs = [
        TransformSpec("fold_batch_norm"),
        TransformSpec("cast_weights", (("dtype", "fp16"),)),
        TransformSpec("channels_last"),
        TransformSpec("cudnn_engines", (("choices", choices),)),
    ]
    if graph:
        specs.append(TransformSpec("cuda_graph"))
    with applied_in_order([create(spec) for spec in specs], workload) as made, torch.no_grad():
        found = made.model(*workload.inputs)
    assert float((found.double() - wide).norm() / wide.norm()) < 3e-3
    assert executables.MISSES == {}


STEM = "fprop/bias_relu/fp16/last/i8x3x64x64/w64x3x7x7/s2x2/p3x3/d1x1/g1"
BRANCH = "fprop/add_bias_relu/fp16/last/i8x64x32x32/w64x64x3x3/s1x1/p1x1/d1x1/g1"


def test_in_a_network_the_convolution_whose_engine_is_gone_is_the_one_that_misses(ran, caplog):
    workload = Workload(Block().eval().cuda(), torch.randn(8, 3, 64, 64, device="cuda"))
    with torch.no_grad():
        wide = workload.model.double()(workload.inputs[0].double())
        workload.model.float()
    there = EngineExecutable(parse(BRANCH), "", DEVICE).name
    choices = write_choices({STEM: Choice("eng999_k1=1"), BRANCH: Choice(there)})
    specs = [
        TransformSpec("fold_batch_norm"),
        TransformSpec("cast_weights", (("dtype", "fp16"),)),
        TransformSpec("channels_last"),
        TransformSpec("cudnn_engines", (("choices", choices),)),
    ]
    with applied_in_order([create(spec) for spec in specs], workload) as made, torch.no_grad():
        results = [made.model(*workload.inputs) for _ in range(3)]
    assert ran == [BRANCH] * 3
    assert list(executables.MISSES) == [STEM]
    assert "eng999_k1=1" in executables.MISSES[STEM]
    assert len([r for r in caplog.records if "in place of eng999_k1=1" in r.getMessage()]) == 1
    for result in results:
        assert float((result.double() - wide).norm() / wide.norm()) < 3e-3
