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
    READ_CYCLES_NS,
    CudaSampler,
    StepError,
    may_be_in_flight,
)

US, MS = 1_000, 1_000_000


class Device:
    """A stream that runs its work in order; `enqueue` adds work."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.free_ns = clock, 0
        self.ends: list[int] = []
        self.most_in_flight = 0

    cuda_stream = 7

    def enqueue(self, host_ns: int, work_ns: int) -> None:
        """Occupies the host, then the device, for the given times."""
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
    """An event that completes after all work enqueued before it."""

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
    # Work that ran or had already ended during the delay does not count as lead.
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


READING_NS = 2 * US


class Counter:
    """Reads the device clock, which slows down at `slow_from_ns`, while there is room."""

    def __init__(self, device: Device, room: int = 1000, slow_from_ns: int = 0) -> None:
        self._device, self._room, self._slow_from = device, room, slow_from_ns
        self.at_ns: list[int] = []

    def read(self, place: int, stream: int) -> bool:
        assert stream == Device.cuda_stream
        if place >= self._room:
            return False
        del self.at_ns[place:]
        self._device.enqueue(5 * US, READING_NS)
        self.at_ns.append(self._device.free_ns)
        return True

    def clocks_mhz(self, count: int) -> np.ndarray:
        at = np.asarray(self.at_ns)
        assert len(at) == count
        return np.where(at[:-1] >= self._slow_from, 1500.0, 1980.0)


def counted(device: Device, counter: Counter | None, work_ns: int, count: int = 100):
    sampler = CudaSampler(device.clock)
    sampler.counter = counter
    sampler.periods(lambda: device.enqueue(10 * US, work_ns), 2)  # how long one takes is known
    device.synchronize()
    found, _ = sampler.periods(lambda: device.enqueue(10 * US, work_ns), count)
    return sampler, found


@pytest.mark.parametrize("work_ns", [200 * US, 700 * US, 3 * MS])
def test_readings_of_the_counter_are_in_no_period(device: Device, work_ns: int):
    counter = Counter(device)
    sampler, found = counted(device, counter, work_ns, 600)
    assert found[2:].tolist() == [work_ns] * 598
    apart = np.diff(counter.at_ns)
    assert len(apart) == -(-600 // -(-READ_CYCLES_NS // work_ns))
    assert (apart[1:-1] >= READ_CYCLES_NS).all()
    assert sampler.gaps_ns is not None
    assert sampler.gaps_ns[1:].sum() == READING_NS * (len(apart) - 1)
    # Both sums include the time of the readings.
    assert sampler.clock_difference() == pytest.approx(0, abs=1e-3)


def test_the_clock_of_an_iteration_is_that_between_the_readings_around_it(device: Device):
    counter = Counter(device, slow_from_ns=50 * MS)
    sampler, _ = counted(device, counter, 500 * US, 102)
    clocks = sampler.clocks_mhz
    # Every fourth boundary is read, and the last.
    assert clocks is not None
    assert len(clocks) == 102
    slow = np.flatnonzero(clocks == 1500.0)
    assert slow.tolist() == list(range(slow[0], 102))
    assert slow[0] % 4 == 0
    assert 50 * MS <= counter.at_ns[slow[0] // 4] < 53 * MS


def test_what_is_not_read_has_no_clock(device: Device):
    sampler, _ = counted(device, Counter(device, room=3), 500 * US)
    assert sampler.clocks_mhz is not None
    assert np.isfinite(sampler.clocks_mhz).tolist() == [True] * 8 + [False] * 92
    for counter in (None, Counter(device, room=0), Counter(device, room=1)):
        sampler, found = counted(device, counter, 500 * US)
        assert sampler.clocks_mhz is None
        assert found[2:].tolist() == [500 * US] * 98


def test_without_an_idea_of_the_time_every_boundary_is_read(device: Device):
    sampler, counter = CudaSampler(device.clock), Counter(device)
    sampler.counter = counter
    found, _ = sampler.periods(lambda: device.enqueue(10 * US, 500 * US), 20)
    assert found[2:].tolist() == [500 * US] * 18
    assert len(counter.at_ns) == 21


def test_what_is_known_of_the_time_says_how_often_to_read(device: Device):
    """Ignores earlier series, such as the overhead measured with empty steps."""
    sampler, counter = CudaSampler(device.clock), Counter(device)
    sampler.periods(lambda: device.enqueue(1 * US, 1 * US), 20)
    device.synchronize()
    sampler.counter, sampler.typical_ns = counter, 500 * US
    sampler.periods(lambda: device.enqueue(10 * US, 500 * US), 400)
    assert len(counter.at_ns) == 101


def test_a_step_that_raises_beside_a_counter_keeps_its_times(device: Device):
    sampler, steps = CudaSampler(device.clock), iter(range(10))
    sampler.counter = Counter(device)

    def step() -> None:
        if next(steps) == 6:
            raise ValueError("no more")
        device.enqueue(10 * US, 500 * US)

    with pytest.raises(StepError) as raised:
        sampler.periods(step, 20)
    assert raised.value.durations_ns[2:].tolist() == [500 * US] * 4
