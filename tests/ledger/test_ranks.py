from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.ledger.ranks import compare, steps_of

from ..traces import synthetic as syn
from ..traces.generated import traces
from ..traces.jobs import TRANSFER, US, job, read

WORK = st.integers(2, 5).flatmap(
    lambda ranks: st.lists(
        st.lists(st.integers(1, 500), min_size=ranks, max_size=ranks), min_size=1, max_size=8
    ).map(lambda steps: [list(rank) for rank in zip(*steps, strict=True)])
)


def compared(files):
    return compare([steps_of(trace) for trace in read(files)])


@pytest.mark.parametrize("gpu", [False, True])
@given(WORK)
def test_own_work_transfer_and_waiting_are_found(gpu, work):
    found = compared(job(work, gpu=gpu))
    expected = np.array(work) * US
    assert np.array_equal(found.own - found.transfer, expected)
    assert np.array_equal(found.transfer, np.full(expected.shape, TRANSFER))
    assert np.array_equal(found.waiting, expected.max(axis=0) - expected)
    assert np.array_equal(found.communication, found.transfer + found.waiting)
    assert (found.collectives, found.unmatched) == (expected.size, 0)


@given(st.lists(traces(), min_size=2, max_size=3))
def test_slices_transfer_and_waiting_add_up_to_the_step(files):
    ranks = [steps_of(syn.trace(events)) for events in files]
    if len({rank.kind for rank in ranks}) > 1:
        return
    found = compare(ranks)
    parts = sum(found.slices.values()) + found.transfer + found.waiting
    assert np.array_equal(parts, found.total)
    for values in (*found.slices.values(), found.transfer, found.waiting, found.communication):
        assert (values >= 0).all()
    assert (found.transfer + found.waiting <= found.communication).all()


def test_work_hides_communication():
    events = [
        syn.step(0, 0, 100),
        syn.op("aten::mm", 0, 60),
        syn.annotation("gloo:all_reduce", 20, 90, thread=9),
    ]
    late = [
        syn.step(0, 0, 100),
        syn.op("aten::mm", 0, 80),
        syn.annotation("gloo:all_reduce", 80, 90, thread=9),
    ]
    found = compare([steps_of(syn.trace(each)) for each in (events, late)])
    assert found.communication[:, 0].tolist() == [70, 10]
    assert found.waiting[:, 0].tolist() == [20, 0]  # 20 to 80, of which work hides 40
    assert found.transfer[:, 0].tolist() == [10, 10]


def test_concurrent_collectives_count_once():
    def rank(joined):
        return syn.trace(
            [
                syn.step(0, 0, 100),
                syn.op("aten::mm", 0, joined),
                syn.annotation("gloo:all_reduce", joined, 90, thread=9),
                syn.annotation("gloo:all_reduce", joined + 1, 95, thread=8),
            ]
        )

    found = compare([steps_of(rank(10)), steps_of(rank(70))])
    assert found.waiting[:, 0].tolist() == [60, 0]
    assert found.transfer[:, 0].tolist() == [25, 25]


def test_a_collective_without_counterpart_is_transfer():
    def rank(times):
        marks = [syn.annotation("gloo:all_reduce", t, t + 10, thread=9) for t in times]
        return syn.trace([syn.step(0, 0, 100), syn.op("aten::mm", 0, 5), *marks])

    found = compare([steps_of(rank([20, 40])), steps_of(rank([20]))])
    assert (found.collectives, found.unmatched) == (3, 3)
    assert found.waiting.sum() == 0
    assert found.transfer[:, 0].tolist() == [20, 10]


def test_collectives_of_other_groups_are_not_matched():
    def rank(group, start):
        details = {"Collective name": "allreduce", "Process Group Ranks": group}
        return syn.trace(
            [
                syn.step(0, 0, 100),
                *syn.launch("gemm", call=(0, 1), gpu=(0, start), correlation=1),
                *syn.launch(
                    *["ncclDevKernel_AllReduce"],
                    call=(1, 2),
                    gpu=(start, 100),
                    correlation=2,
                    details=details,
                ),
                syn.runtime("cudaStreamSynchronize", 2, 100),
            ]
        )

    pairs = [("[0, 1]", 10), ("[0, 1]", 50), ("[2, 3]", 20), ("[2, 3]", 90)]
    found = compare([steps_of(rank(*pair)) for pair in pairs])
    assert found.waiting[:, 0].tolist() == [40, 0, 70, 0]


def test_only_steps_of_all_ranks_are_compared():
    work = [[10] * 4, [10] * 4]
    found = compared(job(work, steps=[{3, 4, 5}, {4, 5, 6}]))
    assert found.numbers == (4, 5)
    assert found.total.shape == (2, 2)


def test_parts_of_a_watch_show_waiting_beyond_the_fastest_rank():
    def rank(script, backward):
        return syn.trace(
            [
                syn.step(0, 0, script + backward),
                syn.annotation("steadytorch.script", 0, script),
                syn.annotation("steadytorch.backward", script, script + backward),
            ]
        )

    ranks = [steps_of(rank(10, 90)), steps_of(rank(70, 30))]
    assert [each.kind for each in ranks] == ["watch", "watch"]
    found = compare(ranks, ("cpu_backward",))
    assert found.waiting[:, 0].tolist() == [60, 0]
    assert found.own[:, 0].tolist() == [40, 100]
    assert found.slices["cpu_backward"][:, 0].tolist() == [30, 30]
