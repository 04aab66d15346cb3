import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.errors import UsageError
from steadytorch.quantities import counted, parse_bytes, parse_duration, size

SECONDS = {"": 1, "s": 1, "ms": 1e-3, "m": 60, "min": 60, "h": 3600}
BYTES = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
amounts = st.decimals(min_value="0.01", max_value=10_000, places=2)
spaces = st.sampled_from(["", " ", "  "])
cases = st.sampled_from([str, str.lower, str.upper])


@given(amount=amounts, unit=st.sampled_from(sorted(SECONDS)), space=spaces, case=cases)
def test_times_are_read_as_they_were_written(amount, unit, space, case):
    written = f"{space}{amount}{space}{case(unit)}{space}"
    assert parse_duration(written) == pytest.approx(float(amount) * SECONDS[unit])


@given(
    amount=st.decimals(min_value=1, max_value=10_000, places=2),
    unit=st.sampled_from(sorted(BYTES)),
    space=spaces,
    case=cases,
)
def test_sizes_are_read_as_they_were_written(amount, unit, space, case):
    found = parse_bytes(f"{amount}{space}{case(unit)}")
    assert isinstance(found, int)
    assert found == pytest.approx(float(amount) * BYTES[unit], abs=1)


@given(st.integers(min_value=1, max_value=2**52))
def test_numbers_are_taken_as_they_are(number):
    assert parse_bytes(number) == number
    assert parse_duration(number) == number
    assert parse_duration(number / 4) == number / 4


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("3m", 180), ("1.5h", 5400), (".5m", 30)]
)
def test_the_documented_forms(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("parse", [parse_duration, parse_bytes])
@pytest.mark.parametrize(
    "text",
    ["", " ", "s", "-1", "-3m", "0", "0.0", "1e3", "nan", "inf", "3 parsecs", "3m 20s", "1,5", "."],
)
def test_malformed_quantities_are_refused_with_the_text_and_an_example(parse, text):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert repr(text) in str(caught.value)
    assert "such as" in str(caught.value)


@pytest.mark.parametrize("text", ["3GB", "3 parsec"])
def test_sizes_are_no_times(text):
    with pytest.raises(UsageError, match="is not a time"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["3m", "90s", "0.5", "0.4B", "9" * 30])
def test_times_and_less_than_a_byte_and_absurd_amounts_are_no_sizes(text):
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)


@given(st.text(max_size=12))
def test_any_text_is_a_positive_time_or_refused(text):
    with contextlib.suppress(UsageError):
        assert parse_duration(text) > 0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2048, "2.00 KiB"),
        (1_234_567_890, "1.15 GiB"),
        (20 << 30, "20.0 GiB"),
        (139 << 30, "139 GiB"),
    ],
)
def test_sizes_are_written_in_a_unit_that_suits(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 calls"), (1, "1 call"), (27157, "27,157 calls")]
)
def test_counts_are_written_with_their_noun(count, text):
    assert counted(count, "call") == text
