from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.report.charts import histogram, timeline, timeline_scale

SAMPLES = st.lists(st.integers(1, 10**12) | st.floats(1e-3, 1e15), min_size=1, max_size=400)
BARS = "▁▂▃▄▅▆▇█"


def _count(row):
    return int(row.rpartition(" ")[2])


@given(SAMPLES, st.integers(1, 90))
def test_a_timeline_is_no_wider_than_asked_and_shows_every_stretch(samples, width):
    drawn = timeline(samples, width)
    assert len(drawn) == min(width, len(samples))
    assert set(drawn) <= set(BARS)


@given(SAMPLES)
def test_the_scale_is_that_of_the_columns(samples):
    low, high = timeline_scale(samples, 60)
    drawn = timeline(samples, 60)
    assert min(samples) <= low <= high <= max(samples)
    if high > low:
        assert {BARS[0], BARS[-1]} <= set(drawn)
    else:
        assert set(drawn) == {BARS[0]}


def test_a_rise_is_drawn_as_one():
    drawn = timeline(range(1, 601), 60)
    assert list(drawn) == sorted(drawn, key=BARS.index)
    assert (drawn[0], drawn[-1]) == (BARS[0], BARS[-1])


def test_a_column_is_the_median_of_its_stretch():
    samples = [10, 10, 9000, 20, 20, 20]
    assert timeline(samples, 2) == BARS[0] + BARS[-1]
    assert timeline_scale(samples, 2) == (median(samples[:3]), median(samples[3:]))


@given(SAMPLES, st.integers(1, 12), st.integers(1, 60))
def test_every_sample_is_counted_once(samples, rows, width):
    drawn = histogram(samples, rows, width)
    assert sum(map(_count, drawn)) == len(samples)
    assert 1 <= len(drawn) <= rows + 1
    assert all(len(row) <= 10 + 1 + width + 1 + len(str(len(samples))) for row in drawn)


@given(SAMPLES)
def test_what_occurs_has_a_bar_and_the_most_frequent_the_longest(samples):
    for row in (drawn := histogram(samples)):
        assert bool(set(row) & set("█▏▎▍▌▋▊▉")) == bool(_count(row))
    assert max(row.count("█") for row in drawn) == 40


def test_rows_are_equal_steps_up_to_the_99th_percentile():
    samples = [*range(1_000_000, 1_000_990), *[9_000_000] * 10]
    drawn = histogram([1000 * sample for sample in samples], rows=4)
    assert [_count(row) for row in drawn[:4]] == pytest.approx([247] * 4, abs=2)
    assert drawn[-1].lstrip().startswith("above")
    assert _count(drawn[-1]) == 10


def test_a_lone_outlier_among_equal_samples_is_not_hidden():
    drawn = histogram([1_000_000] * 99 + [50_000_000])
    assert [row.split()[0] for row in drawn] == ["1.00", "above"]
    assert [_count(row) for row in drawn] == [99, 1]


def test_equal_samples_are_one_row():
    (row,) = histogram([2_000_000] * 7)
    assert row.split()[:2] == ["2.00", "ms"]
    assert row.endswith("█ 7")


@pytest.mark.parametrize("value", [5e-324, 1.0, 1e300])
def test_values_at_the_ends_of_what_floats_hold_are_drawn(value):
    samples = [5e-324, 1e-323, value, value]
    assert len(timeline(samples)) == 4
    assert sum(map(_count, histogram(samples))) == 4
