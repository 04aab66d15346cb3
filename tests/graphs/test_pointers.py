from __future__ import annotations

import pytest
import torch

from steadytorch.graphs import pointers
from steadytorch.graphs.pointers import Kernel, Pointer, nodes_of

from .kernels import COPY, GRAPH, HOST, SET, Driver, Graph, Node, adding, packed_add, zeroing


@pytest.fixture(autouse=True)
def alignment(monkeypatch):
    """Of tensors on the host."""
    monkeypatch.setattr(pointers, "ALIGNMENT", 4)


def made(*nodes):
    graph = Graph(*nodes)
    driver = Driver(graph)
    return graph, driver, nodes_of(driver, graph.raw_cuda_graph())


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


@pytest.mark.parametrize("part", [slice(0, 1), slice(3, 4)])
def test_what_other_nodes_use_is_not_pointed_at(part):
    x, y, z = torch.arange(4.0), torch.zeros(4), torch.zeros(4)
    beside = torch.zeros(12)
    _, _, nodes = made(adding(x, y), adding(x[part], z, COPY), zeroing(beside[4:8], SET))
    assert len(nodes) == 3
    assert not Pointer(nodes, 2, x).is_used
    assert Pointer(nodes, 2, y).is_used
    assert Pointer(nodes[:1], 2, x).is_used
    assert [nodes[2].uses(e.data_ptr(), 16) for e in (beside[:4], beside[4:8], beside[8:])] == [
        False,
        True,
        False,
    ]


def test_all_rows_of_a_copy_are_known():
    x = torch.zeros(4, 8)
    node = adding(x[0, :4], torch.zeros(4), COPY)
    given = node.describe_copy

    def rows(into):
        given(into)
        into.height, into.source_pitch, into.source_y = 3, 32, 1

    node.describe_copy = rows
    _, _, (found,) = made(node)
    assert found.uses(x[3].data_ptr(), 4)
    assert not found.uses(x[3, 4:].data_ptr(), 16)


def test_nothing_is_known_of_graphs_within_graphs_and_of_old_drivers(monkeypatch):
    x, y = torch.arange(4.0), torch.zeros(4)
    assert made(adding(x, y), Node(print, "Q", [(0,)], GRAPH))[2] == []
    assert len(made(adding(x, y), Node(print, "Q", [(0,)], HOST))[2]) == 1
    monkeypatch.delattr(Driver, "cuFuncGetParamInfo")
    assert made(adding(x, y))[2] == []


def test_what_no_kernel_uses_is_not_used():
    x, y = torch.arange(4.0), torch.zeros(4)
    _, _, kernels = made(adding(x, y))
    assert not Pointer(kernels, 2, torch.zeros(4)).is_used
    assert Pointer(kernels, 2, y).is_used


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        ("cuGraphGetNodes", 0),
        ("cuGraphKernelNodeGetParams_v2", 0),
        ("cuGraphMemcpyNodeGetParams", COPY),
    ],
)
def test_where_the_driver_does_not_tell_nothing_is_known(refused, kind):
    graph = Graph(adding(torch.zeros(2), torch.zeros(2), kind))
    driver = Driver(graph)
    driver.refuses.add(refused)
    assert nodes_of(driver, 1) == []


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

    described = pointers.DescribedKernel
    offsets = described.grid_x.offset, described.shared_bytes.offset, described.values.offset
    assert offsets == (8, 32, 40)
    assert (described.kernel.offset, ctypes.sizeof(described)) == (56, 72)
    described = pointers.DescribedMemset
    assert (described.width.offset, ctypes.sizeof(described)) == (24, 40)


def test_values_of_a_kernel_are_copies():
    x, y = torch.arange(4.0), torch.zeros(4)
    graph, _, kernels = made(adding(x, y))
    assert isinstance(kernels[0], Kernel)
    Pointer(kernels, 2, x).point(y.data_ptr())
    graph.instantiate()
    graph.replay()
    assert y.tolist() == [1, 2, 3, 4]
