import pytest

from steadytorch.traces.quality import CUT_SHORT, quality
from steadytorch.traces.reader import read_trace

from .recorded import kept
from .synthetic import (
    ORIGIN_NS,
    annotation,
    kernel,
    launch,
    op,
    overhead,
    python,
    runtime,
    step,
    trace,
)

US = 1000


def _steps(counts, **options):
    """Marked steps of so many kernels each, every one launched and run in its own 10 us."""
    events, at, number = [], 0, 0
    for index, count in enumerate(counts):
        start = at
        for _ in range(count):
            number += 1
            call, gpu = (at, at + 2 * US), (at + 4 * US, at + 8 * US)
            events += launch("k", call=call, gpu=gpu, correlation=number, **options)
            at += 10 * US
        events.append(step(index, start, at))
    return [op("aten::mm", 0, at), *events]


def _of(events, **more):
    return quality(trace(events, **more))


def test_a_sound_trace_has_nothing_wrong():
    found = _of(_steps([50, 50, 50]))
    assert (found.problems, found.notes, found.distrusted) == ((), (), ())
    assert (found.gpu_events, found.steps, found.last_step_share) == (150, 3, 1.0)


@pytest.mark.parametrize(("lost", "said"), [(1, "notes"), (10, "problems")])
def test_gpu_events_without_a_call_are_counted_and_many_a_problem(lost, said):
    orphans = [
        kernel("lost", (9 + i) * 10 * US, (9 + i) * 10 * US + US, correlation=10**6 + i, stream=9)
        for i in range(lost)
    ]
    found = _of([*_steps([100, 100]), *orphans])
    assert found.orphans == lost
    assert f"{lost} " in getattr(found, said)[0]
    assert ("idle_launch" in found.distrusted) == (said == "problems")


def test_without_any_call_that_is_the_problem():
    found = _of([kernel("k", i * US, (i + 1) * US, correlation=i + 1) for i in range(5)])
    assert "no CUDA calls" in found.problems[0]
    assert found.orphans == 5
    assert any("no operators" in note for note in found.notes)


@pytest.mark.parametrize(("skewed", "said"), [(1, "notes"), (20, "problems")])
def test_gpu_events_before_their_call_are_counted_and_many_a_problem(skewed, said):
    early = [
        event
        for i in range(skewed)
        for event in launch(
            "early",
            call=((i + 2) * 10 * US, (i + 2) * 10 * US + US),
            gpu=((i + 1) * 10 * US, (i + 1) * 10 * US + US),
            correlation=10**6 + i,
            stream=9,
        )
    ]
    found = _of([*_steps([100, 100]), *early])
    assert found.negative_latency == skewed
    assert found.worst_latency_ns == 10 * US
    assert "by up to 10.0 us" in getattr(found, said)[0]


def test_a_capture_cut_off_shows_in_its_last_step():
    found = _of(_steps([50, 52, 50, int(50 * CUT_SHORT) - 1]))
    assert found.last_step_share == 39 / 50
    assert "78%" in found.problems[0]
    assert found.distrusted == ("last step",)
    assert _of(_steps([50, 52, 50, int(50 * CUT_SHORT)])).problems == ()


@pytest.mark.parametrize("counts", [[], [5], [0, 0], [0, 3]])
def test_too_few_steps_cannot_show_it(counts):
    assert _of([op("x", 0, 5), *_steps(counts)]).last_step_share is None


def test_events_that_overlap_on_one_stream_are_counted():
    events = [
        event
        for i in range(10)
        for event in launch(
            "k",
            call=(i * 10 * US, i * 10 * US + US),
            gpu=(i * 10 * US + 2 * US, i * 10 * US + (25 if i == 4 else 5) * US),
            correlation=i + 1,
        )
    ]
    found = _of(events)
    # The fifth lasts until 65 us: the next two begin at 52 and 62.
    assert (found.overlaps, found.overlap_ns) == (2, 16 * US)
    assert found.distrusted == ("exclusive times",)


def test_streams_and_devices_may_run_side_by_side():
    events = [
        *launch("a", call=(0, 5), gpu=(10, 90), correlation=1, stream=7),
        *launch("b", call=(5, 9), gpu=(20, 80), correlation=2, stream=8),
        *launch("c", call=(9, 10), gpu=(20, 80), correlation=3, stream=7, device=1),
    ]
    assert _of(events).overlaps == 0


def test_whole_microseconds_overlap_by_their_rounding():
    events = [
        *launch("a", call=(0, US), gpu=(2 * US, 5 * US), correlation=1),
        *launch("b", call=(US, 2 * US), gpu=(4 * US, 9 * US), correlation=2),
    ]
    assert _of(events, schema="2022").overlaps == 0
    assert _of([*events, op("x", 0, 1)]).overlaps == 1


def test_time_of_the_profiler_itself_is_summed():
    sound = _steps([100, 100])
    found = _of([*sound, overhead("Buffer Flush", 0, 30 * US), overhead("Resource", 5, 5 + US)])
    assert found.overhead_ns == 30 * US
    assert found.problems == ()
    found = _of([*sound, overhead("Activity Buffer Request", 0, 500 * US)])
    assert "25%" in found.problems[0]
    assert "idle_profiler" in found.distrusted
    assert _of([*sound, overhead("Lazy Function Loading", 0, 500 * US)]).overhead_ns == 0


def test_what_the_reader_left_out_is_told():
    zero = [kernel("lost", -ORIGIN_NS, 9 - ORIGIN_NS, correlation=1) for _ in range(5)]
    found = _of([*_steps([50]), *zero, op("back", 50, 20)], schema="epoch-float")
    assert found.zero_timestamps == 5
    assert found.bad_durations == 1
    assert "gpu_kernel" in found.distrusted
    assert any("1 negative" in note for note in found.notes)


def test_what_is_missing_is_noted():
    assert _of([op("x", 0, 5), python("f", 0, 5)]).notes == (
        "no GPU events: only the host's time can be explained",
        "no step marks: call profiler.step() after every step to tell steps apart",
        "Python calls were recorded (with_stack), which slowed the host",
    )


@pytest.mark.parametrize("events", [[runtime("cudaFree", 0, 5)], [annotation("a", 0, 0)]])
def test_next_to_nothing_is_no_problem(events):
    found = _of(events)
    assert (found.gpu_events, found.problems) == (0, ())


REAL = ("a100_event_sync", "h100_bert_small", "h100_owlv2", "kineto_v100_resnet50_workers0")


@pytest.mark.parametrize("name", [*REAL, "v100_resnet_ns_resolution"])
def test_real_traces_pass_the_gate(name):
    found = quality(read_trace(kept(f"{name}.json.gz")))
    assert found.problems == ()
    assert (found.orphans, found.negative_latency, found.overlaps) == (0, 0, 0)
