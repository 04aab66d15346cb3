"""Ctrl-C at a real terminal, at several moments of a search, SIGTERM and SIGHUP."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from steadytorch.cli import ended_once

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
CTRL_C = b"\x03"
# Makes the terminal that is its standard input its own and heeds signals, as a shell does.
TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "[signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGHUP)]; "
    "os.execv(sys.executable, [sys.executable, '-m', 'steadytorch', *sys.argv[1:]])"
)
PATIENCE_S = 120


class Terminal:
    """A command at a terminal of 80 columns."""

    def __init__(self, folder, *words):
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.settings = termios.tcgetattr(self._theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *words],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            cwd=folder,
            env={**os.environ, "TERM": "xterm-256color", "TMPDIR": str(self.scratch)},
            start_new_session=True,
        )
        self.text, self._is_open = "", True

    def wait_for(self, pattern):
        """Reads until the pattern is on the screen."""
        end = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.text):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end, self.text
            self._read(0.1)

    def press(self, keys):
        os.write(self._ours, keys)

    def wait(self):
        """Reads until it ends; returns its exit code."""
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.process.returncode

    def _read(self, timeout_s):
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return False
        self.text += os.read(self._ours, 65536).decode("utf-8", "replace")
        return True

    def workers(self):
        """Worker processes of this command that still run."""
        found = []
        # Forked workers and their server are known by their environment only.
        for process in psutil.process_iter(["cmdline", "environ", "status"]):
            ours = (process.info["environ"] or {}).get("TMPDIR") == str(self.scratch)
            if ours and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.info["cmdline"] or []))
        return found

    def hang_up(self):
        """Closes the terminal's window."""
        os.close(self._theirs)
        os.close(self._ours)
        self._is_open = False

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._is_open:
            os.close(self._ours)
            os.close(self._theirs)


@pytest.fixture
def terminal(folder):
    opened = []

    def run(*words):
        opened.append(Terminal(folder, *words))
        return opened[-1]

    yield run
    for each in opened:
        each.close()


def _check_aftermath(terminal):
    assert terminal.workers() == []
    assert list(terminal.scratch.glob("steadytorch-*")) == []
    assert termios.tcgetattr(terminal._theirs) == terminal.settings
    assert terminal.text.count(HIDE) == terminal.text.count(SHOW) or (
        terminal.text.rfind(SHOW) > terminal.text.rfind(HIDE)
    )
    assert "Traceback" not in terminal.text
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.text)
    assert len(re.findall(r"^\r?steady: interrupted", plain, re.MULTILINE)) == 1


@pytest.mark.parametrize(
    ("moment", "budget", "timed"),
    [
        (r"the untouched workload", "5m", 0),
        (r"known strong combinations", "5m", 0),
        # Too little for a compiler, whose candidates would be waited for before any is timed.
        (r"[\d.]+ (us|ms)\b", "30s", 2),
    ],
    ids=["baseline", "candidates being set up", "first result"],
)
@pytest.mark.sampled(every=3)
def test_an_interrupted_search_keeps_what_it_has(terminal, folder, moment, budget, timed):
    running = terminal("tune", "tiny.py:small", "--budget", budget, "--json", "out.json")
    running.wait_for(moment)
    assert HIDE in running.text
    running.press(CTRL_C)
    assert running.wait() == 130
    _check_aftermath(running)
    found = json.loads((folder / "out.json").read_text())
    assert found["interrupted"] is True
    assert (found["plan"], found["speedup"], found["winner"]) == (None, None, None)
    assert len([c for c in found["candidates"] if c["median_ns"]]) >= timed
    table = running.text.rpartition(SHOW)[2]
    for candidate in found["candidates"]:
        if candidate["median_ns"]:
            name = (candidate["transforms"] or ["untouched"])[0]
            assert name.partition("(")[0] in table
    assert not list((folder / "home").rglob("*.json"))


def test_an_impatient_user_is_obeyed(terminal):
    running = terminal("tune", "tiny.py:small", "--budget", "5m", "--store", "plans")
    running.wait_for("the untouched workload")
    for _ in range(5):
        running.press(CTRL_C)
        time.sleep(0.02)
    assert running.wait() == 130
    assert running.workers() == []
    assert running.text.rfind(SHOW) > running.text.rfind(HIDE)


@pytest.mark.slow
def test_an_interrupt_while_the_workload_loads(terminal, folder):
    (folder / "endless.py").write_text(
        "import time\ndef factory():\n    print('loading now', flush=True)\n    time.sleep(600)\n"
    )
    running = terminal("tune", "endless.py:factory", "--json", "out.json")
    running.wait_for("loading now")
    assert any("fork_server_main" in words for words in running.workers())
    running.press(CTRL_C)
    assert running.wait() == 130
    _check_aftermath(running)
    assert not (folder / "out.json").exists()


LOADING = """
import abc, os, signal, sys, time
from steadytorch.cli import ended_once

register = abc.ABCMeta.register

def pressed(kind, subclass):
    abc.ABCMeta.register = register
    os.kill(os.getpid(), signal.SIGINT)
    return register(kind, subclass)

assert "numpy.random" not in sys.modules
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
try:
    with ended_once():
        abc.ABCMeta.register = pressed
        import numpy.random  # its extension modules discard exceptions of `register`
        assert abc.ABCMeta.register is register
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)  # an import cut short may crash at the process's end
"""


