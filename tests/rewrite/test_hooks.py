from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from steadytorch.errors import UnsupportedError
from steadytorch.runtime import benchmark_mode as switch
from steadytorch.transforms.base import NotApplicable
from steadytorch.transforms.compile import Compile
from steadytorch.transforms.cuda_graph import CudaGraph
from steadytorch.transforms.cudnn_engines import CudnnEngines
from steadytorch.transforms.fold_batch_norm import FoldBatchNorm, foldable_pairs
from steadytorch.transforms.fused_kernels import FusedKernels
from steadytorch.workload.hooks import hooks_on_all, is_hooked
from steadytorch.workload.workload import Workload

ON_ALL = [register_module_forward_hook, register_module_forward_pre_hook]


def see_nothing(*given):
    """A hook that only observes."""


class Net(nn.Module):
    """Layers that can be fused, the first two in a block of their own."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)

    def forward(self, x):
        return self.pool(self.relu(self.block(x)))


@pytest.fixture
def made():
    return Workload(Net().eval(), torch.randn(2, 3, 9, 9))


@pytest.fixture(params=ON_ALL)
def hooked(request):
    """Registers a global hook for the duration of a test."""
    handle = request.param(see_nothing)
    yield
    handle.remove()


@pytest.mark.parametrize("register", ON_ALL)
def test_a_hook_on_all_modules_is_seen_and_seen_to_go(register):
    layer = nn.Linear(2, 2)
    assert (hooks_on_all(), is_hooked(layer)) == ((), False)
    handle = register(see_nothing)
    assert (hooks_on_all(), is_hooked(layer)) == ((see_nothing,), True)
    handle.remove()
    assert (hooks_on_all(), is_hooked(layer)) == ((), False)


@pytest.mark.filterwarnings("ignore:benchmark mode comes late")
def test_what_benchmark_mode_counts_by_is_no_hook_of_the_users(monkeypatch):
    monkeypatch.setattr(switch, "why_not", lambda: "")
    hooks = nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    with switch.benchmark_mode(True):
        assert len(hooks) == before + 1
        assert hooks_on_all() == ()
        handle = register_module_forward_hook(see_nothing)
        assert hooks_on_all() == (see_nothing,)
        handle.remove()


def refused(made, facts):
    """Names of the transforms that refuse models with hooks."""
    transforms = (
        *(CudaGraph(), CudnnEngines(), FusedKernels(), FoldBatchNorm()),
        Compile(Compile.Parameters("reduce-overhead", True)),
    )
    found = {each.name: each.applies_to(made, facts) for each in transforms}
    return {
        name
        for name, answer in found.items()
        if isinstance(answer, NotApplicable) and "hooks" in answer.reason
    }


REPLAYED = {"cuda_graph", "compile"}
TRACED = {"cudnn_engines", "fused_kernels"}


@pytest.fixture
def facts(gpu, monkeypatch):
    monkeypatch.setattr("steadytorch.transforms.cudnn_engines.find_spec", lambda name: name)
    return gpu


def test_without_hooks_none_is_refused_for_them(made, facts):
    assert refused(made, facts) == set()


@pytest.mark.usefixtures("hooked")
def test_what_would_skip_a_hook_on_all_modules_is_refused(made, facts):
    assert refused(made, facts) == REPLAYED | TRACED | {"fold_batch_norm"}


@pytest.mark.usefixtures("hooked")
def test_with_a_hook_on_all_modules_no_norm_is_folded():
    flat = Workload(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), torch.ones(1))
    assert foldable_pairs(flat) == []


@pytest.mark.parametrize("where", ["", "block"])
def test_hooks_that_a_graph_would_not_call_are_refused_and_not_called(made, facts, where):
    seen = []
    made.model.get_submodule(where).register_forward_hook(lambda *given: seen.append(given))
    assert refused(made, facts) >= REPLAYED | TRACED
    assert seen == []


@pytest.mark.parametrize("transform", [CudnnEngines, FusedKernels])
@pytest.mark.parametrize("where", ["", "block", "all"])
def test_those_that_came_after_the_plan_was_made_are_refused_too(made, transform, where):
    register = (
        register_module_forward_hook
        if where == "all"
        else made.model.get_submodule(where).register_forward_hook
    )
    handle = register(see_nothing)
    with pytest.raises(UnsupportedError, match="hooks"), transform().applied(made):
        pass
    handle.remove()
    with transform().applied(made):
        pass
