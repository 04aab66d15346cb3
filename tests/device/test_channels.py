from __future__ import annotations

import os
import resource
import shutil
import sys
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace

import pynvml
import pytest
import torch

from steadytorch.device import channels
from steadytorch.device.channels import (
    ALLOCATOR_FIELDS,
    GPU_FIELDS,
    Allocator,
    Compilations,
    CpuTimes,
    Neighbours,
    PoolQueue,
    ProcessUsage,
    ResidentMemory,
    RunQueue,
    open_channels,
    ticks_between,
)
from steadytorch.device.nvml import open_gpu
from steadytorch.device.observe import NOT_ON_CPU, NotObservable, Readings
from steadytorch.device.recording import READ_EVERY

STEP_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@pytest.fixture
def stack():
    with ExitStack() as open_files:
        yield open_files


@pytest.fixture
def tree(tmp_path):
    """A recorded /proc: CPU times, and the schedule of thread 7."""
    (tmp_path / "proc/self/task/7").mkdir(parents=True)
    (tmp_path / "proc/stat").write_text("cpu  10 0 20 300 4 0 0 5 0 0\ncpu0 1 2 3\n")
    (tmp_path / "proc/self/task/7/schedstat").write_text("9000 1234 3\n")
    return tmp_path


def _fault():
    held = bytearray(64 << 20)
    held[:: 1 << 12] = bytes(len(held) >> 12)  # at least 32 huge pages


def test_faults_of_other_threads_are_counted():
    usage = ProcessUsage()
    before = usage.read()
    thread = threading.Thread(target=_fault)
    thread.start()
    thread.join()
    assert usage.read()[2] >= before[2] + 32


def test_what_the_asking_thread_does_itself_is_left_out():
    usage = ProcessUsage()
    before = usage.read()
    _fault()
    assert usage.read()[2] < before[2] + 32


def test_a_kernel_that_counts_nothing_is_not_believed(monkeypatch):
    usage = ProcessUsage()
    counts = SimpleNamespace(ru_nvcsw=0, ru_nivcsw=0, ru_minflt=9, ru_majflt=0)
    monkeypatch.setattr(resource, "getrusage", lambda who: counts)
    assert set(usage.doubts()) == {"voluntary_switches", "involuntary_switches"}


def test_waiting_for_a_core_is_read_per_thread(tree, stack):
    queue = RunQueue(7, stack, tree)
    assert queue.read() == (1234,)
    assert queue.doubts() == {}


def test_a_kernel_without_schedule_statistics_is_not_believed(tree, stack):
    (tree / "proc/self/task/7/schedstat").write_text("0 0 0\n")
    queue = RunQueue(7, stack, tree)
    queue.read()
    assert "schedstats are off" in queue.doubts()["wait_ns"]


def test_of_other_threads_the_longest_wait_counts(tree, stack):
    tasks = tree / "proc/self/task"

    def write(thread, wait_ns, run_ns=9):
        (tasks / str(thread)).mkdir(exist_ok=True)
        (tasks / str(thread) / "schedstat").write_text(f"{run_ns} {wait_ns} 3\n")

    write(8, 1000), write(9, 5000)
    queue = PoolQueue(7, stack, tree)
    assert queue.read() == (0,)  # waits count from the first look
    write(7, 10**9), write(8, 1300), write(9, 5100)
    assert queue.read() == (300,)
    (tasks / "8/schedstat").write_text("")  # ended
    write(9, 5250)
    assert queue.read() == (300,)
    write(10, 70_000)
    for _ in range(PoolQueue.LOOK_EVERY):
        queue.read()
    write(10, 70_900)
    assert queue.read() == (900,)
    assert queue.doubts() == {}


def test_threads_that_come_and_go_leave_no_file_open(tree):
    tasks = tree / "proc/self/task"
    with ExitStack() as stack:
        before = len(os.listdir("/proc/self/fd"))
        queue = PoolQueue(7, stack, tree)
        for thread in range(100, 130):
            (tasks / str(thread)).mkdir()
            (tasks / str(thread) / "schedstat").write_text("1 1 1\n")
            for _ in range(PoolQueue.LOOK_EVERY):
                queue.read()
            (tasks / str(thread) / "schedstat").write_text("")  # ended
            queue.read()
            shutil.rmtree(tasks / str(thread))
        assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_of_one_thread_has_no_pool(tree, stack):
    queue = PoolQueue(7, stack, tree)
    queue.read()
    assert "does not apply" in queue.doubts()["pool_wait_ns"]


