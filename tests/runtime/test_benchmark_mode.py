from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from steadytorch.errors import UsageError
from steadytorch.runtime.benchmark_mode import CHURN, benchmark_mode, why_not

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@NO_GPU
def test_without_a_device_it_does_nothing_and_says_so():
    before = torch.backends.cudnn.benchmark
    with pytest.warns(UserWarning, match="no effect: there is no CUDA device"):
        mode = benchmark_mode(True)
    assert torch.backends.cudnn.benchmark == before
    assert not mode.report().active
    assert mode.report().reason == "there is no CUDA device"


def test_switching_off_warns_of_nothing_and_is_undone():
    torch.backends.cudnn.benchmark = True
    try:
        with benchmark_mode(False):
            assert torch.backends.cudnn.benchmark is False
        assert torch.backends.cudnn.benchmark is True
    finally:
        torch.backends.cudnn.benchmark = False


def test_it_is_undone_when_the_body_raises():
    torch.backends.cudnn.benchmark = True
    try:
        with pytest.raises(KeyError), benchmark_mode(False):
            raise KeyError
        assert torch.backends.cudnn.benchmark is True
    finally:
        torch.backends.cudnn.benchmark = False


def switched_on(monkeypatch, **options):
    """The mode as on a machine with a device; layers there are seen by their shapes alone."""
    monkeypatch.setattr("steadytorch.runtime.benchmark_mode.why_not", lambda: "")
    # Other tests of this process may have asked cuDNN for engines.
    monkeypatch.setattr("steadytorch.runtime.benchmark_mode.has_convolved", lambda: False)

    def count(self, module, args):
        # As on a GPU, which is what the mode looks for.
        if isinstance(module, nn.Conv2d):
            self._seen(module, args[0])

    monkeypatch.setattr(benchmark_mode, "_count", count)
    return benchmark_mode(True, **options)


def test_it_says_when_it_comes_late(monkeypatch):
    monkeypatch.setattr("steadytorch.runtime.benchmark_mode.why_not", lambda: "")
    monkeypatch.setattr("steadytorch.runtime.benchmark_mode.has_convolved", lambda: True)
    with pytest.warns(UserWarning, match="comes late"), benchmark_mode(True):
        pass


def test_settings_are_put_back(monkeypatch):
    cudnn = torch.backends.cudnn
    before = (cudnn.benchmark, cudnn.benchmark_limit)
    with switched_on(monkeypatch):
        assert cudnn.benchmark is True
    assert (cudnn.benchmark, cudnn.benchmark_limit) == before


def test_how_many_engines_are_tried_is_set_while_it_is_on(monkeypatch):
    cudnn = torch.backends.cudnn
    found = cudnn.benchmark_limit  # None without CUDA
    cudnn.benchmark_limit = 7
    try:
        with switched_on(monkeypatch, limit=3):
            assert cudnn.benchmark_limit == 3
        assert cudnn.benchmark_limit == 7
    finally:
        cudnn.benchmark_limit = found


@pytest.mark.parametrize(
    ("cuda", "present", "enabled", "reason"),
    [
        (False, True, True, "there is no CUDA device"),
        (True, False, True, "this PyTorch has no cuDNN"),
        (True, True, False, "cuDNN is switched off in this process"),
        (True, True, True, ""),
    ],
)
def test_the_reason_why_it_has_no_effect(monkeypatch, cuda, present, enabled, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: present)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", enabled)
    assert why_not() == reason
    if reason:
        with pytest.warns(UserWarning, match=f"no effect: {reason}"):
            assert not benchmark_mode(True).report().active


def test_churning_shapes_are_warned_of_once(monkeypatch):
    layer = nn.Conv2d(1, 1, 1)
    with switched_on(monkeypatch) as mode:
        for size in range(1, CHURN):
            layer(torch.empty(1, 1, size, size))
        assert not mode.report().churns
        with pytest.warns(UserWarning, match=f"{CHURN} shapes in 1 convolution layers"):
            layer(torch.empty(1, 1, CHURN, CHURN))
        layer(torch.empty(1, 1, 99, 99))
    report = mode.report()
    assert (report.convolutions, report.shapes, report.layers) == (CHURN + 1, CHURN + 1, 1)
    assert report.churns


def test_the_same_shape_again_counts_once(monkeypatch):
    layer, x = nn.Conv2d(1, 1, 1), torch.empty(1, 1, 4, 4)
    with switched_on(monkeypatch) as mode:
        for _ in range(3):
            layer(x)
    assert (mode.report().convolutions, mode.report().shapes) == (3, 1)


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.`")
def test_compiled_layers_are_compiled_once(monkeypatch):
    layer, x, compiled = nn.Conv2d(1, 1, 1), torch.ones(1, 1, 4, 4), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    with switched_on(monkeypatch) as mode, torch.no_grad():
        called = torch.compile(layer, backend=backend, fullgraph=True)
        for _ in range(10):  # more often than anything is compiled anew
            torch.testing.assert_close(called(x), torch.conv2d(x, layer.weight, layer.bias))
    assert len(compiled) == 1
    assert mode.report().convolutions == 0


def test_a_tracer_with_symbols_for_sizes_passes_and_is_not_counted(monkeypatch):
    layer, x = nn.Conv2d(1, 1, 1), torch.ones(2, 1, 4, 4)
    with switched_on(monkeypatch) as mode:
        traced = make_fx(layer, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    torch.testing.assert_close(traced(x), layer(x))
    assert mode.report().convolutions == 0


@pytest.mark.parametrize("limit", [-1, 2.5, "10", None, True])
def test_a_limit_that_is_no_number_of_engines_is_refused_before_anything_is_switched(
    monkeypatch, limit
):
    cudnn, hooks = torch.backends.cudnn, nn.modules.module._global_forward_pre_hooks
    before = (cudnn.benchmark, cudnn.benchmark_limit, len(hooks))
    with pytest.raises(UsageError, match="or 0 for all"):
        switched_on(monkeypatch, limit=limit)
    assert (cudnn.benchmark, cudnn.benchmark_limit, len(hooks)) == before


def test_counting_stops_at_exit(monkeypatch):
    hooks = nn.modules.module._global_forward_pre_hooks
    before = dict(hooks)
    with switched_on(monkeypatch):
        assert len(hooks) == len(before) + 1
    assert dict(hooks) == before
