from __future__ import annotations

import pytest
import torch

from steadytorch.transforms import pointers
from steadytorch.transforms.pointers import Kernel, Pointer, kernels_of

from .kernels import COPY, Driver, Graph, Node, adding, packed_add


@pytest.fixture(autouse=True)
def alignment(monkeypatch):
    """Of tensors on the host."""
    monkeypatch.setattr(pointers, "ALIGNMENT", 4)


def made(*nodes):
    graph = Graph(*nodes)
    driver = Driver(graph)
    return graph, driver, kernels_of(driver, graph.raw_cuda_graph())


def test_a_kernel_reads_and_writes_where_it_is_told():
    x, y = torch.arange(4.0), torch.zeros(4)
    graph, driver, kernels = made(adding(x, y))
    other, result = torch.full((4,), 7.0), torch.zeros(4)
    given, written = (Pointer(kernels, 2, each) for each in (x, y))
    assert given.point(other.data_ptr())
    assert written.point(result.data_ptr())
    graph.replay()
    assert result.tolist() == [8] * 4
    assert y.tolist() == [0] * 4
    assert given.point(given.own)
    graph.replay()
    assert result.tolist() == [1, 2, 3, 4]
    assert driver.puts == 3


def test_addresses_within_structures_and_within_tensors_are_found():
    x, y = torch.arange(8.0), torch.zeros(8)
    middle = x[4:]
    node = Node(packed_add, ("QQQ", "i"), [(middle.data_ptr(), y.data_ptr(), 5), (4,)])
    graph, _, kernels = made(node)
    other = torch.arange(8.0) * 10
    assert Pointer(kernels, 2, x).point(other.data_ptr())
    graph.replay()
    assert y.tolist() == [41, 51, 61, 71, 0, 0, 0, 0]


def test_only_kernels_are_looked_at():
    x, y = torch.arange(4.0), torch.zeros(4)
    _, _, kernels = made(adding(x, y, COPY))
    assert kernels == []
    assert not Pointer(kernels, 2, x).is_used


def test_what_no_kernel_uses_is_not_used():
    x, y = torch.arange(4.0), torch.zeros(4)
    _, _, kernels = made(adding(x, y))
    assert not Pointer(kernels, 2, torch.zeros(4)).is_used
    assert Pointer(kernels, 2, y).is_used


@pytest.mark.parametrize("refused", ["cuGraphGetNodes", "cuGraphKernelNodeGetParams_v2"])
def test_where_the_driver_does_not_tell_there_are_no_kernels(refused):
    graph = Graph(adding(torch.zeros(2), torch.zeros(2)))
    driver = Driver(graph)
    driver.refuses.add(refused)
    assert kernels_of(driver, 1) == []


def test_an_address_that_is_not_aligned_is_not_taken(monkeypatch):
    x, y = torch.arange(4.0), torch.zeros(4)
    _, driver, kernels = made(adding(x, y))
    pointer = Pointer(kernels, 2, x)
    monkeypatch.setattr(pointers, "ALIGNMENT", 1 << 62)
    assert not pointer.point(y.data_ptr())
    assert (pointer.address, driver.puts) == (pointer.own, 0)
    assert pointer.point(pointer.own)


def test_after_a_refusal_nobody_knows_where_replays_read():
    x, y = torch.arange(4.0), torch.zeros(4)
    _, driver, kernels = made(adding(x, y))
    pointer = Pointer(kernels, 2, x)
    driver.refuses.add("put")
    assert not pointer.point(y.data_ptr())
    assert pointer.address is None


def test_the_description_of_a_kernel_is_laid_out_as_the_driver_reads_it():
    import ctypes

    described = pointers._Parameters
    offsets = described.grid_x.offset, described.shared_bytes.offset, described.values.offset
    assert offsets == (8, 32, 40)
    assert (described.kernel.offset, ctypes.sizeof(described)) == (56, 72)


def test_values_of_a_kernel_are_copies():
    x, y = torch.arange(4.0), torch.zeros(4)
    graph, _, kernels = made(adding(x, y))
    assert isinstance(kernels[0], Kernel)
    Pointer(kernels, 2, x).point(y.data_ptr())
    graph.instantiate()
    graph.replay()
    assert y.tolist() == [1, 2, 3, 4]
