"""Stems and sums, and the configurations of stems that a plan stores."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from steadytorch.conv import timing
from steadytorch.conv.module import engine_convolutions
from steadytorch.errors import UsageError
from steadytorch.kernels.conv_relu_max_pool import OPERATOR
from steadytorch.kernels.stem import CONFIGS
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import create
from steadytorch.transforms.base import applied_in_order
from steadytorch.transforms.cast_weights import CastWeights
from steadytorch.transforms.channels_last import ChannelsLast
from steadytorch.transforms.cudnn_engines import rewritten_model
from steadytorch.transforms.fold_batch_norm import FoldBatchNorm
from steadytorch.transforms.fused_kernels import FusedKernels

from .fusing import STEM, SUMS, functions, residual, workload


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
    monkeypatch.setattr(timing, "take_rounds", timed)
    made, used, found = residual(), [], OPERATOR.overload
    monkeypatch.setattr(
        "steadytorch.kernels.conv_relu_max_pool.OPERATOR.overload",
        lambda *given: used.append(given[-1]) or found(*given),
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
