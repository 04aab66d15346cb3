from __future__ import annotations

import contextlib
import re

import pytest

from steadytorch.report import progress as module_under_test
from steadytorch.report.progress import Progress

from .conftest import CONTROL, HOSTILE, Screen

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
LONG = "fold_batch_norm + channels_last + compile(max-autotune, freezing) + inference_mode"


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(module_under_test, "time", made)
    return made


def _terminal(width=80):
    return Screen(width, force_terminal=True, legacy_windows=False)


def _visible(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def _search(progress, clock=None):
    progress.phase("the untouched workload")
    progress.trial("untouched", "set-up")
    progress.trial("untouched", "verified")
    progress.trial("channels_last", "set-up")
    progress.tick()
    progress.trial("channels_last", "verified")
    progress.trial("tf32", "set-up")
    progress.trial("tf32", "failed", "RuntimeError: no")
    progress.timed("channels_last", 14.2e6)


def test_on_a_terminal_the_events_are_printed():
    screen = _terminal()
    with Progress(screen.console, 60) as progress:
        _search(progress)
    text = _visible(screen.text)
    for fact in ("the untouched workload", "channels_last", "14.20 ms", "failed: RuntimeError: no"):
        assert fact in text


def test_elsewhere_the_events_are_printed_without_control_sequences():
    screen = Screen(force_terminal=False)
    with Progress(screen.console, 60) as progress:
        _search(progress)
    assert not CONTROL.search(screen.text)
    lines = screen.text.splitlines()
    assert len(lines) == 3
    assert "the untouched workload" in lines[0]
    assert "tf32" in lines[1]
    assert "RuntimeError: no" in lines[1]
    assert "channels_last" in lines[2]


def test_elsewhere_an_event_is_one_line_however_long():
    screen = Screen(force_terminal=False)
    with Progress(screen.console, 60) as progress:
        progress.timed(LONG, 14.2e6)
    (line,) = screen.text.splitlines()
    assert line.strip().startswith(LONG)
    assert line.endswith("14.20 ms")


def test_a_quiet_console_shows_nothing():
    for options in ({"force_terminal": True}, {"force_terminal": False}):
        screen = Screen(quiet=True, **options)
        with Progress(screen.console, 60) as progress:
            _search(progress)
        assert screen.text == ""


def test_the_live_line_names_the_clock_the_budget_and_what_is_set_up(clock):
    screen = _terminal()
    with Progress(screen.console, 200) as progress:
        progress.phase("known strong combinations")
        progress.trial("channels_last", "set-up")
        clock.now += 65
        screen.out.truncate(0)
        progress.tick()
        live = _visible(screen.text)
    assert "1:05" in live
    assert "3 min 20 s" in live
    assert "known strong combinations" in live
    assert "channels_last" in live
    assert "65 s" in live


def test_what_is_out_leaves_the_live_line(clock):
    screen = _terminal()
    with Progress(screen.console, 200) as progress:
        progress.trial("channels_last", "set-up")
        progress.trial("channels_last", "verified")
        screen.out.truncate(0)
        clock.now += 1
        progress.tick()
        assert "channels_last" not in _visible(screen.text)


def test_it_redraws_at_most_four_times_a_second(clock):
    screen = _terminal()
    with Progress(screen.console, 200) as progress:
        progress.phase("a phase")
        before = screen.text
        for _ in range(100):
            progress.tick()
        assert screen.text == before
        clock.now += 0.3
        progress.tick()
        assert screen.text != before


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), RuntimeError("no")])
def test_the_cursor_comes_back_however_it_ends(error):
    screen = _terminal()
    ends = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with ends, Progress(screen.console, 60) as progress:
        progress.phase("a phase")
        if error is not None:
            raise error
    assert screen.text.count(HIDE) == 1
    assert screen.text.rindex(SHOW) > screen.text.rindex(HIDE)


def test_no_line_is_wider_than_the_terminal(clock):
    screen = _terminal()
    with Progress(screen.console, 60) as progress:
        progress.phase(f"variations of {LONG} and again {LONG}")
        for label in (LONG, LONG + "2", "x" * 200):
            progress.trial(label, "set-up")
            clock.now += 1
            progress.tick()
            progress.timed(label, 1e6)
            progress.trial(label, "rejected", "a reason " * 30)
    lines = re.split(r"[\r\n]+", _visible(screen.text))
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("terminal", [True, False])
def test_hostile_text_is_neutralised(clock, terminal):
    screen = Screen(force_terminal=terminal, legacy_windows=False)
    with Progress(screen.console, 60) as progress:
        progress.phase(HOSTILE)
        progress.trial(HOSTILE, "set-up")
        clock.now += 1
        progress.tick()
        progress.timed(HOSTILE, 1e6)
        progress.trial(HOSTILE, "failed", HOSTILE)
    for sequence in ("\x1b[2J", "\x1b]0;", "\x07"):
        assert sequence not in screen.text
    assert "[red]boo[/red]" in screen.text


def test_a_step_is_shown_on_the_live_line_only():
    screen, plain = _terminal(), Screen(force_terminal=False)
    for each in (screen, plain):
        with Progress(each.console, 300, brief=True) as progress:
            progress.step("pair of blocks 24 of at most 60")
    assert "of 5 min 0 s: pair of blocks 24 of at most 60" in _visible(screen.text)
    assert plain.text == ""
