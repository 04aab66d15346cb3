import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore"),
]

TYPICAL = (
    "fold_batch_norm + cast_weights(fp16) + channels_last + compile(default, freezing) + cuda_graph"
)
PLANS = {
    "typical": TYPICAL,
    "not frozen": "cast_weights(fp16) + compile(default) + cuda_graph",
    "without a graph": "compile(default, freezing)",
    "engines": "cast_weights(fp16) + channels_last + cudnn_engines + compile(default) + cuda_graph",
    "combo kernels": "cast_weights(fp16) + compile(default, freezing, combo_kernels) + cuda_graph",
    "max-autotune": "cast_weights(fp16) + compile(max-autotune, freezing) + cuda_graph",
}

USE = """
import json, sys
import torch
from torch import nn
import steadytorch as steady

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(32, 10),
).eval().cuda()
x = torch.randn(4, 16, 8, 8, device="cuda")
with torch.no_grad():
    expected = model(x)
fast = steady.optimize(
    model, store=sys.argv[1], precision=sys.argv[2], canary=False, bundle=True
)
off = [float((fast(x) - expected).norm() / expected.norm()) for _ in range(3)]
other = model(2 * x).detach()
off.append(float((fast(2 * x) - other).norm() / other.norm()))
with torch.no_grad():
    model[0].weight.mul_(2)
    stale = torch.equal(fast(x), model(x))
dynamo = "torch._dynamo" in sys.modules
print(json.dumps({"off": off, "hits": fast.report().hits, "dynamo": dynamo, "stale": stale}))
"""


def _stored(name, folder, keep_unmeasured, caplog):
    """Stores a plan for the model of `USE`, makes its bundle; returns its precision."""
    from torch import nn

    from steadytorch import transforms
    from steadytorch.device.facts import load_facts
    from steadytorch.transforms.precision import precision_of
    from steadytorch.tune.select import SearchOptions
    from steadytorch.tune.session import Session
    from steadytorch.workload.workload import Workload

    torch.manual_seed(0)
    layers = (nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model = nn.Sequential(*layers, *head).eval().cuda()
    workload = Workload(model, (torch.randn(4, 16, 8, 8, device="cuda"),))
    candidate = transforms.parse(PLANS[name], load_facts("cuda"))
    for part in map(transforms.create, candidate):
        answer = part.applies_to(workload, load_facts("cuda"))
        if reason := getattr(answer, "reason", None):
            pytest.skip(f"{part.spec} does not apply here: {reason}")
    precision = precision_of(candidate)
    session = Session(workload, SearchOptions(precision=precision), "cuda", folder)
    plan = keep_unmeasured(session, candidate)
    assert session.keep_bundle(plan) is None
    if "set CXX to another" in caplog.text:
        pytest.skip("the C++ compiler of this machine cannot make packages")
    return precision


@pytest.mark.parametrize("name", PLANS)
def test_a_fresh_process_serves_the_package_and_needs_no_compiler(
    name, tmp_path, caplog, keep_unmeasured
):
    precision = _stored(name, tmp_path / "plans", keep_unmeasured, caplog)
    assert not caplog.records, caplog.text
    done = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path / "plans"), precision],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["hits"] == 4, done.stderr
    assert max(found["off"]) < (1e-2 if precision == "fp16" else 5e-3)
    assert found["stale"]
    assert not found["dynamo"] or name == "engines"


def test_contents_on_the_gpu_are_those_on_the_host():
    from torch import nn

    from steadytorch.compiled.model_digest import digest

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4).half()).eval()
    here = digest(model)
    assert digest(model.cuda()) == here
    assert digest(model.to(memory_format=torch.channels_last)) == here
    with torch.no_grad():
        model[2].weight[0, 0] += 1
    assert digest(model) != here


def test_contents_in_pieces_are_the_same(monkeypatch):
    from torch import nn

    from steadytorch.compiled import model_digest

    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5))).cuda()
    whole = model_digest.digest(model)
    monkeypatch.setattr(model_digest, "CHUNK_BYTES", 1500)
    assert model_digest.digest(model) == whole
