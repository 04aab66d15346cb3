from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.conv.module import engine_convolutions
from steadytorch.errors import UsageError
from steadytorch.kernels.conv_relu_max_pool import _eager
from steadytorch.kernels.relu_max_pool import relu_max_pool2d
from steadytorch.kernels.stem import CONFIGS
from steadytorch.transforms import create
from steadytorch.transforms.base import (
    Applicable,
    NotApplicable,
    TransformSpec,
    applied_in_order,
)
from steadytorch.transforms.cast_weights import CastWeights
from steadytorch.transforms.channels_last import ChannelsLast
from steadytorch.transforms.cudnn_engines import rewritten_model
from steadytorch.transforms.fold_batch_norm import FoldBatchNorm
from steadytorch.transforms.fused_kernels import FusedKernels
from steadytorch.transforms.fusible import Layers
from steadytorch.transforms.tracing import traced
from steadytorch.workload.workload import Workload

FUSED = "relu_max_pool2d"


class Net(nn.Module):
    """Layers to choose from; `forward` is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu, self.relu_, self.pool = nn.ReLU(), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.same = nn.Identity()
        self.run = forward

    def forward(self, x: torch.Tensor, scale: float | None = None) -> Any:
        return self.run(self, x) if scale is None else self.run(self, x) * scale


def workload(forward: Any = lambda net, x: net.pool(net.relu(net.conv(x)))) -> Workload:
    torch.manual_seed(0)
    return Workload(Net(forward).eval(), torch.randn(2, 3, 9, 9))


def fused_calls(model: Any) -> int:
    return sum(node.name.startswith(FUSED) for node in model.graph.nodes)


FUSIBLE = {
    "layers": lambda net, x: net.pool(net.relu(net.conv(x))),
    "in place, of a convolution": lambda net, x: net.pool(net.relu_(net.conv(x))),
    "in place, of a sum": lambda net, x: net.pool(net.relu_(net.conv(x) + 1)),
    "in place, through an identity": lambda net, x: net.pool(net.relu_(net.same(net.conv(x)))),
    "functions": lambda net, x: F.max_pool2d(F.relu(net.conv(x)), 3, 2, 1),
    "functions by name": lambda net, x: F.max_pool2d(
        torch.relu(x), kernel_size=(3, 2), padding=(1, 0), ceil_mode=True, dilation=2
    ),
    "in place, a function": lambda net, x: F.max_pool2d(F.relu(net.norm(net.conv(x)), True), 2),
    "torch's own": lambda net, x: torch.max_pool2d(net.conv(x).relu(), 2),
    "method in place": lambda net, x: net.pool(net.conv(x).relu_()),
    "of the input": lambda net, x: net.pool(net.relu(x)),
    "source read by others": lambda net, x: net.pool(net.relu(y := net.conv(x))).sum() + y,
    "twice": lambda net, x: (
        net.pool(net.relu(net.conv(x))).sum() + net.pool(net.relu(net.norm(net.conv(x))))
    ),
}
NOT_FUSIBLE = {
    "the ReLU is read twice": lambda net, x: net.pool(y := net.relu(x)).sum() + y,
    "pooling first": lambda net, x: net.relu(net.pool(x)),
    "not neighbours": lambda net, x: net.pool(net.relu(x) + 1),
    "indices asked for": lambda net, x: F.max_pool2d(F.relu(x), 2, return_indices=True)[0],
    "another pooling": lambda net, x: F.avg_pool2d(F.relu(x), 2),
    "another activation": lambda net, x: net.pool(F.gelu(x)),
    "written into the input": lambda net, x: net.pool(net.relu_(x)),
    "written into a view": lambda net, x: net.pool(net.relu_(net.conv(x).flip(1).mT)),
    "written into what others read": lambda net, x: net.pool(net.relu_(y := net.conv(x))).sum() + y,
    "written through an identity": lambda net, x: (
        net.pool(net.relu_(net.same(y := net.conv(x)))).sum() + y
    ),
    "the window depends on the input": lambda net, x: F.max_pool2d(F.relu(x), x.shape[0]),
}


@pytest.mark.parametrize("forward", FUSIBLE.values(), ids=FUSIBLE)
def test_a_pair_becomes_one_operator_with_the_same_values(forward):
    made = workload(forward)
    expected = made.model(made.inputs[0].clone())
    with FusedKernels().applied(made) as fused:
        assert fused_calls(fused.model) >= 1
        assert torch.equal(fused.model(*made.inputs), expected)


@pytest.mark.parametrize("forward", NOT_FUSIBLE.values(), ids=NOT_FUSIBLE)
def test_what_would_change_results_is_left_alone(forward):
    made = workload(forward)
    assert list(Layers(*traced(made)).pooled()) == []
    with FusedKernels().applied(made) as fused:
        assert fused_calls(fused.model) == 0


STEM, SUMS = FusedKernels.Parameters(stem=True), FusedKernels.Parameters(residual=True)


class Residual(nn.Module):
    """A stem and two residual blocks, batch norms and all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        for norm in (self.bn1, self.bn2, self.bn3):
            nn.init.uniform_(norm.running_mean, -1, 1)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        out = self.bn2(self.conv2(x))
        out += x
        out = self.relu(out)
        return self.relu(self.bn3(self.conv3(out)) + out)


