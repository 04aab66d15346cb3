from __future__ import annotations

import ctypes

import pytest
import torch

from steadytorch.graphs import graph_io_patching
from steadytorch.graphs.graph_io_patching import PointerNode, link, placer
from steadytorch.graphs.pointers import nodes_of, rest

from .kernels import Driver, Graph, Node, adding, float_at, zeroing
from .recording import Recording, around, stand_for_a_gpu


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    stand_for_a_gpu(monkeypatch)


def nowhere(address):
    return None


def test_without_memory_for_proofs_everything_is_copied(monkeypatch):
    found = Recording()
    monkeypatch.setattr(graph_io_patching, "add_copy_nodes", lambda graph, targets: [])

    def refuse(*args, **kwargs):
        raise torch.OutOfMemoryError

    for name in ("clone", "empty"):
        with monkeypatch.context() as without:
            without.setattr(torch.Tensor if name == "clone" else torch, name, refuse)
            linked = found.link(monkeypatch)
        assert linked.outputs == [None]
        assert bool(linked.inputs) is (name == "empty")
    assert found.link(monkeypatch).outputs != [None]


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
    _, (pointer,) = found.link(monkeypatch, nowhere)
    assert pointer is None
    assert [3.0] * 4 in seen
    assert all(len(set(each)) == 1 or each == [2, 3, 4, 5] for each in seen)


def test_small_outputs_and_those_that_share_memory_are_copied_out(monkeypatch):
    found = Recording()
    monkeypatch.setattr(graph_io_patching, "LEAST_BYTES", 17)
    assert found.link(monkeypatch).outputs == [None]
    monkeypatch.setattr(graph_io_patching, "LEAST_BYTES", 16)
    monkeypatch.setattr(graph_io_patching, "cuda_driver", lambda: found.driver)
    twice = link(found.graph, found.graph.replay, [found.x], [found.y, found.y], around(found.y))
    assert twice.outputs == [None, None]


def test_outputs_are_linked_to_the_graph_that_copies_inputs(monkeypatch):
    found = Recording()
    monkeypatch.setattr(graph_io_patching, "is_read_through", lambda *args: False)
    monkeypatch.setattr(
        graph_io_patching, "add_copy_nodes", lambda graph, targets: graph.instantiate() or []
    )
    _, (pointer,) = found.link(monkeypatch)
    assert found.graph.instantiated == 2
    elsewhere = torch.zeros(4)
    assert pointer.point(elsewhere.data_ptr())
    found.graph.replay()
    assert elsewhere.tolist() == [2, 3, 4, 5]


def test_without_the_driver_everything_is_copied(monkeypatch):
    found = Recording()
    monkeypatch.setattr(graph_io_patching, "cuda_driver", lambda: None)
    monkeypatch.setattr(graph_io_patching, "add_copy_nodes", lambda graph, targets: [])
    linked = link(found.graph, found.graph.replay, [found.x], [found.y], around(found.y))
    assert linked == ([], [None])
    assert found.graph.instantiated == 1


def test_a_driver_that_refuses_later_leaves_results_right_or_raises(monkeypatch):
    found = Recording()
    (node,), (pointer,) = found.link(monkeypatch)
    place = placer(pointer, found.y)
    place()
    found.driver.refuses.add("put")
    with pytest.raises(RuntimeError, match="refused to restore an address"):
        place()
    with pytest.raises(RuntimeError, match="refused to restore the input"):
        node.feed(torch.ones(4))
    found.driver.refuses.clear()
    rest(pointer)
    x = torch.ones(4)
    node.feed(x)
    found.graph.replay()
    assert found.y.tolist() == [2] * 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bool])
def test_inputs_without_arithmetic_are_no_reason_not_to_record(monkeypatch, dtype):
    x, y = torch.tensor([1, 0, 1, 1]).to(dtype), torch.zeros(4)

    def read(source, target):
        raw = (ctypes.c_ubyte * x.nbytes).from_address(source[0])
        float_at(target[0], 4)[:] = [raw[i * x.itemsize] for i in range(4)]

    graph = Graph(Node(read, "QQ", [(x.data_ptr(),), (y.data_ptr(),)]))
    driver = Driver(graph)
    monkeypatch.setattr(graph_io_patching, "cuda_driver", lambda: driver)
    (node,), _ = link(graph, graph.replay, [x], [y], around(y))
    assert isinstance(node, PointerNode)


def test_what_lies_in_memory_of_graphs_is_copied_before_a_replay_writes_there(monkeypatch):
    x, y, before = torch.arange(1.0, 5.0), torch.zeros(4), torch.zeros(4)
    found = Recording(x=x)
    found.y = y
    found.graph.nodes = (zeroing(y), adding(before, y), adding(x, y))
    found.kernels = nodes_of(found.driver, 1)
    (node,), _ = found.link(monkeypatch, around(y))
    assert isinstance(node, PointerNode)
    found.graph.replay()
    node.feed(y)
    found.graph.replay()
    assert y.tolist() == [3, 4, 5, 6]
