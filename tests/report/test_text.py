from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from steadytorch.report.charts import BARS
from steadytorch.report.ledger import FILLS
from steadytorch.report.text import (
    duration,
    percent_above,
    plain,
    print_indented,
    printable_anywhere,
    seconds,
    unit_of,
)

from .conftest import Screen


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (1, "1.00 ns"),
        (999, "999.0 ns"),
        (1000, "1.00 us"),
        (28.71e6, "28.71 ms"),
        (123.4e6, "123.4 ms"),
        (3.2e9, "3.20 s"),
        (7200e9, "7200.0 s"),
        (0.25, "0.25 ns"),
    ],
)
def test_durations_have_a_unit_that_fits(nanoseconds, text):
    assert duration(nanoseconds) == text


@given(st.floats(0.01, 1e15))
def test_a_duration_reads_back_to_its_value(nanoseconds):
    value, unit = duration(nanoseconds).split()
    name, size_ns = unit_of(nanoseconds)
    assert name == unit
    assert float(value) * size_ns == pytest.approx(nanoseconds, rel=0.01, abs=0.006 * size_ns)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.0 s"),
        (0.44, "0.4 s"),
        (24.4, "24 s"),
        (119, "119 s"),
        (200, "3 min 20 s"),
        (119.6, "2 min 0 s"),
        (179.7, "3 min 0 s"),
        (9.97, "10 s"),
    ],
)
def test_seconds(value, text):
    assert seconds(value) == text


def test_percent_above():
    assert percent_above(104.1, 100) == "+4.1 %"
    assert percent_above(96, 100) == "-4.0 %"


@given(st.text())
def test_plain_text_holds_nothing_that_a_terminal_acts_on(text):
    assert plain(text).isprintable()


def test_plain_text_shows_what_it_took_out():
    assert plain("\x1b[31mred\n") == "\\x1b[31mred\\n"
    assert plain("a [red]tag[/]") == "a [red]tag[/]"
    assert plain(3) == "3"


def test_a_paragraph_is_indented_wrapped_and_ends_without_blanks():
    screen = Screen(width=20)
    print_indented(screen.console, Text("one two three four five six [bold]"))
    assert screen.text.splitlines() == ["  one two three four", "  five six [bold]"]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_what_an_encoding_lacks_is_replaced(monkeypatch, name):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, name, stream)
    with printable_anywhere():
        print("▁█ ±95 % é \udcff", file=stream)
    assert stream.errors == "strict"
    stream.flush()
    assert stream.buffer.getvalue() == b"_@ +-95 % ? ?\n"


def test_fills_of_a_chart_stay_distinct_in_ascii():
    assert len(set(FILLS.encode("ascii", "steadytorch.ascii"))) == len(FILLS)
    bars = BARS.encode("ascii", "steadytorch.ascii")
    assert len(set(bars)) == len(BARS) == len(bars)


def test_streams_without_an_encoding_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with printable_anywhere():
        pass
