from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.transforms.base import Applicable, NotApplicable
from steadytorch.transforms.fold_batch_norm import FoldBatchNorm, foldable_pairs
from steadytorch.workload.workload import Workload


class Net(nn.Module):
    """A convolution and a batch norm; `forward` is given."""

    def __init__(self, forward):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.run = forward

    def forward(self, x, scale=None):
        return self.run(self, x, scale)


def workload(forward=lambda net, x, scale: net.norm(net.conv(x))):
    return Workload(Net(forward).eval(), torch.randn(1, 3, 4, 4))


def pairs(made):
    return [tuple(pair) for pair in foldable_pairs(made)]


def test_a_convolution_read_by_one_batch_norm_is_a_pair():
    assert pairs(workload()) == [("conv", "norm")]


@pytest.mark.parametrize(
    ("conv", "norm", "shape"),
    [
        (nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), (2, 2, 8)),
        (nn.Conv2d(2, 4, 3, groups=2, bias=False), nn.BatchNorm2d(4, affine=False), (2, 2, 8, 8)),
        (nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), (2, 2, 4, 4, 4)),
    ],
    ids=["1d", "2d grouped", "3d"],
)
def test_the_folded_model_gives_the_same_values_without_its_batch_norm(conv, norm, shape):
    model = nn.Sequential(conv, norm).eval()
    nn.init.uniform_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    x = torch.randn(shape)
    with FoldBatchNorm().applied(Workload(model, x)) as folded:
        assert isinstance(folded.model[1], nn.Identity)
        torch.testing.assert_close(folded.model(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x, scale: (y := net.conv(x)) + net.norm(y),
        lambda net, x, scale: net.norm(net.conv(net.conv(x))),
        lambda net, x, scale: net.norm(net.norm(net.conv(x))),
        lambda net, x, scale: net.conv(net.norm(x)),
        lambda net, x, scale: net.norm(net.conv(x).relu()),
        lambda net, x, scale: net.norm(net.conv(x)) + net.conv.weight.sum(),
        lambda net, x, scale: net.conv(x) if scale is None else net.norm(net.conv(x)),
    ],
    ids=[
        "read twice",
        "convolution twice",
        "norm twice",
        "norm first",
        "not adjacent",
        "weight read",
        "branch not taken",
    ],
)
def test_what_would_change_results_is_no_pair(forward):
    assert pairs(workload(forward)) == []


def test_the_branch_that_the_arguments_choose_is_looked_at():
    def forward(net, x, scale):
        return net.conv(x) if scale is None else net.norm(net.conv(x))

    made = Workload(Net(forward).eval(), (torch.randn(1, 3, 4, 4), 2.0))
    assert pairs(made) == [("conv", "norm")]


def test_batch_norm_in_training_mode_is_left_alone(cpu):
    made = workload()
    made.model.norm.train()
    assert pairs(made) == []
    assert isinstance(FoldBatchNorm().applies_to(made, cpu), NotApplicable)


def test_batch_norm_without_running_statistics_is_left_alone():
    made = workload()
    made.model.norm = nn.BatchNorm2d(3, track_running_stats=False).eval()
    assert pairs(made) == []


def test_hooked_layers_are_left_alone():
    made = workload()
    made.model.conv.register_forward_hook(lambda module, args, output: output * 2)
    assert pairs(made) == []


def test_it_applies_to_a_pair(cpu):
    assert FoldBatchNorm().applies_to(workload(), cpu) == Applicable()


def test_a_model_that_cannot_be_traced_says_why(cpu):
    def forward(net, x, scale):
        return net.norm(net.conv(x)) if x.sum() > 0 else x

    answer = FoldBatchNorm().applies_to(workload(forward), cpu)
    assert isinstance(answer, NotApplicable)
    assert answer.reason.startswith("torch.fx cannot trace the model: ")
    assert "\n" not in answer.reason


def test_asking_leaves_no_trace_in_the_model(cpu):
    def forward(net, x, scale):
        net.calls = getattr(net, "calls", 0) + 1
        return net.norm(net.conv(x))

    made = workload(forward)
    FoldBatchNorm().applies_to(made, cpu)
    assert not hasattr(made.model, "calls")


def test_training_steps_are_refused(cpu):
    model = workload().model
    made = Workload.training(model, torch.ones(1), torch.sum, torch.optim.SGD)
    answer = FoldBatchNorm().applies_to(made, cpu)
    assert "copy of the weights" in answer.reason
