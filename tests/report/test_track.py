"""Series over commits in the terminal."""

from __future__ import annotations

from io import StringIO

from msgspec.structs import replace
from rich.console import Console

from steadytorch.report.track import render_track

from .commits import STEPPED, tracked


def text_of(result):
    console = Console(file=StringIO(), width=120)
    render_track(console, result)
    return console.file.getvalue()


def test_a_change_has_its_size_place_and_delay():
    assert text_of(tracked(STEPPED)).splitlines() == [
        "1 change in 1 series",
        "  resnet50, latency, 28 results, cpu, AMD EPYC, 2 logical cores",
        "    +2.00 % (99 % interval +1.50 to +2.50) at c0000020 (possible: c0000019 to c0000020), "
        "established after 5 results",
        "  at most 1 % of series without a change show one",
    ]


def test_a_series_without_a_change_shows_its_last_value():
    text = text_of(tracked(replace(STEPPED, changes=()), notes=("left out: x",)))
    assert text.startswith("0 changes in 1 series")
    assert "no change; last 1.02 ms at c0000027" in text
    assert text.endswith("left out: x\n")


def test_ratios_name_their_base():
    text = text_of(tracked(replace(STEPPED, unit="ratio", base="0123456789ab")))
    assert "resnet50, time over 0123456789ab, 28 results" in text
