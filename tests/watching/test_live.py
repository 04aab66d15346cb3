"""The live line on the screen of a small VT100."""

from __future__ import annotations

import re
import sys
from typing import ClassVar

import pytest

from steadytorch.watching import live
from steadytorch.watching.clock import StepClock
from steadytorch.watching.live import LiveLine
from steadytorch.watching.watch import on_terminal

WIDTH, HEIGHT = 80, 6


class Screen:
    """A terminal with the control sequences that programs and the live line write."""

    encoding = "utf-8"

    def __init__(self, row=0):
        self.rows = [[" "] * WIDTH for _ in range(HEIGHT)]
        self.row, self.column, self.saved = row, 0, (row, 0)

    def write(self, text):
        for token in re.findall(r"\x1b\[[A-Z]|\x1b.|.|\n", text):
            self._do(token)
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return True

    def _do(self, token):
        if token == "\r":
            self.column = 0
        elif token == "\n":  # the terminal driver adds a carriage return
            self.column = 0
            self._down()
        elif token in self._SEQUENCES:
            self._SEQUENCES[token](self)
        else:
            assert token.isprintable(), f"unknown sequence {token!r}"
            self.rows[self.row][self.column] = token
            self.column += 1

    def _down(self):
        if self.row == HEIGHT - 1:
            self.rows = [*self.rows[1:], [" "] * WIDTH]
        else:
            self.row += 1

    def _erase(self):
        self.rows[self.row][self.column :] = [" "] * (WIDTH - self.column)
        for row in range(self.row + 1, HEIGHT):
            self.rows[row] = [" "] * WIDTH

    def _move(self, rows):
        self.row = min(HEIGHT - 1, max(0, self.row + rows))

    def _save(self):
        self.saved = self.row, self.column

    def _restore(self):
        self.row, self.column = self.saved

    _SEQUENCES: ClassVar = {
        "\x1bD": _down,
        "\x1b[A": lambda self: self._move(-1),
        "\x1b[B": lambda self: self._move(1),
        "\x1b[J": _erase,
        "\x1b7": _save,
        "\x1b8": _restore,
    }

    def lines(self):
        return [line for row in self.rows if (line := "".join(row).rstrip())]


top_and_bottom = pytest.mark.parametrize("row", [0, HEIGHT - 1])


def line_on_screen(row, monkeypatch):
    """A live line, and the screen that it is drawn on."""
    screen = Screen(row)
    monkeypatch.setattr(live, "text", lambda clock: "7 steps, 2.00 ms")
    monkeypatch.setattr(sys, "stderr", screen)
    return LiveLine(StepClock()), screen


@top_and_bottom
def test_a_print_has_a_line_of_its_own(row, monkeypatch):
    line, screen = line_on_screen(row, monkeypatch)
    line.draw()
    assert screen.lines() == ["7 steps, 2.00 ms"]
    screen.write("loss 2.401\n")
    line.draw()
    screen.write("loss 2.303\n")
    assert screen.lines() == ["loss 2.401", "loss 2.303", "7 steps, 2.00 ms"]
    line.erase()
    assert screen.lines() == ["loss 2.401", "loss 2.303"]
    assert screen.column == 0


@top_and_bottom
def test_a_print_without_an_end_of_line_continues_where_it_was(row, monkeypatch):
    line, screen = line_on_screen(row, monkeypatch)
    screen.write("epoch 1:")
    line.draw()
    assert screen.lines() == ["epoch 1:", "7 steps, 2.00 ms"]
    line.draw()
    line.erase()
    screen.write(" done\n")
    assert screen.lines() == ["epoch 1: done"]


def test_a_terminal_that_cannot_move_its_cursor_has_no_live_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setenv("TERM", "xterm")
    assert on_terminal()
    monkeypatch.setenv("TERM", "dumb")
    assert not on_terminal()
