from __future__ import annotations

import pytest
import torch

from steadytorch.transforms import linking, pointers
from steadytorch.transforms.linking import (
    PointerNode,
    is_read_through,
    link,
    placer,
    rest,
    writers_of,
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

    def written(self, *others, room=1 << 12):
        def pointer(static, kernels):
            return Pointer(kernels, 2, static)

        outputs = [self.y, *others]
        return writers_of(self.y, self.kernels, pointer, self.graph.replay, outputs, room)

    def link(self, monkeypatch, room=1 << 12):
        monkeypatch.setattr(linking, "cuda_driver", lambda: self.driver)
        return link(self.graph, self.graph.replay, [self.x], [self.y], lambda tensor: room)


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


@pytest.mark.parametrize("last", [False, True])
def test_what_another_node_writes_last_has_to_be_copied_out(last):
    def zero(address, count):
        float_at(address[0], count[0])[:] = [0.0] * count[0]

    y = torch.zeros(4)
    other = Node(zero, "Qi", [(y.data_ptr(),), (1,)], COPY)
    found = Recording()
    nodes = (adding(found.x, y), other)
    found.graph.nodes = nodes if last else nodes[::-1]
    found.y, found.kernels = y, kernels_of(found.driver, 1)
    assert bool(found.written()) is not last


def summing(x, y, count=4):
    """The node for `y += x`."""

    def add(source, target, number):
        for i, value in enumerate(float_at(source[0], number[0])):
            float_at(target[0], number[0])[i] += value

    return Node(add, "QQi", [(x.data_ptr(),), (y.data_ptr(),), (count,)])


class Reused(Recording):
    """`y = x[:4] + 2`, where `x + 1` lay in eight numbers before of which `y` takes half."""

    def __init__(self):
        super().__init__(x=torch.arange(1.0, 9.0))
        memory, z = torch.zeros(8), torch.zeros(8)
        self.y, self.z = memory[:4], z
        self.graph.nodes = (adding(self.x, memory), adding(memory, z), adding(z[:4], self.y))
        self.kernels = kernels_of(self.driver, 1)


def test_kernels_that_use_what_lay_there_before_keep_it(monkeypatch):
    found = Reused()
    (_, (pointer,)) = found.link(monkeypatch)
    memory = torch.full((16,), 99.0)
    before = found.driver.puts
    assert pointer.point(memory[4:8].data_ptr())
    assert found.driver.puts == before + 1
    found.graph.replay()
    assert memory[4:8].tolist() == [4, 5, 6, 7]
    assert set(memory[:4].tolist() + memory[8:].tolist()) == {99}


def test_an_output_whose_kernels_write_past_its_end_has_to_be_copied_out():
    found = Recording()
    memory = torch.zeros(8)
    found.y = memory[:4]
    found.graph.nodes = (adding(torch.arange(8.0), memory), summing(found.x, found.y))
    found.kernels = kernels_of(found.driver, 1)
    assert not found.written()
    found.graph.nodes = (adding(found.x, found.y), summing(found.x, found.y))
    found.kernels = kernels_of(found.driver, 1)
    assert found.written()


@pytest.mark.parametrize("kind", [0, COPY])
def test_what_is_added_to_follows_with_what_was_there(kind):
    """Were it left behind, a sum with bytes that make a tiny number would pass for right."""
    x, y = torch.arange(1.0, 5.0), torch.zeros(4)
    found = Recording(x=x)
    found.graph.nodes = (adding(x, y, kind), summing(x, y))
    found.y, found.kernels = y, kernels_of(found.driver, 1)
    assert len(found.written()) == (0 if kind == COPY else 2)


def test_without_memory_to_try_it_the_output_is_copied_out(monkeypatch):
    found = Recording()

    def refuse(*args, **kwargs):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as without:
        without.setattr(torch, "empty", refuse)
        assert not found.written()
    assert found.written()


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
    _, (pointer,) = found.link(monkeypatch, room=0)
    assert pointer is None
    assert [3.0] * 4 in seen
    assert all(len(set(each)) == 1 or each == [2, 3, 4, 5] for each in seen)


def test_small_outputs_and_those_that_share_memory_are_copied_out(monkeypatch):
    found = Recording()
    monkeypatch.setattr(linking, "LEAST_BYTES", 17)
    assert found.link(monkeypatch).outputs == [None]
    monkeypatch.setattr(linking, "LEAST_BYTES", 16)
    monkeypatch.setattr(linking, "cuda_driver", lambda: found.driver)
    twice = link(found.graph, found.graph.replay, [found.x], [found.y, found.y], lambda t: 99)
    assert twice.outputs == [None, None]


def test_outputs_are_linked_to_the_graph_that_copies_inputs(monkeypatch):
    found = Recording()
    monkeypatch.setattr(linking, "is_read_through", lambda *args: False)
    monkeypatch.setattr(linking, "add_copy_nodes", lambda graph, targets: graph.instantiate() or [])
    _, (pointer,) = found.link(monkeypatch)
    assert found.graph.instantiated == 2
    elsewhere = torch.zeros(4)
    assert pointer.point(elsewhere.data_ptr())
    found.graph.replay()
    assert elsewhere.tolist() == [2, 3, 4, 5]


def test_without_the_driver_everything_is_copied(monkeypatch):
    found = Recording()
    monkeypatch.setattr(linking, "cuda_driver", lambda: None)
    monkeypatch.setattr(linking, "add_copy_nodes", lambda graph, targets: [])
    linked = link(found.graph, found.graph.replay, [found.x], [found.y], lambda tensor: 99)
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
