from __future__ import annotations

import gc
import itertools
import mmap
import subprocess
import sys
import threading
import time
from collections import Counter

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.device import recorder as recorder_module
from steadytorch.device.channels import GPU_FIELDS
from steadytorch.device.recorder import GcWatch, Recorder, Tape
from steadytorch.device.recording import COUNTERS, LEVELS
from steadytorch.errors import UsageError

SELDOM_S = 3600.0  # only the first tick and the last
UNLIMITED = 1e12  # where the clock is a counter instead of time


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "steadytorch-recorder"]


@given(st.integers(0, 200), st.integers(2, 16))
def test_a_tape_is_bounded_and_keeps_its_order_and_its_beginning(rows, limit):
    tape = Tape(limit)
    for number in range(rows):
        tape.add(number, {"wait_ns": 2 * number})
    assert len(tape.at_ns) <= limit
    assert list(tape.at_ns) == sorted(set(tape.at_ns))
    assert list(tape.at_ns[:1]) == list(range(min(rows, 1)))
    assert list(tape.at_ns[-1:]) == ([rows - 1] if rows else [])
    assert all(
        w == 2 * at for at, w in zip(tape.at_ns, tape.columns().get("wait_ns", ()), strict=True)
    )


def test_a_thinned_tape_asks_for_rarer_ticks():
    tape = Tape(4)
    for number in range(9):
        tape.add(number, {"wait_ns": number})
    assert tape.stride == 8


def test_a_column_left_out_of_a_row_holds_its_last_value():
    tape = Tape()
    tape.add(1, {"other_gpu_processes": 3, "wait_ns": 1})
    tape.add(2, {"wait_ns": 5})
    assert tape.columns() == {"other_gpu_processes": (3, 3), "wait_ns": (0, 4)}


def test_levels_are_kept_as_they_are_and_counters_from_the_first_row():
    tape = Tape()
    tape.add(1, {"sm_clock_mhz": 1980, "minor_faults": 100})
    tape.add(2, {"sm_clock_mhz": 1500, "minor_faults": 107})
    assert tape.columns() == {"sm_clock_mhz": (1980, 1500), "minor_faults": (0, 7)}


def test_a_dropped_column_does_not_come_back():
    tape = Tape()
    tape.add(1, {"wait_ns": 1, "steal_ns": 1})
    tape.drop(("steal_ns",))
    tape.add(2, {"wait_ns": 1})
    assert tape.columns() == {"wait_ns": (0, 0)}


def _hearing(watch):
    """What Python's collector would call."""
    watch.install()
    hear = gc.callbacks[-1]
    watch.remove()
    return hear


def _heard(watch, durations, clock):
    hear = _hearing(watch)
    for duration in durations:
        hear("start", {"generation": 0})
        clock.append(clock[-1] + duration)
        hear("stop", {"generation": 0})


@given(st.lists(st.integers(0, 10**9), max_size=100), st.integers(2, 20))
def test_collections_are_bounded_and_the_long_ones_are_kept(durations, limit):
    clock = [0]
    watch = GcWatch(lambda: clock[-1], limit)
    _heard(watch, durations, clock)
    kept = [took for _, took, _ in watch.events]
    assert len(kept) < limit
    assert (watch.count, watch.total_ns) == (len(durations), sum(durations))
    assert sorted(kept) == sorted(took for took in durations if took >= watch.least_ns)


def test_a_collection_that_began_before_the_watch_is_not_counted():
    watch = GcWatch(lambda: 0)
    _hearing(watch)("stop", {"generation": 2})
    assert watch.events == []


def test_a_provoked_collection_is_recorded_exactly():
    times = itertools.count(1000)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with Recorder("cpu", SELDOM_S, clock=lambda: next(times)) as recorder:
            gc.collect(1)
            gc.collect(2)
    finally:
        if was_enabled:
            gc.enable()
    seen = recorder.recording
    assert seen.gc_generation == (1, 2)
    assert all(duration >= 1 for duration in seen.gc_duration_ns)
    assert seen.at_ns[0] < seen.gc_start_ns[0] < seen.gc_start_ns[1] < seen.at_ns[-1]


