from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import msgspec
import pytest
import torch

from steadytorch.device import facts as facts_module
from steadytorch.device import host
from steadytorch.device.facts import (
    DeviceFacts,
    dotted_cudnn,
    load_facts,
    parse_device,
    resolve_device,
)
from steadytorch.device.observe import NotObservable
from steadytorch.errors import UnsupportedError, UsageError


def test_facts_of_a_cpu_are_those_of_this_process():
    facts = load_facts("cpu")
    assert facts.device == "cpu"
    assert facts.torch == torch.__version__
    assert facts.isa == torch.backends.cpu.get_cpu_capability()
    assert facts.cores_logical == host.usable_logical_cores()
    assert facts.memory_bytes


def test_every_missing_field_of_a_cpu_has_its_reason():
    facts = load_facts("cpu")
    missing = {field for field in facts.__struct_fields__ if getattr(facts, field) is None}
    assert missing == set(facts.unknown)
    assert all(facts.unknown.values())


def test_facts_of_a_gpu(cuda_h200, fake_nvml, monkeypatch):
    monkeypatch.setattr(metadata, "version", {"triton": "3.6.0"}.__getitem__)
    facts = load_facts("cuda", library=fake_nvml())
    assert (facts.device, facts.name, facts.compute_capability) == ("cuda", "NVIDIA H200", "9.0")
    assert (facts.sm_count, facts.l2_cache_bytes) == (132, 62_914_560)
    assert facts.memory_bytes == 150_109_880_320
    assert (facts.driver, facts.cuda, facts.cudnn) == ("580.159.04", "13.0", "9.19.0")
    assert facts.triton == "3.6.0"
    assert facts.mig_profile is None
    assert not set(facts.unknown) & {"mig_profile", "driver", "name", "triton"}


def test_the_index_of_a_gpu_is_no_fact(cuda_h200, fake_nvml):
    assert load_facts("cuda:0", library=fake_nvml()) == load_facts("cuda", library=fake_nvml())


def test_without_nvml_a_gpu_loses_only_what_nvml_alone_knows(cuda_h200, no_library, monkeypatch):
    def hidden():
        raise NotObservable("/proc is hidden")

    monkeypatch.setattr(host, "nvidia_driver_version", hidden)
    facts = load_facts("cuda", library=no_library)
    assert (facts.name, facts.sm_count) == ("NVIDIA H200", 132)
    assert {"driver", "mig_profile"} <= set(facts.unknown)
    assert "libnvidia-ml" in facts.unknown["driver"]


def test_without_nvml_the_driver_is_read_from_proc(cuda_h200, no_library, monkeypatch):
    monkeypatch.setattr(host, "nvidia_driver_version", lambda: "580.95.05")
    assert load_facts("cuda", library=no_library).driver == "580.95.05"


def test_a_mig_slice_is_named(cuda_h200, no_library):
    cuda_h200.name = "NVIDIA H200 MIG 1g.18gb"
    assert load_facts("cuda", library=no_library).mig_profile == "1g.18gb"


def test_a_library_that_fails_in_an_unforeseen_way_costs_its_fields_only(cuda_h200):
    class Broken:
        NVMLError = OSError

        def nvmlInit(self):  # noqa: N802
            raise RuntimeError("segment not mapped")

    facts = load_facts("cuda", library=Broken())
    assert facts.name == "NVIDIA H200"
    assert facts.unknown["mig_profile"] == "RuntimeError: segment not mapped"


def test_facts_of_a_gpu_that_is_not_there_give_the_reason(monkeypatch, no_library):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    facts = load_facts("cuda", library=no_library)
    assert facts.name is None
    assert "built without CUDA" in facts.unknown["name"]
    assert "built without CUDA" in facts.unknown["sm_count"]
    assert facts.cpu_name == load_facts("cpu").cpu_name


def test_a_processor_without_a_model_name_leaves_the_device_nameless(monkeypatch):
    def nameless():
        raise NotObservable("/proc/cpuinfo names no model")

    monkeypatch.setattr(host, "cpu_model", nameless)
    facts = load_facts("cpu")
    assert facts.name is None
    assert facts.unknown["name"] == facts.unknown["cpu_name"] == "/proc/cpuinfo names no model"


def test_facts_survive_json():
    facts = load_facts("cpu")
    assert msgspec.json.decode(msgspec.json.encode(facts), type=DeviceFacts) == facts


@pytest.mark.parametrize(
    ("device", "parsed"), [("cpu", ("cpu", 0)), ("cuda", ("cuda", 0)), ("cuda:12", ("cuda", 12))]
)
def test_devices_are_parsed(device, parsed):
    assert parse_device(device) == parsed


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:-1", "cuda:01", "CUDA", "cpu\n", "٣"])
def test_a_malformed_device_is_misuse_and_shown(device):
    with pytest.raises(UsageError, match="unknown device") as raised:
        resolve_device(device)
    assert repr(device) in str(raised.value)


def test_auto_is_the_gpu_where_there_is_one(cuda_h200):
    assert resolve_device("auto") == "cuda"


def test_auto_is_the_cpu_elsewhere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0"])
def test_a_device_that_is_there_is_kept_as_asked(cuda_h200, device):
    assert resolve_device(device) == device


def test_an_index_beyond_the_last_gpu_is_unsupported(cuda_h200):
    with pytest.raises(UnsupportedError, match=r"'cuda:3'.*sees 1 GPU, the last is cuda:0"):
        resolve_device("cuda:3")


def test_a_build_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UnsupportedError, match="built without CUDA"):
        resolve_device("cuda")


def test_a_missing_driver_is_named(monkeypatch):
    def no_driver():
        raise NotObservable("the NVIDIA kernel driver is not loaded")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(facts_module, "driver_version", no_driver)
    with pytest.raises(UnsupportedError, match="no NVIDIA driver found"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("visible", "reason"),
    [("-1", "CUDA_VISIBLE_DEVICES='-1' leaves no GPU"), (None, "no usable device")],
)
def test_a_hidden_or_absent_device_is_named(monkeypatch, visible, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(facts_module, "driver_version", lambda: "580.95.05")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UnsupportedError, match=reason):
        resolve_device("cuda:0")


@pytest.mark.parametrize(
    ("number", "text"), [(91900, "9.19.0"), (90101, "9.1.1"), (8907, "8.9.7"), (8200, "8.2.0")]
)
def test_cudnn_version_is_dotted(number, text):
    assert dotted_cudnn(number) == text


def test_the_room_imports_neither_torch_nor_the_bindings():
    modules = "facts, telemetry, probes, roofline, host, nvml, observe"
    program = (
        f"from steadytorch.device import {modules}\nimport sys\n"
        "print([name for name in ('torch', 'pynvml', 'triton') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
