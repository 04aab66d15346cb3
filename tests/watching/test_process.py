"""What runs beside the watched thread, in real threads."""

from __future__ import annotations

import threading

import torch

from steadytorch.findings.watched_steps import SteppedOptimizer
from steadytorch.watching.clock import StepClock
from steadytorch.watching.process import ProcessSampler, run_and_wait_ns
from steadytorch.watching.stacks import StackSampler


def spin(stop):
    total = 0
    while not stop.is_set():
        total += sum(range(1000))
    return total


def test_a_busy_thread_is_seen_with_its_line_before_an_idle_one():
    stop = threading.Event()
    busy = threading.Thread(target=spin, args=(stop,), name="busy")
    idle = threading.Thread(target=stop.wait, name="idle")
    busy.start()
    idle.start()
    sampler = ProcessSampler("cpu")
    lines = StackSampler(StepClock())
    try:
        sampler.look(lines._line)
        first = run_and_wait_ns(busy.native_id)
        while run_and_wait_ns(busy.native_id)[0] - first[0] < 20_000_000:
            stop.wait(0.01)
        sampler._looked_ns = 0
        sampler.look(lines._line)
    finally:
        stop.set()
        busy.join()
        idle.join()
    sampler.stop()
    setting = sampler.setting([SteppedOptimizer("SGD", True)])
    busiest = setting.others[0]  # threads of earlier tests may be listed too
    assert busiest.name == "busy"
    assert busiest.busy > 0
    assert busiest.line.startswith("test_process.py:")
    assert setting.optimizers == (SteppedOptimizer("SGD", True),)
    assert 0 <= setting.off_core <= 1
    assert 0 <= setting.core_wait <= 1


def test_modes_are_seen_while_they_are_on():
    sampler = ProcessSampler("cpu")
    with torch.autograd.set_detect_anomaly(True):
        sampler.look(lambda frame: "")
    sampler.look(lambda frame: "")
    assert sampler.setting(()).modes == (("torch.autograd.set_detect_anomaly", 0.5),)


def test_a_rank_has_its_share_of_the_cores(monkeypatch):
    sampler = ProcessSampler("cpu")
    alone = sampler.setting(()).cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert sampler.setting(()).cores == max(1, alone // 2)
