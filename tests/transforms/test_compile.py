from __future__ import annotations

import functools
import gc
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._inductor import config

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError
from steadytorch.transforms import compile as compiling
from steadytorch.transforms.base import Applicable
from steadytorch.transforms.channels_last import ChannelsLast
from steadytorch.transforms.compile import Compile, inductor_options
from steadytorch.workload.workload import Workload

MODES = ("default", "coordinate-descent")
_GLOBAL: dict[str, nn.Module] = {}

compiles = pytest.mark.filterwarnings("ignore")


def variant(mode: str = "default", freezing: bool = False) -> Compile:
    return Compile(Compile.Parameters(mode, freezing))


def linear() -> Workload:
    torch.manual_seed(0)
    return Workload(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4))


@pytest.fixture
def frozen_graphs(monkeypatch):
    """The indices of the inputs that each freezing pass left to be given at run time."""
    from torch._inductor import freezing

    kept = []

    def freeze(*args, original=freezing.freeze, **kwargs):
        graph, preserved = original(*args, **kwargs)
        kept.append(preserved)
        return graph, preserved

    monkeypatch.setattr(freezing, "freeze", freeze)
    return kept


class TestCompiling:
    pytestmark = compiles

    def test_freezing_makes_constants_of_all_weights(self, frozen_graphs):
        made = linear()
        with variant(freezing=True).applied(made) as compiled:
            compiled.model(*made.inputs)
        assert [len(kept) for kept in frozen_graphs] == [1]

    def test_checks_of_values_are_not_left_out(self):
        class Asserts(nn.Linear):
            def forward(self, x):
                torch._assert_async((x >= 0).all())
                return super().forward(x)

        made = Workload(Asserts(4, 4).eval(), torch.rand(2, 4))
        with (
            variant().applied(made) as compiled,
            pytest.raises(Exception, match="would not check the values"),
        ):
            compiled.model(made.inputs[0])

    def test_an_output_folded_to_a_constant_is_the_callers_own(self):
        class Scaled(nn.Linear):
            def forward(self, x):
                return super().forward(x), self.weight * 2

        made = Workload(Scaled(4, 4).eval(), torch.randn(2, 4))
        with variant(freezing=True).applied(made) as compiled:
            for _ in range(3):
                compiled.model(made.inputs[0])[1].fill_(7)
            right = made.model(made.inputs[0])
            torch.testing.assert_close(compiled.model(made.inputs[0]), right)

    @pytest.mark.slow
    def test_freezing_holds_for_a_second_layout_too(self, frozen_graphs):
        made = linear()
        with variant(freezing=True).applied(made) as compiled:
            compiled.model(*made.inputs)
            transposed = made.inputs[0].t().contiguous().t()
            torch.testing.assert_close(compiled.model(transposed), made.model(transposed))
        assert [len(kept) for kept in frozen_graphs] == [1, 1]

    @pytest.mark.slow
    def test_attributes_of_the_models_own_modules_are_seen_and_frozen_again(self, frozen_graphs):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.factor = nn.Linear(4, 4), 2.0

            def forward(self, x):
                return self.factor * self.layer(x)

        made = Workload(Scaled().eval(), torch.randn(2, 4))
        with variant(freezing=True).applied(made) as compiled:
            for factor in (2.0, 3.0):
                made.model.factor = factor
                expected = made.model(*made.inputs)
                torch.testing.assert_close(compiled.model(*made.inputs), expected)
        assert [len(kept) for kept in frozen_graphs] == [1, 1]

    @pytest.mark.slow
    def test_frozen_calls_look_at_no_module_of_pytorchs(self, monkeypatch):
        kept = []

        def spy(guards, original=compiling.guards_to_keep):
            found = original(guards)
            kept.append([g.name for g, keep in zip(guards, found, strict=True) if keep])
            return found

        monkeypatch.setattr(compiling, "guards_to_keep", spy)
        made = linear()
        for freezing in (True, False):
            with variant(freezing=freezing).applied(made) as compiled:
                compiled.model(*made.inputs)
        (names,) = kept
        assert "args[0]" in names
        assert not [name for name in names if "_modules['0']" in name]

    @pytest.mark.slow
    def test_modules_of_one_class_keep_their_weights_where_the_graph_breaks(self):
        """A graph break: Dynamo compiles each submodule separately, from the same code."""

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x):
                x = self.layer(x)
                torch._dynamo.graph_break()
                return x + 1

        made = Workload(nn.Sequential(Block(), Block()).eval(), torch.randn(2, 4))
        with variant(freezing=True).applied(made) as compiled:
            for _ in range(2):
                expected = made.model(*made.inputs)
                torch.testing.assert_close(compiled.model(*made.inputs), expected)

    @pytest.mark.slow
    def test_what_the_model_sets_on_a_module_of_pytorchs_is_seen_behind_a_graph_break(self):
        class Sloped(nn.Module):
            def __init__(self):
                super().__init__()
                self.activation = nn.LeakyReLU(0.5)

            def forward(self, x):
                self.activation.negative_slope = 0.5 if x.sum() < 0 else 0.1
                torch._dynamo.graph_break()
                return self.activation(x)

        made = Workload(Sloped().eval(), torch.tensor([-2.0, 1.0]))
        with variant(freezing=True).applied(made) as compiled:
            for x in (torch.tensor([-2.0, 1.0]), torch.tensor([-2.0, 3.0])):
                torch.testing.assert_close(compiled.model(x), made.model(x))

    @pytest.mark.parametrize("kept", ["in a list", "by the class", "globally"])
    @pytest.mark.slow
    def test_modules_that_the_model_does_not_register_are_frozen_again(self, kept):
        class Listing(nn.Module):
            others: ClassVar = {}

            def __init__(self):
                super().__init__()
                self.listed = [nn.Linear(4, 4)]

            def forward(self, x):
                if kept == "in a list":
                    return self.listed[0](x)
                return (self.others["one"] if kept == "by the class" else _GLOBAL["one"])(x)

        made = Workload(Listing().eval(), torch.randn(2, 4))
        with variant(freezing=True).applied(made) as compiled:
            for _ in range(2):
                made.model.listed[0] = Listing.others["one"] = _GLOBAL["one"] = nn.Linear(4, 4)
                torch.testing.assert_close(compiled.model(*made.inputs), made.model(*made.inputs))

    def test_freezing_leaves_the_process_wide_switch_off(self):
        from torch._inductor import config

        made = linear()
        with variant(freezing=True).applied(made) as compiled:
            compiled.model(*made.inputs)
            assert not config.freezing

    def test_labels_of_guards_show_no_values_while_it_compiles(self, monkeypatch):
        from torch._dynamo import guards

        monkeypatch.delattr(guards, "_safe_type_repr", raising=False)  # as before PyTorch 2.13
        with compiling.weights_by_type():
            assert guards.repr(torch.ones(2)) == "<Tensor>"
            assert guards.repr(nn.Parameter(torch.ones(2))) == "<Parameter>"
            assert guards.repr("text") == "'text'"
        assert not hasattr(guards, "repr")

    def test_freezing_keeps_the_original_parameters(self):
        made = linear()
        expected = made.model(*made.inputs)
        with variant(freezing=True).applied(made) as compiled:
            compiled.model(*made.inputs)
        assert torch.equal(made.model(*made.inputs), expected)

    def test_leaving_drops_what_was_compiled_and_nobody_elses(self):
        mine = torch.compile(nn.Linear(2, 2).eval(), backend="eager")
        mine(torch.ones(1, 2))
        made = linear()
        weights = weakref.ref(made.model)
        with variant().applied(made) as compiled:
            compiled.model(*made.inputs)
        del made, compiled
        gc.collect()
        assert weights() is None
        with torch.compiler.set_stance("fail_on_recompile"):
            mine(torch.ones(1, 2))

    def test_the_callers_module_is_not_marked_as_compiled(self):
        made = linear()
        with variant().applied(made) as compiled:
            compiled.model(*made.inputs)
            assert made.model._compiled_call_impl is None

    def test_gradients_flow_without_freezing(self):
        made = linear()
        with variant().applied(made) as compiled:
            compiled.model(*made.inputs).sum().backward()
        assert made.model[0].weight.grad is not None

    def test_an_error_of_the_model_reaches_the_caller(self):
        def fails(x):
            raise ZeroDivisionError("seen")

        made = Workload(fails, torch.ones(1))
        with (
            variant().applied(made) as compiled,
            pytest.raises(ZeroDivisionError, match="seen"),
        ):
            compiled.model(torch.ones(1))


