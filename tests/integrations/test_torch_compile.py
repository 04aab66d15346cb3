from __future__ import annotations

import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd

from steadytorch.errors import PlanError, UsageError
from steadytorch.integrations import torch_compile
from steadytorch.integrations.torch_compile import (
    ALIASES,
    FIRST,
    GRADIENTS,
    OTHER_WEIGHTS,
    SWITCHES,
    WRITES,
    reports,
    steady,
)
from steadytorch.plan.record import CompilerChoices
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune.session import Session

from ..tune.stored import evidence

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
GROUP = "torch_dynamo_backends"

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 15), reason="torch.compile does not support this Python"
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class Broken(Net):
    def forward(self, x):
        first = super().forward(x)
        torch._dynamo.graph_break()
        return first.flatten(1).sum(1)


@pytest.fixture(autouse=True)
def _apart():
    torch._dynamo.reset()
    torch_compile.GRAPHS.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model():
    return Net().eval()


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 8)


def compiled(model, store, **options):
    return torch.compile(model, backend=steady, options={"store": str(store), **options})


@pytest.fixture
def searches(monkeypatch):
    """Signatures that were searched; each search ends at once and chooses `searches.chosen`."""
    made = SimpleNamespace(signatures=[], chosen=(TransformSpec("channels_last"),))

    def search(self, watcher=None):
        made.signatures.append(str(self.workload.signature()))
        return SimpleNamespace(
            interrupted=False, chosen=made.chosen, evidence=evidence, compiler=CompilerChoices()
        )

    monkeypatch.setattr(Session, "search", search)
    return made


def calls():
    return [report.calls for report in reports()]


def test_pytorch_finds_the_backend_by_its_entry_point(model, x, tmp_path, monkeypatch):
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"][GROUP]
    assert list(declared) == ["steady"]
    registry._lazy_import()
    monkeypatch.setitem(
        registry._BACKENDS, "steady", EntryPoint("steady", declared["steady"], GROUP)
    )
    monkeypatch.setattr(registry, "_COMPILER_FNS", {**registry._COMPILER_FNS})
    registry._COMPILER_FNS.pop("steady", None)
    fast = torch.compile(model, backend="steady", options={"store": str(tmp_path)})
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert calls() == [{f"untouched: {FIRST}": 1}]


def test_a_plan_is_searched_once_and_then_serves_its_graph(model, x, tmp_path, searches):
    for mode in ("tune", "replay", "strict"):
        torch._dynamo.reset()
        torch_compile.GRAPHS.clear()
        fast = compiled(model, tmp_path, mode=mode, canary=False)
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(fast(x), model(x))
        assert calls() == [{"tuned": 2, f"untouched: {FIRST}": 1}]
        assert "channels_last" in str(reports()[0])
    assert len(searches.signatures) == 1


def test_without_a_plan_each_graph_runs_as_captured(x, tmp_path):
    model = Broken().eval()
    fast = compiled(model, tmp_path)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(fast(x), model(x))
    assert len(calls()) == 2  # a graph break makes two
    assert all(sum(each.values()) == 3 and "tuned" not in each for each in calls())


def test_dynamic_shapes_have_a_plan_per_shape(model, tmp_path, searches):
    options = {"store": str(tmp_path), "mode": "tune", "canary": False}
    fast = torch.compile(model, backend=steady, dynamic=True, options=options)
    with torch.no_grad():
        for size in (2, 3, 2, 3, 2):
            given = torch.randn(size, 3, 8, 8)
            torch.testing.assert_close(fast(given), model(given))
    assert calls() == [{"tuned": 4, f"untouched: {FIRST}": 1}]
    assert len(set(searches.signatures)) == len(searches.signatures) == 2


def test_training_runs_as_captured_with_equal_gradients(model, x, tmp_path, searches):
    fast = compiled(model.train(), tmp_path, mode="tune")
    plain = Net()
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        fast(x).sum().backward()
        plain(x).sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert torch.equal(model.norm.running_mean, plain.norm.running_mean)
    assert calls() == [{f"untouched: {GRADIENTS}": 2}]
    assert not searches.signatures


