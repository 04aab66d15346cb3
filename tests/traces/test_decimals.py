from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.traces.decimals import ABSURD, LARGEST_NS, nanoseconds


def _text(ns):
    sign = "-" if ns < 0 else ""
    return f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03d}".encode()


@given(st.lists(st.integers(-LARGEST_NS + 1, LARGEST_NS - 1), max_size=30))
def test_three_decimals_are_exact(times):
    assert nanoseconds([_text(ns) for ns in times]).tolist() == times


@given(st.lists(st.integers(0, LARGEST_NS // 1000), min_size=1, max_size=30))
def test_whole_microseconds_are_exact(times):
    expected = [us * 1000 if us * 1000 < LARGEST_NS else ABSURD for us in times]
    assert nanoseconds([b"%d" % us for us in times]).tolist() == expected


@given(st.from_regex(r"\A(0|[1-9][0-9]{0,17})(\.[0-9]{1,12})?\Z"))
def test_any_number_of_digits_is_rounded_half_up(text):
    exact = Decimal(text) * 1000
    expected = int(exact) + (exact % 1 >= Decimal("0.5"))
    got = int(nanoseconds([text.encode()])[0])
    assert got == (expected if expected < LARGEST_NS else ABSURD)


def test_microseconds_since_1970_keep_their_nanoseconds():
    assert float("1712195495519689.013") * 1000 != 1712195495519689013
    assert nanoseconds([b"1712195495519689.013"]).tolist() == [1712195495519689013]


@pytest.mark.parametrize(
    ("text", "ns"),
    [(b'"12.5"', 12500), (b"1e3", 1_000_000), (b"-0.001", -1), (b"1.5E-2", 15), (b"0" * 40, 0)],
)
def test_other_ways_to_write_a_number(text, ns):
    assert nanoseconds([text, b"1"]).tolist() == [ns, 1000]


ABSURDITIES = (b"", b"NaN", b"-Infinity", b"1e999", b"1e999999999", b"9" * 100_000, b'""', b"null")


@pytest.mark.parametrize("text", [*ABSURDITIES, b"{}", b"1.2.3", b'"\xff"', b"9999999999999999"])
def test_what_is_no_time_is_absurd(text):
    assert nanoseconds([b"1", text]).tolist() == [1000, ABSURD]


def test_nothing_gives_nothing():
    assert nanoseconds([]).dtype == np.int64


def test_what_is_nearly_nothing_is_zero():
    assert nanoseconds([b"1e-9999", b"0." + b"0" * 1000 + b"1"]).tolist() == [0, 0]
