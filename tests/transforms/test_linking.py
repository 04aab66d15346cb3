from __future__ import annotations

import ctypes

import pytest
import torch

from steadytorch.transforms import linking, pointers
from steadytorch.transforms.linking import PointerNode, link, placer
from steadytorch.transforms.pointers import Pointer, nodes_of, rest
from steadytorch.transforms.proofs import is_read_through, writers_of

from .kernels import COPY, SET, Driver, Graph, Node, adding, float_at, zeroing


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    """Tensors of the host stand for those of a GPU, and small ones for large ones."""
    monkeypatch.setattr(pointers, "ALIGNMENT", 4)
    monkeypatch.setattr(linking, "LEAST_BYTES", 16)
    monkeypatch.setattr(linking, "is_dense", lambda tensor: tensor.is_contiguous())


def nowhere(address):
    return None


def around(*tensors):
    """Memory of the graph's own: these tensors."""
    ranges = [range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
    return lambda address: next((each for each in ranges if address in each), None)


class Recording:
    """`y = x + 1`, and what else is asked for, on the host."""

    def __init__(self, *others, kind=0, x=None):
        self.x = torch.arange(1.0, 5.0) if x is None else x
        self.y = torch.zeros(4)
        self.graph = Graph(adding(self.x, self.y, kind), *others)
        self.driver = Driver(self.graph)
        self.kernels = nodes_of(self.driver, 1)

    def read(self, outputs=None):
        pointer = Pointer(self.kernels, 2, self.x)
        outputs = [self.y] if outputs is None else outputs
        return is_read_through(pointer, self.x, self.graph.replay, outputs)

    def written(self, *others):
        def pointer(static, kernels):
            return Pointer(kernels, 2, static)

        outputs = [self.y, *others]
        return writers_of(self.y, self.kernels, pointer, self.graph.replay, outputs, around(self.y))

    def link(self, monkeypatch, own=None):
        monkeypatch.setattr(linking, "cuda_driver", lambda: self.driver)
        own = around(self.y) if own is None else own
        return link(self.graph, self.graph.replay, [self.x], [self.y], own)


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
    """First, too: with other inputs not all of that may be written over."""
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
    """Were it left behind, a sum with bytes that make a tiny number would pass for right."""
    x, y = torch.arange(1.0, 5.0), torch.zeros(4)
    found = Recording(x=x)
    found.graph.nodes = (adding(x, y, kind), summing(x, y))
    found.y, found.kernels = y, nodes_of(found.driver, 1)
    assert len(found.written()) == (0 if kind == COPY else 2)


def test_without_memory_for_proofs_everything_is_copied(monkeypatch):
    found = Recording()
    monkeypatch.setattr(linking, "add_copy_nodes", lambda graph, targets: [])

    def refuse(*args, **kwargs):
        raise torch.OutOfMemoryError

    for name in ("clone", "empty"):
        with monkeypatch.context() as without:
            without.setattr(torch.Tensor if name == "clone" else torch, name, refuse)
            linked = found.link(monkeypatch)
        assert linked.outputs == [None]
        assert bool(linked.inputs) is (name == "empty")
    assert found.link(monkeypatch).outputs != [None]


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
    monkeypatch.setattr(linking, "LEAST_BYTES", 17)
    assert found.link(monkeypatch).outputs == [None]
    monkeypatch.setattr(linking, "LEAST_BYTES", 16)
    monkeypatch.setattr(linking, "cuda_driver", lambda: found.driver)
    twice = link(found.graph, found.graph.replay, [found.x], [found.y, found.y], around(found.y))
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
    linked = link(found.graph, found.graph.replay, [found.x], [found.y], around(found.y))
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


# -- what holds for the inputs of a proof, and not for others ----------------------------------


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
    monkeypatch.setattr(linking, "cuda_driver", lambda: driver)
    monkeypatch.setattr(linking, "add_copy_nodes", lambda graph, targets: [])
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


# -- what must not happen during a proof -------------------------------------------------------


def indices(x, found, y, seen):
    """Nodes for `found = 3, 2, 1, 0` and `y = x[found]`; `seen` gets what is taken for an index."""

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
    """A kernel that begins at the end of what lay there, and goes back: it flips, say."""
    segment = torch.zeros(1 << 16)
    y = torch.frombuffer(segment.numpy(), dtype=torch.float32, count=4, offset=(1 << 18) - 32)
    x, written = torch.arange(1.0, 5.0), []

    def back(end):
        written.append(end[0] - ((1 << 18) - 32))

    graph = Graph(Node(back, "Q", [(y.data_ptr(),)]), adding(x, y))
    driver, own = Driver(graph), range(segment.data_ptr(), segment.data_ptr() + segment.nbytes)
    monkeypatch.setattr(linking, "cuda_driver", lambda: driver)
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
    monkeypatch.setattr(linking, "LEAST_BYTES", least)
    monkeypatch.setattr(linking, "add_copy_nodes", lambda graph, targets: graph.instantiate() or [])
    put = found.driver.cuGraphExecKernelNodeSetParams_v2

    def sometimes(*given):
        return 1 if found.driver.puts >= allowed else put(*given)

    found.driver.cuGraphExecKernelNodeSetParams_v2 = sometimes
    linked = found.link(monkeypatch)
    if linked.inputs:
        linked.inputs[0].feed(found.x)
    found.graph.replay()
    assert found.y.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bool])
def test_inputs_without_arithmetic_are_no_reason_not_to_record(monkeypatch, dtype):
    x, y = torch.tensor([1, 0, 1, 1]).to(dtype), torch.zeros(4)

    def read(source, target):
        raw = (ctypes.c_ubyte * x.nbytes).from_address(source[0])
        float_at(target[0], 4)[:] = [raw[i * x.itemsize] for i in range(4)]

    graph = Graph(Node(read, "QQ", [(x.data_ptr(),), (y.data_ptr(),)]))
    driver = Driver(graph)
    monkeypatch.setattr(linking, "cuda_driver", lambda: driver)
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