@pytest.mark.parametrize("mode", ["coordinate-descent", "reduce-overhead"])
def test_what_is_for_gpus_needs_one(cpu, gpu, conv_workload, mode):
    answer = variant(mode).applies_to(conv_workload, cpu)
    assert answer.reason == f"{mode} needs a CUDA device"
    assert variant(mode).applies_to(conv_workload, gpu) == Applicable()


def test_coordinate_descent_is_the_default_and_that():
    plain, descent = (inductor_options(variant(mode, True).parameters) for mode in MODES)
    assert descent == {**plain, "coordinate_descent_tuning": True}
    assert config.coordinate_descent_tuning is False


def test_combo_kernels_are_those_of_inductor():
    plain, combined = (Compile.Parameters(combo_kernels=each) for each in (False, True))
    added = inductor_options(combined).items() - inductor_options(plain).items()
    assert dict(added) == {"combo_kernels": True, "combo_kernel_per_subkernel_blocks": True}
    assert all(hasattr(config, name) for name, _ in added)


def test_combo_kernels_need_a_gpu_and_constants_where_weights_can_be(cpu, gpu, conv_workload):
    def answer(facts, workload=conv_workload, **parameters):
        parameters = Compile.Parameters(combo_kernels=True, **parameters)
        return Compile(parameters).applies_to(workload, facts)

    assert answer(cpu, freezing=True).reason == "combo kernels need a CUDA device"
    assert answer(gpu, freezing=True) == Applicable()
    assert answer(gpu).reason == "skipped, the freezing variant covers it"
    conv_workload.model.train()
    assert answer(gpu) == Applicable()


