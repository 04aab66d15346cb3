from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
from faulty import Slow
from stored import equal

from steadytorch.errors import UsageError
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.churn import WITHHELD, ChurnGuard
from steadytorch.runtime.entries import RESOLVING
from steadytorch.tune import optimize as module_under_test
from steadytorch.tune import trial
from steadytorch.tune.optimize import OCCUPIED, SEARCHING, optimize
from steadytorch.tune.session import Session


def test_a_new_signature_is_searched_for_once_and_served(model, x, tmp_path, searches):
    tuned = optimize(model, "tune", store=tmp_path, canary=False)
    for _ in range(3):
        assert equal(tuned, model, x)
    assert len(searches.keys) == 1
    assert tuned.report().calls == {"tuned": 3}
    again = optimize(model, "strict", store=tmp_path, canary=False)
    assert equal(again, model, x)


def test_in_the_background_the_untouched_model_serves_meanwhile(model, x, tmp_path, searches):
    searches.may_end.clear()
    tuned = optimize(model, "tune", store=tmp_path, canary=False, background=True)
    for inputs in (x, x, x[:1]):
        assert equal(tuned, model, inputs)
    assert tuned.report().calls == {f"untouched: {SEARCHING}": 3}
    searches.may_end.set()
    deadline = time.monotonic() + 60
    while len(searches.keys) < 2 and time.monotonic() < deadline:
        assert equal(tuned, model, x)
        assert equal(tuned, model, x[:1])
    while tuned.report().hits < 2 and time.monotonic() < deadline:
        assert equal(tuned, model, x)
    assert tuned.report().hits >= 2
    assert len(set(searches.keys)) == len(searches.keys) == 2
    assert threading.current_thread() not in searches.threads


def test_what_is_searched_with_is_not_what_the_caller_writes_to(model, x, tmp_path, monkeypatch):
    seen, may_look = [], threading.Event()

    def search(self, watcher=None):
        assert may_look.wait(60)
        seen.append(self.workload.inputs[0].clone())
        raise UsageError("enough")

    monkeypatch.setattr(Session, "search", search)
    tuned, before = optimize(model, "tune", store=tmp_path, background=True), x.clone()
    tuned(x)
    x.zero_()
    may_look.set()
    deadline = time.monotonic() + 60
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.equal(seen[0], before)


@pytest.mark.parametrize("error", [UsageError("the budget is too small"), OSError("disk")])
@pytest.mark.parametrize("background", [False, True])
def test_a_search_that_fails_leaves_the_model_untouched_and_says_why(
    model, x, tmp_path, searches, caplog, error, background
):
    searches.error = error
    tuned = optimize(model, "tune", store=tmp_path, background=background)
    deadline = time.monotonic() + 60
    while str(error) not in caplog.text and time.monotonic() < deadline:
        assert equal(tuned, model, x)
    assert caplog.text.count(str(error)) == 1
    assert tuned.report().hits == 0
    assert len(searches.keys) == 1


def test_ctrl_c_during_a_search_is_the_callers(model, x, tmp_path, searches):
    searches.error = KeyboardInterrupt()
    tuned = optimize(model, "tune", store=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        tuned(x)
    searches.error = None
    assert equal(tuned, model, x)


def test_in_the_foreground_other_threads_do_not_wait_for_a_search(model, x, tmp_path, searches):
    searches.may_end.clear()
    tuned = optimize(model, "tune", store=tmp_path, canary=False)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(equal, tuned, model, x)
        assert searches.has_begun.wait(60)
        for inputs in (x, x[:1], x[:1]):
            assert equal(tuned, model, inputs)
        calls = {f"untouched: {RESOLVING}": 1, f"untouched: {OCCUPIED}": 2}
        assert tuned.report().calls == calls
        searches.may_end.set()
        assert future.result(60)
    for inputs in (x, x[:1]):
        assert equal(tuned, model, inputs)
    assert tuned.report().calls == {"tuned": 3, **calls}
    assert len(set(searches.keys)) == len(searches.keys) == 2


@pytest.fixture
def bundles(monkeypatch):
    """Records bundle builds, whose pauses run on a fake clock."""
    made = SimpleNamespace(threads=[], begun=threading.Event(), may_end=threading.Event())
    made.now, made.pauses, made.may_wake = 0.0, [], threading.Event()

    def keep_bundle(self, plan):
        made.threads.append(threading.current_thread())
        made.begun.set()
        assert made.may_end.wait(60)

    def sleep(seconds):
        made.pauses.append(seconds)
        assert made.may_wake.wait(60)
        made.now += seconds

    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=sleep)
    monkeypatch.setattr(module_under_test, "time", clock)
    monkeypatch.setattr(module_under_test, "compiles", lambda plan: True)
    monkeypatch.setattr(Session, "keep_bundle", keep_bundle)
    yield made
    made.may_wake.set()
    made.may_end.set()
    # One left behind would turn the next test's clock. It may still be starting.
    for _ in range(6000):
        if not any(t.name.startswith("steadytorch-bundle") for t in threading.enumerate()):
            return
        time.sleep(0.01)
    raise AssertionError("a thread that makes a bundle is left")


