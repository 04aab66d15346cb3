"""Serving a plan with cuDNN engines that another process stored."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from stored import make_plan, store_plan
from torch import nn

from steadytorch.conv.choices import Choice, write_choices
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune.conv import problems_in
from steadytorch.workload.workload import Workload

SERVED = """
import json, subprocess, sys, time, pytest, torch
sys.path[:0] = sys.argv[3:]
from faked import fake
from test_optimize_engines import network
from steadytorch.conv import choose_all, choose, engines, executables, timing
from steadytorch.plan.store import Store
from steadytorch.serve.plan import load_plan
from steadytorch.tune.optimize import optimize
from steadytorch.tune.session import Session

def forbidden(*given, **options):
    raise AssertionError("an engine is not to be looked for, chosen or timed here")

model, x = network()
model.eval()
with torch.no_grad():
    expected = model(x)
with pytest.MonkeyPatch.context() as patch:
    graph = fake(patch)
    for owner, name in (
        (Session, "search"), (subprocess, "Popen"),
        (choose_all, "choose"), (choose_all, "first_sound"),
        (choose, "take_rounds"), (choose, "record_all"), (choose, "promising"),
        (executables, "list_engines"), (engines, "list_engines"),
    ):
        patch.setattr(owner, name, forbidden)
    if sys.argv[2] == "optimize":
        served = optimize(model, store=sys.argv[1], canary=False)
    else:
        (entry,) = Store(sys.argv[1]).entries()
        served = load_plan(entry.path).apply(model)
    with torch.no_grad():
        right = [torch.allclose(served(x), expected, atol=1e-5) for _ in range(3)]
    report = served.report()
    print(json.dumps([right, graph.ran, executables.MISSES, report.convolutions, report.calls]))
"""


def network():
    """Two convolutions with different problem keys."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    return nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8)


def served_by(way, choices, folder, request):
    """The outputs, engines and misses of a fresh process."""
    model, x = network()
    spec = TransformSpec("cudnn_engines", (("choices", write_choices(choices)),))
    store_plan(folder, make_plan(model, x, (spec,)))
    here = request.path.parent
    done = subprocess.run(
        [sys.executable, "-c", SERVED, str(folder), way, str(here), str(here.parent / "conv")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return (*json.loads(done.stdout), done.stderr)


@pytest.fixture
def problems():
    return [problem.key for problem in problems_in(Workload(*network()), ()).problems]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("way", ["optimize", "apply"])
def test_a_fresh_process_takes_the_stored_engines_by_name_and_times_none(
    way, problems, tmp_path, request
):
    names = dict(zip(problems, ("eng41_k2=4", "eng7"), strict=True))
    choices = {problem: Choice(name) for problem, name in names.items()}
    right, ran, misses, _, calls, _ = served_by(way, choices, tmp_path, request)
    assert right == [True] * 3
    assert ran == [[problem, names[problem]] for problem in problems] * 3
    assert (misses, calls) == ({}, {"tuned": 3})


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("way", ["apply", "optimize"])
def test_a_stored_engine_that_is_gone_is_a_miss_of_its_convolution_alone(
    way, problems, tmp_path, request
):
    gone, there = problems
    choices = {gone: Choice("eng999"), there: Choice("eng7")}
    right, ran, misses, told, calls, log = served_by(way, choices, tmp_path, request)
    assert right == [True] * 3
    assert ran == [[there, "eng7"]] * 3
    assert list(misses) == [gone]
    assert "no plan eng999" in misses[gone]
    assert (told, calls) == (misses, {"tuned": 3})
    assert log.count(f"PyTorch runs {gone} in place of eng999") == 1
