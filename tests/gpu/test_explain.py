"""Findings on a real GPU, each provoked on purpose, and none where nothing is provoked."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from scipy.stats import mannwhitneyu

from steadytorch import transforms
from steadytorch.device.facts import load_facts
from steadytorch.explain.session import explain
from steadytorch.ledger.ledger import SLICES
from steadytorch.workload.loading import load_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NEIGHBOUR = """
import torch
x = torch.randn(4096, 4096, device="cuda")
while True:
    for _ in range(20):
        x = torch.nn.functional.normalize(x @ x)
    torch.cuda.synchronize()
    print("works", flush=True)
"""
BUSY = "print('works', flush=True)\nwhile True: pass"
OF_OTHERS = {"neighbour-process", "cpu-contention", "idle-ramp"}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def provoked(name):
    return load_workload(f"{Path(__file__).with_name('explained.py')}:{name}")


def resnet50(batch):
    return load_workload("resnet50", batch=batch)


def explained(workload, **arguments):
    return explain(workload, device="cuda", **{"budget": "8s", **arguments})


def ids(found):
    return {finding.id for finding in found.findings}


@contextmanager
def others(program, count):
    """Runs a program in so many processes; each has begun its work."""
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in running:
            assert process.stdout.readline() == b"works\n"
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="module")
def single():
    """ResNet-50 as it comes, one image at a time."""
    return explained(resnet50(1))


def test_slices_add_up_on_the_gpu(single):
    assert single.gpu.busy_ns + single.gpu.idle_ns == single.gpu.total_ns
    assert 3 <= len(single.steps) <= 5
    for step in single.steps:
        assert step.slices_ns.keys() == set(SLICES)
        assert sum(step.slices_ns.values()) == step.total_ns
    assert single.problems == ()


def test_kernels_are_held_against_the_limits_of_the_gpu(single):
    assert single.roofline.known_ns > 0.5 * single.roofline.busy_ns
    assert single.roofline.share_of_limit > 0


def test_one_image_at_a_time_is_launch_bound(single):
    assert single.regime == "launch-bound"
    assert "launch-bound" in ids(single)
    (finding,) = [finding for finding in single.findings if finding.id == "launch-bound"]
    assert "cuda_graph" in finding.transforms


def test_convolutions_by_the_first_suggestion_are_told(single):
    (finding,) = [finding for finding in single.findings if finding.id == "benchmark-mode"]
    assert finding.information
    assert "steady conv" in finding.fix


def test_a_cuda_graph_is_launch_bound_no_more(single):
    graph = transforms.parse("cuda_graph", load_facts("cuda"))
    found = explained(resnet50(1), candidate=graph)
    assert "launch-bound" not in ids(found)
    assert found.measured.median_ns < single.measured.median_ns


def test_reading_values_in_a_loop_is_synchronisation():
    found = explained(provoked("reading"))
    assert "synchronisation" in ids(found)
    (finding,) = [finding for finding in found.findings if finding.id == "synchronisation"]
    assert any("item" in line for line in (finding.title, *finding.evidence))


def test_input_that_is_not_pinned_is_pageable_copy():
    assert "pageable-copy" in ids(explained(provoked("feeding")))


def test_half_precision_in_nchw_is_layout_conversion():
    workload = provoked("channels_first")
    assert "layout-conversion" in ids(explained(workload))
    last = transforms.parse("channels_last", load_facts("cuda"))
    assert "layout-conversion" not in ids(explained(workload, candidate=last))


def test_new_shapes_under_benchmark_mode_are_autotuning_in_loop():
    found = explained(provoked("churning"))
    assert "autotuning-in-loop" in ids(found)
    assert found.notes["cudnn_benchmark"] is True


def test_training_is_explained_too():
    found = explained(load_workload("resnet18", batch=8, train=True))
    assert len(found.steps) >= 3
    assert any("bn" in line.name.lower() or "norm" in line.name for line in found.roofline.lines)


# -- what others do to it -----------------------------------------------------------------------


def test_a_quiet_run_shows_no_others():
    assert not ids(explained(resnet50(64))) & OF_OTHERS


def test_another_process_on_the_gpu_is_a_neighbour():
    with others(NEIGHBOUR, 1):
        found = explained(resnet50(1))
    blind = {abstention.rule: abstention.why for abstention in found.abstained}
    if "neighbour-process" in blind:
        pytest.skip(blind["neighbour-process"])
    assert "neighbour-process" in ids(found)


def test_all_cores_busy_is_cpu_contention():
    with others(BUSY, 2 * len(os.sched_getaffinity(0))):
        found = explained(resnet50(1))
    blind = {abstention.rule: abstention.why for abstention in found.abstained}
    if "cpu-contention" in blind:
        pytest.skip(blind["cpu-contention"])
    assert "cpu-contention" in ids(found)


def test_pauses_between_calls_are_judged_as_measured():
    graph = transforms.parse("cuda_graph", load_facts("cuda"))
    found = explained(resnet50(1), candidate=graph, pause="100ms")
    probe = found.notes["pause_probe"]
    assert (probe["pause_ms"], probe["asked"]) == ([100.0], True)
    assert "idle-ramp" not in {abstention.rule for abstention in found.abstained}
    slower = probe["after_ns"][0] / probe["steady_ns"] - 1
    after, steady = probe["after_samples_ns"][0], probe["steady_samples_ns"]
    clear = mannwhitneyu(after, steady, alternative="greater").pvalue <= 0.01
    assert ("idle-ramp" in ids(found)) == (slower > 0.03 and clear)
