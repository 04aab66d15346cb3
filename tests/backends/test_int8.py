"""Int8 by the real quantiser and both engines, on a small network; skipped without them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from steadytorch.backends import int8, onnxruntime, openvino
from steadytorch.backends.call import EngineModel
from steadytorch.backends.exported import export
from steadytorch.compiled.artefact import supplied, within
from steadytorch.errors import UnsupportedError
from steadytorch.transforms.onnxruntime import OnnxRuntime
from steadytorch.transforms.openvino import OpenVino
from steadytorch.verification import verify as verification
from steadytorch.verification.verdict import decide
from steadytorch.verification.verify import make_reference, verify
from steadytorch.workload.workload import Workload

from .test_engines import need, tokens

pytestmark = pytest.mark.filterwarnings("ignore")
LOADS = {
    "openvino": lambda parts, form: openvino.load(parts, form, "int8", 1, False),
    "onnxruntime": lambda parts, form: onnxruntime.load(parts, form, 1, True),
}
BOTH = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)


class Net(nn.Module):
    """Convolutions with a residual and a pooling, then tokens and two products."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.mix, self.head = nn.Linear(16, 32), nn.Linear(32, 8, bias=False)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = nn.functional.max_pool2d(torch.relu(self.conv(x) + x), 2)
        return self.head(nn.functional.gelu(self.mix(x.flatten(2).transpose(1, 2))))


@pytest.fixture(scope="module")
def made():
    """The workload, the form of its calls, its float model and the quantised one."""
    need("openvino", "onnxruntime", "onnx", "onnxscript")
    torch.manual_seed(0)
    workload = Workload(Net().eval(), torch.randn(2, 3, 16, 16))
    exported = export(workload)
    parts = onnxruntime.convert(exported)
    return workload, exported.form, parts, int8.quantize(parts, exported.form, workload)


@pytest.fixture(autouse=True)
def flags(monkeypatch):
    """Keeps the reference, which has a process of its own in a search, from changing flags."""
    monkeypatch.setattr(verification, "without_tf32", lambda: None)


def verdict(run, workload, form):
    data, reference = make_reference(workload, 0)
    found = verify(EngineModel("engine", run, form, workload), workload, data)
    return found, decide(found, reference, "int8", None)


@BOTH
def test_an_engine_runs_every_layer_in_int8_within_the_bound(load, made):
    workload, form, _, parts = made
    assert msgspec.json.decode(parts[int8.LAYERS]) == 4
    found, reason = verdict(load(parts, form), workload, form)
    assert reason is None
    assert found.error.relative_l2 > 1e-3  # float32 would be at 1e-6


@BOTH
def test_an_engine_that_computes_in_floating_point_is_refused(load, made):
    _, form, floating, parts = made
    with pytest.raises(UnsupportedError, match=r"int8 did not engage: .* 0 of 4 quantised layers"):
        load({**floating, int8.LAYERS: parts[int8.LAYERS]}, form)


@BOTH
@pytest.mark.parametrize("role", ["activations", "weights"])
def test_a_quantiser_with_a_wrong_scale_is_rejected(load, role, made):
    workload, form, _, parts = made
    run = load({**parts, int8.MODEL: rescaled(parts[int8.MODEL], role)}, form)
    _, reason = verdict(run, workload, form)
    assert "exceeds" in reason


def rescaled(content, role):
    """A quantised model with a quarter of the right scale for one operand of its last product."""
    import onnx

    model = onnx.load_model_from_string(content)
    product = [node for node in model.graph.node if node.op_type == "MatMul"][-1]
    operand = product.input[("activations", "weights").index(role)]
    (dequantized,) = [node for node in model.graph.node if operand in node.output]
    (scale,) = [each for each in model.graph.initializer if each.name == dequantized.input[1]]
    wrong = onnx.numpy_helper.to_array(scale) * np.float32(0.25)
    scale.CopyFrom(onnx.numpy_helper.from_array(wrong, scale.name))
    return model.SerializeToString()


@BOTH
def test_integer_inputs_stay_integers(load):
    need("openvino", "onnxruntime", "onnx", "onnxscript")
    workload = tokens()
    exported = export(workload)
    parts = int8.quantize(onnxruntime.convert(exported), exported.form, workload)
    _, reason = verdict(load(parts, exported.form), workload, exported.form)
    assert reason is None


def test_a_model_with_nothing_to_quantise_says_so():
    need("onnxruntime", "onnx", "onnxscript")
    workload = Workload(nn.Sequential(nn.Softmax(-1), nn.GELU()).eval(), torch.randn(2, 8))
    exported = export(workload)
    with pytest.raises(UnsupportedError, match="int8 needs a convolution or matrix product"):
        int8.quantize(onnxruntime.convert(exported), exported.form, workload)


def test_calibration_takes_the_inputs_or_batches_of_the_loader():
    model, x = nn.Linear(4, 2).eval(), torch.randn(3, 4)
    (given,) = int8.calls(Workload(model, x))
    assert torch.equal(given[0], x)
    batches = [torch.full((3, 4), float(i)) for i in range(9)]
    found = list(int8.calls(Workload.from_loader(model, batches)))
    assert [float(tensors[0].mean()) for tensors in found] == [0.0, 1.0, 2.0, 3.0]


def test_engines_share_a_model_that_is_calibrated_on_all_batches(tmp_path, monkeypatch):
    need("openvino", "onnxruntime", "onnx", "onnxscript")
    torch.manual_seed(0)
    model, x = nn.Linear(16, 16, bias=False).eval(), torch.randn(64, 16)
    tmp_path.chmod(0o700)
    workload = Workload.from_loader(model, [x, x, 8 * x])
    found = []
    for engine in (
        OnnxRuntime(OnnxRuntime.Parameters(precision="int8")),
        OpenVino(OpenVino.Parameters("int8")),
    ):
        with supplied(within(tmp_path)), engine.applied(workload) as changed:
            found.append(changed.model(8 * x))
        monkeypatch.setattr(int8, "quantize", lambda *given: pytest.fail("quantised twice"))
    expected = model(8 * x).detach()
    for each in found:
        assert float((each - expected).norm() / expected.norm()) < 0.02


def nodes(*described):
    """A graph of nodes `(operator, inputs, output)` over two weights, named by their outputs."""
    need("onnx")
    from onnx import TensorProto, helper, numpy_helper

    made = [helper.make_node(op, ins.split(), [out], name=out) for op, ins, out in described]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])]
    weights = [numpy_helper.from_array(np.zeros((1, 1), np.float32), name) for name in "wv"]
    return helper.make_graph(made, "graph", given, given, weights)


@pytest.mark.parametrize(
    ("described", "layers", "others"),
    [
        ([("Conv", "x w", "a"), ("Relu", "a", "b"), ("Add", "b a", "c")], "a", "bc"),
        ([("Conv", "x w", "a"), ("Add", "a x", "b")], "a", ""),
        ([("MatMul", "x w", "a"), ("Add", "a x", "b"), ("Relu", "b", "c")], "a", ""),
        ([("MatMul", "x x", "a"), ("Softmax", "a", "b")], "", ""),
    ],
    ids=["residual", "one side", "product", "attention"],
)
def test_layers_with_weights_are_chosen_and_what_lies_between_convolutions(
    described, layers, others
):
    assert int8.chosen(nodes(*described)) == (list(layers), list(others))
