import pytest

from steadytorch.ledger.ledger import build_ledger
from steadytorch.ledger.repeated_kernels import repeats

from ..traces import synthetic as syn


def matched(*steps):
    """Steps given as lists of (name, grid, length) of kernels one after the other."""
    events = []
    for number, kernels in enumerate(steps):
        at = number * 1_000
        events.append(syn.step(number, at, at + 1_000))
        for name, grid, length in kernels:
            details = {"grid": [grid, 1, 1]}
            events.append(syn.kernel(name, at, at + length, details=details))
            at += length
    read = syn.trace(events)
    return read, repeats(read, build_ledger(read))


def test_each_kernel_is_compared_with_the_same_one_of_other_steps():
    _, found = matched(
        [("gemm", 1, 100), ("gemm", 2, 300)],
        [("gemm", 1, 110), ("gemm", 2, 300)],
        [("gemm", 1, 100), ("gemm", 2, 330)],
    )
    assert found.typical_ns.tolist() == [100, 300] * 3
    assert found.over_ns.tolist() == [0, 0, 10, 0, 0, 30]
    assert found.everywhere.all()


def test_occurrences_within_a_step_are_apart():
    _, found = matched(
        [("gemm", 1, 100), ("gemm", 1, 300)],
        [("gemm", 1, 100), ("gemm", 1, 300)],
        [("gemm", 1, 100), ("gemm", 1, 360)],
    )
    assert found.slower_ns.tolist() == [0, 0, 60]


def test_a_kernel_that_only_one_step_has_is_no_slower_one():
    read, found = matched(
        [("gemm", 1, 100)], [("gemm", 1, 100)], [("gemm", 1, 100), ("odd", 1, 50)]
    )
    assert found.usual_ns.tolist() == [100, 100, 150]
    assert found.slower_ns.tolist() == [0, 0, 0]
    assert found.count.tolist() == [1, 1, 2]
    name, time = found.extra(2)
    assert (read.names[name], time) == ("odd", 50)
    assert found.extra(0) is None
    assert found.slowed(2) is None


def test_the_name_that_lost_most_is_told():
    read, found = matched(
        [("a", 1, 100), ("b", 1, 100)],
        [("a", 1, 100), ("b", 1, 100)],
        [("a", 1, 120), ("b", 1, 190)],
    )
    name, time = found.slowed(2)
    assert (read.names[name], time) == ("b", pytest.approx(90))


def test_steps_without_kernels_have_none():
    _, found = matched([("a", 1, 100)], [], [("a", 1, 100)])
    assert found.count.tolist() == [1, 0, 1]
    assert found.slowed(1) is None
