from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steadytorch.findings.figures import duration
from steadytorch.findings.finding import Abstention, Case
from steadytorch.ledger.ledger import build_ledger
from steadytorch.rules.synchronisation import NAME, rule
from steadytorch.traces.reader import read_trace

from ..findings.cases import US, kept, launch, memcpy, op, runtime, step, the, traced


class Program:
    """A host that launches kernels and reads values, and the GPU that follows it."""

    def __init__(self):
        self.events, self.now, self.free, self.number, self.began = [], 0, 0, 0, 0

    def kernel(self, length, call=6 * US, python=10 * US):
        self.number += 1
        called = (self.now, self.now + call)
        begin = max(self.free, called[1])
        self.events += launch(
            "k", call=called, gpu=(begin, begin + length), correlation=self.number
        )
        self.free, self.now = begin + length, called[1] + python
        return self

    def item(self):
        """Copies a value to the host and waits for it."""
        self.number += 1
        start, copied = self.now, self.now + 8 * US
        begin = max(self.free, copied)
        end = begin + 2 * US
        done = max(copied, end) + 6 * US
        self.events += [
            op("aten::item", start, done + US),
            runtime("cudaMemcpyAsync", start + US, copied, correlation=self.number),
            memcpy("Memcpy DtoH (Device -> Pageable)", begin, end, correlation=self.number, size=4),
            runtime("cudaStreamSynchronize", copied, done),
        ]
        self.free, self.now = end, done + 2 * US
        return self

    def wait(self, name="cudaDeviceSynchronize"):
        done = max(self.now, self.free) + 5 * US
        self.events.append(runtime(name, self.now, done))
        self.now = done + US
        return self

    def step(self, index):
        self.events.append(step(index, self.began, self.now))
        self.began = self.now
        return self


def test_item_in_a_loop_of_short_steps_is_found():
    """Launch-bound steps of 3 ms, with values read in between."""
    program = Program()
    for index in range(1, 5):
        for _ in range(20):
            for _ in range(8):
                program.kernel(4 * US)
            program.item()
        program.step(index)
    found = the(rule(traced(program.events)))
    assert found.id == NAME
    assert "aten::item" in found.title
    assert found.cost_ns > 100 * US


def test_of_a_hundred_waits_each_is_counted():
    program = Program()
    for index in range(1, 4):
        for _ in range(100):
            program.kernel(4 * US).item()
        program.step(index)
    case = traced(program.events)
    found = the(rule(case))
    (line,) = [line for line in found.evidence if line.startswith("aten::item")]
    assert line == f"aten::item: {duration(found.cost_ns)} a step"


def test_small_copies_from_pageable_memory_do_not_wait():
    """The driver stages them (CUDA Driver API, "API synchronization behavior")."""
    events, now = [], 0
    for index in range(4):
        began = now
        for copy in range(8):
            number = 10 * index + copy + 1
            called = (now, now + 15 * US)
            events += [
                op("aten::copy_", now, now + 16 * US),
                runtime("cudaMemcpyAsync", *called, correlation=number),
                memcpy(
                    "Memcpy HtoD (Pageable -> Device)",
                    called[1],
                    called[1] + US,
                    correlation=number,
                    size=64,
                ),
            ]
            now += 30 * US
        events.append(step(index + 1, began, now))
    case = traced(events)
    assert rule(case) == ()
    assert case.ledger.mean("idle_synchronisation") == 0


def test_a_wait_that_keeps_the_host_from_running_ahead_is_found():
    """A GPU-bound step with one wait: the GPU idles until the next step's first launch."""
    program = Program()
    for index in range(1, 5):
        for _ in range(50):
            program.kernel(40 * US)
        program.item()
        program.now += 60 * US
        program.step(index)
    found = the(rule(traced(program.events)))
    assert "aten::item" in found.title
    assert found.confidence == "medium"
    assert 50 * US < found.recoverable_ns[1] < 100 * US


def test_waiting_while_the_gpu_works_costs_nothing():
    """The summed time of calls is not lost time: nearly the whole step is one waiting call."""
    program = Program()
    for index in range(1, 4):
        program.kernel(9000 * US)
        program.events.append(runtime("cudaStreamSynchronize", program.now, program.free - US))
        program.now = program.free - 100 * US
        program.kernel(900 * US)
        program.now = program.free - 100 * US
        program.step(index)
    case = traced(program.events)
    assert rule(case) == ()


def test_waits_of_whoever_profiles_are_left_out():
    program = Program()
    for index in range(1, 4):
        for _ in range(50):
            program.kernel(40 * US)
        program.step(index).wait("cudaEventSynchronize")
        program.began = program.now
    case = traced(program.events)
    assert case.ledger.mean("idle_synchronisation") < 0.01 * case.ledger.steps[0].total_ns
    assert rule(case) == ()


def test_launch_bound_without_waits_is_something_else():
    program = Program()
    for index in range(1, 4):
        for _ in range(100):
            program.kernel(4 * US)
        program.step(index)
    assert rule(traced(program.events)) == ()


def test_a_trace_without_a_gpu_cannot_tell():
    assert isinstance(rule(Case()), Abstention)
    assert isinstance(rule(traced([op("aten::item", 0, 9)])), Abstention)


def test_a_real_trace_with_much_waiting_and_little_loss_is_not_blamed():
    read = read_trace(kept("h100_owlv2.json.gz"))
    assert rule(Case(trace=read, ledger=build_ledger(read))) == ()


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 3))
def test_what_is_claimed_was_idle(kernels, length, items):
    program = Program()
    for index in range(1, 4):
        for _ in range(kernels):
            program.kernel(length * US)
        for _ in range(items):
            program.item()
        program.step(index)
    case = traced(program.events)
    verdict = rule(case)
    assert not isinstance(verdict, Abstention)
    idle = case.ledger.mean("idle_synchronisation", "idle_launch", "unknown")
    assert all(0 <= found.recoverable_ns[1] <= idle + 1 for found in verdict)