def test_threads_of_openmp_are_seen_and_those_of_python_are_not(stack):
    with ThreadPoolExecutor(1) as python:
        other = python.submit(threading.get_native_id).result()
        torch.ones(300_000).exp()  # starts the pool
        queue = PoolQueue(threading.get_native_id(), stack)
        queue.read()
        assert not {other, threading.get_native_id()} & set(queue._first)
        if torch.get_num_threads() > 1:
            assert "does not apply" not in str(queue.doubts())


def test_a_missing_file_says_which(tree, stack):
    with pytest.raises(NotObservable, match="task/8/schedstat cannot be read"):
        RunQueue(8, stack, tree)


def test_pages_of_files_are_no_memory_that_leaks(stack, tree):
    (tree / "proc/self").mkdir(parents=True, exist_ok=True)
    (tree / "proc/self/statm").write_text("5000 700 250 10 0 900 0\n")
    assert ResidentMemory(stack, tree).read()[0] == 450 * os.sysconf("SC_PAGE_SIZE")


def test_memory_that_the_heap_holds_free_is_told_from_memory_in_use(stack):
    memory = ResidentMemory(stack)
    if memory.doubts():
        pytest.skip(memory.doubts()["heap_free_bytes"])
    blocks = [torch.ones(25_000) for _ in range(1000)]  # 100 kB each: from the heap
    full, used = memory.read()
    del blocks[:-1]  # the last keeps the heap from shrinking
    assert memory.read()[1] == used, "it was read without growth"
    still, free = ResidentMemory(stack).read()
    assert free > used + 50_000_000
    assert still - free < full - used - 50_000_000


def test_stolen_and_disk_time_are_in_nanoseconds(tree, stack):
    assert CpuTimes(stack, tree).read() == (5 * STEP_NS, 4 * STEP_NS)


@pytest.mark.parametrize("text", ["", "cpu  0 0 0 0 0 0 0 0\n", "cpu  1 2 3\n", "intr 1 2 3\n"])
def test_cpu_times_that_are_not_there_are_refused(tree, stack, text):
    (tree / "proc/stat").write_text(text)
    with pytest.raises(NotObservable, match="does not count stolen time"):
        CpuTimes(stack, tree).read()


def test_cpu_times_that_stand_still_are_not_believed(tree, stack):
    times = CpuTimes(stack, tree)
    for _ in range(10):
        times.read()
    assert "do not advance" in times.doubts()["steal_ns"]


def test_cpu_times_are_not_doubted_after_a_moment(tree, stack):
    times = CpuTimes(stack, tree)
    times.read()
    assert times.doubts() == {}


def test_cpu_times_that_move_are_believed(tree, stack):
    times = CpuTimes(stack, tree)
    times.read()
    (tree / "proc/stat").write_text("cpu  10 0 20 400 4 0 0 6 0 0\n")
    for _ in range(10):
        assert times.read() == (6 * STEP_NS, 4 * STEP_NS)
    assert times.doubts() == {}


@pytest.fixture
def dynamo(monkeypatch):
    """The module in which torch.compile keeps its counters."""
    module = ModuleType("torch._dynamo.utils")
    module.counters = defaultdict(Counter)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", module)
    return module


def test_compilations_are_counted_through_resets(dynamo):
    compilations = Compilations()
    dynamo.counters["frames"]["total"] = 3
    assert compilations.read() == (3,)
    dynamo.counters.clear()
    assert compilations.read() == (3,)
    dynamo.counters["frames"]["total"] = 2
    assert compilations.read() == (5,)
    assert compilations.doubts() == {}


def test_reading_compilations_leaves_the_counters_as_they_are(dynamo):
    Compilations().read()
    assert not dynamo.counters


def test_without_torch_compile_there_is_nothing_to_count(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    compilations = Compilations()
    assert compilations.read() == (0,)
    assert "not in use" in compilations.doubts()["compilations"]


def test_a_real_compilation_is_counted():
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compilations = Compilations()
    (before,) = compilations.read()
    compiled(torch.ones(3))
    assert compilations.read() == (before + 1,)


def test_the_allocator_of_an_untouched_gpu_stays_untouched():
    allocator = Allocator(0)
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is initialised in this process already")
    assert allocator.read() == (0, 0)
    assert not torch.cuda.is_initialized()
    assert set(allocator.doubts()) == set(ALLOCATOR_FIELDS)


def test_the_allocator_counts_segments_that_come_and_go(monkeypatch):
    counts = {"num_alloc_retries": 2, "segment": {"all": {"allocated": 9, "freed": 4}}}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda index: counts)
    allocator = Allocator(0)
    assert allocator.read() == (2, 13)
    assert allocator.doubts() == {}


