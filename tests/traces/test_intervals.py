import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.traces.intervals import (
    NEVER,
    complement,
    covered_ns,
    crossings,
    firsts,
    innermost,
    intersect,
    joined,
    parents,
    self_times,
    subtract,
    union,
)

LATEST = 40
pairs = st.lists(st.tuples(st.integers(0, LATEST), st.integers(0, 8)), max_size=12)


def columns(stretches):
    start = np.array([start for start, _ in stretches], np.int64)
    return start, start + np.array([length for _, length in stretches], np.int64)


def spans_of(stretches):
    return union(*columns(stretches))


def instants(spans):
    return {t for start, end in zip(*spans, strict=True) for t in range(start, end)}


def nested(stretches):
    """Sorted as in a trace, each cut at the end of its enclosing event."""
    found = []
    for start, length in sorted(stretches, key=lambda s: (s[0], -s[1])):
        end = start + length
        end = min([end, *(e for s, e in found if s <= start < e)])
        if end > start:
            found.append((start, end))
    found.sort(key=lambda s: (s[0], -s[1]))
    return np.array([s for s, _ in found], np.int64), np.array([e for _, e in found], np.int64)


@given(pairs)
def test_a_union_covers_what_any_covers_in_stretches_apart(stretches):
    spans = spans_of(stretches)
    assert instants(spans) == {t for s, n in stretches for t in range(s, s + n)}
    assert (spans.end > spans.start).all()
    assert (spans.start[1:] > spans.end[:-1]).all()
    assert spans.total_ns == len(instants(spans))


@given(pairs, pairs)
def test_two_sets_of_time_are_joined_intersected_and_subtracted(some, others):
    a, b = spans_of(some), spans_of(others)
    assert instants(joined(a, b)) == instants(a) | instants(b)
    assert instants(intersect(a, b)) == instants(a) & instants(b)
    assert instants(subtract(a, b)) == instants(a) - instants(b)


@given(pairs, pairs)
def test_crossings_name_who_shares_each_stretch(some, others):
    a, b = spans_of(some), spans_of(others)
    here, there, shared = crossings(a, b)
    assert (shared.end > shared.start).all()
    assert (shared.start[1:] >= shared.end[:-1]).all()
    for i, j, start, end in zip(here, there, *shared, strict=True):
        assert a.start[i] <= start
        assert end <= a.end[i]
        assert b.start[j] <= start
        assert end <= b.end[j]


@given(pairs)
def test_time_and_all_other_time_do_not_meet(stretches):
    spans = spans_of(stretches)
    rest = complement(spans)
    assert not len(intersect(spans, rest).start)
    assert len(joined(spans, rest).start) == 1


@given(pairs, pairs)
def test_windows_count_the_time_covered_in_them(stretches, windows):
    spans, (start, end) = spans_of(stretches), columns(windows)
    expected = [len(instants(spans) & set(range(s, e))) for s, e in zip(start, end, strict=True)]
    assert covered_ns(spans, start, end).tolist() == expected


@given(pairs)
def test_overlapping_time_goes_to_the_first(stretches):
    start, end = columns(sorted(stretches))
    places, spans = firsts(start, end)
    for place, low, high in zip(places, *spans, strict=True):
        for t in range(low, high):
            assert place == min(i for i in range(len(start)) if start[i] <= t < end[i])
    assert instants(spans) == instants(union(start, end))


@given(pairs)
def test_the_innermost_event_is_the_latest_open_one(stretches):
    start, end = nested(stretches)
    moments = np.arange(-1, LATEST + 10)
    found = innermost(start, end, moments)
    for moment, place in zip(moments, found, strict=True):
        around = [i for i in range(len(start)) if start[i] <= moment < end[i]]
        assert place == (around[-1] if around else -1)


@given(pairs)
def test_the_parent_is_the_latest_event_around(stretches):
    start, end = nested(stretches)
    for place, parent in enumerate(parents(start, end)):
        around = [i for i in range(place) if start[i] <= start[place] < end[i]]
        assert parent == (around[-1] if around else -1)


@given(pairs)
def test_self_times_share_out_the_covered_time(stretches):
    start, end = nested(stretches)
    owner, pieces = self_times(start, end)
    assert instants(pieces) == instants(union(start, end))
    assert pieces.total_ns == union(start, end).total_ns
    assert (owner == innermost(start, end, pieces.start)).all()


@given(pairs)
def test_events_that_cross_get_no_wrong_innermost(stretches):
    start, end = columns(sorted(stretches, key=lambda s: (s[0], -s[1])))
    lasting = end > start
    start, end = start[lasting], end[lasting]
    moments = np.arange(LATEST + 10)
    found = innermost(start, end, moments)
    known = found >= 0
    assert (start[found[known]] <= moments[known]).all()
    assert (end[found[known]] > moments[known]).all()


def test_no_time_is_no_time():
    assert union(np.array([5]), np.array([5])).total_ns == 0
    assert subtract(NEVER, spans_of([(1, 2)])).total_ns == 0
    assert instants(subtract(spans_of([(1, 2)]), NEVER)) == {1, 2}
