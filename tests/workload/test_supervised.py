from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from steadytorch.errors import UsageError
from steadytorch.workload.supervised import CrossEntropy, logits_of, supervised
from steadytorch.workload.workload import Workload

Auxiliary = namedtuple("Auxiliary", ["logits", "aux"])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=seeded())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, None),
        lambda x: Auxiliary(logits=x, aux=None),
        lambda x: OrderedDict(out=x, aux=None),
        lambda x: {"logits": x},
    ],
    ids=["tensor", "tuple", "namedtuple", "out", "logits"],
)
def test_class_scores_are_found_in_the_usual_outputs(wrap):
    scores = torch.zeros(2, 3)
    assert logits_of(wrap(scores)) is scores


@pytest.mark.parametrize("output", [None, (), {"features": torch.zeros(1)}])
def test_an_output_without_class_scores_is_refused(output: object):
    with pytest.raises(TypeError, match=r"an output of type .* holds no class scores"):
        logits_of(output)


def test_the_loss_of_images_is_cross_entropy():
    scores, targets = images(4, 5), torch.tensor([0, 1, 2, 3])
    assert torch.equal(CrossEntropy(targets)(scores), functional.cross_entropy(scores, targets))


def test_the_loss_of_tokens_has_its_classes_last():
    scores, targets = images(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = functional.cross_entropy(scores.movedim(-1, 1), targets)
    torch.testing.assert_close(CrossEntropy(targets, classes_last=True)(scores), expected)


@pytest.mark.parametrize(
    ("model", "inputs", "targets"),
    [
        (nn.Linear(3, 7), images(4, 3), (4,)),
        (nn.Conv2d(3, 7, 3), images(2, 3, 8, 8), (2, 6, 6)),
        (nn.Embedding(7, 9), torch.tensor([[1, 2, 3]] * 2), (2, 3)),
    ],
    ids=["per sample", "per pixel", "per token"],
)
def test_targets_match_the_output(model: nn.Module, inputs: torch.Tensor, targets: tuple):
    step = supervised(Workload(model, inputs), seeded()).training_step
    assert step is not None
    assert isinstance(step.loss, CrossEntropy)
    assert step.loss.targets.shape == targets


def test_the_model_is_put_in_train_mode_and_its_weights_move():
    model = nn.Linear(3, 7).eval()
    workload = supervised(Workload(model, images(4, 3), name="tiny"), seeded())
    before = model.weight.clone()
    first = workload.step_function()()
    assert (workload.name, model.training, first.shape) == ("tiny", True, ())
    assert not torch.equal(model.weight, before)


def test_statistics_of_the_model_are_not_touched_while_shapes_are_found():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    supervised(Workload(model, images(2, 1, 4, 4)), seeded())
    assert model[1].num_batches_tracked == 0


def test_inputs_that_do_not_fit_are_reported():
    with pytest.raises(UsageError, match=r"Linear cannot be trained on inputs 4x2:float32: mat1"):
        supervised(Workload(nn.Linear(3, 7), images(4, 2)), seeded())
