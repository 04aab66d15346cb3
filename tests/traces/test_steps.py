import dataclasses

import pytest

from steadytorch.traces.events import Category
from steadytorch.traces.steps import busiest_device, find_steps, gpu_rows, launch_rows, step_marks

from . import synthetic as syn
from .published import needs_published, oracle, trace


def found(*events):
    read = syn.trace(
        [e for each in events for e in ([each] if isinstance(each, syn.Event) else each)]
    )
    steps, marks = find_steps(read, busiest_device(read))
    return [(s.name, s.start_ns, s.end_ns) for s in steps], len(marks)


def launch(call, gpu, correlation, **where):
    return syn.launch("gemm", call=call, gpu=gpu, correlation=correlation, **where)


def test_a_step_ends_with_the_last_event_that_it_launched_and_delays_the_next():
    steps, _ = found(
        syn.step(3, 0, 1_000),
        syn.step(4, 1_000, 2_000),
        launch((100, 200), (500, 1_700), 1),
        launch((1_100, 1_200), (1_700, 1_900), 2),
    )
    assert steps == [("ProfilerStep#3", 0, 1_700), ("ProfilerStep#4", 1_700, 2_000)]


def test_what_was_launched_before_the_first_step_delays_it():
    steps, _ = found(
        launch((0, 10), (20, 1_500), 1), syn.step(0, 1_000, 2_000), syn.step(1, 2_000, 3_000)
    )
    assert steps[0] == ("ProfilerStep#0", 1_500, 2_000)


def test_a_step_whose_time_is_taken_up_by_the_one_before_is_empty():
    steps, _ = found(
        syn.step(0, 0, 1_000), syn.step(1, 1_000, 2_000), launch((1, 2), (500, 5_000), 1)
    )
    assert steps[1] == ("ProfilerStep#1", 5_000, 5_000)


def test_a_call_at_the_end_of_a_mark_belongs_to_the_next_step():
    steps, _ = found(
        syn.step(0, 0, 1_000),
        syn.step(1, 1_000, 2_000),
        launch((1_000, 1_010), (1_200, 2_500), 1),
    )
    assert steps == [("ProfilerStep#0", 0, 1_000), ("ProfilerStep#1", 1_000, 2_500)]


def test_without_marks_all_work_is_one_step():
    steps, marks = found(
        syn.python("main", 0, 9_000),
        syn.op("aten::add", 100, 300),
        launch((200, 250), (400, 800), 1),
    )
    assert steps == [("whole trace", 100, 800)]
    assert marks == 0


def test_launches_of_other_gpus_do_not_make_a_step_longer():
    steps, _ = found(
        syn.step(0, 0, 1_000),
        launch((100, 110), (200, 900), 1),
        launch((120, 130), (850, 1_500), 2, device=1),
    )
    assert steps == [("ProfilerStep#0", 0, 1_000)]


def test_marks_of_another_process_are_left_out():
    other = syn.Event("user_annotation", "ProfilerStep#0", 0, 400, process=7, thread=7)
    steps, _ = found(other, syn.step(0, 100, 1_000), launch((200, 210), (300, 900), 1))
    assert steps == [("ProfilerStep#0", 100, 1_000)]


def test_the_process_counts_with_all_of_its_threads():
    def foreign(start_ns, correlation):
        call = syn.runtime("cudaLaunchKernel", start_ns, start_ns + 10, correlation=correlation)
        made = syn.kernel("gemm", start_ns + 20, start_ns + 30, correlation=correlation)
        return dataclasses.replace(call, process=7, thread=7), made

    other = syn.Event("user_annotation", "ProfilerStep#0", 0, 400, process=7, thread=7)
    own = [launch((n * 100, n * 100 + 10), (n * 100 + 20, 950), n, thread=n) for n in (2, 3, 4)]
    steps, _ = found(other, syn.step(0, 100, 1_000), foreign(110, 8), foreign(150, 9), *own)
    assert steps == [("ProfilerStep#0", 100, 1_000)]


def test_a_range_on_the_gpu_is_no_mark():
    read = syn.trace([syn.gpu_annotation("ProfilerStep#0", 0, 500), syn.step(0, 0, 1_000)])
    assert [read.events.category[row] for row in step_marks(read)] == [Category.ANNOTATION]


def test_one_call_can_have_launched_many():
    read = syn.trace(
        [
            syn.runtime("cudaGraphLaunch", 0, 10, correlation=5),
            syn.kernel("a", 20, 30, correlation=5),
            syn.kernel("b", 30, 40, correlation=5),
            syn.kernel("orphan", 50, 60, correlation=6),
        ]
    )
    calls = launch_rows(read, gpu_rows(read, 0))
    assert [c if c < 0 else read.name_of(c) for c in calls] == ["cudaGraphLaunch"] * 2 + [-1]


def test_of_calls_with_one_id_the_last_before_the_event_launched_it():
    read = syn.trace(
        [
            syn.kernel("early", 5, 8, correlation=5),
            syn.runtime("first", 10, 20, correlation=5),
            syn.kernel("a", 30, 40, correlation=5),
            syn.runtime("second", 50, 60, correlation=5),
            syn.kernel("b", 70, 80, correlation=5),
        ]
    )
    calls = launch_rows(read, gpu_rows(read, 0))
    assert [read.name_of(c) for c in calls] == ["first", "first", "second"]


@needs_published
@pytest.mark.parametrize("index", range(6))
def test_published_steps_to_the_microsecond(index):
    read = trace("kineto_v100_resnet50_workers0")
    steps, _ = find_steps(read, busiest_device(read))
    published = oracle("kineto_v100_resnet50_workers0")["steps_us"]
    assert len(steps) == len(published)
    assert steps[index].total_ns == published[str(steps[index].index)][-1] * 1000
