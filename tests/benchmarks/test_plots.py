"""Small plots as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import plots
import pytest
from plots import Axis, Line, Panel, Points


def test_values_lie_between_the_ends_of_their_axis():
    assert Axis(2, 4).place(3, 10, 20) == 15
    assert Axis(1, 100, log=True).place(10, 10, 20) == pytest.approx(15)


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (Axis(0, 50), ["0", "10", "20", "30", "40", "50"]),
        (Axis(0, 0.7), ["0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7"]),
        (Axis(0.9, 11, log=True), ["1", "2", "5", "10"]),
        (Axis(0.2, 900, log=True), ["0.3", "1", "3", "10", "30", "100", "300"]),
    ],
)
def test_ticks_are_round_and_have_room(axis, expected):
    assert [text for _, text in axis.ticks(200)] == expected


def test_a_narrow_range_has_ticks():
    assert len(Axis(0.28, 0.36, log=True).ticks(200)) >= 1


def test_a_panel_is_well_formed_and_escapes_its_texts():
    panel = Panel(
        "a < b",
        Axis(0, 1, label="s & ms"),
        Axis(-0.5, 1.5, names=["<first>", "second"]),
        [
            Line("ours", [(0, 0), (1, 1)], steps=True),
            Points("hand", [(0.5, 1)], ["<title>"], ["1"]),
        ],
    )
    parsed = ElementTree.fromstring(plots.svg(panel))
    texts = ["".join(each.itertext()) for each in parsed]
    assert {"a < b", "s & ms", "<first>", "second", "<title>", "1"} <= set(texts)
    # The first category is at the top.
    heights = {"".join(t.itertext()): float(t.get("y", "0")) for t in parsed.iter("text")}
    assert heights["<first>"] < heights["second"]
