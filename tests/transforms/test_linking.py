from __future__ import annotations

import pytest
import torch

from steadytorch.transforms import linking, pointers
from steadytorch.transforms.linking import (
    PointerNode,
    is_read_through,
    is_written_through,
    link,
    placer,
    rest,
)
from steadytorch.transforms.pointers import Pointer, kernels_of

from .kernels import COPY, Driver, Graph, Node, adding, float_at


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    """Tensors of the host stand for those of a GPU, and small ones for large ones."""
    monkeypatch.setattr(pointers, "ALIGNMENT", 4)
    monkeypatch.setattr(linking, "LEAST_BYTES", 16)
    monkeypatch.setattr(linking, "is_dense", lambda tensor: tensor.is_contiguous())


class Recording:
    """`y = x + 1`, and what else is asked for, on the host."""

    def __init__(self, *others, kind=0, x=None):
        self.x = torch.arange(1.0, 5.0) if x is None else x
        self.y = torch.zeros(4)
        self.graph = Graph(adding(self.x, self.y, kind), *others)
        self.driver = Driver(self.graph)
        self.kernels = kernels_of(self.driver, 1)

    def read(self, outputs=None):
        pointer = Pointer(self.kernels, 2, self.x)
        outputs = [self.y] if outputs is None else outputs
        return is_read_through(pointer, self.x, self.graph.replay, outputs)

    def written(self, *others):
        pointer = Pointer(self.kernels, 2, self.y)
        return is_written_through(pointer, self.y, self.graph.replay, [self.y, *others])

    def link(self, monkeypatch, is_own=lambda tensor: True):
        monkeypatch.setattr(linking, "cuda_driver", lambda: self.driver)
        return link(self.graph, self.graph.replay, [self.x], [self.y], is_own)


def test_what_kernels_alone_use_needs_no_copy_and_is_as_before_after_the_proof():
    found = Recording()
    assert found.read()
    assert found.written()
    assert found.x.tolist() == [1, 2, 3, 4]
    assert found.y.tolist() == [2, 3, 4, 5]


def test_what_another_node_reads_has_to_be_copied():
    x, z = torch.arange(1.0, 5.0), torch.zeros(4)
    found = Recording(adding(x, z, COPY), x=x)
    assert not found.read([found.y, z])
    assert found.read([found.y])
    assert found.x.tolist() == [1, 2, 3, 4]


def test_what_another_node_writes_has_to_be_copied_out():
    def zero(address, count):
        float_at(address[0], count[0])[:] = [0.0] * count[0]

    y = torch.zeros(4)
    before = Node(zero, "Qi", [(y.data_ptr(),), (1,)], COPY)
    found = Recording()
    found.graph.nodes = (before, adding(found.x, y))
    found.y, found.kernels = y, kernels_of(found.driver, 1)
    assert not found.written()


def test_an_output_that_a_later_kernel_reads_follows_for_both():
    z = torch.zeros(4)
    found = Recording()
    found.graph.nodes = (*found.graph.nodes, adding(found.y, z))
    found.kernels = kernels_of(found.driver, 1)
    assert found.written(z)
    found.graph.nodes = (found.graph.nodes[0], adding(found.y, z, COPY))
    found.kernels = kernels_of(found.driver, 1)
    assert not found.written(z)


def test_an_input_that_is_written_to_has_to_be_copied():
    x = torch.arange(1.0, 5.0)
    assert not Recording(adding(x, x), x=x).read()


def test_where_all_integers_are_alike_nothing_can_be_told():
    x = torch.ones(4, dtype=torch.int32)
    found = Recording(x=x)
    assert not found.read([found.y])


def test_where_replays_differ_nothing_can_be_told():
    count = []

    def counts(address):
        count.append(1)
        float_at(address[0], 1)[0] = len(count)

    z = torch.zeros(1)
    found = Recording(Node(counts, "Q", [(z.data_ptr(),)]))
    assert not found.read([found.y, z])


def test_a_linked_graph_reads_from_and_writes_to_the_callers_memory(monkeypatch):
    found = Recording()
    linked = found.link(monkeypatch)
    (node,), (pointer,) = linked
    assert isinstance(node, PointerNode)
    place = placer(pointer, found.y)
    kept = []
    for value in (7.0, 8.0):
        x = torch.full((4,), value)
        node.feed(x)
        kept.append(place())
        found.graph.replay()
    assert [each.tolist() for each in kept] == [[8] * 4, [9] * 4]
    assert found.x.tolist() == [1, 2, 3, 4]
    rest(pointer)
    node.feed(found.x)
    found.graph.replay()
    assert found.y.tolist() == [2, 3, 4, 5]


def test_tensors_of_another_type_are_copied_to_the_static_one(monkeypatch):
    found = Recording()
    (node,), _ = found.link(monkeypatch)
    for x in (torch.full((4,), 7.0), torch.full((4,), 8.0, dtype=torch.float64)):
        node.feed(x)
        found.graph.replay()
        assert found.y.tolist() == (x + 1).tolist()
    assert found.x.tolist() == [8] * 4


def test_memory_of_others_is_never_written_over_for_a_proof(monkeypatch):
    found = Recording()
    found.y.fill_(3)
    seen = []
    replay = found.graph.replay
    found.graph.replay = lambda: (seen.append(found.y.tolist()), replay())
    _, (pointer,) = found.link(monkeypatch, is_own=lambda tensor: False)
    assert pointer is None
    assert [3.0] * 4 in seen
    assert all(len(set(each)) == 1 or each == [2, 3, 4, 5] for each in seen)


def test_small_outputs_and_those_that_share_memory_are_copied_out(monkeypatch):
    found = Recording()
    monkeypatch.setattr(linking, "LEAST_BYTES", 17)
    assert found.link(monkeypatch).outputs == [None]
    monkeypatch.setattr(linking, "LEAST_BYTES", 16)
    monkeypatch.setattr(linking, "cuda_driver", lambda: found.driver)
    twice = link(found.graph, found.graph.replay, [found.x], [found.y, found.y], lambda t: True)
    assert twice.outputs == [None, None]


def test_without_the_driver_everything_is_copied(monkeypatch):
    found = Recording()
    monkeypatch.setattr(linking, "cuda_driver", lambda: None)
    monkeypatch.setattr(linking, "add_copy_nodes", lambda graph, targets: [])
    linked = link(found.graph, found.graph.replay, [found.x], [found.y], lambda tensor: True)
    assert linked == ([], [None])
    assert found.graph.instantiated == 1


def test_a_driver_that_refuses_later_leaves_results_right_or_raises(monkeypatch):
    found = Recording()
    (node,), (pointer,) = found.link(monkeypatch)
    place = placer(pointer, found.y)
    place()
    found.driver.refuses.add("put")
    with pytest.raises(RuntimeError, match="own output back"):
        place()
    with pytest.raises(RuntimeError, match="own input back"):
        node.feed(torch.ones(4))
    found.driver.refuses.clear()
    rest(pointer)
    x = torch.ones(4)
    node.feed(x)
    found.graph.replay()
    assert found.y.tolist() == [2] * 4
