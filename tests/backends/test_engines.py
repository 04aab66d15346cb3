"""What both engines promise, on the installed libraries; skipped with the reason without them."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.backends import onnxruntime, openvino
from steadytorch.backends.exported import export
from steadytorch.errors import UnsupportedError
from steadytorch.workload.workload import Workload


class Tokens(nn.Module):
    """Integers in, an unused input, integers and booleans out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 48)

    def forward(self, ids, unused, bias):
        hidden = self.head(self.embedding(ids)) + bias
        return hidden, hidden.argmax(-1), ids > 3


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return x + self.calls


def need(*packages):
    """Skips the test without these; importing OpenVINO to find out would send its telemetry."""
    for name in packages:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def openvino_run(workload, precision="f32"):
    need("openvino")
    made = export(workload)
    return openvino.load(openvino.convert(made), made.form, precision, 1, False)


def onnxruntime_run(workload):
    need("onnxruntime", "onnxscript")
    made = export(workload)
    return onnxruntime.load(onnxruntime.convert(made), made.form, 1, True)


RUNS = {"openvino": openvino_run, "onnxruntime": onnxruntime_run}
BOTH = pytest.mark.parametrize(
    "name", ["openvino", pytest.param("onnxruntime", marks=pytest.mark.slow)]
)
pytestmark = pytest.mark.filterwarnings("ignore")


def tokens() -> Workload:
    torch.manual_seed(0)
    inputs = torch.randint(0, 32, (2, 8)), torch.randn(3), torch.randn(48)
    return Workload(Tokens().eval(), inputs)


@pytest.mark.parametrize("name", RUNS)
def test_integers_unused_inputs_and_several_results(name):
    workload = tokens()
    found = RUNS[name](workload)(list(workload.inputs))
    hidden, best, large = workload.model(*workload.inputs)
    torch.testing.assert_close(found[0], hidden.detach())
    assert torch.equal(found[1].long(), best)
    assert torch.equal(found[2].bool(), large)


class Rounds(nn.Module):
    """Operators whose results depend on the sign and size of their inputs."""

    def forward(self, ids, x):
        down = torch.div(ids, 4, rounding_mode="floor"), ids // 3, ids % 3
        return *down, torch.div(ids, 3, rounding_mode="trunc"), x.std(), F.logsigmoid(x), x // 2.0


@pytest.mark.parametrize("name", RUNS)
def test_inputs_unlike_those_of_conversion_are_computed_alike(name):
    model, ids, x = Rounds().eval(), torch.arange(1, 9), torch.rand(8)
    run = RUNS[name](Workload(model, (ids, x)))
    for given in ((ids, x), (-ids, -x), (ids - 4, x * 300 - 200)):
        for found, expected in zip(run(list(given)), model(*given), strict=True):
            torch.testing.assert_close(found.to(expected.dtype), expected)


class Small(nn.Module):
    """Adds and multiplies by constants that are almost 0 and almost 1."""

    def forward(self, x):
        return (
            (x.relu() + 1e-9).log(),
            x / (x.norm(dim=0) + 1e-8),
            x * (1 + 8e-6),
            x - 1e-8,
            x / 1.000008,
        )


@pytest.mark.parametrize("name", RUNS)
def test_small_constants_count(name):
    model = Small().eval()
    run = RUNS[name](Workload(model, (torch.randn(8),)))
    for given in (torch.zeros(8), torch.full((8,), 1e-8), torch.randn(8)):
        for found, expected in zip(run([given]), model(given), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


class Attention(nn.Module):
    def forward(self, x, mask):
        return F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=mask)


@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("name", RUNS)
def test_attention_is_zero_where_the_mask_allows_nothing(name, boolean):
    model, x = Attention().eval(), torch.randn(2, 3, 5, 8)
    allowed = torch.rand(2, 1, 5, 5) > 0.3
    allowed[1, :, 2] = False
    mask = allowed if boolean else torch.zeros(2, 1, 5, 5).masked_fill(~allowed, -torch.inf)
    run = RUNS[name](Workload(model, (x, torch.ones_like(mask))))
    (found,) = run([x, mask])
    torch.testing.assert_close(found, model(x, mask))
    assert not found[1, :, 2].any()


@BOTH
def test_results_of_earlier_calls_stay(name):
    workload = tokens()
    run = RUNS[name](workload)
    first = run(list(workload.inputs))[0]
    before = first.clone()
    ids, unused, bias = workload.inputs
    run([ids.flip(1), unused, bias + 1])
    assert torch.equal(first, before)