@pytest.mark.parametrize("background", [False, True])
def test_bundles_are_made_in_a_thread_while_the_plan_serves(
    model, x, tmp_path, searches, bundles, background
):
    bundles.may_wake.set()
    tuned = optimize(
        model, "tune", store=tmp_path, canary=False, bundle=True, background=background
    )
    deadline = time.monotonic() + 60
    while not bundles.begun.is_set() and time.monotonic() < deadline:
        assert equal(tuned, model, x)
    (thread,) = bundles.threads
    assert thread not in (threading.current_thread(), *searches.threads)
    assert thread.daemon
    assert equal(tuned, model, x)
    assert tuned.report().hits > 0
    # Compiling meanwhile would disturb a search.
    assert equal(tuned, model, x[:1])
    reason = SEARCHING if background else OCCUPIED
    assert tuned.report().calls[f"untouched: {reason}"] >= 1
    assert len(searches.keys) == 1
    bundles.may_end.set()
    while len(searches.keys) < 2 and time.monotonic() < deadline:
        assert equal(tuned, model, x[:1])
    assert len(searches.keys) == 2


def test_a_bundle_waits_until_signatures_cease_to_be_new(model, tmp_path, searches, bundles):
    tuned = optimize(model, "tune", store=tmp_path, canary=False, bundle=True)
    for size in (1, 2):
        assert equal(tuned, model, torch.randn(size, 8))
    assert len(searches.keys) == 2
    assert tuned.report().calls == {"tuned": 2}
    assert not bundles.begun.is_set()
    bundles.may_wake.set()
    assert bundles.begun.wait(60)
    assert bundles.now == pytest.approx(module_under_test.QUIET_S, abs=0.2)


def test_churn_is_warned_of_once(model, tmp_path, searches, caplog):
    caplog.set_level(logging.DEBUG, "steadytorch")
    tuned = optimize(model, "tune", store=tmp_path, canary=False)
    for size in range(1, 21):
        tuned(torch.randn(size, 8))
    said = [r.levelname for r in caplog.records if WITHHELD in r.getMessage()]
    assert said.count("WARNING") == 1
    assert said.count("DEBUG") == len(said) - 1 > 1


def test_signatures_that_churn_are_not_searched_for(model, tmp_path, searches, caplog):
    tuned = optimize(model, "tune", store=tmp_path, canary=False)
    inputs = [torch.randn(size, 8) for size in range(1, 13)]
    for x in inputs:
        assert equal(tuned, model, x)
    withheld = len(inputs) - len(searches.keys)
    assert 0 < len(searches.keys) < len(inputs)
    assert tuned.report().calls[f"untouched: {WITHHELD}"] == withheld
    assert "signatures in" in caplog.text


def test_each_call_is_counted_once_and_the_numbers_are_those_of_now(model, tmp_path, searches):
    tuned = optimize(model, "tune", store=tmp_path, canary=False)
    for size in (*range(1, 13), *range(1, 13)):
        tuned(torch.randn(size, 8))
    said = {served.detail for served in tuned.report().signatures if served.reason == WITHHELD}
    (numbers,) = said
    served = len(searches.keys)
    assert numbers.startswith(f"12 signatures in {24 - served} calls without a plan")


@pytest.mark.parametrize("background", [False, True])
def test_the_calls_of_the_signatures_add_up(model, x, tmp_path, searches, monkeypatch, background):
    guard = partial(ChurnGuard, first_sight=0, break_even_calls=2)
    monkeypatch.setattr(module_under_test, "ChurnGuard", guard)
    tuned = optimize(model, "tune", store=tmp_path, canary=False, background=background)
    deadline = time.monotonic() + 60
    calls = 0
    while tuned.report().hits < 2 and time.monotonic() < deadline:
        assert equal(tuned, model, x)
        calls += 1
    (served,) = tuned.report().signatures
    assert served.others >= 2
    assert served.hits + served.others == sum(tuned.report().calls.values()) == calls


@pytest.mark.usefixtures("faulty_transforms", "no_process_left")
@pytest.mark.slow
def test_a_real_search_in_worker_processes(tmp_path, monkeypatch):
    quick = TransformSpec("quick")
    monkeypatch.setattr(trial, "HANDLER", "faulty:FaultyHandler")
    monkeypatch.setattr(Session, "options_that_apply", lambda self: ([quick], {}))
    torch.manual_seed(0)
    model, x = Slow().eval(), torch.randn(2, 8)
    tuned = optimize(model, "tune", store=tmp_path, budget="10m", canary=False)
    assert equal(tuned, model, x)
    assert tuned.report().calls == {"tuned": 1}
    assert tuned.report().signatures[0].executor == "quick"


def test_a_process_that_ends_while_it_searches_leaves_nothing(tmp_path):
    script = """
        import time
        from pathlib import Path

        import torch

        from steadytorch import optimize

        fast = optimize(torch.nn.Linear(8, 2).eval(), "tune", store="plans", background=True)
        fast(torch.randn(2, 8))
        for name in ("workload.pt", "trial-1.log"):
            while not list(Path("scratch").glob(f"steadytorch-*/{name}")):
                time.sleep(0.01)
    """
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "TMPDIR": str(scratch)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert list(scratch.iterdir()) == []
    assert [p for p in psutil.process_iter(["cmdline"]) if str(scratch) in str(p.info)] == []
    assert ended.stderr == ""
