from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from steadytorch import transforms
from steadytorch.backends.exported import Exported
from steadytorch.compiled.artefact import supplied, within
from steadytorch.errors import UnsupportedError
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.executors import build
from steadytorch.transforms import conflict, create, engines, parse
from steadytorch.transforms.base import Applicable
from steadytorch.transforms.engine import Engine, thread_count
from steadytorch.transforms.onnxruntime import OnnxRuntime
from steadytorch.transforms.openvino import OpenVino
from steadytorch.workload.workload import Workload

KINDS = (OpenVino, OnnxRuntime)


class Programs(Engine):
    """An engine without a library: its converted model is PyTorch's program in memory."""

    name = "programs"
    engine_title = "Programs"
    packages = ()
    extra = "none"
    kept: Any = None

    def libraries(self) -> dict[str, str]:
        return {"programs": "1"}

    def convert(self, exported: Exported) -> Mapping[str, Any]:
        Programs.kept = exported.program.module()
        return {"program": b"kept"}

    def load(self, parts, form):
        assert bytes(parts["program"]) == b"kept"
        return lambda tensors: [t.detach() for t in Programs.kept(*tensors)]


def test_a_model_runs_on_the_engine(conv_workload):
    with Programs().applied(conv_workload) as changed:
        found = changed.model(*conv_workload.inputs)
    torch.testing.assert_close(found, conv_workload.model(*conv_workload.inputs).detach())


def test_a_second_candidate_reads_the_artefact(conv_workload, tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    with supplied(within(tmp_path)), Programs().applied(conv_workload):
        pass
    monkeypatch.setattr(Programs, "convert", lambda *given: pytest.fail("converted twice"))
    with supplied(within(tmp_path)), Programs().applied(conv_workload) as changed:
        assert changed.model(*conv_workload.inputs).shape == (2, 4)


@pytest.mark.parametrize("action", ["convert", "load"])
def test_an_error_of_a_library_says_whose_it_is(conv_workload, monkeypatch, action):
    class OwnError(Exception):
        pass

    def fails(*given):
        raise OwnError("no such operator: aten::wish")

    monkeypatch.setattr(Programs, action, fails)
    with (
        pytest.raises(UnsupportedError, match=f"Programs cannot {action}.*aten::wish"),
        Programs().applied(conv_workload),
    ):
        pass


def test_a_model_that_another_transform_changed_is_refused(conv_workload):
    changed = conv_workload.with_model(nn.Identity())
    with pytest.raises(UnsupportedError, match="no other transform"), Programs().applied(changed):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_it_combines_with_nothing_but_a_loaders(kind):
    own = kind().spec
    other = TransformSpec("channels_last")
    assert conflict((own, other)) == f"{own.name} runs the whole model, without channels_last"
    assert conflict((own, TransformSpec("prefetch"))) is None
    assert engines((other, own)) == (own.name,)


def test_two_engines_do_not_combine():
    assert "runs the whole model" in str(conflict((OpenVino().spec, OnnxRuntime().spec)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda w: w.with_model(w.model.forward), "plain callable"),
        (lambda w: w.with_model(w.model.train()), "evaluation mode"),
        (lambda w: w.with_model(w.model.double()), "float64"),
        (lambda w: w.with_model(w.model, (w.inputs[0].to(torch.complex64),)), "complex"),
        (lambda w: w.with_model(w.model, (w.inputs[0].to_sparse(),)), "sparse"),
        (lambda w: hooked(w), "user functions"),
    ],
)
def test_what_does_not_apply_says_why(kind, changed, why, conv_workload, cpu, monkeypatch):
    monkeypatch.setattr(kind, "packages", ())
    assert why in kind().applies_to(changed(conv_workload), cpu).reason


def hooked(workload: Workload) -> Workload:
    workload.model.register_forward_hook(lambda *given: None)
    return workload


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_and_a_missing_package_are_told(kind, conv_workload, cpu, gpu, monkeypatch):
    assert "on a CPU only" in kind().applies_to(conv_workload, gpu).reason
    monkeypatch.setattr(kind, "packages", ("no_such_package",))
    reason = kind().applies_to(conv_workload, cpu).reason
    assert "not installed" in reason
    assert f"steadytorch[{kind.extra}]" in reason


def test_weights_beyond_onnx_limit_are_told(cpu, monkeypatch):
    monkeypatch.setattr(OnnxRuntime, "packages", ())
    with torch.device("meta"):
        model = nn.Linear(30_000, 30_000, bias=False).eval()
    workload = Workload(model, torch.zeros(1, 30_000))
    assert "ONNX's limit is 2 GiB" in OnnxRuntime().applies_to(workload, cpu).reason


def test_openvino_has_a_class_per_precision(cpu):
    (bf16,) = parse("openvino(bf16)", cpu)
    assert create(bf16).precision == "bf16"
    assert create(*parse("openvino", cpu)).precision == "same"


INT8 = [
    OpenVino(OpenVino.Parameters("int8")),
    OnnxRuntime(OnnxRuntime.Parameters("", False, "int8")),
]


@pytest.mark.parametrize("engine", INT8, ids=lambda engine: engine.name)
def test_int8_is_a_class_of_its_own_and_one_artefact_of_all_engines(engine, cpu):
    (parsed,) = parse(f"{engine.name}(int8)", cpu)
    assert parsed == engine.spec
    assert engine.precision == "int8"
    assert engine.converters() == INT8[1].libraries()
    assert transforms.artefacts((engine.spec,)) == ("int8",)
    assert transforms.artefacts((type(engine)().spec,)) == (engine.name,)


@pytest.mark.parametrize("engine", INT8, ids=lambda engine: engine.name)
def test_int8_says_why_it_does_not_apply(engine, conv_workload, cpu, gpu, monkeypatch):
    loss, update = torch.sum, lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    training = Workload.training(conv_workload.model, conv_workload.inputs, loss, update)
    assert "inference only" in engine.applies_to(training, cpu).reason
    assert "on a CPU only" in engine.applies_to(conv_workload, gpu).reason
    monkeypatch.setattr(OpenVino, "packages", ())
    monkeypatch.setattr(OnnxRuntime, "packages", ("no_such_package",))
    reason = engine.applies_to(conv_workload, cpu).reason
    assert reason.startswith("needs ONNX Runtime, which is not installed")
    assert isinstance(OpenVino().applies_to(conv_workload, cpu), Applicable)


def test_int8_is_not_served_without_the_artefact_of_its_search(conv_workload):
    with pytest.raises(UnsupportedError, match="only a search calibrates int8"):
        build(conv_workload.model, conv_workload.inputs, {}, (INT8[1].spec,))


def test_threads_are_relative_to_pytorchs():
    present = torch.get_num_threads()
    assert thread_count("") == present
    assert thread_count("one fewer") == max(1, present - 1)
    assert thread_count("half") == max(1, present // 2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_executor_holds_the_weights_of_its_build(kind, conv_workload, cpu):
    if not isinstance(kind().applies_to(conv_workload, cpu), Applicable):
        pytest.skip(f"{kind.engine_title} is not installed")
    executor = build(conv_workload.model, conv_workload.inputs, {}, (kind().spec,))
    assert not executor.is_live  # so that changed weights end its use
    executor.close()


def test_importing_the_package_imports_no_engine():
    import subprocess
    import sys

    code = (
        "import sys, steadytorch, steadytorch.transforms\n"
        "print([n for n in ('openvino', 'onnxruntime', 'onnx', 'onnxscript') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_plans_engine_is_known_by_name():
    assert {"openvino", "onnxruntime"} <= set(transforms.names())
