from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.device.facts import DeviceFacts
from steadytorch.findings.finding import Abstention, Case
from steadytorch.findings.watched_steps import Setting
from steadytorch.rules.cpu_contention import NAME, rule

from ..findings.cases import MS, US, noise, steadily, the, timed, watched


def _preempted(count, wait_ns, every):
    """Samples of which every n-th waits for a core, and the counter of these waits."""
    times = noise(count)
    times[every::every] += wait_ns
    ends = np.cumsum(times)[every::every]
    return times, lambda at: wait_ns * np.searchsorted(ends, at, side="right")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_waiting_for_a_core_is_found(device):
    times, waits = _preempted(1000, 5 * MS, 17)
    found = the(rule(timed(times, device=device, wait_ns=waits)))
    assert found.id == NAME
    assert found.confidence == "high"
    assert 200 * US < found.cost_ns < 400 * US
    assert found.variance_share > 0.9


def test_the_switches_of_a_quiet_machine_are_not():
    """Switches always happen; only lost time counts."""
    case = timed(
        noise(2000),
        involuntary_switches=steadily(40),
        wait_ns=steadily(400_000),  # 0.04 % of the time
        steal_ns=lambda at: at // 10**9 * 10 * MS,
    )
    assert rule(case) == ()


def test_one_preemption_in_a_quiet_run_is_none():
    times, waits = _preempted(2000, 8 * MS, 1500)
    assert rule(timed(times, wait_ns=waits)) == ()


def test_a_step_that_waits_for_a_thread_without_a_core_is_found():
    waiting = {"wait_ns": steadily(0), "pool_wait_ns": steadily(300 * MS)}
    found = the(rule(timed(noise(1000), device="cpu", **waiting)))
    assert 0.8 * MS < found.cost_ns < 1.0 * MS  # of 3 ms
    assert found.confidence == "medium"
    assert "openvino" in found.transforms
    assert "OMP_WAIT_POLICY=passive" in found.fix
    assert rule(timed(noise(1000), device="cuda", **waiting)) == ()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_threads_of_its_own_beyond_the_cores_come_first(device):
    facts = DeviceFacts(device=device, cores_logical=2)
    waiting = {"wait_ns": steadily(370 * MS), "pool_wait_ns": steadily(420 * MS)}

    def found(threads):
        case = timed(noise(1000), device=device, facts=facts, notes={"threads": threads}, **waiting)
        return the(rule(case))

    own = "PyTorch runs 16 threads, but this process may use 2 cores: they take turns"
    crowded = found(16)
    assert (crowded.evidence[0] == own) == (device == "cpu")
    assert crowded.fix.startswith("Call torch.set_num_threads(2)") == (device == "cpu")
    assert found(2).fix.startswith("Stop or move other programs")
    assert not any("PyTorch runs" in line for line in found(2).evidence)


def test_threads_of_a_watched_script_beyond_the_cores_come_first():
    watching = watched(setting=Setting(threads=16, cores=2)).watched
    case = timed(noise(1000), device="cpu", watched=watching, wait_ns=steadily(370 * MS))
    assert the(rule(case)).evidence[0].startswith("PyTorch runs 16 threads")


def test_a_pool_that_shares_its_cores_with_the_recorder_only_is_none():
    case = timed(noise(1000), device="cpu", wait_ns=steadily(0), pool_wait_ns=steadily(15 * MS))
    assert rule(case) == ()


def test_a_gpu_bound_step_does_not_wait_with_its_host():
    times = noise(1000)
    waiting = steadily(50 * MS)
    assert rule(timed(times, host_ns=0.3 * times, wait_ns=waiting)) == ()
    assert the(rule(timed(times, host_ns=0.97 * times, wait_ns=waiting))).cost_ns > 0


def test_stolen_time_is_found():
    case = timed(noise(1000), device="cpu", steal_ns=steadily(300 * MS), cpus=2)
    found = the(rule(case))
    assert found.confidence == "medium"
    assert "other virtual machines took 15 % of all cores' time" in found.evidence


@pytest.mark.parametrize("cpus", [64, None])
def test_stolen_time_is_that_of_the_whole_machine(cpus):
    """One percent of each core is little, though it adds up to two thirds of one core."""
    facts = DeviceFacts(device="cpu", cores_logical=2)
    steal = steadily(640 * MS)
    case = timed(
        noise(1000), device="cpu", steal_ns=steal, cpus=cpus, wait_ns=steadily(0), facts=facts
    )
    assert rule(case) == ()


def test_without_the_kernels_account_it_abstains():
    case = timed(noise(100), unknown={"wait_ns": "schedstats are off"})
    said = rule(case)
    assert isinstance(said, Abstention)
    assert "schedstats are off" in said.why
    assert isinstance(rule(Case()), Abstention)


@given(st.floats(0, 0.009), st.floats(0, 1000))
def test_less_than_a_hundredth_of_the_time_is_never_called_contention(share, switches):
    case = timed(
        noise(300),
        wait_ns=steadily(share * 0.95e9),
        involuntary_switches=steadily(switches),
    )
    assert rule(case) == ()
