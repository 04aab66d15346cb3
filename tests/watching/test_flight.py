from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadytorch.device.recording import Recording
from steadytorch.explain.session import explain
from steadytorch.ledger.ledger import build_ledger
from steadytorch.ledger.operator_slices import PARTS
from steadytorch.measure.measurement import summarize
from steadytorch.measure.variability import find_outliers, slow_limit
from steadytorch.traces.reader import read_trace
from steadytorch.watching import flight as flights
from steadytorch.watching.clock import (
    BACKWARD,
    FORWARD,
    INPUT,
    MODULE,
    OPTIMIZER,
    OPTIMIZING,
    SLICES,
    StepClock,
)
from steadytorch.watching.flight import (
    DEEPEST,
    FIRST_LIMIT,
    JUDGED_BY,
    LEAD,
    MOST_EVENTS,
    SPARE,
    FlightRecorder,
    Sample,
)
from steadytorch.watching.probes import Probes
from steadytorch.watching.tracefile import Names, write_trace

MS = 1_000_000
SLOW = (60, 73, 80, 81, 95, 108, 117, 126, 139, 141, 150, 166, 178, 199)


class Time:
    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


def made(keep=14, limit=slow_limit):
    time = Time()
    flight = FlightRecorder(keep, time, time)
    flight.limit = limit
    clock = StepClock(time, flight=flight)
    clock.boundary(OPTIMIZING, 1)
    return time, clock, flight


def during(clock, time, phase, ns):
    assert clock.begin(phase)
    time.now += ns
    clock.end()


