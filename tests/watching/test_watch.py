from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import steadytorch as steady
from steadytorch.errors import UsageError
from steadytorch.results.saved import decode, to_json


def train(steps=8):
    model = nn.Linear(4, 2)
    chosen = torch.optim.SGD(model.parameters(), 0.1)
    for x in DataLoader(torch.randn(2 * steps, 4), 2):
        model(x).sum().backward()
        chosen.step()


def watched_until(seen, error):
    with seen:
        train()
        raise error


def test_a_block_is_watched():
    with steady.watch() as seen:
        train()
    result = seen.result
    assert result.unit == "optimizer steps"
    assert len(result.measured.samples_ns) == 7
    assert result.overhead_share > 0
    sums = [sum(step) for step in zip(*result.slices_ns.values(), strict=True)]
    assert sums == list(result.measured.samples_ns)
    assert sum(result.variance_shares.values()) == pytest.approx(1)
    assert "optimizer steps" in seen._repr_html_()
    saved = decode("x", to_json(result, "watch", result.environment), "run")
    assert saved.result == result


def test_a_loop_is_watched_by_its_iterations():
    total = 0
    seen = steady.watch(range(12))
    assert len(seen) == 12
    for each in seen:
        total += each
    assert total == 66
    assert seen.result.unit == "iterations"
    assert len(seen.result.measured.samples_ns) == 12


def test_a_loop_may_break_and_raise():
    seen = steady.watch(range(100))
    for each in seen:
        if each == 5:
            break
    del each
    assert len(seen.result.measured.samples_ns) == 5
    failing = steady.watch()
    with pytest.raises(ValueError, match="no"):
        watched_until(failing, ValueError("no"))
    assert failing.result.failed == "ValueError: no"
    assert len(failing.result.measured.samples_ns) == 7


def test_an_interrupted_cell_keeps_its_steps():
    seen = steady.watch()
    with pytest.raises(KeyboardInterrupt):
        watched_until(seen, KeyboardInterrupt())
    assert seen.result.interrupted
    assert seen.result.failed is None


def test_one_watch_at_a_time():
    with steady.watch() as seen:
        with pytest.raises(UsageError, match="a watch is active"):
            steady.watch().__enter__()
        with pytest.raises(UsageError, match="once the watched code has ended"):
            _ = seen.result
    assert seen.result.measured is None


def test_a_watch_is_true_whatever_its_length():
    assert steady.watch()
    assert steady.watch([])


def test_only_a_loader_can_be_iterated():
    with pytest.raises(UsageError, match="pass one to iterate over"):
        next(iter(steady.watch()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_not_watched():
    with steady.watch() as seen:
        train()
        before = seen.clock.events
        child = os.fork()
        if not child:
            train(2)
            os._exit(seen.clock.events != before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert seen.result.measured is not None


def test_live_line_names_the_largest_slice():
    from steadytorch.watching.live import text

    with steady.watch() as seen:
        train()
    assert text(seen.clock).startswith("7 optimizer steps, ")
