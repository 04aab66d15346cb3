from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest

from steadytorch.bench.bench_worker import save_payload
from steadytorch.device.recording import Recording
from steadytorch.errors import UsageError
from steadytorch.explain import explain_worker as in_worker
from steadytorch.explain.capture import capture, element_types
from steadytorch.explain.explain_worker import ExplainHandler, Profiled
from steadytorch.traces.events import Category
from steadytorch.traces.reader import read_trace
from steadytorch.workload.loading import load_workload


def workload(name):
    return load_workload(f"{Path(__file__).with_name('workloads.py')}:{name}")


def captured(name, **arguments):
    defaults = {"device": "cpu", "seconds": 1.5, "steps": 4}
    return capture(workload(name), **{**defaults, **arguments})


def names_of(trace, *categories):
    return [trace.name_of(int(row)) for row in trace.events.of(*categories)]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Measure the device's limits once for all of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def tiny(cache):
    told = []
    return captured("tiny", progress=told.append), told


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """Fail the test if it leaves a process or a folder behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    yield
    assert not set(psutil.Process().children(recursive=True)) - before
    assert list(tmp_path.iterdir()) == []


# -- a whole capture ----------------------------------------------------------------------------


def test_the_workload_is_measured_before_it_is_profiled(tiny):
    seen, told = tiny
    assert told == [
        "measuring without the profiler",
        "calls after pauses",
        "profiling",
        "measuring the device's limits",
    ]
    assert len(seen.measured.period.samples_ns) == len(seen.series.durations_ns) >= 10
    assert (seen.gaps, seen.failed, seen.interrupted) == ((), None, False)


def test_each_profiled_step_is_marked_and_holds_its_operators(tiny):
    seen, trace = tiny[0], tiny[0].trace
    marks = trace.events.of(Category.ANNOTATION)
    steps = [row for row in marks if trace.name_of(int(row)).startswith("ProfilerStep#")]
    count = len(seen.profiled.periods_ns)
    assert 3 <= count <= 4
    # Warm-up and settling steps are counted but not marked.
    numbers = [trace.name_of(int(row)).removeprefix("ProfilerStep#") for row in steps]
    assert numbers == [str(number) for number in range(3, 3 + count)]
    products = [row for row in trace.events.of(Category.CPU_OP) if "addmm" in trace.name_of(row)]
    start, end = trace.events.start_ns, trace.events.end_ns
    inside = [sum(start[step] <= start[row] <= end[step] for row in products) for step in steps]
    assert inside == [2] * count
    assert len(products) == 2 * (count + 1)


def test_shapes_and_memory_are_recorded(tiny):
    trace = tiny[0].trace
    assert {"shapes", "memory"} <= trace.recorded
    assert element_types(trace) == ["float32"]
    assert len(trace.events.of(Category.MEMORY))


def test_integers_are_no_element_types():
    kinds = [{"types": ("long int", "float")}, {"types": ("bool", "c10::BFloat16")}, {}]
    assert element_types(SimpleNamespace(inputs=kinds)) == ["bfloat16", "float32"]


def test_the_distortion_is_of_the_same_probe(tiny):
    seen = tiny[0]
    expected = np.median(seen.profiled.periods_ns) / seen.measured.period.median_ns
    assert seen.distortion == pytest.approx(expected)


def test_the_rates_of_the_device_are_of_the_types_in_the_trace(tiny):
    rates = tiny[0].rates
    assert rates.copy_bandwidth_bytes_per_s > 1e8
    assert rates.matrix_flops_per_s.keys() == {"float32"}


def test_notes_are_data(tiny):
    notes = tiny[0].notes
    assert notes["threads"] >= 1
    assert notes["cudnn_benchmark"] is False
    assert notes["cudnn_benchmark_late"] is False
    assert not notes["compile_events"]
    assert "graph_breaks" not in notes
    msgspec.json.encode(msgspec.to_builtins(notes))


def test_recording_and_trace_lie_on_one_clock(tiny):
    seen = tiny[0]
    recording = seen.notes["profile_recording"]
    assert isinstance(recording, Recording)
    offset = seen.notes["clock_offset_ns"]
    first = seen.trace.origin_ns + int(seen.trace.events.start_ns.min())
    last = seen.trace.origin_ns + int(seen.trace.events.end_ns.max())
    # The recorder runs around the profiler; the clocks are read within microseconds.
    assert recording.at_ns[0] + offset <= first < last
    assert last <= recording.at_ns[-1] + offset + 1_000_000


def test_calls_after_pauses_are_timed_in_turns(tiny):
    probe = tiny[0].notes["pause_probe"]
    assert (probe["pause_ms"], probe["asked"]) == ([10, 100], False)
    assert 1 <= probe["rounds"] <= 10
    assert len(probe["after_ns"]) == 2
    assert [len(taken) for taken in probe["after_samples_ns"]] == [probe["rounds"]] * 2
    assert len(probe["steady_samples_ns"]) == probe["rounds"]
    assert probe["steady_ns"] > 0


# -- other workloads ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_step_shows_backward_and_optimizer(nothing_left):
    seen = captured("training", steps=3, seconds=0.8)
    found = names_of(seen.trace, Category.CPU_OP, Category.ANNOTATION)
    assert any("AddmmBackward" in name for name in found)
    assert any("Optimizer.step#SGD" in name for name in found)


@pytest.mark.slow
def test_a_pause_that_is_asked_for_is_the_one_tried(nothing_left):
    probe = captured("tiny", steps=1, seconds=0.8, pause_s=0.02).notes["pause_probe"]
    assert (probe["pause_ms"], probe["asked"]) == ([20.0], True)


# -- failures -----------------------------------------------------------------------------------


def test_a_workload_that_raises_at_once_is_a_usage_error(nothing_left):
    with pytest.raises(UsageError, match="the workload fails: RuntimeError: the data ended"):
        captured("at_once")


@pytest.mark.slow
def test_a_workload_that_raises_while_timed_is_not_profiled(nothing_left):
    seen = captured("while_timed", seconds=60)
    assert seen.failed == "RuntimeError: the data ended"
    assert len(seen.measured.period.samples_ns) >= 10
    assert (seen.trace, seen.profiled, seen.rates, seen.distortion) == (None, None, None, None)


def test_a_workload_that_cannot_be_profiled_is_measured_all_the_same(nothing_left):
    seen = captured("shy", seconds=0.8)
    assert (seen.trace, seen.failed, seen.interrupted) == (None, None, False)
    (gap,) = seen.gaps
    assert gap.rule == "profile"
    assert "not while you watch" in gap.why
    assert seen.measured.period.median_ns > 0
    assert seen.notes["pause_probe"]["rounds"] >= 1


@pytest.mark.parametrize(
    "moment", ["calls after pauses", "profiling", "measuring the device's limits"]
)
@pytest.mark.sampled(every=3)
def test_an_interrupt_after_the_measurement_keeps_it(nothing_left, moment):
    def interrupt(message):
        if message == moment:
            raise KeyboardInterrupt

    seen = captured("tiny", seconds=0.8, progress=interrupt)
    assert seen.interrupted
    assert seen.measured.period.median_ns > 0
    assert (seen.trace is not None) == (moment == "measuring the device's limits")


def test_an_interrupt_before_anything_was_timed_is_raised(nothing_left):
    def interrupt(message):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captured("tiny", progress=interrupt)


# -- in the worker ------------------------------------------------------------------------------


@pytest.fixture
def handler(tmp_path):
    """A handler in this process, its workload warmed up."""

    def ready(name):
        save_payload(workload(name), tmp_path)
        made = ExplainHandler(tmp_path)
        made.load("cpu", {})
        made.set_up([])
        return made

    return ready


def test_a_workload_that_fetches_its_inputs_shows_its_loader(handler, tmp_path):
    handler("fetching").profile(3, 1.0)
    trace = read_trace(tmp_path / in_worker.TRACE_FILE)
    found = names_of(trace, Category.CPU_OP, Category.ANNOTATION)
    assert any("DataLoader" in name for name in found)


@pytest.fixture
def little_to_collect():
    """Exclude objects of earlier tests from collections, from now on."""
    gc.collect()
    gc.freeze()


def test_collections_are_in_the_trace(handler, tmp_path, little_to_collect):
    handler("collecting").profile(3, 1.0)
    trace = read_trace(tmp_path / in_worker.TRACE_FILE)
    assert names_of(trace, Category.ANNOTATION).count("steadytorch.gc") >= 3


def test_fewer_steps_are_profiled_where_traces_get_large(handler, monkeypatch):
    monkeypatch.setattr(in_worker, "TRACE_BYTES", 1)
    profiled = msgspec.convert(handler("tiny").profile(5, 60.0), Profiled)
    assert len(profiled.periods_ns) == 1


def test_fewer_steps_are_profiled_where_time_is_short(handler):
    profiled = msgspec.convert(handler("tiny").profile(10, 1e-9), Profiled)
    assert len(profiled.periods_ns) == in_worker.FEWEST_STEPS


def test_the_collector_is_listened_to_no_longer_than_needed(handler):
    before = list(gc.callbacks)
    handler("tiny").profile(1, 1.0)
    assert gc.callbacks == before
