"""Who is timed how often. The workers here answer with times that are known beforehand."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import msgspec
import rival_timing
from rival_arms import Arm

from steadytorch.process.worker import Fault, WorkerFault

from .rivalry import series


class Scripted:
    """Stands for a worker whose iterations take turns between a time and a hundredth more."""

    fails = None

    def __init__(self, ns, dies_after=None):
        self.ns, self.dies_after, self.asked = ns, dies_after, []

    def call(self, method, deadline_s, metric=None, **arguments):
        self.asked.append((metric, arguments))
        if self.dies_after is not None and len(self.asked) > self.dies_after:
            raise WorkerFault(Fault.SIGNAL, "segmentation fault")
        return getattr(self, method)(**arguments)

    def block(self, count):
        return [int(self.ns * (1 + 0.01 * (i % 2))) for i in range(count)]

    def series(self, seconds, whole):
        assert whole
        taken = self.block(round(seconds * 1e9 / self.ns))
        return msgspec.to_builtins(series(taken, self.fails))

    def clocks(self):
        return self.counted

    def kill(self):
        self.ns = None


def arms(**ns):
    return [Arm(name, Scripted(value), stage="ready") for name, value in ns.items()]


def timed(found, metrics=("period", "latency"), seconds=20.0):
    rival_timing.time_all(found, metrics, seconds, Random(0))
    return {arm.option: arm for arm in found}


def test_ours_and_near_rivals_get_the_samples_that_p99_needs():
    found = timed(arms(steadytorch=1e6, near=1.4e6, far=1.6e6))
    for name in ("steadytorch", "near"):
        assert len(found[name].samples("period")) >= 1000
    assert len(found["far"].blocks["period"]) == 12
    assert len(found["far"].samples("period")) < 100


def test_block_i_of_all_arms_is_of_the_same_round():
    found = timed(arms(steadytorch=1e6, near=1.4e6, far=9e6))
    assert len(found["far"].blocks["latency"]) == 12
    assert len(found["near"].blocks["latency"]) == len(found["steadytorch"].blocks["latency"])
    assert len(found["near"].blocks["period"]) >= 60


def test_with_no_time_left_the_fewest_rounds_are_taken_still():
    found = timed(arms(steadytorch=1e6, near=1.4e6), seconds=0.0)
    assert {len(arm.blocks["period"]) for arm in found.values()} == {12}
    assert {len(arm.blocks["latency"]) for arm in found.values()} == {12}


def test_an_arm_that_dies_is_out_and_the_others_go_on():
    found = arms(steadytorch=1e6, near=1.2e6)
    found[1].worker.dies_after = 5
    by_name = timed(found)
    assert by_name["near"].failed == "while it was timed: segmentation fault"
    assert len(by_name["steadytorch"].blocks["period"]) >= 60


def test_without_ours_the_fastest_is_what_near_means():
    found = timed(arms(eager=9e6, graph=1e6))
    assert len(found["graph"].blocks["period"]) > len(found["eager"].blocks["period"]) == 12


def test_those_that_never_got_ready_are_passed_by():
    found = arms(steadytorch=1e6, broken=1e6)
    found[1].reject("> 90 s, not ready")
    assert timed(found)["broken"].blocks == {}


def test_ours_comes_first_where_time_is_short():
    given = arms(fast=5e6, steadytorch=6e6, slow=7e6)
    for arm in given:
        arm.typical_ns = arm.worker.ns
    needed_s = 1.3e-9 * 1500 * 6e6
    one = rival_timing.affordable(given, "period", 1.01 * needed_s)
    two = rival_timing.affordable(given, "period", 1.9 * needed_s)
    assert [arm.option for arm in one] == ["steadytorch"]
    assert [arm.option for arm in two] == ["steadytorch", "fast"]


def test_blocks_last_ten_milliseconds_at_least():
    assert rival_timing.block_count(0.1e6, 0.1e6) == 100
    assert rival_timing.block_count(1e6, 1e6) == 10
    assert rival_timing.block_count(20e6, 20e6) == 5
    assert rival_timing.block_count(20e6, 1e6) == 3


def test_samples_in_clumps_are_not_taken_for_independent_ones():
    (alone,) = arms(steadytorch=1e6)
    alone.blocks["period"] = [[1_000_000] * 743 + [2_000_000] * 7] * 2
    assert rival_timing.lacks(alone, "period")
    alone.blocks["period"] = [[1_000_000 + 7 * (i * 7919 % 1501) for i in range(1500)]]
    assert not rival_timing.lacks(alone, "period")


def test_the_chosen_are_timed_alone_after_the_others_have_ended():
    found = arms(steadytorch=1e6, best=2e8, other=1e6)
    timed(found, seconds=0.0)
    rival_timing.time_alone(found, ["steadytorch", "best"], ("period", "latency"), Random(0))
    ours, best, other = found
    assert {metric: len(found.durations_ns) for metric, found in ours.alone.items()} == {
        "period": 1000,
        "latency": 1000,
    }
    assert len(best.alone["period"].durations_ns) == 20
    assert other.alone == {}
    assert other.worker.ns is None


def test_our_period_is_timed_longer_alone_where_it_scatters():
    ours, best, other = found = arms(steadytorch=1e6, best=1e6, other=1e6)
    for arm in found:
        arm.typical_ns = arm.worker.ns
        arm.blocks["latency"] = arm.blocks["period"] = [[1_000_000] * 9 + [1_100_000]]
    both = ["steadytorch", "best"]
    rival_timing.time_alone(found, both, ("period", "latency"), Random(0))
    taken = [{m: len(s.durations_ns) for m, s in arm.alone.items()} for arm in (ours, best)]
    assert taken == [{"period": 3000, "latency": 1000}, {"period": 1000, "latency": 1000}]
    assert other.alone == {}
    (steady,) = found = arms(steadytorch=1e6)
    steady.typical_ns = steady.worker.ns
    steady.blocks["period"] = [[1_000_000] * 9 + [1_001_000]]
    rival_timing.time_alone(found, both, ["period"], Random(0))
    assert len(steady.alone["period"].durations_ns) == 1000


def test_one_that_dies_alone_has_what_it_was_asked_before():
    found = arms(steadytorch=1e6)
    timed(found, seconds=0.0)
    found[0].worker.dies_after = len(found[0].worker.asked) + 1
    rival_timing.time_alone(found, ["steadytorch"], ("period", "latency"), Random(0))
    assert [*found[0].alone] == ["period"]


def test_one_that_raises_alone_has_no_figures_of_it(monkeypatch):
    found = arms(steadytorch=1e6)
    timed(found, seconds=0.0)
    monkeypatch.setattr(Scripted, "fails", "RuntimeError: no room")
    rival_timing.time_alone(found, ["steadytorch"], ("period", "latency"), Random(0))
    assert found[0].alone == {}
    assert found[0].failed == "while it was timed: RuntimeError: no room"


class Clocked(Scripted):
    """One whose blocks take the time that they tell, by a clock of its own."""

    now_s = 0.0

    def call(self, method, deadline_s, metric, **arguments):
        times = super().call(method, deadline_s, metric, **arguments)
        Clocked.now_s += 1e-9 * sum(times)
        return times


def test_time_too_short_for_the_p99_of_any_goes_to_rounds(monkeypatch):
    monkeypatch.setattr(Clocked, "now_s", 0.0)
    clock = SimpleNamespace(
        monotonic=lambda: Clocked.now_s, perf_counter_ns=lambda: round(1e9 * Clocked.now_s)
    )
    monkeypatch.setattr(rival_timing, "time", clock)
    slow = {"steadytorch": 60e6, "near": 66e6}
    found = timed([Arm(n, Clocked(ns), stage="ready") for n, ns in slow.items()], ["period"])
    assert Clocked.now_s > 19.0
    a_round_s = 5 * (60e6 + 66e6) * 1e-9
    assert len(found["near"].blocks["period"]) >= 18.0 / a_round_s


def test_clocks_are_of_the_periods_that_are_kept():
    (arm,) = arms(steadytorch=1e6)
    arm.blocks = {"period": [[1, 2], [3]], "latency": [[9]]}
    # A block before the first round was for the scale alone.
    arm.worker.counted = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert rival_timing.clocks(arm) == [3.0, 4.0, 5.0]
    arm.worker.dies_after = 0
    assert rival_timing.clocks(arm) == []
    assert not arm.is_live
    assert rival_timing.clocks(arm) == []