def test_an_interrupt_while_an_extension_module_loads_is_not_lost():
    words = [sys.executable, "-c", LOADING]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == "interrupted\n", (done.returncode, done.stderr)


# -- SIGTERM and SIGHUP -------------------------------------------------------------------------


def _check_end_by_signal(terminal, code=143, said="terminated"):
    assert terminal.wait() == code
    assert terminal.workers() == []
    assert list(terminal.scratch.glob("steadytorch-*")) == []
    assert "Traceback" not in terminal.text
    assert terminal.text.count(f"steady: {said}") == 1


def _wait_until_ignored(process, number):
    """Wait until the first signal was heeded: of signals that wait, Python takes the lowest."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process}/status").read_text()
        if int(status.split("SigIgn:")[1].split()[0], 16) >> (number - 1) & 1:
            return
        time.sleep(0.01)
    raise AssertionError(f"{number} was not heeded in {PATIENCE_S} s")


@pytest.mark.parametrize("moment", ["the untouched workload", "known strong combinations"])
@pytest.mark.sampled(every=2)
def test_a_search_that_is_terminated_leaves_nothing(terminal, folder, moment):
    running = terminal("tune", "tiny.py:small", "--budget", "5m", "--json", "out.json")
    running.wait_for(moment)
    running.process.terminate()
    _wait_until_ignored(running.process.pid, signal.SIGTERM)
    running.process.send_signal(signal.SIGTERM)
    running.process.send_signal(signal.SIGINT)
    _check_end_by_signal(running)
    assert running.text.rfind(SHOW) > running.text.rfind(HIDE)
    assert not (folder / "out.json").exists()


@pytest.mark.slow
def test_so_does_one_whose_workload_loads(terminal, folder):
    (folder / "endless.py").write_text(
        "import time\ndef factory():\n    print('loading now', flush=True)\n    time.sleep(600)\n"
    )
    running = terminal("tune", "endless.py:factory")
    running.wait_for("loading now")
    assert any("fork_server_main" in words for words in running.workers())
    running.process.terminate()
    _check_end_by_signal(running)


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "hung up")],
)
@pytest.mark.sampled(every=2)
def test_a_measurement_that_is_ended_leaves_nothing(terminal, number, code, said):
    running = terminal("measure", "tiny.py:small", "--budget", "10m")
    running.wait_for("process 1 of 1")
    running.process.send_signal(number)
    _check_end_by_signal(running, code, said)


@pytest.mark.slow
def test_a_search_whose_terminal_is_closed_leaves_nothing(terminal):
    running = terminal("tune", "tiny.py:small", "--budget", "5m", "--store", "plans")
    running.wait_for("the untouched workload")
    running.hang_up()
    assert running.process.wait(PATIENCE_S) == 129
    assert running.workers() == []
    assert list(running.scratch.glob("steadytorch-*")) == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_signals_that_are_ignored_stay_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with ended_once():
            assert signal.getsignal(number) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


# -- measure ------------------------------------------------------------------------------------

TELLING = """
import time
from pathlib import Path

import torch
from torch import nn

class Telling(nn.Module):
    def __init__(self, path):
        super().__init__()
        self.path, self.calls = path, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 700:
            Path(self.path).touch()
        time.sleep(0.001)
        return x

def factory():
    return Telling(str(Path("timing").absolute())).eval(), torch.ones(8)
"""


def _check_end(terminal):
    assert terminal.workers() == []
    assert list(terminal.scratch.glob("steadytorch-*")) == []
    assert "Traceback" not in terminal.text
    assert terminal.text.count("steady: interrupted") == 1


def test_an_interrupted_series_keeps_its_samples(terminal, folder):
    """Warming up takes half a second, 500 calls at the most: the 700th is timed."""
    (folder / "telling.py").write_text(TELLING)
    running = terminal("measure", "telling.py:factory", "--budget", "10m", "--json", "out.json")
    end = time.monotonic() + PATIENCE_S
    while not (folder / "timing").exists():
        assert running.process.poll() is None, running.text
        assert time.monotonic() < end
        time.sleep(0.02)
    running.press(CTRL_C)
    assert running.wait() == 130
    _check_end(running)
    found = json.loads((folder / "out.json").read_text())
    calls = found["processes"][0]["set_up"]["warm_up"]["calls"]
    assert len(found["samples_ns"]) >= 700 - 1 - calls
    assert (found["interrupted"], found["failed"]) == (True, None)


@pytest.mark.slow
def test_an_interrupt_in_the_second_process_keeps_the_first(terminal, folder):
    running = terminal(
        *("measure", "tiny.py:small", "--processes", "2", "--budget", "1s"),
        *("--json", "out.json"),
    )
    running.wait_for("process 2 of 2")
    running.press(CTRL_C)
    assert running.wait() == 130
    _check_end(running)
    found = json.loads((folder / "out.json").read_text())
    assert (len(found["processes"]), found["interrupted"]) == (1, True)
    assert "over time, medians from" in running.text


@pytest.mark.slow
def test_an_interrupt_before_anything_was_timed_leaves_nothing(terminal, folder):
    running = terminal("measure", "tiny.py:small", "--json", "out.json")
    running.wait_for("process 1 of 1")
    running.press(CTRL_C)
    assert running.wait() == 130
    _check_end(running)
    assert not (folder / "out.json").exists()
