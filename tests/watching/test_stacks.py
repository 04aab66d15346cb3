from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import pytest
import torch

from steadytorch.watching import stacks
from steadytorch.watching.clock import StepClock
from steadytorch.watching.flight import FlightRecorder
from steadytorch.watching.stacks import SWITCH_S, StackSampler, SwitchInterval, stack_of


def seen_from_another_thread():
    found, watched = [], threading.get_ident()
    thread = threading.Thread(target=lambda: found.append(stack_of(watched)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_stack_is_read_and_the_collector_left_as_it_was(enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        stack = seen_from_another_thread()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    functions = [function.rpartition(".")[2] for _, function, _ in stack]
    inner = functions.index("seen_from_another_thread")
    assert functions[inner + 1].startswith("test_a_stack_is_read")
    assert stack[inner][0] == __file__
    code = seen_from_another_thread.__code__
    assert stack[inner][2] in {line for *_, line in code.co_lines()}


def test_a_thread_that_has_ended_has_no_stack():
    thread = threading.Thread(target=time.sleep, args=(0,))
    thread.start()
    thread.join()
    assert stack_of(thread.ident) == []


STRESS = """
import gc, sys, threading, time
from steadytorch.watching.stacks import stack_of

def heard(phase, info):  # lets another thread run in the middle of a collection
    time.sleep(0)

def deep(level):
    return [deep(level - 1)] if level else []

gc.callbacks.append(heard)
gc.set_threshold(30)
main, ends, kinds = threading.get_ident(), time.monotonic() + float(sys.argv[1]), set()

def read():
    while time.monotonic() < ends:
        for line in stack_of(main):
            kinds.add(tuple(map(type, line)))

thread = threading.Thread(target=read)
thread.start()
while thread.is_alive():
    deep(40)
assert kinds and kinds <= {(str, str, int), (str, str, type(None))}, kinds
assert gc.isenabled()
"""


@pytest.mark.parametrize("seconds", ["1", pytest.param("20", marks=pytest.mark.slow)])
def test_collections_while_a_stack_is_read_do_no_harm(seconds):
    line = [sys.executable, "-X", "faulthandler", "-c", STRESS, seconds]
    subprocess.run(line, check=True, timeout=120)


def sampled(work, enough):
    """The sampler after this thread has worked until that is enough, and the switch intervals."""
    sampler = StackSampler(StepClock(), interval_s=0.002)
    sampler.start()
    ends, seen = time.monotonic() + 20, set()
    while time.monotonic() < ends and not enough(sampler, seen):
        work()
        seen.add(round(sys.getswitchinterval(), 6))
    sampler.stop()
    return sampler, seen


def after(samples):
    return lambda sampler, seen: len(sampler.places) >= samples


def is_seen(function):
    return lambda sampler, seen: any(f" {function}" in name for name in list(sampler.names))


def test_lines_that_hold_the_lock_are_seen_and_the_switch_interval_restored(monkeypatch):
    monkeypatch.setattr(stacks, "is_alone", lambda: True)  # threads of earlier tests may be left
    found = sys.getswitchinterval()

    def own_code():
        until_ns = time.perf_counter_ns() + 3_000_000  # several switch intervals
        while time.perf_counter_ns() < until_ns:
            pass

    def work():
        own_code()
        time.sleep(0.001)

    sampler, seen = sampled(work, is_seen("own_code"))
    assert sys.getswitchinterval() == found
    assert SWITCH_S in seen
    assert is_seen("own_code")(sampler, seen)


def test_beside_another_thread_the_switch_interval_stays():
    found, ended = sys.getswitchinterval(), threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        _, seen = sampled(lambda: time.sleep(0.001), after(5))
    finally:
        ended.set()
        thread.join()
    assert seen == {round(found, 6)}


def test_a_switch_interval_that_the_script_sets_stays():
    found = sys.getswitchinterval()
    try:
        sampled(lambda: sys.setswitchinterval(0.02), after(5))
        assert sys.getswitchinterval() == pytest.approx(0.02)
    finally:
        sys.setswitchinterval(found)


def test_a_forked_child_has_its_own_switch_interval_again():
    found = sys.getswitchinterval()
    switch = SwitchInterval()
    assert switch.shorten(alone=True)
    assert sys.getswitchinterval() < found
    switch.restore()
    switch.restore()
    assert sys.getswitchinterval() == found


def losses():
    return torch.nn.functional.cross_entropy(torch.zeros(50_000, 100), torch.zeros(50_000).long())


def test_losses_are_told_from_the_scripts_own_code():
    sampler, _ = sampled(losses, is_seen("losses, in cross_entropy"))
    by_name = dict(zip(sampler.names, sampler.routine, strict=True))
    assert any(routine for name, routine in by_name.items() if name.endswith("in cross_entropy"))
    assert not any(routine for name, routine in by_name.items() if " sampled" in name)


def test_a_flight_recorder_gets_the_lines_of_other_threads():
    flight = FlightRecorder(1)
    sampler = StackSampler(StepClock(flight=flight), interval_s=0.001)
    ended = threading.Event()

    def neighbour():
        while not ended.is_set():
            time.sleep(0.001)

    thread = threading.Thread(target=neighbour, name="beside")
    thread.start()
    sampler.start()
    try:
        while len(flight.samples) < 3:
            time.sleep(0.001)
    finally:
        sampler.stop()
        ended.set()
        thread.join()
    sample = flight.samples[-1]
    ((_, line),) = [each for each in sample.others if each[0] == "beside"]
    assert "test_stacks.py" in sampler.names[line]
    assert " neighbour" in sampler.names[line]
    assert "test_stacks.py" in sampler.names[sample.place]
