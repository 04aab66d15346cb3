import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

_SCRIPT = """
import sys
with open({marker!r}, "a") as marker:
    marker.write("x")
import torch
from torch import nn
import steadytorch
from steadytorch.tune.session import Session
from steadytorch import transforms
from steadytorch.device.facts import load_facts

torch.manual_seed(0)
WEIGHT = 7.25

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return helper(self.linear(x))

def helper(x):
    return torch.relu(x) + OFFSET

OFFSET = 0.5
model = Mine().eval()
with torch.no_grad():
    model.linear.weight.fill_(WEIGHT)

def trusts_its_weights(module, inputs):
    if not torch.compiler.is_compiling() and not bool((module.weight == WEIGHT).all()):
        raise RuntimeError("other weights than the caller's")

model.linear.register_forward_pre_hook(trusts_its_weights)
specs = [t.spec for t in transforms.all_variants(load_facts("cpu"))]
wanted = [s for s in specs if str(s) == {option!r}]
assert len(wanted) == 1, specs
Session.options_that_apply = lambda self: (wanted, {{}})
x = torch.randn(4, 16)
plan = steadytorch.tune(steadytorch.Workload(model, x), budget="10m", store={store!r})
(trial,) = [t for t in plan.evidence.trials if t.transforms == tuple(wanted)]
assert trial.status == "ok", trial
assert trial.error < 1e-5, trial
served = plan.apply(model)
with torch.no_grad():
    torch.testing.assert_close(served(x), model(x))
assert served.report().calls == {{"tuned": 1}} or not plan.candidate, served.report()
print(plan.path)
"""
WAYS = {"file": "cudnn_deterministic", "stdin": "cudnn_deterministic", "-c": "compile(default)"}
"""How Python gets a script, and the only option that it searches over."""


def _script(folder, option="inference_mode"):
    store, marker = str(folder / "plans"), str(folder / "marker")
    return textwrap.dedent(_SCRIPT).format(marker=marker, store=store, option=option)


def _started(folder, way):
    """Runs a script as a file without a main guard, from standard input, or as an argument."""
    script, path = _script(folder, WAYS[way]), folder / "script.py"
    path.write_text(script)
    arguments = {"file": [str(path)], "stdin": ["-"], "-c": ["-c", script]}[way]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with path.open() as text:
        return subprocess.Popen(
            [sys.executable, *arguments], stdin=text, cwd=folder, text=True, **pipes
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_a_model_defined_in_the_main_module_is_tuned_with_its_weights(tmp_path, way):
    with _started(tmp_path, way) as process:
        try:
            printed, errors = process.communicate(timeout=280)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert printed.strip().startswith(str(tmp_path / "plans"))
    assert (tmp_path / "marker").read_text() == "x"


def _interruptible():
    # A test run in the background may have inherited that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_control_c_ends_every_worker(tmp_path):
    (tmp_path / "script.py").write_text(_script(tmp_path))
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_interruptible,
    )
    assert parent.stderr is not None
    process, workers = psutil.Process(parent.pid), []
    deadline = time.monotonic() + 120
    while len(workers) < 3 and parent.poll() is None and time.monotonic() < deadline:
        workers = process.children(recursive=True)  # the fork server and two of its workers
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=60)
    assert len(workers) >= 3
    assert "KeyboardInterrupt" in errors
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    assert not (tmp_path / "plans").exists()