def test_collections_beyond_the_limit_are_counted_and_timed():
    times, was_enabled = itertools.count(), gc.isenabled()
    gc.disable()
    try:
        with Recorder("cpu", SELDOM_S, clock=lambda: next(times)) as recorder:
            for _ in range(recorder_module.MAX_COLLECTIONS + 10):
                gc.collect(0)
    finally:
        if was_enabled:
            gc.enable()
    seen = recorder.recording
    assert seen.gc_dropped >= recorder_module.MAX_COLLECTIONS // 2
    kept = len(seen.gc_duration_ns)
    assert seen.collections == (0, seen.gc_dropped + kept)
    assert seen.collections[-1] == recorder_module.MAX_COLLECTIONS + 10
    assert seen.collecting_ns == (0, seen.gc_dropped_ns + sum(seen.gc_duration_ns))
    assert seen.collecting_ns[-1] >= seen.collections[-1]  # the clock advances in each


def test_callbacks_are_restored_and_those_of_others_stay():
    def other(phase, info):
        pass

    before = list(gc.callbacks)
    try:
        with Recorder("cpu", SELDOM_S):
            assert len(gc.callbacks) == len(before) + 2  # of all collections, of its own thread's
            gc.callbacks.append(other)
        assert gc.callbacks == [*before, other]
    finally:
        gc.callbacks[:] = before


def test_a_body_that_clears_the_callbacks_does_no_harm():
    before = list(gc.callbacks)
    try:
        with Recorder("cpu", SELDOM_S) as recorder:
            gc.callbacks.clear()
        assert gc.callbacks == []
    finally:
        gc.callbacks[:] = before
    assert not _threads()
    assert len(recorder.recording.at_ns) == 2


def test_a_body_that_raises_stops_the_recorder_and_leaves_a_recording():
    recorder, before = Recorder("cpu", SELDOM_S), list(gc.callbacks)
    with pytest.raises(ZeroDivisionError), recorder:
        _ = 1 / 0
    assert not _threads()
    assert gc.callbacks == before
    assert len(recorder.recording.at_ns) == 2


def test_a_recorder_interrupted_on_entry_stops_its_thread(monkeypatch):
    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            if timeout == recorder_module.PATIENCE_S:
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(recorder_module.threading, "Event", Interrupted)
    recorder, before = Recorder("cpu", SELDOM_S), list(gc.callbacks)
    with pytest.raises(KeyboardInterrupt):
        recorder.__enter__()
    for thread in _threads():
        thread.join()
    assert gc.callbacks == before


def test_there_is_a_tick_before_the_body_and_one_after_it():
    times = itertools.count()
    with Recorder("cpu", SELDOM_S, clock=lambda: next(times)) as recorder:
        within = next(times)
    before, after = recorder.recording.at_ns
    assert before < within < after


def test_ticks_follow_each_other_while_the_body_runs():
    ticked = threading.Event()
    count = itertools.count()

    def clock():
        number = next(count)
        if number > 40:
            ticked.set()
        return number

    with Recorder("cpu", 1e-4, UNLIMITED, clock=clock) as recorder:
        assert ticked.wait(60.0)
    at = recorder.recording.at_ns
    assert len(at) > 3
    assert list(at) == sorted(at)


def test_every_channel_has_a_value_per_tick_or_a_reason():
    with Recorder("cpu", SELDOM_S) as recorder:
        pass
    seen = recorder.recording
    for channel in (*COUNTERS, *LEVELS):
        column = getattr(seen, channel)
        assert (column is None) == (channel in seen.unknown)
        assert column is None or len(column) == len(seen.at_ns)


def test_the_work_of_the_body_shows_in_the_counters():
    with Recorder("cpu", SELDOM_S) as recorder, mmap.mmap(-1, 16 << 20) as held:
        held.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(0, len(held), 1 << 12):
            held[page] = 1
    if recorder.recording.minor_faults is None:
        pytest.skip(recorder.recording.unknown["minor_faults"])
    assert recorder.recording.minor_faults[-1] >= 4096


def test_the_cost_of_the_recorder_is_in_the_recording():
    with Recorder("cpu", 1e-3) as recorder:
        threading.Event().wait(0.05)
    assert 0 < recorder.recording.cpu_share < 1
    assert recorder.recording.tick_ns > 0


def test_dear_ticks_become_rarer():
    with Recorder("cpu", 1e-3, 1e-9) as recorder:
        deadline = time.monotonic() + 60
        while recorder._ticks < 2 and time.monotonic() < deadline:  # the next is put off then
            threading.Event().wait(0.01)
        threading.Event().wait(0.05)
    assert len(recorder.recording.at_ns) <= 3
    assert recorder.recording.interval_ns > 1_000_000


