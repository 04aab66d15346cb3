from __future__ import annotations

import re

import pytest

from steadytorch.report.compare import markdown, render_compare, sentence
from steadytorch.results.compare import SustainedRun

from .conftest import HOSTILE, Screen
from .measured import compared

UNKNOWN = {"low": None, "high": None, "mde": None, "verdict": "undecided"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {},
            "resnet50@channels_last is faster by 12.34 % (99 % interval -13.00 to -11.70 %)",
        ),
        (
            {"estimate": 0.031, "low": 0.024, "high": 0.04, "verdict": "slower"},
            "resnet50@channels_last is slower by 3.10 % (99 % interval +2.40 to +4.00 %)",
        ),
        (
            {"estimate": 0.001, "low": -0.002, "high": 0.004, "verdict": "tie"},
            "a tie within 0.5 % (99 % interval -0.20 to +0.40 %)",
        ),
        (
            {"estimate": 0.01, "low": -0.01, "high": 0.03, "verdict": "undecided"},
            "cannot tell (99 % interval -1.00 to +3.00 %; detectable: 0.60 %)",
        ),
        (
            {"estimate": 0.01, "low": -0.01, "high": 0.03, "verdict": "undecided", "mde": None},
            "cannot tell (99 % interval -1.00 to +3.00 %)",
        ),
        (
            {"estimate": 0.01, **UNKNOWN},
            "cannot tell: resnet50@channels_last takes +1.00 % time, no interval",
        ),
        ({"estimate": None, **UNKNOWN}, "nothing was measured"),
    ],
    ids=["faster", "slower", "tie", "undecided", "no mde", "no interval", "nothing"],
)
def test_the_verdict_is_a_sentence(fields, said):
    assert sentence(compared(**fields)) == said


def test_both_sides_and_the_basis_are_shown(screen):
    render_compare(screen.console, compared())
    assert "A resnet50: latency 12.41 ms" in screen.text
    assert "B resnet50@channels_last: latency 10.88 ms" in screen.text
    assert "27 pairs of blocks, 1 process a side; claim: process" in screen.text


def test_saved_results_have_processes_and_no_pairs(screen):
    found = compared(pairs=0, processes=5, claim="machine", metric="period")
    render_compare(screen.console, found)
    assert "5 processes a side; claim: machine" in screen.text
    assert "pairs" not in screen.text


def test_what_a_power_limit_hides_is_shown_beside_the_verdict(screen):
    alone = (SustainedRun("a", 10.01, 12.0e6, 1755.0), SustainedRun("b", 10.02, 12.6e6, 1620.0))
    result = compared(dwells=alone)
    said = "run alone for 10 s each, B takes +5.00 % time (A 1755 MHz, B 1620 MHz)"
    render_compare(screen.console, result)
    assert said in screen.flat
    assert said in markdown(result, None)


def test_a_note_is_shown(screen):
    render_compare(screen.console, compared(note="measure with --processes 5"))
    assert "measure with --processes 5" in screen.text


@pytest.mark.parametrize("width", [40, 80])
def test_names_and_notes_of_others_are_neutralised(width):
    screen = Screen(width=width)
    render_compare(screen.console, compared(HOSTILE, HOSTILE, note=HOSTILE))
    screen.check_width()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", screen.text)
    assert "[red]boo[/red]" in screen.text


# -- Markdown -----------------------------------------------------------------------------------


def test_the_summary_holds_verdict_sides_basis_and_gate():
    text = markdown(compared("first", "second", note="a note"), "passed (slower than 2.00%)")
    assert text.splitlines() == [
        "### second is faster by 12.34 % (99 % interval -13.00 to -11.70 %)",
        "",
        "| | workload | latency |",
        "|---|---|---|",
        "| A | first | 12.41 ms |",
        "| B | second | 10.88 ms |",
        "",
        "27 pairs of blocks, 1 process a side; claim: process",
        "",
        "a note",
        "",
        "Gate: passed (slower than 2.00%)",
    ]


def test_without_a_gate_none_is_told():
    assert "Gate" not in markdown(compared(), None)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a|b", r"a\|b"),
        ("<img src=x>", r"\<img src=x\>"),
        ("`code`", r"\`code\`"),
        ("[text](https://example.org)", r"\[text\](https\://example.org)"),
        ("![x](y)", r"\!\[x\](y)"),
        ("*bold* _it_", r"\*bold\* \_it\_"),
        ("back\\slash", r"back\\slash"),
        ("two\nlines", r"two\\nlines"),
        ("&lt;", r"\&lt;"),
        ("tiny.py:small", "tiny.py:small"),
    ],
)
def test_names_cannot_shape_the_page(name, shown):
    text = markdown(compared(name, "other", note=name), None)
    assert f"| A | {shown} |" in text
    assert f"\n{shown}\n" in text
    assert markdown(compared("other", name), None).startswith(f"### {shown} is faster")


def test_hostile_names_leave_the_table_as_it_is():
    lines = markdown(compared(HOSTILE, HOSTILE, note=HOSTILE), None).splitlines()
    assert len(lines) == len(markdown(compared(note="x"), None).splitlines())
    assert all(line.isprintable() for line in lines)
