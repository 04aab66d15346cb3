from __future__ import annotations

import pytest

from steadytorch.findings.finding import Abstention
from steadytorch.findings.watched_steps import BusyThread, Setting
from steadytorch.rules.interpreter_lock import rule

from ..findings.cases import MS, the, watched

BUSY = (BusyThread("summary", 0.9, "train.py:5 summarize"),)


def test_a_busy_thread_is_named_where_the_training_thread_is_off_its_core():
    case = watched(backward=10 * MS, setting=Setting(off_core=0.5, core_wait=0.0, others=BUSY))
    found = the(rule(case))
    assert found.title.endswith("summary, mostly train.py:5 summarize")
    assert found.cost_ns == 10 * MS
    assert found.confidence == "high"


@pytest.mark.parametrize(
    ("off", "wait", "share"), [(0.0, 0.5, 0.5), (0.05, 0.5, 0.55), (0.2, 0.95, 1.1)]
)
def test_waits_for_a_core_count_up_to_the_time_of_the_thread(off, wait, share):
    case = watched(backward=10 * MS, setting=Setting(off_core=off, core_wait=wait, others=BUSY))
    assert the(rule(case)).cost_ns == pytest.approx(share * 20 * MS)


def test_idle_threads_waits_for_data_and_a_running_training_thread_are_no_fault():
    idle = (BusyThread("log", 0.01),)
    assert rule(watched(setting=Setting(off_core=0.9, core_wait=0.0, others=idle))) == ()
    waiting = Setting(off_core=0.5, core_wait=0.0, others=BUSY)
    assert rule(watched(input_wait=10 * MS, setting=waiting)) == ()
    assert rule(watched(setting=Setting(off_core=0.05, core_wait=0.0, others=BUSY))) == ()


def test_without_the_kernels_account_it_abstains():
    assert isinstance(rule(watched(setting=Setting(others=BUSY))), Abstention)
