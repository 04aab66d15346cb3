from __future__ import annotations

import ctypes

import pytest
import torch

from steadytorch.graphs import graph_io_patching
from steadytorch.graphs.graph_io_patching import link
from steadytorch.graphs.pointers import nodes_of

from .kernels import COPY, SET, Driver, Graph, Node, adding, float_at, zeroing
from .recording import Recording, around, stand_for_a_gpu


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    stand_for_a_gpu(monkeypatch)


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
    assert not found.read([found.y])  # other inputs may show what these do not
    assert found.x.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("last", [False, True])
def test_what_another_node_writes_has_to_be_copied_out(last):
    """Must be included, because other inputs may not overwrite all of it."""
    found = Recording()
    nodes = (adding(found.x, found.y), zeroing(found.y[:1], SET))
    found.graph.nodes = nodes if last else nodes[::-1]
    found.kernels = nodes_of(found.driver, 1)
    assert not found.written()


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
        self.y, self.z = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4), z
        self.graph.nodes = (adding(self.x, memory), adding(memory, z), adding(z[:4], self.y))
        self.kernels = nodes_of(self.driver, 1)


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
    found.kernels = nodes_of(found.driver, 1)
    assert not found.written()
    found.graph.nodes = (adding(found.x, found.y), summing(found.x, found.y))
    found.kernels = nodes_of(found.driver, 1)
    assert found.written()


@pytest.mark.parametrize("kind", [0, COPY])
def test_what_is_added_to_follows_with_what_was_there(kind):
    """If left out, adding bytes that read as a tiny number would look correct."""
    x, y = torch.arange(1.0, 5.0), torch.zeros(4)
    found = Recording(x=x)
    found.graph.nodes = (adding(x, y, kind), summing(x, y))
    found.y, found.kernels = y, nodes_of(found.driver, 1)
    assert len(found.written()) == (0 if kind == COPY else 2)


def test_an_output_that_a_later_kernel_reads_follows_for_both():
    z = torch.zeros(4)
    found = Recording()
    found.graph.nodes = (*found.graph.nodes, adding(found.y, z))
    found.kernels = nodes_of(found.driver, 1)
    assert found.written(z)
    found.graph.nodes = (found.graph.nodes[0], adding(found.y, z, COPY))
    found.kernels = nodes_of(found.driver, 1)
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


# -- kernels that behave differently for other inputs --------------------------------------------


def scattering(x, places, y):
    """The node for `y[places] = x`."""

    def scatter(source, where, target, number):
        for i, at in enumerate(int64_at(where[0], number[0])):
            float_at(target[0], 4)[at] = float_at(source[0], number[0])[i]

    values = [(each.data_ptr(),) for each in (x, places, y)]
    return Node(scatter, "QQQi", [*values, (x.numel(),)])


def int64_at(address, count):
    return (ctypes.c_int64 * count).from_address(address)


def picking(mask, x, y):
    """The node for `y = 0 where the mask is set, else x`."""

    def pick(where, source, target):
        for i, is_set in enumerate(float_at(where[0], 4)):
            float_at(target[0], 4)[i] = 0 if is_set else float_at(source[0], 4)[i]

    return Node(pick, "QQQ", [(each.data_ptr(),) for each in (mask, x, y)])


def linked_output(monkeypatch, nodes, outputs, inputs=()):
    graph = Graph(*nodes)
    driver = Driver(graph)
    monkeypatch.setattr(graph_io_patching, "cuda_driver", lambda: driver)
    monkeypatch.setattr(graph_io_patching, "add_copy_nodes", lambda graph, targets: [])
    linked = link(graph, graph.replay, list(inputs), list(outputs), around(*outputs))
    return graph, linked.outputs[0]


@pytest.mark.parametrize("place", [scattering, None], ids=["scatter", "pick"])
def test_what_fills_an_output_follows_though_these_inputs_have_it_written_over(monkeypatch, place):
    x, places, y = torch.arange(1.0, 5.0), torch.arange(4), torch.zeros(4)
    mask = torch.ones(4)
    nodes = [zeroing(y), scattering(x, places, y)]
    if place is None:
        nodes = [adding(x, y), picking(mask, y, y)]
    graph, pointer = linked_output(monkeypatch, nodes, [y])
    mask.zero_()
    places.copy_(torch.tensor([0, 0, 2, 2]))
    new = torch.full((4,), 99.0)
    assert pointer.point(new.data_ptr())
    graph.replay()
    assert new.tolist() == ([2, 3, 4, 5] if place is None else [2, 0, 4, 0])


