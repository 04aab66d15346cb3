from __future__ import annotations

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.queue_full import FULL, NAME, rule

from ..findings.cases import MS, US, kernel, launch, op, overhead, runtime, step, the, traced


def _burst(count, streams=(7,)):
    """One launch per microsecond; each kernel runs for ten."""
    events = [step(1, 0, count * 10 * US + 2 * MS)]
    for at in range(count):
        events += launch(
            "k",
            call=(at * US, (at + 1) * US),
            gpu=(2 * MS + at * 10 * US, 2 * MS + (at + 1) * 10 * US),
            correlation=at + 1,
            stream=streams[at % len(streams)],
        )
    return events


def test_a_full_queue_is_told_and_nothing_to_mend():
    found = the(rule(traced(_burst(FULL + 22))))
    assert found.id == NAME
    assert "1,022 outstanding" in found.title
    assert found.information
    assert found.recoverable_ns == (0, 0)


def test_a_host_that_is_merely_ahead_is_not():
    assert rule(traced(_burst(FULL - 1))) == ()


def test_each_stream_has_its_queue():
    assert rule(traced(_burst(FULL + 100, streams=(7, 20)))) == ()


def test_a_graph_is_one_launch_however_many_kernels_it_brings():
    events = [step(1, 0, 50 * MS), runtime("cudaGraphLaunch", 0, 10 * US, correlation=3)]
    events += [
        kernel("k", MS + at * 10 * US, MS + (at + 1) * 10 * US, correlation=3)
        for at in range(2 * FULL)
    ]
    assert rule(traced(events)) == ()


def test_what_the_driver_says_itself_is_believed():
    events = [*_burst(10), overhead("Command Buffer Full", 100 * US, 300 * US)]
    found = the(rule(traced(events)))
    assert found.confidence == "medium"
    assert any("200 us" in line for line in found.evidence)


def test_without_calls_it_abstains():
    verdict = rule(traced([step(1, 0, MS), kernel("k", 0, US, correlation=1)]))
    assert isinstance(verdict, Abstention)
    assert "ProfilerActivity.CPU" in verdict.recapture


def test_without_a_gpu_it_abstains():
    assert isinstance(rule(traced([op("aten::mm", 0, MS)])), Abstention)
    assert isinstance(rule(Case()), Abstention)
