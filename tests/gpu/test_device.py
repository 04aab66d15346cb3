from __future__ import annotations

import math
import os
import subprocess
import sys

import msgspec
import pytest
import torch

from steadytorch.device.facts import DeviceFacts, load_facts, resolve_device
from steadytorch.device.probes import observability
from steadytorch.device.roofline import copy_bandwidth, matrix_rate
from steadytorch.device.telemetry import holds_context, snapshot
from steadytorch.errors import UnsupportedError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_facts_of_a_real_gpu_are_what_pytorch_says_and_survive_json():
    facts = load_facts("cuda")
    properties = torch.cuda.get_device_properties(0)
    assert facts.name == properties.name
    assert facts.sm_count == properties.multi_processor_count
    assert facts.compute_capability == ".".join(map(str, torch.cuda.get_device_capability(0)))
    assert facts.cuda == torch.version.cuda
    assert msgspec.json.decode(msgspec.json.encode(facts), type=DeviceFacts) == facts


def test_every_missing_fact_of_a_real_gpu_has_its_reason():
    facts = load_facts("cuda")
    missing = {field for field in facts.__struct_fields__ if getattr(facts, field) is None}
    assert missing - {"mig_profile"} <= set(facts.unknown)


def test_every_missing_reading_of_a_real_gpu_has_its_reason():
    now = snapshot("cuda", interval_s=0.05)
    missing = {field for field in now.__struct_fields__ if getattr(now, field) is None}
    assert missing == set(now.unknown)


@pytest.mark.alone
def test_this_process_is_not_its_own_neighbour():
    held = torch.ones(8, device="cuda")
    now = snapshot("cuda", interval_s=0.0)
    program = (
        "import torch; held = torch.ones(8, device='cuda')\n"
        "from steadytorch.device.telemetry import snapshot\n"
        "print(snapshot('cuda', interval_s=0.0).other_gpu_processes)"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    if now.other_gpu_processes is None:
        pytest.skip(now.unknown["other_gpu_processes"])
    assert int(child.stdout) == now.other_gpu_processes + 1
    assert held.is_cuda


def test_looking_at_the_gpu_creates_no_context_on_it():
    program = (
        "import torch\nfrom steadytorch.device.facts import load_facts\n"
        "from steadytorch.device.telemetry import holds_context, snapshot\n"
        "load_facts('cuda'); snapshot('cuda', interval_s=0.0)\nprint(holds_context(0))\n"
        "held = torch.ones(8, device='cuda')\nprint(holds_context(0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["False", "True"]


def test_a_hidden_gpu_is_explained():
    program = (
        "from steadytorch.device.facts import load_facts, resolve_device\n"
        "print(load_facts('cuda').unknown['name'])\nresolve_device('cuda')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CUDA_VISIBLE_DEVICES='' leaves no GPU" in done.stdout
    assert "UnsupportedError" in done.stderr


def test_an_index_beyond_the_last_gpu_is_unsupported():
    count = torch.cuda.device_count()
    assert resolve_device("auto") == "cuda"
    assert resolve_device(f"cuda:{count - 1}") == f"cuda:{count - 1}"
    with pytest.raises(UnsupportedError, match=f"the last is cuda:{count - 1}"):
        resolve_device(f"cuda:{count}")


def test_the_roofline_of_a_real_gpu_is_finite_and_changes_nothing_global():
    def state():
        return (
            torch.backends.cuda.matmul.allow_tf32,
            torch.cuda.current_device(),
            torch.cuda.current_stream(),
            torch.get_default_dtype(),
        )

    before, random_before = state(), torch.cuda.get_rng_state()
    assert 0 < copy_bandwidth("cuda", budget_s=0.05) < math.inf
    for dtype in ("float32", "bfloat16", "float16"):
        assert 0 < matrix_rate("cuda", dtype, budget_s=0.05) < math.inf
    assert state() == before
    assert torch.equal(torch.cuda.get_rng_state(), random_before)


def test_a_gpu_that_does_not_exist_cannot_be_measured():
    with pytest.raises(UnsupportedError, match="cannot copy memory"):
        copy_bandwidth(f"cuda:{torch.cuda.device_count()}")


def test_the_machine_is_probed_without_an_exception():
    assert {found.name for found in observability("cuda")} >= {"NVML", "GPU process list", "Triton"}


def test_a_context_is_seen_once_there_is_one():
    held = torch.ones(8, device="cuda")
    assert holds_context(held.get_device())