def test_what_reads_from_what_lay_there_before_stays_though_these_inputs_hide_it(monkeypatch):
    x, y, mask = torch.arange(1.0, 5.0), torch.zeros(4), torch.ones(4)
    old, seen, hidden = y, torch.zeros(4), torch.zeros(4)
    nodes = [adding(x, old), adding(old, seen), picking(mask, old, hidden), adding(seen, y)]
    graph, pointer = linked_output(monkeypatch, nodes, [y, seen, hidden])
    mask.zero_()
    new = torch.full((4,), 99.0)
    assert pointer.point(new.data_ptr())
    graph.replay()
    assert (new.tolist(), hidden.tolist()) == ([4, 5, 6, 7], [2, 3, 4, 5])


@pytest.mark.parametrize("count", [16, 17])
def test_where_too_many_kernels_use_an_output_it_has_to_be_copied_out(monkeypatch, count):
    x, y = torch.arange(1.0, 5.0), torch.zeros(4)
    nodes = [zeroing(y), *[adding(x, y) for _ in range(count - 1)]]
    _, pointer = linked_output(monkeypatch, nodes, [y])
    assert (pointer is None) is (count > 16)


def test_a_part_of_what_kernels_write_to_has_to_be_copied_out(monkeypatch):
    x, places, memory = torch.arange(1.0, 5.0), torch.arange(4), torch.zeros(8)
    _, pointer = linked_output(monkeypatch, [scattering(x, places, memory)], [memory[:4]])
    assert pointer is None
    _, pointer = linked_output(monkeypatch, [scattering(x, places, memory[:4].clone())], [memory])
    assert pointer is None


# -- validation must be harmless -----------------------------------------------------------------


def indices(x, found, y, seen):
    """Nodes for `found = 3, 2, 1, 0` and `y = x[found]`; `seen` collects the indices used."""

    def write(target):
        int64_at(target[0], 4)[:] = [3, 2, 1, 0]

    def gather(source, where, target):
        for i, at in enumerate(int64_at(where[0], 4)):
            seen.add(at)
            float_at(target[0], 4)[i] = float_at(source[0], 4)[at % 4]

    values = [(each.data_ptr(),) for each in (x, found, y)]
    return Node(write, "Q", [values[1]]), Node(gather, "QQQ", values)


def test_no_kernel_meets_an_index_that_is_none(monkeypatch):
    x, seen = torch.arange(4.0), set()
    found, y = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    _, pointer = linked_output(monkeypatch, indices(x, found, y, seen), [found, y])
    assert pointer is None
    assert seen == {0, 1, 2, 3}


def test_no_kernel_meets_an_index_that_is_none_in_memory_of_indices_before(monkeypatch):
    x, z, seen = torch.arange(4.0), torch.zeros(4), set()
    y = torch.zeros(8)
    before = y.view(torch.int64)
    nodes = [*indices(x, before, z, seen), adding(z, y[:4]), adding(z, y[4:])]
    _, pointer = linked_output(monkeypatch, nodes, [y])
    assert pointer is not None
    assert seen == {0, 1, 2, 3}


def test_what_is_tried_writes_to_no_memory_of_others(monkeypatch):
    """A kernel that starts at the end of the old tensor and runs backwards, such as a flip."""
    segment = torch.zeros(1 << 16)
    y = torch.frombuffer(segment.numpy(), dtype=torch.float32, count=4, offset=(1 << 18) - 32)
    x, written = torch.arange(1.0, 5.0), []

    def back(end):
        written.append(end[0] - ((1 << 18) - 32))

    graph = Graph(Node(back, "Q", [(y.data_ptr(),)]), adding(x, y))
    driver, own = Driver(graph), range(segment.data_ptr(), segment.data_ptr() + segment.nbytes)
    monkeypatch.setattr(graph_io_patching, "cuda_driver", lambda: driver)
    taken = []
    empty = torch.empty

    def noted(*args, **kwargs):
        taken.append(empty(*args, **kwargs))
        return taken[-1]

    monkeypatch.setattr(torch, "empty", noted)
    link(graph, graph.replay, [], [y], lambda address: own if address in own else None)
    (memory,) = taken
    there = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
    assert len(set(written)) == 2
    assert all(start in own or start in there for start in written)


@pytest.mark.parametrize("least", [1, 1 << 20], ids=["of both", "of inputs"])
@pytest.mark.parametrize("allowed", range(12))
def test_a_driver_that_refuses_during_proofs_leaves_a_graph_that_is_right(
    monkeypatch, allowed, least
):
    found = Recording()
    monkeypatch.setattr(graph_io_patching, "LEAST_BYTES", least)
    monkeypatch.setattr(
        graph_io_patching, "add_copy_nodes", lambda graph, targets: graph.instantiate() or []
    )
    put = found.driver.cuGraphExecKernelNodeSetParams_v2

    def sometimes(*given):
        return 1 if found.driver.puts >= allowed else put(*given)

    found.driver.cuGraphExecKernelNodeSetParams_v2 = sometimes
    linked = found.link(monkeypatch)
    if linked.inputs:
        linked.inputs[0].feed(found.x)
    found.graph.replay()
    assert found.y.tolist() == [2, 3, 4, 5]
