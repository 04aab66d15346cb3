"""Fake cuDNN without a GPU: graphs that compute on the CPU from the addresses they get."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import ClassVar

import pytest
import torch

from steadytorch.conv import executables
from steadytorch.conv.engines import BIAS, INPUT, OTHER, OUTPUT, WEIGHT
from steadytorch.conv.frontend import Target
from steadytorch.conv.problem import ConvProblem, strides
from steadytorch.errors import UnsupportedError

HERE = torch.device("cpu")
GONE = "eng999"
"""An engine that no graph has."""
SCRATCH_BYTES = 64


def _at(address: int, shape: tuple[int, ...], problem: ConvProblem) -> torch.Tensor:
    dtype = executables.DTYPES[problem.number]
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
    flat = len(shape) == 1
    return memory if flat else memory.as_strided(shape, strides(shape, problem.layout))


class FakeGraph:
    """A graph with one plan; `on_execute` runs before each call, and may raise.

    Attributes:
        runs: the addresses of each call, with that of its workspace and the handle.
        ran: the problem of each call, by key, and the name of the plan that was run.
    """

    on_execute: ClassVar[Callable[[], None]] = staticmethod(lambda: None)
    runs: ClassVar[list[tuple[dict[int, int], int, int]]] = []
    ran: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, problem: ConvProblem, target: Target, wanted: str) -> None:
        if wanted == "eng_none":
            raise UnsupportedError(f"cuDNN has no engine for {problem}")
        self.problem, self.names = problem, () if wanted == GONE else (wanted,)

    def build(self, index: int) -> int:
        return SCRATCH_BYTES

    def execute(self, index: int, pointers: dict[int, int], workspace: int, handle: int) -> None:
        if handle != get_ident():
            raise RuntimeError("the handle is of another thread")
        self.on_execute()
        problem = self.problem
        x = _at(pointers[INPUT], problem.input, problem)
        weight = _at(pointers[WEIGHT], problem.weight, problem)
        bias = _at(pointers[BIAS], problem.weight[:1], problem) if problem.biased else None
        y = torch.conv2d(
            *(x, weight, bias, problem.stride, problem.padding, problem.dilation, problem.groups)
        )
        if problem.adds:
            y += _at(pointers[OTHER], problem.output, problem)
        _at(pointers[OUTPUT], problem.output, problem).copy_(y.relu() if problem.rectified else y)
        FakeGraph.runs.append((dict(pointers), workspace, handle))
        FakeGraph.ran.append((problem.key, self.names[index]))


class FakeHandle:
    """A handle whose number is that of the thread that made it."""

    def __init__(self) -> None:
        self.number = get_ident()

    def on_current_stream(self) -> int:
        return self.number


def fake(patch: pytest.MonkeyPatch) -> type[FakeGraph]:
    """Makes plans from fake graphs and lets CPU tensors pass as GPU tensors."""
    patch.setattr(executables, "MISSES", {})
    patch.setattr(executables, "handle", lambda device: FakeHandle())
    patch.setattr(executables, "target", lambda device: Target(get_ident(), None, "9.0"))
    patch.setattr(executables, "version", lambda: 91900)
    patch.setattr(executables, "Graph", FakeGraph)
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    patch.setattr(FakeGraph, "runs", [])
    patch.setattr(FakeGraph, "ran", [])
    patch.setattr(FakeGraph, "on_execute", staticmethod(lambda: None))
    return FakeGraph


@pytest.fixture(name="cudnn")
def fake_cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeGraph]]:
    """See `fake`; no thread knows any plan."""
    found = fake(monkeypatch)
    executables.RUNNERS.known.clear()
    yield found
    executables.RUNNERS.known.clear()
