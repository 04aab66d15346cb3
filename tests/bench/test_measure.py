from __future__ import annotations

import math
from itertools import cycle, islice

import numpy as np
import pytest
from scipy.stats import t as student

import steadytorch
from steadytorch.bench import measure as module
from steadytorch.bench.bench_worker import STOP, BrokenOff, SetUp
from steadytorch.bench.measure import measure, t_interval
from steadytorch.device.recording import Recording
from steadytorch.errors import UsageError
from steadytorch.measure.sampler import WarmUp
from steadytorch.process.worker import Fault, WorkerFault

MS = 1_000_000


def _about(level_ns, count=400, seed=0):
    """Independent times around a level."""
    noise = np.random.default_rng(seed).normal(0, 0.002, count)
    return [int(level_ns * math.exp(value)) for value in noise]


@pytest.fixture
def tiny():
    """A workload that scripted workers never run."""
    return steadytorch.Workload(lambda: None)


# -- real processes -----------------------------------------------------------------------------


def test_one_process_measures_a_real_model(workload, no_process_left):
    told = []
    found = measure(workload("short"), budget="1s", progress=told.append)
    assert told == ["process 1 of 1"]
    assert (found.claim, found.spread, found.failed, found.interrupted) == (
        *("process", None, None),
        False,
    )
    (only,) = found.processes
    assert found.median_ns == pytest.approx(only.period.median_ns)
    assert found.median_ci_ns == only.period.median_ci_ns
    assert len(only.period.samples_ns) >= 10
    assert (only.latency, only.device) == (None, None)
    assert only.host.enqueue_median_ns > 0
    assert 0 < only.host.overhead_ns < found.median_ns
    assert only.set_up.peak_memory_bytes > 10 << 20
    assert only.unknown.keys() >= {"sm_clock_mhz", "power_milliwatts"}


@pytest.mark.slow
def test_three_processes_of_a_training_step_claim_for_the_machine(workload, no_process_left):
    found = measure(workload("training"), processes=3, budget=0.6)
    medians = [process.period.median_ns for process in found.processes]
    assert len(medians) == 3
    assert found.claim == "machine"
    assert found.median_ns == pytest.approx(math.prod(medians) ** (1 / 3))
    low, high = found.median_ci_ns
    assert low < found.median_ns < high
    assert found.spread == pytest.approx(np.std(np.log(medians), ddof=1))


@pytest.mark.slow
def test_a_workload_that_raises_late_keeps_its_samples(workload, no_process_left):
    found = measure(workload("while_timed"), budget="60s")
    (only,) = found.processes
    # One call for set-up, the warm-up, and the one that raised, which is not a sample.
    assert len(only.period.samples_ns) == 1000 - 1 - only.set_up.warm_up.calls - 1
    assert len(only.period.samples_ns) >= 400
    assert found.failed == "RuntimeError: the data ended?[2J"
    assert not only.resolved


def test_a_process_that_is_killed_while_timed_leaves_its_samples(workload, no_process_left):
    found = measure(workload("killed_while_timed"), budget="60s")
    (only,) = found.processes
    assert len(only.period.samples_ns) >= 100
    assert min(only.period.samples_ns) >= MS
    assert "SIGKILL" in found.failed
    assert only.host.overhead_ns is None
    assert "left no recording" in only.unknown["steal_ns"]


def test_a_workload_that_raises_at_once_is_a_usage_error(workload, no_process_left):
    with pytest.raises(UsageError, match="the workload fails: RuntimeError: the data ended"):
        measure(workload("at_once"), budget="1s")


@pytest.mark.slow
def test_a_workload_that_raises_while_warming_up_keeps_its_calls(workload, no_process_left):
    found = measure(workload("while_warming_up"), budget="1s")
    (only,) = found.processes
    assert only.period.metric == "latency"
    assert len(only.period.samples_ns) == only.set_up.warm_up.calls == 50 - 1 - 1
    assert found.failed.startswith("RuntimeError: the data ended")
    assert only.host.involuntary_switches is None
    assert "involuntary_switches" in only.unknown


