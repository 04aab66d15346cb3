from __future__ import annotations

import math
import random
import statistics
import threading
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from steadytorch.watching import clock as clocks
from steadytorch.watching.clock import (
    BACKWARD,
    COLLECTION,
    FORWARD,
    INPUT,
    LOADER,
    MODULE,
    OPTIMIZER,
    OPTIMIZING,
    SLICES,
    StepClock,
    standard_error,
)


class Time:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def made():
    time = Time()
    return time, StepClock(time)


def during(clock, time, phase, ns):
    assert clock.begin(phase)
    time.now += ns
    clock.end()


def slices(clock, step):
    return {name: c[step] for name, c in zip(SLICES, clock.slices_ns, strict=True) if c[step]}


def train(clock, time, who=1, input_ns=10, rest_ns=0):
    during(clock, time, INPUT, input_ns)
    during(clock, time, FORWARD, 20)
    during(clock, time, BACKWARD, 40)
    time.now += rest_ns
    during(clock, time, OPTIMIZER, 5)
    clock.boundary(OPTIMIZING, who)


def test_first_step_begins_at_the_first_boundary():
    time, clock = made()
    time.now = 1000  # imports and set-up
    train(clock, time)
    train(clock, time, rest_ns=3)
    assert list(clock.durations_ns) == [78]
    assert list(clock.starts_ns) == [1075]
    assert slices(clock, 0) == {
        "input_wait": 10, "forward": 20, "backward": 40, "optimizer": 5, "rest": 3,
    }  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(range(7)), st.integers(0, 10**9)), max_size=60))
def test_slices_add_up_to_the_step_and_steps_follow_each_other(events):
    time, clock = made()
    for phase, ns in events:
        time.now += 1
        during(clock, time, phase, ns)
        if phase == OPTIMIZER:
            clock.boundary(OPTIMIZING, 1)
    for step, total in enumerate(clock.durations_ns):
        assert sum(column[step] for column in clock.slices_ns) == total
    ends = [s + d for s, d in zip(clock.starts_ns, clock.durations_ns, strict=True)]
    assert ends[:-1] == list(clock.starts_ns)[1:]


def test_nested_calls_belong_to_the_outer_slice_and_closures_to_their_own():
    time, clock = made()
    clock.boundary(OPTIMIZING, 1)
    clock.begin(FORWARD)
    assert not clock.begin(BACKWARD)
    time.now += 7
    clock.end()
    clock.begin(OPTIMIZER)
    during(clock, time, FORWARD, 11)  # a closure
    time.now += 2
    clock.end()
    clock.boundary(OPTIMIZING, 1)
    assert slices(clock, 0) == {"forward": 18, "optimizer": 2}


def test_two_optimizers_make_one_step():
    time, clock = made()
    for _ in range(5):
        for who in (1, 2):
            train(clock, time, who)
    assert clock.steps == 4
    assert set(clock.durations_ns) == {150}


def test_a_replaced_optimizer_takes_over():
    time, clock = made()
    for who in (1, 1, 1, 2, 2, 2):
        train(clock, time, who)
    assert clock.steps == 4  # the first of each is not timed alone
    assert list(clock.durations_ns) == [75, 75, 150, 75]


def test_stronger_signs_discard_steps_of_weaker_ones():
    time, clock = made()
    for _ in range(4):
        during(clock, time, FORWARD, 5)
        clock.boundary(MODULE, 1)
    assert (clock.unit, clock.steps) == (MODULE, 3)
    clock.boundary(LOADER, "loader")
    train(clock, time)
    clock.boundary(MODULE, 1)
    train(clock, time)
    assert (clock.unit, clock.steps) == (OPTIMIZING, 1)
    assert clock.discarded == 3


def test_other_threads_are_ignored():
    clock = StepClock()
    found = []

    def other():
        found.append(clock.begin(FORWARD))
        clock.boundary(OPTIMIZING, 1)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [False]
    assert clock.unit == MODULE


def test_time_between_epochs_of_batches_is_no_step():
    time, clock = made()
    for _ in range(2):
        for _ in range(3):
            clock.boundary(LOADER, "loader")
            time.now += 10
        clock.boundary(LOADER, "loader")
        clock.pause()
        time.now += 500
    assert list(clock.durations_ns) == [10] * 6


def test_steps_beyond_the_limit_are_counted(monkeypatch):
    monkeypatch.setattr(clocks, "MOST_STEPS", 3)
    time, clock = made()
    for _ in range(8):
        train(clock, time)
    assert (clock.steps, clock.untimed) == (3, 4)


def test_reset_leaves_an_interrupted_optimizer():
    clock = StepClock()
    clock.begin(OPTIMIZER)
    clock.reset()
    assert clock.begin(FORWARD)


def test_a_child_ignores_its_parents_clock():
    clock = StepClock()
    clock.ignore()
    assert not clock.begin(FORWARD)


def test_a_collection_interrupts_any_slice_and_its_own_time_is_not_counted_twice():
    time, clock = made()
    clock.boundary(OPTIMIZING, 1)
    assert clock.begin(FORWARD)
    time.now += 5
    assert clock.interrupt(COLLECTION)
    time.now += 7
    clock.resume()
    time.now += 1
    clock.end()
    clock.boundary(OPTIMIZING, 1)
    assert slices(clock, 0) == {"forward": 6, "collection": 7}
    assert clock.late_means_ns()["collection"] == (7, inf)


def test_a_collection_while_a_step_is_finished_stays_where_it_is():
    _, clock = made()
    clock.boundary(OPTIMIZING, 1)
    clock._finishing = True
    assert not clock.interrupt(COLLECTION)


def test_the_error_of_a_mean_allows_for_times_that_drift():
    draw = random.Random(0)
    alike = [draw.gauss(10, 1) for _ in range(800)]
    drifting = [time + 3 * math.sin(index / 60) for index, time in enumerate(alike)]
    independent = statistics.stdev(alike) / 800**0.5
    assert independent <= standard_error(alike) < 2 * independent
    assert standard_error(drifting) > 4 * statistics.stdev(drifting) / 800**0.5
    assert standard_error([5.0, 7.0]) == 1.0
    assert standard_error([5.0]) == inf
