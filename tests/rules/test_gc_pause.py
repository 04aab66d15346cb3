from __future__ import annotations

import numpy as np

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.gc_pause import NAME, rule
from steadytorch.transforms import names

from ..findings.cases import MS, US, annotation, launch, noise, step, the, timed, traced


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
