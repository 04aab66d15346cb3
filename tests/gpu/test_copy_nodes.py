from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.transforms.copy_nodes import MOST
from steadytorch.transforms.cuda_graph import CudaGraph, _Pool, _record
from steadytorch.transforms.static_buffers import static_inputs
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
        graph, found, _ = _record(Weighted(), static, _Pool(0))
        assert len(found) == nodes
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
def test_tensors_of_other_types_and_places_are_converted(change):
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
