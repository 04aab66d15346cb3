from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.report.plots import (
    MOST_ROWS,
    embedded,
    figure,
    format_thinning,
    lines_at,
    shortened,
    table,
    thinned,
)


@given(values=st.lists(st.integers(1, 10**12), min_size=1, max_size=300), most=st.integers(2, 60))
def test_thinning_keeps_order_and_extremes(values, most):
    kept = thinned(values, most)
    assert kept == sorted(set(kept))
    if len(values) <= most:
        assert kept == list(range(len(values)))
    assert len(kept) <= most or len(values) <= most
    drawn = [values[place] for place in kept]
    assert (min(drawn), max(drawn)) == (min(values), max(values))


def test_every_stretch_keeps_its_smallest_and_its_largest():
    values = [100] * 1000
    values[310], values[777] = 1, 900
    kept = thinned(values, 20)
    assert {310, 777} <= set(kept)
    assert len(kept) <= 20


def test_what_is_not_drawn_is_told():
    assert format_thinning(7, 7) == ""
    assert format_thinning(7, 8000, "pairs").startswith("7 of 8,000 pairs are drawn: the minimum")


@given(st.text())
def test_embedded_text_neither_ends_a_script_nor_hides_anything(text):
    shown = embedded({"name": text})
    assert not set(shown) & set("<>&\u2028\u2029\x1b\x00\n")
    assert shown.isascii() or shown.isprintable()
    assert json.loads(shown).keys() == {"name"}


def test_embedded_strings_are_escaped_for_plotly_but_for_templates_of_ours():
    made = {"hovertemplate": "%{x}<br>", "text": ["<b>", 1, "a\x1b"], "y": [1.5, None]}
    assert json.loads(embedded(made)) == {
        "hovertemplate": "%{x}<br>",
        "text": ["&lt;b&gt;", 1, "a\\x1b"],
        "y": [1.5, None],
    }


def test_long_tables_say_what_is_not_shown():
    assert table(["x"], [(1,)] * MOST_ROWS).note == ""
    cut = table(["x"], [(1,)] * (MOST_ROWS + 1), note="Read so.")
    assert len(cut.rows) == MOST_ROWS
    assert cut.note.startswith("Read so. Shown: the first 2,000 of 2,001 rows")


@pytest.mark.parametrize(
    ("name", "shown"), [("short", "short"), ("x" * 9, "xxxx…"), ("\x1b", "\\x1b")]
)
def test_names_on_axes_are_short(name, shown):
    assert shortened(name, 5) == shown


def test_axes_of_a_figure_have_titles_and_take_what_differs():
    made = figure([], "time, ms", "samples", height=100, layout={"xaxis": {"type": "log"}})
    assert made["layout"]["xaxis"]["title"]["text"] == "time, ms"
    assert made["layout"]["xaxis"]["type"] == "log"
    assert made["layout"]["height"] == 100


def test_labels_of_upright_lines_do_not_cover_one_another():
    made = lines_at([(1.0, "a", "#000000", "dot"), (1.1, "b", "#000000", "dot")])
    assert len({each["y"] for each in made["annotations"]}) == len(made["shapes"]) == 2