def test_neighbours_are_looked_up_only_when_the_list_changes(monkeypatch, fake_nvml, gpu_uuid):
    looks = []
    monkeypatch.setattr(channels, "own_pids", lambda: looks.append(1) or frozenset({10}))
    monkeypatch.setattr(channels, "holds_context", lambda index: True)
    listed = [SimpleNamespace(pid=10), SimpleNamespace(pid=99)]
    library = fake_nvml(nvmlDeviceGetComputeRunningProcesses=listed)
    with open_gpu(gpu_uuid, 0, library) as gpu:
        neighbours = Neighbours(gpu, 0)
        assert [neighbours.read() for _ in range(3)] == [(1,)] * 3
        listed.append(SimpleNamespace(pid=100))
        assert neighbours.read() == (2,)
    assert len(looks) == 2


def test_on_a_cpu_the_channels_of_a_gpu_do_not_apply(stack):
    readings = Readings()
    opened = open_channels("cpu", threading.get_native_id(), stack, readings)
    fields = {field for channel in opened for field in channel.fields}
    assert not fields & {*GPU_FIELDS, *ALLOCATOR_FIELDS}
    assert {readings.unknown[field] for field in (*GPU_FIELDS, *ALLOCATOR_FIELDS)} == {NOT_ON_CPU}


def test_the_channels_of_a_gpu(cuda_h200, fake_nvml, stack):
    readings = Readings()
    library = fake_nvml(nvmlDeviceGetCurrentClocksEventReasons=0x1004)
    opened = open_channels("cuda", threading.get_native_id(), stack, readings, library=library)
    values = {
        field: value
        for channel in opened
        for field, value in zip(channel.fields, channel.read(), strict=True)
    }
    assert values["sm_clock_mhz"] == 345
    assert values["power_milliwatts"] == 76_500
    assert values["clock_event_mask"] == 0x1004
    assert values["other_gpu_processes"] == 0


def test_what_a_channel_reads_together_it_reads_as_often(cuda_h200, fake_nvml, stack):
    opened = open_channels(
        "cuda", threading.get_native_id(), stack, Readings(), library=fake_nvml()
    )
    for channel in opened:
        assert {READ_EVERY.get(field, 1) for field in channel.fields} == {ticks_between(channel)}
    assert max(map(ticks_between, opened)) == READ_EVERY["other_gpu_processes"]


def test_leaving_the_stack_ends_the_session_of_the_library(cuda_h200, fake_nvml):
    library = fake_nvml()
    with ExitStack() as open_files:
        open_channels("cuda", threading.get_native_id(), open_files, Readings(), library=library)
        assert ("nvmlShutdown",) not in library.calls
    assert library.calls.count(("nvmlShutdown",)) == 1


def test_without_the_library_the_host_is_still_watched(cuda_h200, no_library, stack):
    readings = Readings()
    opened = open_channels("cuda", threading.get_native_id(), stack, readings, library=no_library)
    assert "libnvidia-ml" in readings.unknown["sm_clock_mhz"]
    assert "involuntary_switches" in {field for channel in opened for field in channel.fields}


def test_pytorch_is_not_imported_to_find_the_gpu(monkeypatch, fake_nvml, stack):
    monkeypatch.delitem(sys.modules, "torch")
    readings = Readings()
    open_channels("cuda", threading.get_native_id(), stack, readings, library=fake_nvml())
    assert "not loaded" in readings.unknown["sm_clock_mhz"]
    assert "torch" not in sys.modules


def test_a_refused_reading_raises_its_reason(cuda_h200, fake_nvml, stack):
    library = fake_nvml(refused={"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NO_PERMISSION})
    opened = open_channels("cuda", threading.get_native_id(), stack, Readings(), library=library)
    power = next(c for c in opened if c.fields == ("power_milliwatts",))
    with pytest.raises(NotObservable, match="no permission"):
        power.read()