def test_batch_statistics_are_updated_as_captured(model, x, tmp_path):
    fast = compiled(model.train(), tmp_path)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
    assert model.norm.num_batches_tracked == 3
    assert calls() == [{f"untouched: {FIRST}": 1, f"untouched: {WRITES}": 2}]


def test_views_of_inputs_stay_views(tmp_path):
    fast = compiled(lambda x: x.view(-1), tmp_path)
    for _ in range(2):
        given = torch.zeros(2, 2)
        fast(given).add_(1)
        assert given.sum() == 4
    assert calls() == [{f"untouched: {FIRST}": 1, f"untouched: {ALIASES}": 1}]


def test_autocast_within_a_graph_stays(model, x, tmp_path, searches):
    def half(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    fast = compiled(half, tmp_path, mode="tune")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(fast(x), half(x))
    assert calls() == [{f"untouched: {SWITCHES}": 2}]
    assert not searches.signatures


def test_another_model_of_the_same_code_keeps_its_own_weights(x, tmp_path, searches):
    layers = [Net().eval() for _ in range(2)]
    layers[1].conv.weight.data.mul_(2)

    def run(layer, x):
        return layer(x)

    fast = compiled(run, tmp_path, mode="tune", canary=False)
    with torch.no_grad():
        for layer in [*layers, *layers]:
            torch.testing.assert_close(fast(layer, x), layer(x))
    assert calls() == [{"tuned": 1, f"untouched: {FIRST}": 1, f"untouched: {OTHER_WEIGHTS}": 2}]


def test_graphs_of_aot_autograd_give_the_same_gradients(model, x, tmp_path):
    def boxed(graph, given):
        return make_boxed_func(steady(graph, given, options={"store": str(tmp_path)}))

    fast = torch.compile(model, backend=aot_autograd(fw_compiler=boxed))
    fast(x).sum().backward()
    mine = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(mine, [each.grad for each in model.parameters()])


def test_changed_weights_are_seen(model, x, tmp_path, searches):
    fast = compiled(model, tmp_path, mode="tune", canary=False)
    with torch.no_grad():
        for _ in range(3):
            model.conv.weight.mul_(1.5)
            torch.testing.assert_close(fast(x), model(x))


def test_a_fault_of_the_search_leaves_the_graph_as_captured(model, x, tmp_path, monkeypatch):
    monkeypatch.setattr(Session, "search", lambda self, watcher: 1 / 0)
    fast = compiled(model, tmp_path, mode="tune", budget="5s")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(fast(x), model(x))
    assert "the search for its plan failed; ZeroDivisionError" in str(reports()[0])


def test_a_graph_that_cannot_be_prepared_runs_as_captured(model, x, monkeypatch, caplog):
    monkeypatch.setattr(torch_compile, "optimize", lambda *args, **options: 1 / 0)
    fast = torch.compile(model, backend=steady)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert "running a graph as captured: ZeroDivisionError: division by zero" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [({"buckets": "8"}, "unknown option 'buckets'"), ({"mode": "fast"}, "unknown mode 'fast'")],
)
def test_wrong_options_are_refused_at_the_first_call(model, x, options, said):
    with pytest.raises(Exception, match=said) as raised:
        torch.compile(model, backend=steady, options=options)(x)
    assert isinstance(raised.value.__cause__ or raised.value.inner_exception, UsageError)


def test_mode_strict_raises_without_a_plan(model, x, tmp_path):
    fast = compiled(model, tmp_path, mode="strict")
    with torch.no_grad():
        fast(x)
        with pytest.raises(PlanError, match="no stored plan"):
            fast(x)


@pytest.mark.slow
def test_mode_tune_searches_and_another_compilation_replays(model, tmp_path):
    x = torch.randn(2, 3, 32, 32)
    fast = compiled(model, tmp_path, mode="tune", budget="20s")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))
    assert list(tmp_path.rglob("*.json"))
    torch._dynamo.reset()
    fast = compiled(model, tmp_path, mode="strict")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))
