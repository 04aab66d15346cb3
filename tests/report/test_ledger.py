from __future__ import annotations

import pytest

from steadytorch.ledger.ledger import CPU_SLICES, SLICES, build_ledger
from steadytorch.rates.regime import REGIMES
from steadytorch.report.ledger import in_words, render_ledger, shown_slices
from steadytorch.results.explain import StepTime

from ..traces.synthetic import op, trace
from .conftest import HOSTILE, Screen
from .explained import FULL, MS, explained


def _rendered(width=80, **fields):
    screen = Screen(width)
    render_ledger(screen.console, explained(**fields))
    screen.check_width()
    return screen


def _of(**slices):
    return {"steps": (StepTime(0, sum(slices.values()), slices),)}


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_bar_takes_the_whole_width_in_proportion(width):
    bar = _rendered(width).text.splitlines()[2].strip()
    assert len(bar) == width - 2
    assert bar.count("█") == pytest.approx(0.60 * len(bar), abs=1)
    assert bar.count("▒") == pytest.approx(0.30 * len(bar), abs=1)
    assert bar == "".join(sorted(bar, key="█▓▒░#".index))


def test_short_waits_between_operators_are_not_called_python_alone():
    """Without stacks, a trace does not tell a short sleep from running Python code."""
    ledger = build_ledger(trace([op("aten::mm", at, at + 50_000) for at in (0, 400_000, 800_000)]))
    steps = tuple(StepTime(s.index, s.total_ns, s.slices) for s in ledger.steps)
    assert "Python, or waiting" in _rendered(steps=steps, gpu=None).text
    assert "Python or short waits set the pace" in REGIMES["python-bound"]


def test_the_legend_has_percent_and_time_and_adds_up():
    slices = shown_slices(FULL)
    assert [label for label, _ in slices] == [
        *("kernels", "copies", "idle: launching", "idle: garbage collection", "unknown"),
    ]
    assert sum(time for _, time in slices) == pytest.approx(FULL.step_ns)
    flat = _rendered().flat
    assert "█ kernels 60.0 % 60.00 ms" in flat
    assert "▒ idle: launching 30.0 % 30.00 ms" in flat


def test_small_slices_are_added_up():
    found = explained(**_of(gpu_kernel=99 * MS, idle_gc=MS // 2, idle_compile=MS // 2))
    shown = shown_slices(explained(**_of(gpu_kernel=990, idle_gc=1, idle_compile=2)))
    assert shown[-1] == ("2 others", 3)
    assert len(shown_slices(found)) == 3


def test_no_more_slices_are_shown_than_can_be_told_apart():
    many = _of(**{name: 10 * MS for name in SLICES})
    shown = shown_slices(explained(**many))
    assert len(shown) == 9
    assert shown[-1][0] == f"{len(SLICES) - 8} others"
    bar = _rendered(**many).text.splitlines()[2]
    assert len(set(bar.strip())) == 9


def test_every_slice_has_a_name():
    names = {in_words(name) for name in (*SLICES, *CPU_SLICES)}
    assert not any("_" in name for name in names)


def test_slices_in_a_sentence_are_named_as_in_the_legend():
    assert in_words("idle_data_wait 68.7 ms, gpu_other 3") == (
        "idle: waiting for data 68.7 ms, gpu_other 3"
    )


def test_unknown_names_are_neutralised(screen):
    render_ledger(screen.console, explained(**_of(**{HOSTILE: 10 * MS})))
    assert "[red]boo[/red]" in screen.text
