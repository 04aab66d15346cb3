from __future__ import annotations

import io

import pytest
from rich.console import Console

from steadytorch.report.sweep import format_row, render_sweep
from steadytorch.results.sweep import Sweep, SweepRow

from .swept import NO_INTERVAL, UNTOUCHED, done, failed


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            done(),
            "resnet18 --batch 8: 1.32x [1.28, 1.36], plan abcdef012345, 41 s",
        ),
        (
            done(replayed=True, seconds=3.0),
            "resnet18 --batch 8: 1.32x [1.28, 1.36], stored plan abcdef012345, 3.0 s",
        ),
        (done(speedup=NO_INTERVAL), "resnet18 --batch 8: 1.10x, plan abcdef012345, 41 s"),
        (done(plan=UNTOUCHED), "resnet18 --batch 8: untouched, plan abcdef012346, 41 s"),
        (failed("no\x1b[31m data"), "bad: failed after 2.0 s: no\\x1b[31m data"),
    ],
)
def test_a_finished_workload_is_a_line(row, line):
    assert format_row(row) == line


def test_the_table_has_a_row_each_and_the_reasons_below():
    rows = (
        done(),
        failed("the data are missing"),
        SweepRow(workload="third", status="running", worker="host:8"),
        SweepRow(workload="fourth", status="waiting"),
    )
    out = io.StringIO()
    console = Console(file=out, width=80)
    render_sweep(console, Sweep(list="l", folder="f", rows=rows))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["fourth", "waiting", "-", "-", "-"] in lines
    assert ["third", "running", "-", "host:8", "-"] in lines
    assert out.getvalue().count("abcdef012345") == 1
    assert "bad: the data are missing" in out.getvalue()
    assert "1 of 4 workloads done, 1 failed, 1 running, 1 waiting" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80
