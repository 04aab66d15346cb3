"""Ranks record the same step or none; ranks are threads, recordings are tapes on the CPU."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from steadytorch.graphs import uniform_step
from steadytorch.graphs.data_parallel import WARM_UP
from steadytorch.graphs.uniform_step import ACCUMULATES, WAITING, UniformStep
from steadytorch.ranks.group import Ranks
from steadytorch.workload.step import EagerStep
from steadytorch.workload.update import Update

from . import taped

STEPS = 60
VOTE = WARM_UP + 1


@pytest.fixture(autouse=True)
def _tapes(monkeypatch):
    taped.install(monkeypatch)
    counts = defaultdict(itertools.count)
    own = lambda self: f"{self.name}/{next(counts[self.name, self.rank])}"  # noqa: E731
    monkeypatch.setattr(Ranks, "next_prefix", own)


def run(act=lambda rank, number, step: None, size=None, layouts=({}, {}), steps=STEPS, **options):
    """The steps of two ranks that train the same network on the same batches."""
    store, at_once = dist.HashStore(), threading.Barrier(2)
    one_at_a_time = threading.Lock()  # tapes and hooks of PyTorch are of the whole process

    def one(rank):
        with one_at_a_time:
            generator = torch.Generator().manual_seed(0)
            net = nn.Linear(4, 3)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        update = Update(optimizer, "fused")
        eager = EagerStep(net, nn.functional.mse_loss, optimizer, update=update, **options)
        step = UniformStep(
            eager,
            "step",
            [net],
            lambda: None,
            ranks=Ranks(rank, 2, store, "t", 20.0),
            prefix="t",
            layout=lambda: layouts[rank],
            stream=taped.Stream(),
        )
        for number in range(1, steps + 1):
            act(rank, number, step)
            count = 8 if size is None else size(rank, number)
            x = torch.randn(count, 4, generator=torch.Generator().manual_seed(number))
            at_once.wait()
            if step._calls + 1 == step._next:  # votes need both ranks at once
                step((x,), {}, (x[:, :3],))
            else:
                with one_at_a_time:
                    step((x,), {}, (x[:, :3],))
        return step, net.state_dict()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_ranks_record_at_the_first_vote_and_replay_from_then_on():
    (one, weights), (other, weights2) = run()
    assert one.replays == other.replays == STEPS - WARM_UP
    torch.testing.assert_close(weights, weights2, rtol=0, atol=0)
    assert one.fault is None


def test_other_shapes_at_the_vote_leave_all_eager_until_the_next():
    found = run(size=lambda rank, number: 4 if rank == 1 and number == VOTE else 8)
    for step, _ in found:
        assert step.replays == STEPS - 3 * VOTE + 1
        assert any("all ranks run eagerly" in reason for reason in step.eager)


def test_other_buckets_are_never_recorded():
    for step, _ in run(layouts=({"bucket_sizes": "8"}, {"bucket_sizes": "4, 4"})):
        assert step.replays == 0
        assert any("differ from rank 0 in bucket_sizes" in reason for reason in step.eager)


def test_a_recording_that_fails_on_one_rank_is_used_on_none(monkeypatch):
    record = UniformStep._record

    def failing(self, *arguments, **options):
        if self._ranks.rank == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return record(self, *arguments, **options)

    monkeypatch.setattr(UniformStep, "_record", failing)
    for step, _ in run():
        assert step.replays == 0
        assert any("not permitted when stream is capturing" in reason for reason in step.eager)


def test_a_graph_that_is_wrong_on_one_rank_is_used_on_none(monkeypatch):
    compare = UniformStep._disagreement

    def wrong(self, *arguments):
        found = compare(self, *arguments)
        return "the loss differs" if self._ranks.rank == 0 else found

    monkeypatch.setattr(UniformStep, "_disagreement", wrong)
    (one, weights), (other, weights2) = run()
    assert one.replays == other.replays == 0
    assert any("rank 0: the loss differs" in reason for reason in other.eager)
    torch.testing.assert_close(weights, weights2, rtol=0, atol=0)


def test_a_shape_that_was_not_agreed_on_runs_eagerly_on_its_rank():
    found = run(size=lambda rank, number: 4 if rank == 1 and number > 30 else 8)
    (one, _), (other, _) = found
    assert one.replays == STEPS - WARM_UP
    assert other.replays == 30 - WARM_UP
    assert other.eager[WAITING] > 0
    assert other.fault is None


def test_dropped_graphs_are_a_fault_and_ranks_vote_again_together():
    def act(rank, number, step):
        if rank == 1 and number == 30:
            step._forget()
        if number == 40:
            assert (step.fault is not None) == (rank == 1)
            step.begin_again("rank 1: its graphs were dropped")

    for step, _ in run(act, steps=80):
        assert step.fault is None
        assert step._agreed


def test_a_step_that_finds_no_memory_is_not_repeated():
    """Its collectives would meet those of another step on the other ranks."""
    tries = []

    def act(rank, number, step):
        def backward(*given):
            tries.append(rank)
            raise torch.OutOfMemoryError("full")

        if number == 30:
            assert step._has_graphs()
            step.step.backward = backward

    with pytest.raises(torch.OutOfMemoryError):
        run(act, size=lambda rank, number: 5 if number == 30 else 8)
    assert sorted(tries) == [0, 1]


def test_micro_batches_are_not_recorded():
    for step, _ in run(accumulate=2):
        assert step.replays == 0
        assert step.eager[ACCUMULATES] > 0


def test_votes_end(monkeypatch):
    monkeypatch.setattr(uniform_step, "MOST_VOTES", 1)
    for step, _ in run(size=lambda rank, number: 4 if rank == 1 and number == VOTE else 8):
        assert step.replays == 0
