from __future__ import annotations

import gc

import msgspec
import pytest
import torch

from steadytorch.device.channels import ALLOCATOR_FIELDS, GPU_FIELDS
from steadytorch.device.recorder import MAX_CPU_SHARE, Recorder
from steadytorch.device.recording import Recording

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def _matrices(count=2000):
    left = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(count):
        left @ left
    torch.cuda.synchronize()


def _observed(recording, *channels):
    for channel in channels:
        if getattr(recording, channel) is None:
            pytest.skip(recording.unknown[channel])


def test_every_channel_of_a_real_gpu_has_values_or_a_reason():
    with Recorder("cuda") as recorder:
        _matrices()
    seen = recorder.recording
    for channel in (*GPU_FIELDS, *ALLOCATOR_FIELDS):
        column = getattr(seen, channel)
        assert (column is None) == (channel in seen.unknown)
        assert column is None or len(column) == len(seen.at_ns)
    assert msgspec.json.decode(msgspec.json.encode(seen), type=Recording) == seen


def test_a_busy_gpu_has_a_clock_and_a_draw():
    with Recorder("cuda") as recorder:
        _matrices()
    _observed(recorder.recording, "sm_clock_mhz", "power_milliwatts")
    assert min(recorder.recording.sm_clock_mhz) > 0
    assert min(recorder.recording.power_milliwatts) > 0


def test_the_number_of_neighbours_holds_still():
    held = torch.ones(8, device="cuda")
    with Recorder("cuda", 0.002) as recorder:
        _matrices(500)
    _observed(recorder.recording, "other_gpu_processes")
    assert len(set(recorder.recording.other_gpu_processes)) == 1
    assert held.is_cuda


def test_segments_taken_and_given_back_are_counted():
    torch.ones(8, device="cuda")
    torch.cuda.empty_cache()
    # More than the allocator holds, whatever other tests left there.
    size = torch.cuda.memory_reserved() + (256 << 20)
    with Recorder("cuda", 3600.0) as recorder:
        held = torch.empty(size, dtype=torch.uint8, device="cuda")
        del held
        gc.collect()
        torch.cuda.empty_cache()
    assert recorder.recording.allocator_device_calls[-1] >= 2
    assert recorder.recording.allocator_retries[-1] == 0


@pytest.mark.alone
def test_the_recorder_keeps_to_its_share_of_a_core():
    with Recorder("cuda") as recorder:
        _matrices(20_000)
    assert recorder.recording.cpu_share < 2 * MAX_CPU_SHARE