# -- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"processes": 0}, "0 processes"),
        ({"processes": -1}, "-1 processes"),
        ({"budget": "0s"}, "'0s' is not a time"),
        ({"budget": "soon"}, "'soon' is not a time"),
        ({"budget": -1}, "'-1' is not a time"),
        ({"budget": math.nan}, "'nan' is not a time"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_wrong_arguments_start_no_process(tiny, scripted, arguments, said):
    started = scripted(module)
    with pytest.raises(UsageError, match=said):
        measure(tiny, **arguments)
    assert started == []


def test_a_workload_that_cannot_travel_is_a_usage_error(workload, scripted):
    started = scripted(module)
    with pytest.raises(UsageError, match="cannot be sent to a worker process"):
        measure(workload("unpicklable"))
    assert started == []


# -- failing processes --------------------------------------------------------------------------


def test_the_budget_is_shared_among_the_processes(tiny, scripted, answer):
    asked = []

    def series(metric, seconds):
        asked.append((metric, seconds))
        return answer.series(_about(2 * MS))

    started = scripted(module, *[{"series": series}] * 4)
    measure(tiny, processes=4, budget="1m")
    assert asked == [("period", 15.0)] * 4
    assert all(worker.killed for worker in started)
    assert not started[0].directory.exists()


def test_two_processes_give_no_interval(tiny, scripted, answer):
    scripted(module, *[{"series": answer.series(_about(2 * MS))}] * 2)
    found = measure(tiny, processes=2)
    assert (found.claim, found.median_ci_ns, found.spread) == ("process", None, 0.0)


def test_an_unsteady_process_gives_no_interval(tiny, scripted, answer):
    levels = islice(cycle([*_about(2 * MS, 60), *_about(3 * MS, 60)]), 600)
    scripted(module, {"series": answer.series(list(levels))})
    found = measure(tiny)
    assert found.median_ci_ns is None
    assert "no steady state" in found.processes[0].period.why_no_ci


def test_a_later_process_that_dies_leaves_the_earlier_ones(tiny, scripted, answer):
    dead = WorkerFault(Fault.SIGNAL, "segmentation fault (SIGSEGV)")
    good = {"series": answer.series(_about(2 * MS))}
    started = scripted(module, good, good, {"set_up": dead})
    found = measure(tiny, processes=5)
    assert (len(found.processes), len(started)) == (2, 3)
    assert found.failed == "segmentation fault (SIGSEGV)"
    assert all(worker.killed for worker in started)


def test_a_later_process_that_fails_while_warming_up_is_not_mixed_in(tiny, scripted, answer):
    """Its calls were timed as latencies, not as periods."""
    from steadytorch.process.messages import RemoteException

    fault = WorkerFault(Fault.RAISED, "ValueError: no", raised=RemoteException("ValueError", "no"))
    broken = BrokenOff(SetUp(0.1, WarmUp(1, 3, 1, 1), 1), answer.series([9 * MS] * 3))
    scripted(
        module,
        {"series": answer.series(_about(2 * MS))},
        {"set_up": fault, "broken_off": broken},
    )
    found = measure(tiny, processes=2)
    assert (len(found.processes), found.failed) == (1, "ValueError: no")


def test_the_first_process_that_dies_is_a_usage_error(tiny, scripted):
    dead = WorkerFault(Fault.EXIT, "process exited with status 7")
    started = scripted(module, {"series": dead})
    with pytest.raises(UsageError, match="the workload fails: process exited with status 7"):
        measure(tiny)
    assert started[0].killed


def test_no_process_is_started_after_one_that_failed(tiny, scripted, answer):
    failed = answer.series(_about(2 * MS, 100), failed="ValueError: no", resolved=False)
    started = scripted(module, {"series": failed}, {})
    found = measure(tiny, processes=2)
    assert (len(started), len(found.processes), found.failed) == (1, 1, "ValueError: no")
    assert len(found.processes[0].period.samples_ns) == 100


@pytest.mark.parametrize("cut", [{"failed": "ValueError: no"}, {"stopped": True}])
def test_a_process_that_ended_early_is_no_equal_of_complete_ones(tiny, scripted, answer, cut):
    whole = {"series": answer.series(_about(2 * MS))}
    short = answer.series([3 * MS], resolved=False, **cut)
    scripted(module, whole, whole, {"series": short})
    found = measure(tiny, processes=3)
    assert [process.complete for process in found.processes] == [True, True, False]
    assert (found.claim, found.median_ci_ns) == ("process", None)
    assert found.median_ns == pytest.approx(2 * MS, rel=0.01)


# -- interrupts ---------------------------------------------------------------------------------


def test_an_interrupted_series_is_asked_for_what_it_has(tiny, scripted, answer):
    def stopped(**arguments):
        assert (started[0].directory / STOP).exists()
        return answer.series(_about(2 * MS, 100), stopped=True, resolved=False)

    started = scripted(module, {"series": [KeyboardInterrupt(), stopped]}, {})
    found = measure(tiny, processes=2)
    assert (found.interrupted, found.failed) == (True, None)
    assert len(found.processes[0].period.samples_ns) == 100
    assert len(started) == 1
    assert started[0].killed


@pytest.mark.parametrize(
    "later", [WorkerFault(Fault.DEADLINE, "no answer within 10 s, killed"), KeyboardInterrupt()]
)
def test_an_interrupted_worker_that_does_not_answer_is_let_go(tiny, scripted, answer, later):
    good = {"series": answer.series(_about(2 * MS))}
    started = scripted(module, good, {"series": [KeyboardInterrupt(), later]})
    found = measure(tiny, processes=2)
    assert (found.interrupted, found.failed, len(found.processes)) == (True, None, 1)
    assert all(worker.killed for worker in started)


@pytest.mark.parametrize("moment", ["load", "set_up"])
def test_an_interrupt_before_anything_was_timed_is_raised(tiny, scripted, moment):
    started = scripted(module, {moment: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        measure(tiny)
    assert started[0].killed
    assert not started[0].directory.exists()


# -- recordings ---------------------------------------------------------------------------------

TICK = 15 * MS


def _recorded(device="cpu", **columns):
    return Recording(
        device=device,
        interval_ns=TICK,
        at_ns=tuple(range(0, 200 * TICK, TICK)),
        gc_start_ns=(601 * MS,),
        gc_duration_ns=(4 * MS,),
        gc_generation=(2,),
        **columns,
    )


def test_outliers_carry_the_causes_that_were_recorded(tiny, scripted, answer):
    """The second stretch starts long after the first: a running sum would misplace it."""
    times = _about(2 * MS, 600)
    times[20] += 9 * MS
    times[150] += 6 * MS
    second = 601 * MS - sum(times[100:150]) - MS
    assert second > sum(times[:100]) + 100 * MS
    stretches = [(0, 100), (second, 500)]
    scripted(module, {"series": answer.series(times, stretches=stretches, recording=_recorded())})
    period = measure(tiny).processes[0].period
    assert [(o.index, o.cause) for o in period.outliers] == [
        (20, "unattributed"),
        (150, "garbage collection"),
    ]
    assert list(period.samples_ns) == times


def test_the_host_block_says_what_rose(tiny, scripted, answer):
    recording = _recorded(
        involuntary_switches=tuple(3 * i for i in range(200)),
        major_faults=(0,) * 199 + (4,),
        unknown={"steal_ns": "no such line in /proc/stat"},
        gc_dropped=7,
        gc_dropped_ns=MS,
    )
    scripted(module, {"series": answer.series(_about(2 * MS), recording=recording)})
    host = measure(tiny).processes[0].host
    assert (host.gc_collections, host.gc_ns) == (8, 5 * MS)
    assert (host.involuntary_switches, host.major_faults, host.steal_ns) == (597, 4, None)


def test_on_a_gpu_period_and_latency_are_series_of_their_own(tiny, scripted, answer, monkeypatch):
    monkeypatch.setattr(module, "resolve_device", lambda device: "cuda:0")
    seconds = {}
    recording = _recorded(
        "cuda",
        sm_clock_mhz=(1980,) * 200,
        power_milliwatts=(300_000,) * 200,
        clock_event_mask=(0,) * 199 + (4,),
        other_gpu_processes=(0,) * 100 + (2,) * 100,
    )

    def series(metric, **arguments):
        seconds[metric] = arguments["seconds"]
        level = 2 * MS if metric == "period" else 3 * MS
        return answer.series(_about(level), recording=recording)

    scripted(module, {"series": series})
    (only,) = measure(tiny, budget="10s").processes
    assert sum(seconds.values()) == pytest.approx(10.0)
    assert (only.period.metric, only.latency.metric) == ("period", "latency")
    assert only.latency.median_ns == pytest.approx(3 * MS, rel=0.01)
    assert (only.device.sm_clock_mhz, only.device.power_watts) == (1980.0, 300.0)
    assert (only.device.clock_held_by, only.device.other_processes) == (("power_cap",), 2)


def test_a_device_that_shows_nothing_is_unknown_not_zero(tiny, scripted, answer, monkeypatch):
    monkeypatch.setattr(module, "resolve_device", lambda device: "cuda:0")
    nothing = Recording(device="cuda", interval_ns=TICK)
    scripted(module, {"series": lambda **_: answer.series(_about(2 * MS), recording=nothing)})
    device = measure(tiny).processes[0].device
    assert (device.sm_clock_mhz, device.power_watts) == (None, None)
    assert (device.clock_held_by, device.other_processes) == (None, None)


def test_the_interval_over_processes_is_students():
    values = np.array([10.0, 10.2, 10.1, 9.9, 10.3])
    logs = np.log(values)
    low, high = t_interval(logs)
    expected = student.interval(0.95, 4, logs.mean(), logs.std(ddof=1) / math.sqrt(5))
    assert (low, high) == pytest.approx(tuple(np.exp(expected)))