def test_reduce_overhead_is_not_for_hooked_models(gpu, conv_workload):
    assert variant("reduce-overhead").applies_to(conv_workload, gpu) == Applicable()
    conv_workload.model.register_forward_hook(lambda *given: None)
    assert "hooks" in variant("reduce-overhead").applies_to(conv_workload, gpu).reason
    assert variant().applies_to(conv_workload, gpu) == Applicable()


def test_a_gpu_needs_triton(conv_workload):
    answer = variant().applies_to(conv_workload, DeviceFacts(device="cuda"))
    assert answer.reason == "needs Triton, which is not installed"


def test_a_cpu_needs_a_cpp_compiler(cpu, conv_workload, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    answer = variant().applies_to(conv_workload, cpu)
    assert answer.reason == "no C++ compiler found: no-such-compiler is not on PATH"


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_frozen_weights_are_for_inference(gpu, conv_workload, mode):
    training = Workload.training(
        conv_workload.model, conv_workload.inputs, torch.sum, torch.optim.SGD
    )
    assert variant(mode, True).applies_to(conv_workload, gpu) == Applicable()
    assert (
        variant(mode, True).applies_to(training, gpu).reason == "freezing supports inference only"
    )
    assert variant(mode).applies_to(training, gpu) == Applicable()


def test_autotuning_without_freezing_is_for_what_cannot_be_frozen(gpu, conv_workload):
    answer = variant("max-autotune").applies_to(conv_workload, gpu)
    assert answer.reason == "skipped, the freezing variant covers it"
    assert variant("max-autotune").applies_to(Workload(torch.relu, torch.ones(1)), gpu) == (
        Applicable()
    )
    conv_workload.model.train()
    assert variant("max-autotune").applies_to(conv_workload, gpu) == Applicable()


def test_a_module_in_training_mode_cannot_be_frozen(gpu, conv_workload):
    conv_workload.model.train()
    answer = variant(freezing=True).applies_to(conv_workload, gpu)
    assert answer.reason == "freezing needs a model in evaluation mode"


def test_a_plain_callable_can_be_compiled_but_not_frozen(gpu):
    made = Workload(torch.relu, torch.ones(1))
    assert variant().applies_to(made, gpu) == Applicable()
    assert "plain callable" in variant(freezing=True).applies_to(made, gpu).reason


# -- functions of the caller's in the model -------------------------------------------------------


def _closure():
    rate = [1.0]
    return lambda *given: given[-1] * rate[0]


class Callable:
    def __call__(self, *given):
        return None


STEERED = {
    "hook": lambda m: m.register_forward_hook(lambda *given: None),
    "pre-hook": lambda m: m.register_forward_pre_hook(lambda *given: None),
    "hook on a layer": lambda m: next(m.children()).register_forward_hook(_closure()),
    "patched forward": lambda m: setattr(next(m.children()), "forward", _closure()),
    "method": lambda m: setattr(m, "activation", Callable().__call__),
    "callable object": lambda m: setattr(m, "activation", Callable()),
    "partial": lambda m: setattr(
        m, "activation", functools.partial(torch.add, other=torch.ones(1))
    ),
    "default": lambda m: setattr(m, "activation", eval("lambda x, rates=[1]: x")),
}
FIXED = {
    "function": lambda m: setattr(m, "activation", torch.nn.functional.relu),
    "built-in": lambda m: setattr(m, "activation", torch.relu),
    "class": lambda m: setattr(m, "norm_layer", torch.nn.BatchNorm2d),
    "partial of a class": lambda m: setattr(
        m, "norm_layer", functools.partial(torch.nn.LayerNorm, eps=1e-6)
    ),
    "default": lambda m: setattr(m, "activation", eval("lambda x, rate=1: x")),
}


@pytest.mark.parametrize("name", STEERED)
def test_what_users_functions_know_is_not_frozen(cpu, conv_workload, name):
    STEERED[name](conv_workload.model)
    freezing, plain = variant("default", freezing=True), variant("default", freezing=False)
    assert "calls user functions" in freezing.applies_to(conv_workload, cpu).reason
    assert isinstance(plain.applies_to(conv_workload, cpu), Applicable)
    with (
        pytest.raises(UnsupportedError, match="calls user functions"),
        freezing.applied(conv_workload),
    ):
        pass


@pytest.mark.parametrize("name", FIXED)
def test_functions_without_a_state_may_be_frozen(cpu, conv_workload, name):
    FIXED[name](conv_workload.model)
    found = variant("default", freezing=True).applies_to(conv_workload, cpu)
    assert isinstance(found, Applicable)


class Featured(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, pair, kept):
        kept["features"] = self.conv(pair[0]) + self.conv(pair[1])
        return kept["features"].mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_containers_that_are_new_at_each_call_are_compiled_for_once():
    from torch._dynamo.utils import counters

    model = Featured().eval()
    made = Workload(model, ([torch.randn(1, 3, 8, 8)] * 2, {}))
    counters.clear()
    with ChannelsLast().applied(made) as last, Compile().applied(last) as compiled, torch.no_grad():
        for _ in range(4):
            pair, kept = [torch.randn(1, 3, 8, 8) for _ in range(2)], {}
            found, expected = compiled.model(pair, kept), model(pair, {})
            torch.testing.assert_close(found, expected)
            assert kept["features"].is_contiguous()
    assert counters["stats"]["unique_graphs"] == 1
