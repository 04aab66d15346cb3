from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.graphs import copy_nodes, graph_io_patching
from steadytorch.graphs.copy_nodes import MOST
from steadytorch.graphs.static_buffers import static_inputs
from steadytorch.transforms.cast_weights import CastWeights
from steadytorch.transforms.cuda_graph import CudaGraph, Pool, record
from steadytorch.workload.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class Weighted(nn.Module):
    """Several inputs that must not be mistaken for one another."""

    def forward(self, *inputs):
        return sum((i + 1) * x for i, x in enumerate(inputs))


def numbers(count=1, size=1000):
    return [torch.randn(size, device="cuda") for _ in range(count)]


def recorded(count=1):
    return CudaGraph().applied(Workload(Weighted(), tuple(numbers(count)), {}))


def test_a_recorded_graph_has_a_node_for_each_of_a_few_tensors():
    for count, nodes in ((1, 1), (MOST, MOST), (MOST + 1, 0)):
        static = static_inputs(tuple(numbers(count)), {})
        graph, found = record(Weighted(), static, Pool(0))
        assert len(found.linked.inputs) == nodes
        graph.reset()


@pytest.mark.parametrize("count", [1, 2, MOST, MOST + 1])
def test_inputs_at_changing_addresses_are_what_is_computed(count):
    with recorded(count) as workload:
        calls = [numbers(count) for _ in range(20)]
        torch.cuda._sleep(20_000_000)  # so that sources change while replays wait
        found = [workload.model(*inputs) for inputs in calls]
        for inputs, result in zip(calls, found, strict=True):
            assert torch.equal(result, Weighted()(*inputs))


def test_inputs_that_are_freed_after_the_call_are_still_computed_with():
    with recorded() as workload:
        torch.cuda._sleep(20_000_000)
        found = [workload.model(torch.full((1000,), float(i), device="cuda")) for i in range(50)]
        assert [int(result[-1]) for result in found] == list(range(50))


def test_static_tensors_and_others_may_be_mixed():
    with recorded(2) as workload:
        a, b = workload.model.static_inputs.args
        x, y = numbers(2)
        for _ in range(3):
            a.fill_(3)
            assert torch.equal(workload.model(a, y), 3 + 2 * y)
            assert torch.equal(workload.model(x, y), x + 2 * y)
            b.fill_(4)
            assert torch.equal(workload.model(x, b), x + 8)


@pytest.mark.parametrize(
    "change", [torch.neg, torch.Tensor.double, torch._neg_view, torch.Tensor.cpu]
)
@pytest.mark.parametrize("most", [0, MOST])
def test_tensors_of_other_types_and_places_are_converted(change, most, monkeypatch):
    for room in (copy_nodes, graph_io_patching):
        monkeypatch.setattr(room, "MOST", most)
    with recorded() as workload:
        (x,) = numbers()
        for _ in range(3):
            assert torch.equal(workload.model(x), x)
            assert torch.equal(workload.model(change(x)), change(x).float().cuda())


def test_after_closing_a_call_raises():
    with recorded() as workload:
        (x,) = numbers()
        workload.model(x)
    for given in (x, x.clone()):
        with pytest.raises(RuntimeError):
            workload.model(given)


def test_inputs_that_a_transform_before_converts_are_what_is_computed():
    model, inputs = nn.Linear(100, 4).eval().cuda(), numbers(10, 100)
    with (
        torch.no_grad(),
        CastWeights().applied(Workload(model, (inputs[0],), {})) as half,
        CudaGraph().applied(half) as workload,
    ):
        found = [workload.model.exact(x) for x in inputs]
        for x, result in zip(inputs, found, strict=True):
            torch.testing.assert_close(result, half.model(x), rtol=0.02, atol=0.02)


class Several(nn.Module):
    """Outputs of several kinds, the last of them the input itself."""

    def forward(self, x):
        return {"rest": [x.half(), (x.reshape(10, -1).T, 3)], "same": x}


def test_each_output_has_memory_of_its_own():
    with recorded() as workload:
        inputs = numbers(50)
        torch.cuda._sleep(20_000_000)  # so that all calls are made before the first replay
        found = [workload.model(x) for x in inputs]
        for x, result in zip(inputs, found, strict=True):
            assert torch.equal(result, x)
        assert len({result.data_ptr() for result in found}) == 50


@pytest.mark.parametrize("most", [0, MOST])
def test_outputs_nested_strided_or_handed_through_are_copied(most, monkeypatch):
    for room in (copy_nodes, graph_io_patching):
        monkeypatch.setattr(room, "MOST", most)
    with CudaGraph().applied(Workload(Several(), tuple(numbers()), {})) as workload:
        inputs = [numbers()[0] for _ in range(5)]
        found = [workload.model(x) for x in inputs]
        for x, result in zip(inputs, found, strict=True):
            torch.testing.assert_close(result, Several()(x))
            assert result["same"].data_ptr() != x.data_ptr()


def test_outputs_are_right_on_whatever_stream_comes_next():
    with recorded() as workload:
        streams = [torch.cuda.Stream() for _ in range(3)]
        inputs = numbers(30)
        torch.cuda.synchronize()
        found = []
        for i, x in enumerate(inputs):
            with torch.cuda.stream(streams[i % 3 if i % 2 else 0]):
                found.append(workload.model(x) + 0)
        torch.cuda.synchronize()
        for x, result in zip(inputs, found, strict=True):
            assert torch.equal(result, x)


def test_outputs_made_in_inference_mode_can_be_used_outside():
    with recorded() as workload:
        (x,) = numbers()
        with torch.inference_mode():
            workload.model(x)
        weight = torch.ones(1000, device="cuda", requires_grad=True)
        (workload.model(x) * weight).sum().backward()
        assert torch.equal(weight.grad, x)


def test_memory_of_results_is_given_back():
    with recorded() as workload:
        (x,) = numbers()
        workload.model(x)
        before = torch.cuda.memory_allocated()
        for _ in range(100):
            workload.model(x)
        assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_calls_from_another_current_device_are_right():
    with recorded() as workload:
        inputs = numbers(10)
        with torch.cuda.device(1):
            found = [workload.model(x) for x in inputs]
        for x, result in zip(inputs, found, strict=True):
            assert torch.equal(result, x)
