from __future__ import annotations

import ctypes

import pytest
import torch

from steadytorch.graphs.copy_nodes import CopyNode, DescribedCopy, add_copy_nodes

from .driver import Driver


def opened(driver, target):
    node = CopyNode(driver, target, ctypes.c_void_p())
    assert node.open(1)
    return node


def computed(driver, node, x):
    node.feed(x)
    driver.replay()
    return node.target.clone()


def test_the_description_of_a_copy_is_laid_out_as_the_driver_reads_it():
    offsets = (
        DescribedCopy.source_kind.offset,
        DescribedCopy.source.offset,
        DescribedCopy.target_kind.offset,
    )
    assert offsets == (32, 48, 120)
    assert (
        DescribedCopy.target.offset,
        DescribedCopy.width_bytes.offset,
        ctypes.sizeof(DescribedCopy),
    ) == (136, 176, 200)


def test_each_tensor_is_what_the_replay_computes_with():
    driver, inputs = Driver(), [torch.randn(2, 3) for _ in range(3)]
    node = opened(driver, torch.zeros(2, 3))
    for x in (*inputs, *inputs):
        assert torch.equal(computed(driver, node, x), x)
    assert driver.changes == 6


def test_the_source_is_not_changed_for_a_tensor_at_the_same_address():
    driver, x = Driver(), torch.randn(2, 3)
    node = opened(driver, torch.zeros(2, 3))
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        assert torch.equal(computed(driver, node, x[:]), x)
    assert driver.changes == 1


def test_what_was_written_to_the_static_tensor_itself_stays():
    driver, target = Driver(), torch.zeros(3)
    node = opened(driver, target)
    for value in (1.0, 2.0):
        computed(driver, node, torch.ones(3) * 9)
        target.fill_(value)
        assert computed(driver, node, target).tolist() == [value] * 3


def test_tensors_known_to_be_alike_are_told_apart_by_their_place_and_sign():
    driver, x, y = Driver(), torch.randn(4), torch.randn(4)
    node = opened(driver, torch.zeros(4))
    move = node.mover()
    for given in (x, y, y, torch._neg_view(y), y, node.target, x):
        expected = given.clone()
        if given.data_ptr() != node.source or given.is_neg():
            move(given, given.data_ptr())
        driver.replay()
        assert torch.equal(node.target, expected)


def test_expanded_tensors_are_never_read_as_they_lie():
    driver, target = Driver(), torch.zeros(4, 4)
    node = opened(driver, target)
    for row in (torch.randn(1, 4), torch.randn(1, 4)):
        node.feed(row.expand(4, 4))
        driver.replay()
        assert torch.equal(target, row.expand(4, 4))
    assert driver.changes == 0


def _other_views():
    x = torch.randn(4, 4)
    imaginary = torch.view_as_complex(torch.randn(4, 4, 2)).conj().imag
    return {
        "layout": (x, x.T),
        "type": (x, x.view(torch.int32)),
        "sign": (x, torch._neg_view(x)),
        "conjugate": (x, imaginary),
        "gradient": (x, x.double().requires_grad_()),
        "expanded": (x, x[:1].expand(4, 4)),
    }


@pytest.mark.parametrize("name", _other_views())
def test_tensors_of_other_bytes_are_converted_even_at_the_same_address(name):
    plain, other = _other_views()[name]
    driver = Driver()
    node = opened(driver, torch.zeros(4, 4))
    for x in (plain, other, plain, other, other):
        expected = torch.zeros(4, 4).copy_(x.detach())
        assert torch.equal(computed(driver, node, x), expected)
    assert not node.target.requires_grad


def test_where_the_driver_does_not_take_a_source_the_tensor_is_copied():
    driver, inputs = Driver("point"), [torch.randn(3), torch.randn(3)]
    node = opened(driver, torch.zeros(3))
    for x in (*inputs, *inputs):
        assert torch.equal(computed(driver, node, x), x)


def test_where_a_node_cannot_be_turned_off_nothing_may_be_replayed():
    driver, target = Driver(), torch.zeros(3)
    node = opened(driver, target)
    computed(driver, node, torch.ones(3))
    driver.refuses = ("turn",)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refused to restore the input"):
            node.feed(target)
    assert not CopyNode(driver, target, ctypes.c_void_p()).open(1)


def test_a_closed_node_leaves_the_graph_alone():
    driver, x = Driver(), torch.ones(3)
    node = opened(driver, torch.zeros(3))
    computed(driver, node, x)
    node.close()
    node.feed(x)
    node.feed(torch.ones(3))
    assert driver.changes == 1


class Instantiated:
    """A graph that only allows `instantiate`."""

    def __init__(self) -> None:
        self.times = 0

    def instantiate(self) -> None:
        self.times += 1


@pytest.mark.parametrize("targets", [[], [torch.zeros(2)], [torch.zeros(2)] * 9])
def test_without_tensors_of_a_gpu_there_are_no_nodes(targets):
    graph = Instantiated()
    assert add_copy_nodes(graph, targets) == []
    assert graph.times == 1
