from __future__ import annotations

import numpy as np

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.gc_pause import NAME, rule
from steadytorch.transforms import names

from ..findings.cases import MS, US, annotation, launch, noise, steadily, step, the, timed, traced


def _with_collections(length_ns, every, **known):
    times = noise(1000)
    places = np.arange(every, 1000, every)
    times[places] += length_ns
    starts = np.concatenate([[0], np.cumsum(times)])[places]
    return timed(times, gc=[(int(start), length_ns) for start in starts], **known)


def test_long_collections_are_found_with_their_share_of_the_variance():
    found = the(rule(_with_collections(30 * MS, 100, device="cpu")))
    assert found.id == NAME
    assert found.variance_share > 0.9
    assert 200 * US < found.cost_ns < 400 * US
    assert set(found.transforms) <= set(names())


def test_a_collection_that_waits_for_a_core_is_not_to_blame():
    """Such a collection is long because its thread waits for a core: another finding."""

    def waiting(share):
        return lambda at: share * at

    assert rule(_with_collections(30 * MS, 100, device="cpu", wait_ns=waiting(0.99))) == ()
    assert rule(_with_collections(30 * MS, 100, device="cpu", wait_ns=waiting(0.56))) == ()
    assert the(rule(_with_collections(30 * MS, 100, device="cpu", wait_ns=waiting(0.1)))).id == NAME


def test_frequent_short_collections_are_found_by_their_sum():
    assert the(rule(_with_collections(40 * US, 2))).cost_ns > 15 * US


def _dropped(**known):
    """Four collections of 150 us a step of 3 ms, of which the recorder kept ten."""
    times = noise(1000)
    starts = np.concatenate([[0], np.cumsum(times)])[100:1000:90]
    return timed(
        times,
        device="cpu",
        gc=[(int(start), 150 * US) for start in starts],
        gc_dropped=3990,
        collections=steadily(4 / 3e-3),
        collecting_ns=steadily(600 * US / 3e-3),
        **known,
    )


def test_collections_that_were_too_many_to_keep_count_too():
    found = the(rule(_dropped()))
    assert 590 * US < found.cost_ns < 610 * US
    assert found.title.startswith("Python's garbage collector takes 20 % of the time")
    counted, rest = found.evidence[0].split(" collections in 1000 steps: ")
    assert 3980 <= int(counted) <= 4020
    assert rest == "the longest 10 are 10 of generation 2"


def test_waits_elsewhere_are_not_taken_from_dropped_collections():
    """Multi-threaded operators may wait for cores most of the time."""
    found = the(rule(_dropped(wait_ns=lambda at: at * 7 // 10)))
    assert 590 * US < found.cost_ns < 610 * US


def test_the_usual_short_collections_are_not():
    assert rule(_with_collections(30 * US, 50)) == ()


def test_collections_that_a_busy_gpu_hides_cost_nothing():
    times = noise(1000)
    gc = [(int(at), 40 * US) for at in np.cumsum(times)[::2]]
    assert rule(timed(times, host_ns=0.2 * times, gc=gc)) == ()


def test_collections_in_the_trace_are_found_where_the_gpu_is_idle():
    events = []
    for k in range(4):
        at = 10 * k * MS
        events.append(step(k + 1, at, at + 10 * MS))
        if k:
            events.append(annotation("steadytorch.gc", at + 10 * US, at + 2 * MS))
        events += launch(
            "k", call=(at + 2 * MS, at + 2 * MS + US), gpu=(at + 3 * MS, at + 9 * MS), correlation=k
        )
    assert the(rule(traced(events))).slices == ("idle_gc",)


def test_a_trace_without_marks_of_collections_cannot_tell():
    assert isinstance(rule(traced([step(1, 0, 9 * MS)])), Abstention)
    assert isinstance(rule(Case()), Abstention)