def test_a_gpu_is_recorded(cuda_h200, fake_nvml):
    with Recorder("cuda:0", SELDOM_S, library=fake_nvml()) as recorder:
        pass
    seen = recorder.recording
    assert seen.device == "cuda"
    assert seen.sm_clock_mhz == (345, 345)
    assert seen.power_milliwatts == (76_500, 76_500)
    assert seen.other_gpu_processes == (0, 0)


def test_dear_channels_take_turns(cuda_h200, fake_nvml):
    library, ticked = fake_nvml(), threading.Event()
    count = itertools.count()

    def clock():
        number = next(count)
        if number > 60:
            ticked.set()
        return number

    with Recorder("cuda", 1e-4, UNLIMITED, clock=clock, library=library) as recorder:
        assert ticked.wait(60.0)
    ticks = len(recorder.recording.at_ns)
    looks = Counter(name for name, *_ in library.calls)
    # All at the first tick and the last; in between every third, or every tenth.
    assert looks["nvmlDeviceGetClockInfo"] in (2 + (ticks - 2) // 3, 3 + (ticks - 2) // 3)
    assert looks["nvmlDeviceGetComputeRunningProcesses"] <= 3 + (ticks - 2) // 10


def test_one_refused_channel_leaves_the_others(cuda_h200, fake_nvml):
    library = fake_nvml(refused={"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NO_PERMISSION})
    with Recorder("cuda", SELDOM_S, library=library) as recorder:
        pass
    seen = recorder.recording
    assert seen.power_milliwatts is None
    assert "no permission" in seen.unknown["power_milliwatts"]
    assert seen.sm_clock_mhz == (345, 345)


def test_a_channel_that_fails_midway_is_let_go_with_its_reason(cuda_h200, fake_nvml):
    refused = {"nvmlSystemGetDriverVersion": pynvml.NVML_ERROR_UNKNOWN}
    with Recorder("cuda", SELDOM_S, library=fake_nvml(refused=refused)) as recorder:
        refused["nvmlDeviceGetClockInfo"] = pynvml.NVML_ERROR_GPU_IS_LOST
    seen = recorder.recording
    assert seen.sm_clock_mhz is None
    assert "NVML error" in seen.unknown["sm_clock_mhz"]
    assert seen.power_milliwatts == (76_500, 76_500)


def test_without_nvml_every_gpu_channel_has_the_reason(cuda_h200, no_library):
    with Recorder("cuda", SELDOM_S, library=no_library) as recorder:
        pass
    for channel in GPU_FIELDS:
        assert "libnvidia-ml" in recorder.recording.unknown[channel]


def test_a_driver_that_hangs_does_not_hang_the_measurement(cuda_h200, fake_nvml, monkeypatch):
    monkeypatch.setattr(recorder_module, "PATIENCE_S", 0.05)
    release = threading.Event()
    library = fake_nvml()
    answer = library._answer

    def hang(name, arguments):
        if name == "nvmlDeviceGetPowerUsage":
            release.wait()
        return answer(name, arguments)

    library._answer = hang
    try:
        with Recorder("cuda", SELDOM_S, library=library) as recorder:
            pass
    finally:
        release.set()
        for thread in _threads():
            thread.join()
    assert recorder.recording.at_ns == ()
    assert "did not return" in recorder.recording.unknown["power_milliwatts"]


def test_a_recorder_can_be_used_again():
    recorder = Recorder("cpu", SELDOM_S)
    with recorder:
        pass
    first = recorder.recording
    with recorder, pytest.raises(UsageError, match="block has ended"):
        _ = recorder.recording
    assert recorder.recording.at_ns[0] > first.at_ns[-1]


def test_a_malformed_device_is_misuse():
    with pytest.raises(UsageError, match="unknown device"):
        Recorder("tpu")


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_that_is_no_time_is_misuse(interval_s):
    with pytest.raises(UsageError, match="must be positive"):
        Recorder("cpu", interval_s)


def test_a_process_that_never_leaves_the_body_can_still_end():
    program = (
        "from steadytorch.device.recorder import Recorder\n"
        "Recorder('cpu', 3600.0).__enter__()\nprint('done')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert ended.stdout.split() == ["done"]
