"""`steady gate` and `steady track` on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import click
import pytest

from steadytorch.bench import gate as module
from steadytorch.cli.gate import gate
from steadytorch.results.compare import Interval
from steadytorch.results.gate import GateResult, GateRow, Revision

from .conftest import TINY, only_line

FAILING = GateRow(workload="b", status="failed", reason="it fails on the head: OSError: no\x1b[2J")


def row(verdict="tie", **fields):
    return GateRow(workload="a", status="judged", verdict=verdict, **fields)


@pytest.fixture
def scripted(monkeypatch):
    """Puts a result in the place of a gate; returns what was asked for."""
    asked = {}

    def script(*rows, **fields):
        def gate(workloads, **arguments):
            asked.update(arguments, workloads=workloads)
            return GateResult(
                base=Revision("main", "0" * 40),
                head=Revision("working tree", "1" * 40),
                threshold=arguments["threshold"],
                familywise_alpha=0.01,
                metric=arguments["metric"],
                rows=rows,
                gate_failed=any(each.verdict == "slower" for each in rows),
                **fields,
            )

        monkeypatch.setattr(module, "gate", gate)
        return asked

    return script


@pytest.mark.parametrize(
    ("rows", "fields", "code", "error"),
    [
        ((row(),), {}, 0, ""),
        ((row("undecided"),), {}, 0, ""),
        ((row("slower"),), {}, 1, ""),
        ((row("slower"), FAILING), {}, 1, ""),
        ((row(), FAILING), {}, 2, "b: it fails on the head: OSError: no\\x1b[2J"),
        ((row(),), {"interrupted": True}, 130, "interrupted; earlier processes are above"),
    ],
)
def test_exit_codes(steady, scripted, rows, fields, code, error):
    scripted(*rows, **fields)
    ended = steady("gate", "--base", "main", "a", "b", "--threshold", "2%", "--device", "cpu")
    assert ended.code == code
    assert ended.err == (f"steady: {error}\n" if error else "")


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_a_failed_gate_is_told_once(steady, scripted, quiet):
    scripted(row("slower"))
    ended = steady("gate", "--base", "main", "a", "--device", "cpu", *quiet)
    told = "gate failed: 1 of 1 workload slower by more than 1 %"
    assert (ended.out + ended.err).count(told) == 1
    assert ended.err == (f"steady: {told}\n" if quiet else "")


def test_options_reach_the_gate(steady, scripted, folder):
    asked = scripted(row(interval=Interval(0.0, -0.001, 0.001)))
    ended = steady(
        *("gate", "--base", "v1", "a", "--batch", "4", "--train", "--seed", "3", "--quiet"),
        *("--processes", "8", "--budget", "5m", "--metric", "period", "--install"),
        *("--device", "cpu", "--json", "out.json", "--markdown", "-"),
    )
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("### steady gate passed")
    assert asked["workloads"] == ("a",)
    assert (asked["base"], asked["batch"], asked["train"], asked["seed"]) == ("v1", 4, True, 3)
    assert (asked["processes"], asked["budget"], asked["metric"]) == (8, "5m", "period")
    assert (asked["install"], asked["base_env"], asked["threshold"]) == (True, None, 0.01)
    found = json.loads((folder / "out.json").read_text())
    assert (found["kind"], found["rows"][0]["effect"]["low"]) == ("gate", -0.001)


@pytest.mark.parametrize("text", ["-1%", "fast", "100%", ""])
def test_a_threshold_is_a_percentage(steady, text):
    ended = steady("gate", "--base", "HEAD", "a", "--threshold", text)
    assert ended.code == 2
    assert "is not a percentage such as 2%" in only_line(ended.err)


def test_outside_a_repository_it_is_refused(steady):
    ended = steady("gate", "--base", "HEAD", "tiny.py:small", "--device", "cpu", "--quiet")
    assert ended.code == 2
    assert "is not in a git repository" in only_line(ended.err)


def hears_ctrl_c():
    """Undoes what a shell does to commands in the background, where the tests may run."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_leaves_no_worktree_and_no_process(repository, tmp_path):
    repository.commit(tiny_py=TINY)
    scratch = tmp_path / "own"
    scratch.mkdir()
    command = [sys.executable, "-m", "steadytorch", "gate", "--base", "HEAD", "tiny.py:slow"]
    with subprocess.Popen(
        [*command, "--device", "cpu"],
        cwd=repository.root,
        env={**os.environ, "TMPDIR": str(scratch)},
        preexec_fn=hears_ctrl_c,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        end = time.monotonic() + 100
        while not list(scratch.glob("*/base-1.log")):  # the workers are up
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error.strip()) == (130, "steady: interrupted")
    assert (repository.worktrees(), list(scratch.iterdir())) == (1, [])


def test_results_are_tracked_to_a_page(steady, scripted, folder):
    scripted(row(interval=Interval(0.0, -0.001, 0.001), head_median_ns=1e6))
    (folder / "results").mkdir()
    for name in "ab":
        steady(*("gate", "--base", "m", "a", "--device", "cpu", "--json", f"results/{name}.json"))
    ended = steady("track", "results", "--html", "page.html", "--json", "track.json")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("0 changes in 1 series\n  a, time over 000000000000, 2 results")
    assert "<title>a: steady track</title>" in (folder / "page.html").read_text()
    assert len(list(folder.glob("plotly-*.min.js"))) == 1
    assert len(json.loads((folder / "track.json").read_text())["series"][0]["points"]) == 2
    assert steady("report", "track.json").code == 0


def test_what_cannot_be_tracked_is_bad_input(steady):
    ended = steady("track", "tiny.py")
    assert ended.code == 2
    assert "is not a saved result" in only_line(ended.err)


def test_the_command_has_the_defaults_of_the_function():
    context = click.Context(gate)
    processes, threshold = (
        next(option for option in gate.params if option.name == name)
        for name in ("processes", "threshold")
    )
    assert processes.get_default(context) == module.PROCESSES
    given = threshold.get_default(context)
    assert threshold.process_value(context, given) == module.THRESHOLD
