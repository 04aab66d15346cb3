"""What a comparison of a graph with the eager step finds, on CPU tensors."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from steadytorch.graphs import checks
from steadytorch.graphs.checks import Snapshot, distance, synchronisations


@pytest.fixture
def modes(monkeypatch):
    found = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 7)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *args: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *args: None)
    monkeypatch.setattr(checks, "free_bytes", lambda: 1 << 30)
    return found


def left(loss=1.0, gradients=(1.0, 2.0), moved=(0.1, 0.2)):
    return torch.tensor(loss), [torch.tensor([value]) for value in gradients], moved


def disagreement(*steps):
    """What a snapshot finds for steps from one state."""
    tensors = [torch.ones(1), torch.ones(1)]
    snapshot = Snapshot(tensors)
    for loss, gradients, moved in steps:
        for tensor, much in zip(tensors, moved, strict=True):
            tensor.add_(much)
        snapshot.taken(loss, gradients)
        snapshot.restore()
    return snapshot.disagreement()


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_equal_steps_agree(modes, monkeypatch, free):
    monkeypatch.setattr(checks, "free_bytes", lambda: free)
    assert disagreement(left(), left(), left()) is None


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (left(loss=1.01), "differ in loss"),
        (left(loss=float("nan")), "differ in loss"),
        (left(gradients=(1.0, 2.1)), "differ in gradients"),
        (left(gradients=(1.0, float("inf"))), "differ in gradients"),
        (left(gradients=(1.0,)), "another number of gradients"),
        (left(moved=(0.1, 0.0)), "differ in update"),
    ],
)
def test_another_step_is_told_by_its_part(modes, other, said):
    found = disagreement(left(), left(), other)
    assert found is not None
    assert said in found
    assert "\n" not in found


def test_what_two_eager_steps_differ_by_is_allowed(modes):
    assert disagreement(left(), left(loss=1.01), left(loss=1.02)) is None
    assert disagreement(left(), left(loss=1.01), left(loss=1.1)) is not None


@pytest.mark.parametrize("others", [True, False])
def test_a_graph_that_draws_other_random_numbers_is_told(modes, monkeypatch, others):
    drawn = iter([0, 1, 1, 2 if others else 1])
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([next(drawn)]))
    found = disagreement(left(), left(), left(loss=1.01))
    assert found is not None
    assert ("draws other random numbers" in found) is others


def test_a_snapshot_puts_tensors_and_random_numbers_back(modes):
    tensors = [torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.complex64)]
    counter = torch.zeros((), dtype=torch.int64)
    snapshot = Snapshot([*tensors, counter])
    drawn = torch.rand(3)
    with torch.no_grad():
        for tensor in (*tensors, counter):
            tensor.add_(2)
    snapshot.restore()
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [1, 1]]
    assert counter == 0
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize(
    ("found", "right", "apart"),
    [
        ([3.0], [3.0], 0.0),
        ([3.0], [4.0], 0.25),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], float("inf")),
        ([float("inf"), 3.0], [float("inf"), 4.0], 0.25),
        ([float("nan"), 3.0], [float("nan"), 3.0], 0.0),
        ([1j], [2j], 0.5),
    ],
)
def test_distances(found, right, apart):
    assert distance([torch.tensor(found)], [torch.tensor(right)]) == pytest.approx(apart)


@pytest.mark.parametrize(("found", "right"), [(float("nan"), 1.0), (float("inf"), 1.0)])
def test_a_value_that_is_not_finite_in_one_alone_is_a_difference(found, right):
    assert not distance([torch.tensor([found])], [torch.tensor([right])]) <= 1.0


def wait():
    with synchronisations() as found:
        warnings.warn("called a synchronizing CUDA operation (Triggered", stacklevel=1)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        warnings.warn("the step's own", DeprecationWarning, stacklevel=1)
    return found


def test_calls_that_wait_are_told_with_their_line_and_others_are_passed_on(modes):
    with pytest.warns(DeprecationWarning, match="the step's own"):
        found = wait()
    assert len(found) == 1
    assert found[0].startswith("test_checks.py:")
    assert 'warnings.warn("called' in found[0]
    assert found[0].endswith("keep the value on the GPU, and read it outside of the step")
    assert modes == ["warn", 7]


def test_calls_of_other_threads_that_wait_are_not_the_steps(modes):
    said = "called a synchronizing CUDA operation (Triggered"
    with synchronisations() as found:
        thread = threading.Thread(target=warnings.warn, args=(said,))
        thread.start()
        thread.join()
    assert not found


def test_the_mode_is_put_back_where_the_step_raises(modes):
    with pytest.raises(ZeroDivisionError), synchronisations():
        raise ZeroDivisionError
    assert modes == ["warn", 7]


def test_unwatched_steps_change_no_mode(modes):
    with synchronisations(False) as found:
        pass
    assert not found
    assert not modes
