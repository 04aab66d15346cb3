import numpy as np
import pytest

from steadytorch.measure.clock import FakeClock
from steadytorch.measure.sampler import GROUPING_BELOW_NS, HostSampler, grouped, warm_up


def _scripted(clock, durations):
    remaining = iter(durations)
    return lambda: clock.advance(next(remaining))


def test_every_iteration_gives_its_own_period():
    clock = FakeClock()
    periods, host = HostSampler(clock).periods(_scripted(clock, [5, 7, 11]), 3)
    assert periods.tolist() == [5, 7, 11]
    assert host.tolist() == periods.tolist()


def test_latency_of_a_host_step_is_its_period():
    clock = FakeClock(100)
    assert HostSampler(clock).latencies(_scripted(clock, [3, 4]), 2).tolist() == [3, 4]


def test_warm_up_keeps_the_first_call_apart():
    clock = FakeClock()
    warmed = warm_up(_scripted(clock, [10**10] + [10**8] * 50), HostSampler(clock))
    assert warmed.first_call_ns == 10**10
    assert warmed.calls == 1 + 5
    assert warmed.iteration_ns == 10**8


def test_warm_up_makes_three_calls_however_slow_they_are():
    clock = FakeClock()
    assert warm_up(_scripted(clock, [10**9] * 5), HostSampler(clock)).calls == 3


@pytest.mark.parametrize(("iteration", "group"), [(GROUPING_BELOW_NS, 1), (30_000, 4), (100, 1000)])
def test_short_iterations_are_grouped(iteration, group):
    clock = FakeClock()
    warmed = warm_up(lambda: clock.advance(iteration), HostSampler(clock))
    assert warmed.group == group


def test_a_group_takes_the_step_that_often():
    calls = []
    step = grouped(lambda: calls.append(1), 5)
    step()
    assert len(calls) == 5


def test_a_group_of_one_is_the_step_itself():
    def step():
        return None

    assert grouped(step, 1) is step


def test_samples_are_integers_of_nanoseconds():
    assert HostSampler().latencies(lambda: None, 4).dtype == np.int64


def test_the_host_has_one_clock_only():
    sampler = HostSampler()
    sampler.periods(lambda: None, 4)
    assert sampler.clock_difference() is None