def train(clock, time, ns):
    during(clock, time, INPUT, ns // 10)
    during(clock, time, FORWARD, ns // 5)
    during(clock, time, BACKWARD, ns // 2)
    time.now += ns - ns // 10 - ns // 5 - ns // 2
    clock.boundary(OPTIMIZING, 1)


def recorded(slow=SLOW, steps=200, seed=0, warm_up=()):
    """Steps as they are recorded: right-skewed, 3 % apart, some five times as long."""
    noise = np.random.default_rng(seed).lognormal(0, 0.03, steps)
    noise[list(slow)] *= 5
    noise[: len(warm_up)] = warm_up
    return (5 * MS * noise).astype(np.int64).tolist()


def slow_ones(durations):
    every = summarize(durations)
    return {o.index for o in every.outliers if o.sample_ns > every.median_ns}


@pytest.mark.parametrize("seed", range(5))
def test_slow_steps_are_held_whenever_they_come(seed):
    time, clock, flight = made()
    durations = recorded(seed=seed, warm_up=[40, 20, 9, 5, 3])
    for ns in durations:
        train(clock, time, ns)
    assert set(SLOW) <= slow_ones(durations)
    assert slow_ones(durations) <= flight.held().keys()


def test_slow_steps_of_a_long_warm_up_leave_room_for_later_ones():
    time, clock, flight = made(keep=14)
    durations = recorded(steps=400, slow=[], warm_up=[100] * SPARE)
    for place in range(200, 340, 10):
        durations[place] *= 5
    for ns in durations:
        train(clock, time, ns)
    assert slow_ones(durations) == set(range(200, 340, 10)) < flight.held().keys()


@given(st.lists(st.integers(1, 10**10), min_size=4, max_size=60))
def test_the_limit_is_that_of_outliers(samples):
    every = np.array(samples, dtype=np.float64)
    limit, median = slow_limit(every), np.median(every)
    slow = {o.index for o in find_outliers(every) if o.sample_ns > median}
    near = set(np.flatnonzero(np.abs(every / limit - 1) < 1e-9).tolist())
    assert slow ^ set(np.flatnonzero(every > limit).tolist()) <= near


def test_the_limit_is_computed_ever_more_rarely():
    counts = []

    def limit(durations):
        counts.append(clock.steps)
        assert len(durations) <= JUDGED_BY
        return slow_limit(durations)

    time, clock, _ = made(limit=limit)
    for ns in recorded(slow=(), steps=3000):
        train(clock, time, ns)
    assert counts[0] == FIRST_LIMIT
    assert len(counts) < 30
    assert all(later <= 1.35 * earlier for earlier, later in pairwise(counts))


def test_only_the_slowest_are_held_with_the_steps_before_them():
    time, clock, flight = made(keep=2, limit=None)
    for step in range(400):
        train(clock, time, MS * (1000 + step if step % 3 else 5))
    held = flight.held()
    assert sorted(held) == [step for step in range(400) if step % 3][-2 - SPARE :]
    tape = held[max(held)]
    assert [step.number for step in tape.steps] == list(range(max(held) - LEAD, max(held) + 1))
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(tape.steps))


def test_work_of_the_recorder_belongs_to_no_step():
    time, clock, flight = made()

    def limit(durations):
        time.now += 7 * MS
        return 10 * MS

    flight.limit = limit
    for _ in range(FIRST_LIMIT + 1):
        train(clock, time, 5 * MS)
    assert set(clock.durations_ns) == {5 * MS}
    assert flight.spent_ns >= 7 * MS


def test_events_of_a_step_are_bounded():
    time, clock, flight = made()
    module = nn.Identity()
    for _ in range(MOST_EVENTS):
        during(clock, time, FORWARD, 1)
        assert flight.enter(module, outermost=True)
        assert flight.leave()
    clock.boundary(OPTIMIZING, 1)
    (tape,) = flight.held()[0].steps
    assert len(tape.codes) == len(tape.at_ns) <= MOST_EVENTS + 2


def test_modules_are_bounded_and_ids_that_are_used_again_told_apart(monkeypatch):
    monkeypatch.setattr(flights, "MOST_MODULES", 5)
    _, _, flight = made()
    for kind in (nn.ReLU, nn.GELU, nn.SiLU):
        flight.enter(kind())
        flight.leave()
    assert flight.module_names() == ["ReLU", "GELU", "SiLU", "another module"]
    for _ in range(10):
        flight.enter(nn.Tanh())
        flight.leave()
    assert len(flight.module_names()) == 6
    assert max(flight._codes) == flights.FIRST_MODULE + 5


def test_names_of_modules_give_their_place():
    _, _, flight = made()
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    for module in (model, model[0], model[1], model[1][0]):
        flight.enter(module)
    assert flight.module_names()[:4] == ["Sequential", "Linear 0", "Sequential 1", "ReLU 1.0"]


def test_fewer_levels_are_recorded_where_calls_cost_too_much():
    time, clock, flight = made()
    flight._event_ns = 1_000.0
    for _ in range(4):
        for depth in range(10):
            assert flight.enter(time, outermost=not depth) or depth >= flight.depth
            time.now += 10_000
        while flight._open:
            flight.leave()
        clock.boundary(OPTIMIZING, 1)
    assert flight.depth < 10
    for _ in range(100):
        flight.enter(time, outermost=True)
        flight.leave()
        time.now += 10
        clock.boundary(OPTIMIZING, 1)
    assert flight.depth == 1


def test_calls_that_cost_little_are_all_recorded():
    time, clock, flight = made()
    flight._event_ns = 200.0
    for _ in range(4):
        train(clock, time, MS)
    assert flight.depth == DEEPEST


def test_other_threads_and_children_record_nothing():
    _, clock, flight = made()
    found = []
    thread = threading.Thread(target=lambda: found.append(flight.enter(nn.Identity())))
    thread.start()
    thread.join()
    assert found == [False]
    clock.ignore()
    assert not flight.enter(nn.Identity())


def test_steps_under_another_profiler_are_set_aside():
    time, clock, flight = made()
    running = [False]
    flight.profiling = lambda: running[0]
    for step in range(6):
        running[0] = step in (2, 3)
        train(clock, time, MS)
    assert flight.profiled == 3  # the one in which it ended, too
    assert flight.held().keys() == {0, 1, 5}


def test_a_stronger_sign_forgets_the_steps_before():
    time = Time()
    flight = FlightRecorder(3, time, time)
    clock = StepClock(time, flight=flight)
    for _ in range(3):
        during(clock, time, FORWARD, MS)
        clock.boundary(MODULE, 1)
    assert flight.held()
    clock.boundary(OPTIMIZING, 1)
    assert not flight.held()


def written(path, flight, step, lines=(), what=(), job=None, **recording):
    known = Recording(device="cpu", interval_ns=1, **recording)
    names = Names(flight.module_names(), list(lines))
    write_trace(path, flight.held()[step], names, known, what, job)
    return read_trace(path)


def test_traces_of_ranks_name_them_and_are_compared(tmp_path):
    paths = []
    for rank in range(2):
        time, clock, flight = made(limit=None)
        for _ in range(9):
            during(clock, time, FORWARD, MS)
            during(clock, time, BACKWARD, 2 * MS if rank == 1 else 7 * MS)
            time.now += 5 * MS * rank  # the script's own code
            clock.boundary(OPTIMIZING, 1)
        job = {"rank": rank, "world_size": 2}
        paths.append(tmp_path / f"{1 - rank}.json.gz")
        assert written(paths[-1], flight, 8, job=job).job == job
    (late,) = explain(paths).late
    assert (late.rank, late.slice) == (1, "cpu_script")
    assert late.late_ns == pytest.approx(5 * MS, rel=0.01)


STEPS = st.lists(
    st.lists(st.tuples(st.sampled_from(range(7)), st.integers(1, 10**7)), max_size=12),
    min_size=1,
    max_size=4,
)


@given(STEPS)
def test_a_trace_has_the_slices_of_the_clock(tmp_path_factory, steps):
    time, clock, flight = made(limit=None)
    module = nn.Identity()
    for events in steps:
        time.now += 10
        for phase, ns in events:
            time.now += 3
            if phase == FORWARD:
                assert clock.begin(phase)
                flight.enter(module, outermost=True)
                time.now += ns
                flight.leave()
                clock.end()
            else:
                during(clock, time, phase, ns)
        clock.boundary(OPTIMIZING, 1)
    path = tmp_path_factory.mktemp("t") / "x.json.gz"
    ledger = build_ledger(written(path, flight, len(steps) - 1))
    assert [step.index for step in ledger.steps] == list(range(len(steps)))
    kinds = dict(zip(SLICES, PARTS.values(), strict=True))
    for place, step in enumerate(ledger.steps):
        expected = {kinds[n]: c[place] for n, c in zip(SLICES, clock.slices_ns, strict=True)}
        assert {n: ns for n, ns in step.slices.items() if ns} == {
            n: ns for n, ns in expected.items() if ns
        }


def test_a_trace_shows_modules_lines_collections_and_other_threads(tmp_path):
    time, clock, flight = made(limit=None)
    model = nn.Sequential(nn.ReLU())
    train(clock, time, MS)
    clock.begin(FORWARD)
    flight.enter(model, outermost=True)
    flight.enter(model[0])
    time.now += MS
    flight.samples.append(Sample(time.now, FORWARD, 1, (("loader", 0),)))
    time.now += MS
    flight.leave()
    flight.leave()
    clock.end()
    collected = time.now
    time.now += MS
    clock.boundary(OPTIMIZING, 1)
    trace = written(
        tmp_path / "x.json.gz",
        flight,
        1,
        lines=["b.py:2 work", "a.py:1 \udc80"],
        what=["rest \udc80"],
        gc_start_ns=(collected, 10**15),
        gc_duration_ns=(MS // 2, MS),
        gc_generation=(2, 2),
    )
    assert {"nn.Module: Sequential", "nn.Module: ReLU 0", "a.py:1 ? (sampled)"} <= set(trace.names)
    (line,) = (trace.events.name == trace.names.index("b.py:2 work (sampled)")).nonzero()[0]
    (mark,) = (trace.events.name == trace.names.index("ProfilerStep#1")).nonzero()[0]
    assert trace.events.thread[line] != trace.events.thread[mark]
    slices = build_ledger(trace).steps[1].slices
    assert {n: ns for n, ns in slices.items() if ns} == {
        "cpu_forward": 2 * MS,
        "cpu_gc": MS // 2,
        "cpu_script": MS // 2,
    }


def test_parts_are_the_slices_in_their_order():
    assert len(PARTS) == len(SLICES)
    for part, name in zip(PARTS, SLICES, strict=True):
        known = {"input_wait": "dataloader", "rest": "script"}
        assert part == f"steadytorch.{known.get(name, name)}"


def test_nested_calls_are_recorded_and_exceptions_leave_nothing_open():
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    flight = FlightRecorder(3)
    clock = StepClock(flight=flight)
    probes = Probes(clock)
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    probes.install()
    try:
        for _ in range(3):
            model(torch.ones(1, 2))
        with pytest.raises(ValueError, match="no"):
            nn.Sequential(Failing())(torch.ones(1))
        assert flight._open == []
        model(torch.ones(1, 2))
    finally:
        probes.remove()
    assert clock.steps >= 2
    names = flight.module_names()
    assert names[:4] == ["Sequential", "Sequential 0", "Linear 0.0", "ReLU 1"]
    codes = next(iter(flight.held().values())).steps[-1].codes
    assert sum(code >= flights.FIRST_MODULE for code in codes) == 4
    assert codes.count(flights.LEAVE) == 4
    assert OPTIMIZER not in codes


def test_costly_steps_are_recorded_in_part():
    time, clock, flight = made()
    flight._event_ns = 1_000.0
    for _ in range(5000):
        train(clock, time, 70_000)  # seven events
    assert 0.05 < flight.recorded / 5000 < 0.3
    assert flight.cost_ns() < 0.011 * sum(clock.durations_ns) + 6e6
    train(clock, time, 10**9)
    flight.on = True
    clock.flight.begin(time.now, 7)
    train(clock, time, 10**9)
    assert clock.steps - 1 in flight.held()


def test_a_step_that_is_not_recorded_leaves_open_calls_alone():
    time, clock, flight = made()
    flight.on = False
    module = nn.Identity()
    assert clock.begin(FORWARD)
    assert flight.enter(module, outermost=True)
    assert not flight.enter(module)
    assert flight.leave()
    clock.end()
    clock.boundary(OPTIMIZING, 1)
    assert flight.recorded == 0
    assert not flight.held()
    assert flight.on
    train(clock, time, MS)
    assert flight.held().keys() == {1}


def test_an_interrupt_within_the_recorder_costs_one_step():
    time, clock, flight = made()

    def interrupted():
        raise KeyboardInterrupt

    assert clock.begin(FORWARD)
    flight._now = interrupted
    with pytest.raises(KeyboardInterrupt):
        flight.enter(nn.Identity(), outermost=True)
    flight._now = time
    flight._open.append(1)  # as if it had come a little later
    clock.end()
    clock.boundary(OPTIMIZING, 1)
    assert flight.recorded == 0
    assert flight.enter(nn.Identity(), outermost=True)
    assert flight.leave()
    assert flight._open == []
    train(clock, time, MS)
    assert flight.held().keys() == {1}


def test_a_step_is_overdue_once_it_takes_longer_than_slow_ones():
    time, clock, flight = made(limit=lambda _: 10 * MS)
    for _ in range(FIRST_LIMIT):
        train(clock, time, 5 * MS)
    assert not flight.is_overdue(time.now + 10 * MS)
    assert flight.is_overdue(time.now + 10 * MS + 1)
    flight.clear()
    assert not flight.is_overdue(time.now + 10**10)
