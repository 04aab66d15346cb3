from __future__ import annotations

import gc
import threading
import time

from steadytorch.device.thread_time import ThreadTime


def test_collections_in_the_thread_do_not_count_and_work_does():
    kept = [[number] for number in range(300_000)]
    with ThreadTime() as cpu:
        before_ns, began_ns = cpu.ns(), time.thread_time_ns()
        gc.collect()
        spent_ns = time.thread_time_ns() - began_ns
        assert cpu.ns() - before_ns < spent_ns / 2
        before_ns = cpu.ns()
        sum(number[0] for number in kept)
        assert cpu.ns() > before_ns


def test_collections_in_another_thread_take_nothing_off():
    kept = [[number] for number in range(300_000)]
    other = threading.Thread(target=gc.collect)
    gc.disable()  # but for the one asked for
    try:
        with ThreadTime() as cpu:
            other.start()
            other.join()
            low, found, high = time.thread_time_ns(), cpu.ns(), time.thread_time_ns()
    finally:
        gc.enable()
    assert low <= found <= high
    assert kept


def test_the_collector_is_left_as_it_was():
    before = list(gc.callbacks)
    with ThreadTime():
        assert len(gc.callbacks) == len(before) + 1
    assert gc.callbacks == before
