"""The CUDA sampler beside a device that runs by the host's fake clock, one step after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steadytorch.measure.clock import FakeClock
from steadytorch.measure.sampler import (
    IN_FLIGHT,
    LEAD_NS,
    MOST_IN_FLIGHT,
    CudaSampler,
    may_be_in_flight,
)

US, MS = 1_000, 1_000_000


class Device:
    """A stream whose work is done in order; `enqueue` adds some."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.free_ns = clock, 0
        self.ends: list[int] = []
        self.most_in_flight = 0

    def enqueue(self, host_ns: int, work_ns: int) -> None:
        """Takes the host so long, then the device so long."""
        self.clock.advance(host_ns)
        self.free_ns = max(self.free_ns, self.clock.now_ns()) + work_ns
        self.ends.append(self.free_ns)
        in_flight = sum(end > self.clock.now_ns() for end in self.ends)
        self.most_in_flight = max(self.most_in_flight, in_flight)

    def until(self, moment_ns: int) -> None:
        self.clock.advance(max(0, moment_ns - self.clock.now_ns()))

    def synchronize(self) -> None:
        self.until(self.free_ns)


class Event:
    """What a device passes after all that was enqueued before it."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, device: Device) -> None:
        self.device, self.at_ns = device, max(device.free_ns, device.clock.now_ns())

    def synchronize(self) -> None:
        self.device.until(self.at_ns)

    def elapsed_time(self, later: Event) -> float:
        assert later.at_ns <= self.device.clock.now_ns(), "not passed yet"
        return (later.at_ns - self.at_ns) * 1e-6


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device(FakeClock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return found


def periods(device: Device, work_ns: int, host_ns: int, stall_ns: int = 0) -> np.ndarray:
    """Of 100 steps; the host is held up once, in step 60."""
    steps = iter(range(100))

    def step() -> None:
        device.enqueue(host_ns + (stall_ns if next(steps) == 60 else 0), work_ns)

    found, host = CudaSampler(device.clock).periods(step, 100)
    assert np.median(host) == host_ns
    return found


def test_a_short_stall_of_the_host_is_none_of_the_device(device: Device):
    found = periods(device, 200 * US, 10 * US, stall_ns=3 * MS)
    assert found[2:].tolist() == [200 * US] * 98


def test_a_stall_longer_than_the_lead_shows_in_one_sample(device: Device):
    found = periods(device, 200 * US, 10 * US, stall_ns=10 * MS)
    (place,) = np.flatnonzero(found[2:] > 200 * US) + 2
    assert place == 60
    # What ran, and what had ended unnoticed, when the host was held up is no lead.
    assert 10 * MS - LEAD_NS < found[place] <= 10 * MS - LEAD_NS + 3 * 200 * US


@pytest.mark.parametrize(
    ("work_ns", "host_ns", "most"),
    [
        (200 * US, 10 * US, 20),
        (200 * US, 30 * US, 20),
        (200 * US, 150 * US, 6),
        (800 * US, 600 * US, 2),
        (20 * MS, 10 * US, 2),
        (3 * MS, 10 * US, 2),
        (100 * US, 1 * US, 40),
        (50 * US, 1 * US, MOST_IN_FLIGHT),
    ],
)
def test_no_more_is_in_flight_than_the_lead_or_two(device, work_ns, host_ns, most):
    periods(device, work_ns, host_ns)
    assert device.most_in_flight == most


def test_one_short_step_at_first_does_not_fill_the_queue(device: Device):
    works = iter([3 * MS, 50 * US, *[3 * MS] * 98])
    CudaSampler(device.clock).periods(lambda: device.enqueue(10 * US, next(works)), 100)
    assert device.most_in_flight == IN_FLIGHT


def test_steps_that_become_short_fill_the_queue_later(device: Device):
    works = iter([3 * MS] * 6 + [200 * US] * 94)
    CudaSampler(device.clock).periods(lambda: device.enqueue(10 * US, next(works)), 100)
    assert device.most_in_flight == LEAD_NS // (200 * US)


def test_launch_bound_work_takes_what_the_host_takes(device: Device):
    assert periods(device, 50 * US, 80 * US)[2:].tolist() == [80 * US] * 98


def test_few_steps_are_timed_as_they_are(device: Device):
    sampler = CudaSampler(device.clock)
    for count in range(1, 6):
        found, host = sampler.periods(lambda: device.enqueue(10 * US, 200 * US), count)
        assert found[1:].tolist() == [200 * US] * (count - 1)
        assert len(host) == count


def test_what_costs_the_host_much_leaves_room_in_the_queue():
    assert may_be_in_flight(80 * US, np.asarray([500 * US, 900 * US])) == IN_FLIGHT
    assert may_be_in_flight(80 * US, np.asarray([100 * US, 900 * US])) == 10
    assert may_be_in_flight(80 * US, np.asarray([10 * US, 90 * US])) == 50
    assert may_be_in_flight(0.0, np.asarray([0])) == MOST_IN_FLIGHT