def residual() -> Workload:
    torch.manual_seed(0)
    return Workload(Residual().eval(), torch.randn(2, 3, 33, 40))


def functions(model: Any) -> list[str]:
    return [node.target.__name__ for node in model.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("folded", [False, True], ids=["as it is", "folded before"])
def test_a_stem_becomes_one_operator_with_its_batch_norm_folded(folded):
    made = residual()
    stack = [FoldBatchNorm()] if folded else []
    with applied_in_order([*stack, FusedKernels(STEM)], made) as fused:
        assert functions(fused.model)[0] == "conv_relu_max_pool2d"
        assert "relu_max_pool2d" not in functions(fused.model)
        torch.testing.assert_close(fused.model(*made.inputs), made.model(*made.inputs))
    assert made.model.bn1.running_mean is not None  # the model itself is as it was


def test_other_batch_norms_stay_where_only_the_stems_is_folded():
    with FusedKernels(STEM).applied(residual()) as fused:
        left = {type(module) for module in fused.model.modules()}
        assert nn.BatchNorm2d in left
        assert nn.MaxPool2d not in left


def test_pairs_that_are_no_stems_are_fused_as_ever():
    made = workload(lambda net, x: net.pool(net.relu(net.norm(net.conv(x)))))
    with FusedKernels(STEM).applied(made) as fused:  # a window of 2x2
        assert functions(fused.model)[-1] == "relu_max_pool2d"
        assert "conv_relu_max_pool2d" not in functions(fused.model)


def test_the_configuration_goes_to_the_operator():
    (name, *_) = CONFIGS
    with FusedKernels(FusedKernels.Parameters(True, False, name)).applied(residual()) as fused:
        (node,) = [n for n in fused.model.graph.nodes if n.name.startswith("conv_relu_max_pool2d")]
        assert node.args[-1] == name


@pytest.mark.parametrize("folded", [False, True], ids=["as it is", "folded before"])
def test_sums_and_the_bias_before_them_become_one_operator(folded):
    made = residual()
    stack = [FoldBatchNorm()] if folded else []
    with applied_in_order([*stack, FusedKernels(SUMS)], made) as fused:
        sums = [n for n in fused.model.graph.nodes if n.name.startswith("bias_add_relu")]
        assert len(sums) == 2
        assert [n.args[2] is not None for n in sums] == [folded, folded]
        assert fused.model.conv2.bias is fused.model.conv3.bias is None
        torch.testing.assert_close(fused.model(*made.inputs), made.model(*made.inputs))


def test_a_bias_that_moved_is_converted_with_the_rest():
    made = residual()
    stack = [FoldBatchNorm(), FusedKernels(SUMS), CastWeights(CastWeights.Parameters("bf16"))]
    with applied_in_order([*stack, ChannelsLast()], made) as fused:
        found = fused.model(*made.inputs)
    torch.testing.assert_close(found, made.model(*made.inputs), rtol=0.1, atol=0.1)


def test_what_engines_of_cudnn_take_is_what_a_fused_stem_leaves():
    made = residual()
    stack = [FoldBatchNorm(), FusedKernels(STEM), CastWeights(CastWeights.Parameters("bf16"))]
    with applied_in_order([*stack, ChannelsLast()], made) as before:
        fused = rewritten_model(before)
        layers = [convolution.label for convolution in engine_convolutions(fused)]
        assert layers == ["conv2", "conv3"]
        found = fused(*before.inputs)
    torch.testing.assert_close(found, made.model(*made.inputs), rtol=0.1, atol=0.1)


def test_every_pair_is_fused():
    with FusedKernels().applied(workload(FUSIBLE["twice"])) as fused:
        assert fused_calls(fused.model) == 2
        assert {"relu", "pool"}.isdisjoint(n.target for n in fused.model.graph.nodes)


@pytest.mark.parametrize("layer", ["relu", "pool"])
def test_hooked_layers_are_left_alone(layer):
    made = workload()
    getattr(made.model, layer).register_forward_hook(lambda module, args, output: output * 2)
    assert list(Layers(*traced(made)).pooled()) == []


def test_a_hook_that_would_see_a_value_before_it_is_overwritten_keeps_the_relu():
    made = workload(FUSIBLE["in place, of a convolution"])
    made.model.conv.register_forward_hook(lambda module, args, output: None)
    assert list(Layers(*traced(made)).pooled()) == []


def test_layers_of_the_users_own_are_looked_into():
    class Own(nn.MaxPool2d):
        def forward(self, input):
            return super().forward(input) * 2

    made = workload()
    made.model.pool = Own(2)
    expected = made.model(*made.inputs)
    with FusedKernels().applied(made) as fused:
        assert fused_calls(fused.model) == 1
        assert torch.equal(fused.model(*made.inputs), expected)


def test_it_sees_through_a_folded_batch_norm():
    made = workload(lambda net, x: net.pool(net.relu_(net.norm(net.conv(x)))))
    expected = made.model(*made.inputs)
    with applied_in_order([FoldBatchNorm(), FusedKernels()], made) as fused:
        assert fused_calls(fused.model) == 1
        torch.testing.assert_close(fused.model(*made.inputs), expected)


def test_its_graph_can_be_traced_again():
    with FusedKernels().applied(workload()) as fused:
        _, graph = traced(fused)
        assert relu_max_pool2d in [node.target for node in graph.nodes]


def test_weights_are_shared_and_keep_their_names():
    made = workload()
    with FusedKernels().applied(made) as fused:
        assert fused.model.conv.weight is made.model.conv.weight
        made.model.conv.weight.data.zero_()
        assert torch.equal(fused.model(*made.inputs), made.model(*made.inputs))


def test_arguments_are_taken_as_the_model_takes_them():
    made = workload()
    (x,) = made.inputs
    with FusedKernels().applied(made) as fused:
        assert torch.equal(fused.model(x=x), made.model(x))


def test_it_applies_on_a_gpu(gpu):
    assert FusedKernels().applies_to(workload(), gpu) == Applicable()


def test_every_variant_applies_where_there_is_something_for_it(gpu):
    for parameters in FusedKernels.variants(gpu):
        assert FusedKernels(parameters).applies_to(residual(), gpu) == Applicable()


def test_variants_that_would_find_nothing_do_not_apply(gpu):
    assert "no convolution of few channels" in refusal(workload(), gpu, STEM)
    assert "no ReLU of the sum" in refusal(workload(), gpu, SUMS)
    both = FusedKernels.Parameters(stem=True, residual=True)
    stem = workload(lambda net, x: F.max_pool2d(net.relu(net.conv(x)), 3, 2))
    assert FusedKernels(STEM).applies_to(stem, gpu) == Applicable()
    assert "no ReLU of the sum" in refusal(stem, gpu, both)


def test_a_spec_says_what_is_fused():
    assert str(FusedKernels().spec) == "fused_kernels"
    assert str(FusedKernels(STEM).spec) == "fused_kernels(stem)"
    (name, *_) = CONFIGS
    chosen = FusedKernels(FusedKernels.Parameters(stem=True, config=name))
    assert str(chosen.spec) == f"fused_kernels(stem, {name})"
    assert create(chosen.spec).parameters == chosen.parameters


def test_a_stored_configuration_is_replayed_and_none_is_timed(monkeypatch):
    name = list(CONFIGS)[-1]
    stored = msgspec.json.encode(FusedKernels(FusedKernels.Parameters(True, False, name)).spec)
    spec = msgspec.json.decode(stored, type=TransformSpec)

    def timed(*given, **named):
        raise AssertionError("a replay takes no time of anything")

    monkeypatch.setattr(torch.cuda, "Event", timed)
    monkeypatch.setattr("steadytorch.conv.timing.take_rounds", timed)
    made, used = residual(), []
    monkeypatch.setattr(
        "steadytorch.kernels.conv_relu_max_pool._OPERATOR",
        lambda *given: used.append(given[-1]) or _eager(*given),
    )
    with create(spec).applied(made) as fused:
        for _ in range(3):
            fused.model(*made.inputs)
    assert used == [name] * 3


@pytest.mark.parametrize(
    "parameters",
    [(("stem", True), ("config", "fast")), (("config", next(iter(CONFIGS))),)],
    ids=["an unknown configuration", "a configuration without a stem"],
)
def test_only_the_closed_list_is_taken_from_a_plan(parameters):
    with pytest.raises(UsageError, match="fused_kernels"):
        create(TransformSpec("fused_kernels", parameters))


def test_a_plan_from_before_there_were_stems_is_what_it_was():
    assert create(TransformSpec("fused_kernels")).parameters == FusedKernels.Parameters()


def refusal(made: Workload, facts: Any, parameters: Any = None) -> str:
    answer = FusedKernels(parameters).applies_to(made, facts)
    assert isinstance(answer, NotApplicable)
    return answer.reason


def test_it_is_for_cuda(cpu):
    assert refusal(workload(), cpu) == "no CUDA device"


def test_it_needs_triton(gpu):
    import msgspec

    bare = msgspec.structs.replace(gpu, triton=None)
    assert "needs Triton" in refusal(workload(), bare)


def test_it_says_where_there_is_nothing_to_fuse(gpu, attention_workload):
    assert "no ReLU" in refusal(attention_workload, gpu)


def test_it_says_why_a_model_cannot_be_traced(gpu):
    made = workload(lambda net, x: net.pool(net.relu(x)) if x.sum() > 0 else x)
    assert refusal(made, gpu).startswith("the model cannot be traced by torch.fx: ")


def test_a_hooked_model_is_refused(gpu):
    made = workload()
    made.model.register_forward_hook(lambda module, args, output: output * 2)
    assert "hooks" in refusal(made, gpu)


def test_training_steps_are_refused(gpu):
    made = Workload.training(workload().model, torch.ones(1), torch.sum, torch.optim.SGD)
    assert "copy of the weights" in refusal(made, gpu)
