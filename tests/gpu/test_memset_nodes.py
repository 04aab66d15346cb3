"""Nodes that set memory are kernels in what `cuda_graph` recorded, with the same results."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from steadytorch.device.driver import cuda_driver
from steadytorch.graphs import graph_io_patching
from steadytorch.graphs.memset_nodes import replace_memsets
from steadytorch.transforms.cuda_graph import CudaGraph
from steadytorch.workload.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SETS = {
    torch.uint8: ("cuMemsetD8Async", ctypes.c_ubyte, 200),
    torch.int16: ("cuMemsetD16Async", ctypes.c_ushort, 0xFFFE),
    torch.int32: ("cuMemsetD32Async", ctypes.c_uint, 0xFFFFFFF0),
}
EXPECTED = {torch.uint8: 200.0, torch.int16: -2.0, torch.int32: -16.0}


def set_memory(dtype: torch.dtype, count: int) -> torch.Tensor:
    """New memory, set by the driver on the current stream."""
    memory = torch.empty(count, dtype=dtype, device="cuda")
    name, kind, value = SETS[dtype]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    address, size = ctypes.c_uint64(memory.data_ptr()), ctypes.c_size_t(count)
    assert getattr(cuda_driver(), name)(address, kind(value), size, stream) == 0
    return memory


class Adds(nn.Module):
    """Adds memory that was set, `times` over, in memory that it uses again."""

    def __init__(self, dtype: torch.dtype, times: int = 1) -> None:
        super().__init__()
        self.dtype, self.times = dtype, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x + set_memory(self.dtype, x.numel()).to(x.dtype)
        return x


def memsets_of(call) -> int:
    call()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        torch.cuda.synchronize()
    return sum("memset" in event.name.lower() for event in seen.events())


@pytest.fixture
def left(monkeypatch):
    """Leaves nodes as they are."""
    monkeypatch.setattr(graph_io_patching, "replace_memsets", lambda driver, graph: 0)


@pytest.mark.parametrize("count", [1, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", SETS, ids=str)
def test_kernels_set_what_nodes_set(dtype, count):
    x = torch.randn(count, device="cuda")
    with CudaGraph().applied(Workload(Adds(dtype, 3), (x,), {})) as changed:
        for given in (x, torch.randn_like(x), x):
            found = changed.model(given)
            torch.testing.assert_close(found, given + 3 * EXPECTED[dtype], rtol=1e-6, atol=1e-4)
        assert memsets_of(lambda: changed.model(x)) == 0


@pytest.mark.usefixtures("left")
def test_there_were_such_nodes():
    x = torch.randn(1000, device="cuda")
    with CudaGraph().applied(Workload(Adds(torch.int32, 3), (x,), {})) as changed:
        assert memsets_of(lambda: changed.model(x)) == 3


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                x = F.scaled_dot_product_attention(x, x, x)
        return x


def test_attention_of_cudnn_gives_the_same_bits_call_after_call():
    x = torch.randn(4, 12, 256, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = Attention()(x)
        with CudaGraph().applied(Workload(Attention(), (x,), {})) as changed:
            for _ in range(20):
                assert torch.equal(changed.model(x), expected)
            assert memsets_of(lambda: changed.model(x)) == 0


def test_branches_wait_for_what_they_need_alone():
    side = torch.cuda.Stream()

    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                other = set_memory(torch.int32, x.numel()).to(x.dtype) * x
            own = set_memory(torch.int32, x.numel()).to(x.dtype) + x
            current.wait_stream(side)
            return own + other

    x = torch.randn(1 << 16, device="cuda")
    with CudaGraph().applied(Workload(Branches(), (x,), {})) as changed:
        for _ in range(10):
            torch.testing.assert_close(changed.model(x), -15 * x - 16, rtol=1e-6, atol=1e-4)
        assert memsets_of(lambda: changed.model(x)) == 0


def test_nothing_is_done_where_there_is_nothing_to_replace():
    x = torch.randn(100, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        x + 1
    assert replace_memsets(cuda_driver(), graph) == 0
    graph.reset()
