"""Graphs that read and write where the caller's tensors lie, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.errors import UnsupportedError
from steadytorch.graphs import graph_io_patching
from steadytorch.graphs.copy_nodes import CopyNode
from steadytorch.graphs.graph_io_patching import PointerNode
from steadytorch.graphs.static_buffers import static_inputs
from steadytorch.transforms.cuda_graph import CudaGraph, Pool, record
from steadytorch.workload.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def small_outputs_too(monkeypatch):
    monkeypatch.setattr(graph_io_patching, "LEAST_BYTES", 1)


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10)
        )


def made(model, *inputs):
    static = static_inputs(inputs, {})
    return record(model, static, Pool(0))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval().cuda()


def images(count):
    return [torch.randn(4, 3, 8, 8, device="cuda") for _ in range(count)]


def test_elementwise_kernels_need_no_copies():
    graph, recorded = made(lambda x: x * 2 + 1, torch.randn(1000, device="cuda"))
    (node,), (pointer,) = recorded.linked
    assert isinstance(node, PointerNode)
    assert pointer is not None
    graph.reset()


def test_what_a_copy_node_reads_is_copied():
    graph, recorded = made(lambda x: x.clone(), torch.randn(1000, device="cuda"))
    (node,), (_pointer,) = recorded.linked
    assert isinstance(node, (CopyNode, PointerNode))  # as PyTorch copies: by a node or a kernel
    graph.reset()


@pytest.mark.parametrize("half", [False, True])
def test_results_are_the_models_and_stay_whatever_the_addresses(net, half):
    model = net.half() if half else net
    inputs = [x.half() if half else x for x in images(30)]
    with torch.no_grad(), CudaGraph().applied(Workload(model, (inputs[0],), {})) as workload:
        torch.cuda._sleep(20_000_000)  # so that addresses change while replays wait
        found = [workload.model(x) for x in inputs]
        for x, result in zip(inputs, found, strict=True):
            torch.testing.assert_close(result, model(x), rtol=1e-3, atol=1e-3)
        assert len({result.data_ptr() for result in found}) == len(inputs)


@pytest.mark.parametrize("half", [False, True])
def test_nothing_is_written_but_the_output_where_larger_tensors_lay_before(net, half):
    x = images(1)[0]
    model, x = (net.half(), x.half()) if half else (net, x)
    with torch.no_grad():
        graph, recorded = made(model, x)
        (pointer,), result = recorded.linked.outputs, recorded.outputs
        assert pointer is not None
        memory = torch.full((1 << 20,), 7.0, dtype=result.dtype, device="cuda")
        middle = memory[1 << 19 :][: result.numel()]
        assert pointer.point(middle.data_ptr())
        recorded.replay()
        torch.testing.assert_close(middle.view_as(result), model(x), rtol=1e-3, atol=1e-3)
        middle.fill_(7.0)
        assert bool((memory == 7.0).all())
    graph.reset()


def test_addresses_that_are_not_aligned_are_copied():
    long = torch.randn(1001, device="cuda")
    with CudaGraph().applied(Workload(lambda x: x * 2, (long[:1000].clone(),), {})) as workload:
        for x in (long[1:], long[:1000], long[1:], long[:1000].clone()):
            assert torch.equal(workload.model(x), x * 2)


def test_a_model_that_writes_to_its_input_is_not_recorded():
    x = torch.randn(1000, device="cuda")
    with (
        pytest.raises(UnsupportedError, match="writes to its inputs"),
        CudaGraph().applied(Workload(lambda x: x.mul_(2) + 1, (x,), {})),
    ):
        pass


def test_indices_stay_in_range_while_it_is_found_out():
    model = nn.Embedding(50, 64).cuda()
    ids = torch.randint(0, 50, (4, 32), device="cuda")
    with torch.no_grad(), CudaGraph().applied(Workload(model, (ids,), {})) as workload:
        for _ in range(3):
            ids = torch.randint(0, 50, (4, 32), device="cuda")
            assert torch.equal(workload.model(ids), model(ids))


def test_a_weight_that_is_returned_is_never_written_over():
    class Gives(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight

    model = Gives(100, 100).cuda()
    kept, x = model.weight.detach().clone(), torch.randn(8, 100, device="cuda")
    with torch.no_grad(), CudaGraph().applied(Workload(model, (x,), {})) as workload:
        for _ in range(3):
            result, weight = workload.model(x)
            torch.testing.assert_close(result, model(x)[0])
            assert torch.equal(weight, kept)
    assert torch.equal(model.weight, kept)


def test_aliased_outputs_are_the_graphs_own_after_others_were_given_out(net):
    x, y = images(2)
    with torch.no_grad(), CudaGraph().applied(Workload(net, (x,), {})) as workload:
        kept = workload.model(x)
        own = workload.model.aliasing(y)
        torch.testing.assert_close(own, net(y))
        assert workload.model.aliasing(x).data_ptr() == own.data_ptr()
        torch.testing.assert_close(kept, net(x))


def test_random_numbers_are_not_taken_for_proof():
    model = nn.Dropout(0.5).cuda().train()
    x = torch.ones(100_000, device="cuda")
    with CudaGraph().applied(Workload(model, (x,), {})) as workload:
        first, second = workload.model(x), workload.model(x)
        assert not torch.equal(first, second)
        assert {0.0, 2.0} == set(first.unique().tolist())


def test_what_fills_an_output_follows_though_the_recorded_places_cover_all_of_it():
    def model(x, places):
        return torch.zeros_like(x).scatter_(0, places, x)

    x, places = torch.ones(1000, device="cuda"), torch.arange(1000, device="cuda")
    with CudaGraph().applied(Workload(model, (x, places), {})) as workload:
        for found in (places, places // 2, places, places // 3):
            torch.full((1000,), 99.0, device="cuda")  # what new memory holds
            assert torch.equal(workload.model(x, found), model(x, found))


def test_an_aliased_output_can_be_the_next_input():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
    x = torch.randn(512, 64, device="cuda")
    with torch.no_grad(), CudaGraph().applied(Workload(model, (x,), {})) as workload:
        own = workload.model.aliasing(x)
        torch.testing.assert_close(workload.model.aliasing(own), model(model(x)))
