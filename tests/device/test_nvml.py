from __future__ import annotations

import pynvml
import pytest

from steadytorch.device.nvml import mig_profile_in, open_gpu, open_nvml
from steadytorch.device.observe import NotObservable


def test_readings_of_a_whole_gpu_come_in_the_units_they_name(fake_nvml, gpu_uuid):
    with open_gpu(gpu_uuid, 0, fake_nvml()) as gpu:
        assert gpu.sm_clock_mhz() == 345
        assert gpu.sm_clock_max_mhz() == 1980
        assert gpu.power_watts() == 76.5
        assert gpu.power_limit_watts() == 700.0
        assert gpu.temperature_celsius() == 31
        assert gpu.memory_free_bytes() == 149_000_000_000
        assert gpu.clock_event_reasons() == ("gpu_idle",)
        assert gpu.mig_profile() is None


def test_the_session_is_closed_whatever_is_raised_inside(fake_nvml):
    library = fake_nvml()
    with pytest.raises(ZeroDivisionError), open_nvml(library):
        _ = 1 / 0
    assert library.calls[-1] == ("nvmlShutdown",)


def test_a_missing_library_is_a_reason(no_library):
    with pytest.raises(NotObservable, match="libnvidia-ml"), open_nvml(no_library):
        pass


def test_missing_bindings_are_a_reason(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(NotObservable, match="nvidia-ml-py is not installed"), open_nvml():
        pass


def test_a_refused_permission_costs_its_own_reading_only(fake_nvml, gpu_uuid):
    refused = {"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NO_PERMISSION}
    with open_gpu(gpu_uuid, 0, fake_nvml(refused=refused)) as gpu:
        with pytest.raises(NotObservable, match="no permission"):
            gpu.power_watts()
        assert gpu.temperature_celsius() == 31


def test_the_gpu_is_found_by_uuid_not_by_index(fake_nvml, gpu_uuid):
    library = fake_nvml(nvmlDeviceGetHandleByUUID={f"GPU-{gpu_uuid}": "second", "GPU-x": "first"})
    with open_gpu(gpu_uuid, 0, library) as gpu:
        gpu.temperature_celsius()
    assert ("nvmlDeviceGetTemperature", "second", 0) in library.calls


def test_a_gpu_the_library_does_not_show_is_a_reason(fake_nvml):
    with pytest.raises(NotObservable, match="does not list"), open_gpu("other", 0, fake_nvml()):
        pass


def _slice_library(fake_nvml, uuids):
    return fake_nvml(
        nvmlDeviceGetHandleByUUID=uuids,
        nvmlDeviceIsMigDeviceHandle={"slice": 1, "gpu": 0},
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle={"slice": "gpu"},
        nvmlDeviceGetName={"slice": "NVIDIA H200 MIG 1g.18gb"},
    )


def test_of_a_slice_memory_is_its_own_and_power_the_whole_gpus(fake_nvml, gpu_uuid):
    library = _slice_library(fake_nvml, {f"MIG-{gpu_uuid}": "slice"})
    with open_gpu(gpu_uuid, 0, library) as gpu:
        assert gpu.mig_profile() == "1g.18gb"
        gpu.power_watts()
        gpu.memory_free_bytes()
    assert ("nvmlDeviceGetPowerUsage", "gpu") in library.calls
    assert ("nvmlDeviceGetMemoryInfo", "slice") in library.calls


def test_a_slice_named_in_the_environment_is_preferred(fake_nvml, gpu_uuid, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-abc")
    library = _slice_library(fake_nvml, {"MIG-abc": "slice", f"GPU-{gpu_uuid}": "gpu"})
    with open_gpu(gpu_uuid, 0, library) as gpu:
        assert gpu.mig_profile() == "1g.18gb"


def test_mig_mode_without_a_visible_slice_is_unknown(fake_nvml, gpu_uuid):
    with (
        open_gpu(gpu_uuid, 0, fake_nvml(nvmlDeviceGetMigMode=[1, 1])) as gpu,
        pytest.raises(NotObservable, match="slice of this process"),
    ):
        gpu.mig_profile()


def test_a_gpu_that_knows_no_mig_is_a_whole_gpu(fake_nvml, gpu_uuid):
    refused = {"nvmlDeviceGetMigMode": pynvml.NVML_ERROR_NOT_SUPPORTED}
    with open_gpu(gpu_uuid, 0, fake_nvml(refused=refused)) as gpu:
        assert gpu.mig_profile() is None


def test_clock_events_are_named_and_new_bits_kept(fake_nvml, gpu_uuid):
    library = fake_nvml(nvmlDeviceGetCurrentClocksEventReasons=0x4 | 0x40 | 0x8000)
    with open_gpu(gpu_uuid, 0, library) as gpu:
        reasons = gpu.clock_event_reasons()
    assert reasons == ("power_cap", "hardware_thermal_slowdown", "bit_0x8000")


def test_no_clock_event_is_an_empty_answer(fake_nvml, gpu_uuid):
    with open_gpu(gpu_uuid, 0, fake_nvml(nvmlDeviceGetCurrentClocksEventReasons=0)) as gpu:
        assert gpu.clock_event_reasons() == ()


def test_an_older_driver_is_asked_by_the_older_name(fake_nvml, gpu_uuid):
    library = fake_nvml(
        refused={"nvmlDeviceGetCurrentClocksEventReasons": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND},
        nvmlDeviceGetCurrentClocksThrottleReasons=0x20,
    )
    with open_gpu(gpu_uuid, 0, library) as gpu:
        assert gpu.clock_event_reasons() == ("thermal_slowdown",)


def test_newer_bindings_are_asked_by_the_newer_name(fake_nvml, gpu_uuid):
    library = fake_nvml(missing=("nvmlDeviceGetTemperature",), nvmlDeviceGetTemperatureV=29)
    with open_gpu(gpu_uuid, 0, library) as gpu:
        assert gpu.temperature_celsius() == 29


def test_a_function_nobody_offers_is_a_reason(fake_nvml, gpu_uuid):
    library = fake_nvml(missing=("nvmlDeviceGetPowerUsage",))
    with (
        open_gpu(gpu_uuid, 0, library) as gpu,
        pytest.raises(NotObservable, match="nvmlDeviceGetPowerUsage"),
    ):
        gpu.power_watts()


def test_bytes_of_old_bindings_become_text(fake_nvml):
    library = fake_nvml(nvmlSystemGetDriverVersion=b"450.80.02")
    with open_nvml(library) as nvml:
        assert nvml.call("nvmlSystemGetDriverVersion") == "450.80.02"


def test_mig_profile_is_told_from_the_device_name():
    assert mig_profile_in("NVIDIA H100 80GB HBM3 MIG 1g.10gb") == "1g.10gb"
    assert mig_profile_in("NVIDIA H200") is None
