from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.kernels.relu_max_pool import relu_max_pool2d
from steadytorch.rewrite.fusible import Layers
from steadytorch.rewrite.tracing import traced
from steadytorch.transforms.base import (
    Applicable,
    NotApplicable,
    applied_in_order,
)
from steadytorch.transforms.fold_batch_norm import FoldBatchNorm
from steadytorch.transforms.fused_kernels import FusedKernels
from steadytorch.workload.workload import Workload

from .fusing import STEM, SUMS, residual, workload

FUSED = "relu_max_pool2d"


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
        made = pointwise() if parameters.separable else residual()
        assert FusedKernels(parameters).applies_to(made, gpu) == Applicable()


def pointwise() -> Workload:
    return Workload(nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU()).eval(), torch.ones(1, 3, 5, 5))


def test_variants_that_would_find_nothing_do_not_apply(gpu):
    assert "no few-channel convolution" in refusal(workload(), gpu, STEM)
    assert "no sum of two layer outputs" in refusal(workload(), gpu, SUMS)
    both = FusedKernels.Parameters(stem=True, residual=True)
    stem = workload(lambda net, x: F.max_pool2d(net.relu(net.conv(x)), 3, 2))
    assert FusedKernels(STEM).applies_to(stem, gpu) == Applicable()
    assert "no sum of two layer outputs" in refusal(stem, gpu, both)


def refusal(made: Workload, facts: Any, parameters: Any = None) -> str:
    answer = FusedKernels(parameters).applies_to(made, facts)
    assert isinstance(answer, NotApplicable)
    return answer.reason


def test_it_is_for_cuda(cpu):
    assert refusal(workload(), cpu) == "no CUDA device"


def test_it_needs_triton(gpu):

    bare = msgspec.structs.replace(gpu, triton=None)
    assert "needs Triton" in refusal(workload(), bare)


def test_it_says_where_there_is_nothing_to_fuse(gpu, attention_workload):
    assert "no ReLU" in refusal(attention_workload, gpu)


def test_it_says_why_a_model_cannot_be_traced(gpu):
    made = workload(lambda net, x: net.pool(net.relu(x)) if x.sum() > 0 else x)
    assert refusal(made, gpu).startswith("torch.fx cannot trace the model: ")


def test_a_hooked_model_is_refused(gpu):
    made = workload()
    made.model.register_forward_hook(lambda module, args, output: output * 2)
    assert "hooks" in refusal(made, gpu)


def test_training_steps_are_refused(gpu):
    made = Workload.training(workload().model, torch.ones(1), torch.sum, torch.optim.SGD)
    assert "copy of the weights" in refusal(made, gpu)
