from __future__ import annotations

import pytest

from steadytorch.findings.figures import amount, duration, many, percent, variance_of
from steadytorch.findings.finding import Case

from .cases import MS, launch, step, traced


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0 ns"), (950, "950 ns"), (28_712_345, "28.7 ms"), (1_234, "1.23 us"), (619e6, "619 ms")],
)
def test_times_have_three_digits(ns, text):
    assert duration(ns) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.0042, "0.42 %"), (0.0412, "4.1 %"), (0.331, "33 %"), (1.0, "100 %")]
)
def test_shares_have_the_digits_they_deserve(share, text):
    assert percent(share) == text


def test_one_is_singular():
    assert [many(n, "call") for n in (1, 1.0, 2, 2.5, 30.2)] == [
        "1 call",
        "1 call",
        "2 calls",
        "2.5 calls",
        "30 calls",
    ]


def test_counts_have_no_exponent():
    assert [amount(n) for n in (0.04, 2.5, 3, 12.6, 1600, 1_234_567)] == [
        "0.04",
        "2.5",
        "3",
        "13",
        "1600",
        "1234567",
    ]


def test_the_variance_of_a_slice_is_known_from_three_steps_on():
    def case(count):
        events = [step(k + 1, 10 * k * MS, 10 * (k + 1) * MS) for k in range(count)]
        for k in range(count):
            start = 10 * k * MS
            ran = (start + 1000, start + MS * (3 + k))
            events += launch("k", call=(start, start + 1000), gpu=ran, correlation=k + 1)
        return traced(events)

    assert variance_of(Case(), "gpu_kernel") is None
    assert variance_of(case(2), "gpu_kernel") is None
