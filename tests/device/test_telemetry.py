from __future__ import annotations

import os
from types import SimpleNamespace

import msgspec
import psutil
import pynvml
import pytest
import torch

from steadytorch.device import telemetry
from steadytorch.device.observe import NOT_ON_CPU, NotObservable
from steadytorch.device.telemetry import (
    Snapshot,
    count_others,
    cpu_shares,
    holds_context,
    own_pids,
    snapshot,
)
from steadytorch.errors import UsageError


def _times(**fields):
    base = dict.fromkeys(("user", "nice", "system", "idle", "iowait", "steal", "guest"), 0.0)
    values = {**base, **fields}
    return SimpleNamespace(_fields=tuple(values), **values)


def test_a_snapshot_of_a_cpu_has_its_own_fields_and_says_the_others_do_not_apply():
    now = snapshot("cpu", interval_s=0.05)
    assert now.load_average_1m is not None
    assert now.memory_free_bytes
    assert now.unknown["sm_clock_mhz"] == now.unknown["other_gpu_processes"] == NOT_ON_CPU


def test_a_snapshot_of_a_gpu(cuda_h200, fake_nvml):
    now = snapshot("cuda", interval_s=0.0, library=fake_nvml())
    assert (now.sm_clock_mhz, now.sm_clock_max_mhz) == (345, 1980)
    assert (now.power_watts, now.power_limit_watts) == (76.5, 700.0)
    assert (now.temperature_celsius, now.clock_event_reasons) == (31, ("gpu_idle",))
    assert now.gpu_memory_free_bytes == 149_000_000_000
    assert now.other_gpu_processes == 0


def test_one_refused_reading_leaves_the_others(cuda_h200, fake_nvml):
    library = fake_nvml(
        refused={"nvmlDeviceGetComputeRunningProcesses": pynvml.NVML_ERROR_NO_PERMISSION}
    )
    now = snapshot("cuda", interval_s=0.0, library=library)
    assert now.other_gpu_processes is None
    assert "no permission" in now.unknown["other_gpu_processes"]
    assert now.sm_clock_mhz == 345


def test_without_nvml_every_gpu_field_has_the_reason(cuda_h200, no_library):
    now = snapshot("cuda", interval_s=0.0, library=no_library)
    assert now.power_watts is None
    assert "libnvidia-ml" in now.unknown["power_watts"]
    assert "libnvidia-ml" in now.unknown["other_gpu_processes"]
    assert now.memory_free_bytes


def test_without_cuda_every_gpu_field_has_the_reason(monkeypatch, fake_nvml):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    now = snapshot("cuda", interval_s=0.0, library=fake_nvml())
    assert "built without CUDA" in now.unknown["sm_clock_mhz"]


def test_a_malformed_device_is_misuse():
    with pytest.raises(UsageError):
        snapshot("tpu")


def test_a_snapshot_survives_json(cuda_h200, fake_nvml):
    now = snapshot("cuda", interval_s=0.0, library=fake_nvml())
    assert msgspec.json.decode(msgspec.json.encode(now), type=Snapshot) == now


def test_busy_leaves_out_waiting_for_disks_and_counts_guests_once():
    shares = cpu_shares(
        _times(), _times(user=2.0, guest=1.0, system=1.0, steal=1.0, idle=4.0, iowait=2.0)
    )
    assert shares.busy == pytest.approx(0.4)
    assert shares.steal == pytest.approx(0.1)


def test_a_system_without_steal_reports_none():
    before, after = (
        SimpleNamespace(_fields=("user", "idle"), user=seconds, idle=seconds)
        for seconds in (0.0, 1.0)
    )
    shares = cpu_shares(before, after)
    assert (shares.busy, shares.steal) == (0.5, None)


def test_counters_that_stand_still_are_not_an_idle_cpu():
    with pytest.raises(NotObservable, match="do not advance"):
        cpu_shares(_times(user=5.0), _times(user=5.0))


def test_standing_counters_cost_both_fields_of_a_snapshot(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_times", lambda: _times(user=5.0))
    now = snapshot("cpu", interval_s=0.0)
    assert now.cpu_busy is None
    assert now.unknown["cpu_steal"] == now.unknown["cpu_busy"]


def test_own_processes_on_the_gpu_are_not_others():
    assert count_others([10, 11, 99], own=[10, 11], has_context=True) == 1


def test_without_a_context_of_our_own_all_listed_are_others():
    assert count_others([7, 8], own=[10], has_context=False) == 2


def test_under_another_numbering_one_of_the_listed_is_us():
    assert count_others([4001, 4002], own=[1], has_context=True) == 1


def test_a_list_without_even_ourselves_is_not_believed():
    with pytest.raises(NotObservable, match="omits this process"):
        count_others([], own=[1], has_context=True)


def test_neighbours_on_the_gpu_are_counted_in_a_snapshot(cuda_h200, fake_nvml):
    listed = [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=2**22 + 1)]
    library = fake_nvml(nvmlDeviceGetComputeRunningProcesses=listed)
    assert snapshot("cuda", interval_s=0.0, library=library).other_gpu_processes == 1


def test_own_pids_hold_this_process():
    assert os.getpid() in own_pids()


def test_no_context_before_cuda_is_initialized(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert holds_context(0) is False


def test_the_cpu_is_watched_for_the_interval_asked_for(monkeypatch):
    slept = []
    monkeypatch.setattr(telemetry.time, "sleep", slept.append)
    snapshot("cpu", interval_s=0.25)
    assert slept == [0.25]
