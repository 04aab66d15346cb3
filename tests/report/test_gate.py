"""A gate in the terminal and as a comment."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from msgspec.structs import replace
from rich.console import Console

from steadytorch.report.gate import change, headline, markdown, render_gate, verdict
from steadytorch.results.compare import Interval

from .commits import ADDED, FAILED, JUDGED, SLOWER, gated


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (gated(), "passed: no workload shown to be slower by more than 1 %"),
        (gated(JUDGED, SLOWER), "failed: 1 of 2 workloads slower by more than 1 %"),
        (gated(SLOWER, FAILED), "failed: 1 of 1 workload slower by more than 1 %"),
        (gated(JUDGED, FAILED), "not answered: 1 workload of 2 cannot be timed on both sides"),
        (gated(ADDED), "passed: no workload exists on both sides"),
        (gated(JUDGED, ADDED, interrupted=True), "interrupted: 1 of 2 workloads judged"),
        (gated(threshold=0.025), "passed: no workload shown to be slower by more than 2.5 %"),
    ],
)
def test_the_outcome_in_one_sentence(result, told):
    assert headline(result) == told


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (SLOWER, ("+5.00 % (+4.00 to +6.00)", "slower")),
        (replace(JUDGED, verdict="undecided"), ("+0.10 % (-0.40 to +0.60)", "cannot tell; ")),
        (ADDED, ("-", "added")),
        (FAILED, ("-", "failed")),
    ],
)
def test_a_row_shows_its_change_and_verdict(row, told):
    assert change(row) == told[0]
    assert verdict(row).startswith(told[1])


def test_the_comment_is_one_table_with_the_evidence():
    page = markdown(gated(JUDGED, SLOWER, ADDED))
    lines = page.splitlines()
    assert lines[0] == "### steady gate failed: 1 of 2 workloads slower by more than 1 %"
    rows = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in rows} == {6}
    assert rows[3].endswith("| **slower** |")
    assert "| resnet50 | 12.00 ms | 12.01 ms | +0.10 % (-0.40 to +0.60) | tie |" in page
    assert "- Base origin/main (0123456789ab), head working tree on fedcba987654; " in page
    assert "99 % confidence. Evidence: 5 to 8 fresh processes a side." in page
    assert "- work.py:new: it exists on the head only" in page


def test_foreign_text_makes_no_markup():
    page = markdown(gated(replace(FAILED, workload="a|b<script>@you")))
    assert r"| a\|b\<script\>\@you |" in page
    assert not re.search(r"[^\\]<", page)


def test_the_terminal_shows_every_row_and_reason():
    console = Console(file=StringIO(), width=100)
    render_gate(console, gated(JUDGED, SLOWER, FAILED))
    text = " ".join(console.file.getvalue().split())
    for told in ("serving.py:factory", "12.00 ms", "slower", "OSError: | no <disk>"):
        assert told in text


def test_names_are_whole_in_80_columns_and_what_is_detectable_is_below():
    named = replace(SLOWER, workload="benchmarks/serving.py:factory")
    unsure = replace(named, verdict="undecided", interval=Interval(0.1, -0.2034, 0.3123), mde=0.25)
    console = Console(file=StringIO(), width=80)
    render_gate(console, gated(named, unsure, FAILED))
    lines = console.file.getvalue().splitlines()
    assert sum(line.startswith(" benchmarks/serving.py:factory ") for line in lines) == 2
    assert max(map(len, lines)) <= 80
    flat = " ".join(console.file.getvalue().split())
    assert "Detectable changes: benchmarks/serving.py:factory 25.0 %." in flat
    assert "cannot tell; " not in flat


def test_a_name_as_wide_as_the_screen_is_whole_over_several_lines():
    console = Console(file=StringIO(), width=80)
    render_gate(console, gated(replace(SLOWER, workload="x" * 100)))
    assert console.file.getvalue().count("x") == 100