@BOTH
def test_weights_are_those_of_conversion(name):
    """Nothing is shared with the model: part of the weights would follow it, part would not."""
    workload = tokens()
    run = RUNS[name](workload)
    before = run(list(workload.inputs))[0].clone()
    with torch.no_grad():
        for weight in workload.model.parameters():
            weight.mul_(3)
    assert torch.equal(run(list(workload.inputs))[0], before)


@BOTH
def test_a_model_that_writes_to_its_buffers_is_refused(name):
    with pytest.raises(UnsupportedError, match="writes to its"):
        RUNS[name](Workload(Counts().eval(), torch.ones(2)))


def _graph(*precisions, devices=("CPU",)):
    nodes = [
        SimpleNamespace(
            get_rt_info=lambda p=p: {
                "layerType": SimpleNamespace(astype=lambda _: "Convolution"),
                "runtimePrecision": SimpleNamespace(astype=lambda _: p),
            }
        )
        for p in precisions
    ]
    return SimpleNamespace(
        get_property=lambda name: list(devices),
        get_runtime_model=lambda: SimpleNamespace(get_ops=lambda: nodes),
    )


@pytest.mark.parametrize(
    ("graph", "precision", "why"),
    [
        (_graph("f32", "bf16"), "f32", "computes in bf16, expected f32"),
        (_graph("f32", "f16"), "f32", "computes in f16"),
        (_graph("f32", "i32"), "bf16", "bf16 did not engage"),
        (_graph("f32", devices=("GPU",)), "f32", "runs it on GPU, expected CPU"),
        (_graph("i8", devices=("GPU",)), "int8", "runs it on GPU, expected CPU"),
    ],
)
def test_openvino_has_to_prove_what_engaged(graph, precision, why):
    with pytest.raises(UnsupportedError, match=why):
        openvino.prove(graph, precision)


def test_openvino_in_its_default_precision_is_caught_where_that_is_lower():
    need("openvino")
    workload = Workload(nn.Linear(64, 64).eval(), torch.randn(4, 64))
    try:
        openvino_run(workload, "bf16")
    except UnsupportedError:
        pytest.skip("this processor has no bf16 arithmetic")
    library, core = openvino.import_openvino(), openvino.shared_core()
    model = core.read_model(*_files(workload, library))
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    openvino.prove(compiled, "bf16")
    with pytest.raises(UnsupportedError, match="computes in bf16"):
        openvino.prove(compiled, "f32")


def _files(workload, library):
    import numpy as np

    parts = openvino.convert(export(workload))
    weights = np.frombuffer(parts[openvino.WEIGHTS], dtype=np.uint8)
    return parts[openvino.MODEL], library.Tensor(weights)


def test_onnxruntime_has_to_run_on_its_cpu_provider():
    session = SimpleNamespace(get_providers=lambda: ["AzureExecutionProvider"])
    with pytest.raises(UnsupportedError, match="runs it on AzureExecutionProvider"):
        onnxruntime.prove(session)


def test_only_the_warnings_on_torchvision_are_silenced(caplog):
    logger = logging.getLogger(onnxruntime.REGISTRATION)
    lost = "torchvision is not installed. Skipping %s"
    with onnxruntime.without_torchvision_warnings():
        logger.warning(lost, "torchvision::nms")
        logger.warning("an operator is unknown")
        logging.getLogger("torch.onnx").warning("opset 1 is old")
    logger.warning(lost, "torchvision::nms")
    assert [each.getMessage() for each in caplog.records] == [
        "an operator is unknown",
        "opset 1 is old",
        "torchvision is not installed. Skipping torchvision::nms",
    ]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_conversion_is_silent_without_torchvision(caplog, capfd):
    need("onnxruntime", "onnxscript")
    onnxruntime.convert(export(tokens()))
    assert "torchvision" not in caplog.text + capfd.readouterr().err


FREED_IN_ORDER = """
import os, signal, torch
from steadytorch.backends import openvino
from steadytorch.backends.exported import export
from steadytorch.workload.workload import Workload

made = export(Workload(torch.nn.Linear(8, 8).eval(), torch.randn(2, 8)))
parts = openvino.convert(made)
first, second = (openvino.load(parts, made.form, "f32", 1, False) for _ in range(2))
del first
del second
signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_signal_after_models_were_freed_is_survived():
    need("openvino")
    words = [sys.executable, "-W", "ignore", "-c", FREED_IN_ORDER]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.strip()) == (0, "handled"), found.stderr


def test_the_telemetry_of_openvino_stays_out():
    need("openvino")
    code = (
        "import sys\n"
        "from steadytorch.backends import openvino\n"
        "openvino.import_openvino()\n"
        "print([name for name in sys.modules if name.startswith('openvino_telemetry')])"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
