from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.workload.loading import load_workload
from steadytorch.workload.supervised import CrossEntropy
from steadytorch.workload.workload import Workload

MODEL = """
import torch
from torch import nn
from steadytorch.workload.workload import Workload

def factory(batch=2):
    return nn.Linear(3, 1), torch.randn(batch, 3)

def tokens():
    return nn.Embedding(5, 2), torch.zeros(1, dtype=torch.int64)

def two():
    return torch.add, (torch.zeros(1), torch.zeros(1))

def fed():
    return Workload.from_loader(nn.Linear(3, 1), [torch.zeros(2, 3)])

def masked():
    return torch.where, (torch.zeros(2, dtype=torch.bool), torch.zeros(2), torch.ones(2))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("user") / "model.py"
    path.write_text(MODEL)
    return str(path)


def targets_of(workload: Workload) -> torch.Tensor:
    assert workload.training_step is not None
    assert isinstance(workload.training_step.loss, CrossEntropy)
    return workload.training_step.loss.targets


def test_a_bundled_model_comes_with_a_batch_of_one_in_eval_mode():
    workload = load_workload("mobilenet_v3_large")
    assert (workload.name, workload.model.training) == ("mobilenet_v3_large", False)
    assert str(workload.signature()) == "1x3x224x224:float32"


def test_batch_sets_the_leading_size():
    assert load_workload("mobilenet_v3_large", batch=3).inputs[0].shape == (3, 3, 224, 224)


def test_the_same_seed_gives_the_same_weights_and_inputs():
    first, again, other = (
        load_workload("mobilenet_v3_large", batch=1, seed=seed) for seed in (7, 7, 8)
    )
    weights = [next(w.model.parameters()) for w in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(first.inputs[0], again.inputs[0])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(first.inputs[0], other.inputs[0])


def test_the_seed_reaches_factories(file: str):
    first, again = (load_workload(f"{file}:factory", seed=3) for _ in range(2))
    assert torch.equal(first.model.weight, again.model.weight)


def test_the_random_state_of_the_caller_is_left_alone(file: str):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    load_workload(f"{file}:factory", seed=3)
    with pytest.raises(UsageError):
        load_workload(f"{file}:missing", seed=3)
    assert torch.equal(torch.rand(3), expected)


def test_training_brings_targets_and_updates_weights():
    workload = load_workload("mobilenet_v3_large", batch=2, train=True)
    before = next(workload.model.parameters()).clone()
    loss = workload.step_function()()
    assert workload.is_training
    assert workload.model.training
    assert loss.isfinite()
    assert not torch.equal(next(workload.model.parameters()), before)


def test_targets_are_the_same_for_the_same_seed():
    first, again = (
        targets_of(load_workload("resnet18", inputs=["8x3x32x32"], train=True, seed=5))
        for _ in range(2)
    )
    assert torch.equal(first, again)
    assert len(first.unique()) > 1


def test_inputs_replace_what_the_model_came_with():
    workload = load_workload("resnet18", inputs=["2x3x64x96"])
    assert str(workload.signature()) == "2x3x64x96:float32"
    assert workload.step_function()().shape == (2, 1000)


def test_training_fits_targets_to_named_inputs():
    workload = load_workload("resnet18", inputs=["3x3x32x32"], train=True)
    assert targets_of(workload).shape == (3,)


@pytest.mark.parametrize("text", ["40", "10x4:int32", "300:uint8"])
def test_integers_stay_below_the_size_of_the_embedding(file: str, text: str):
    (drawn,) = load_workload(f"{file}:tokens", inputs=[text]).inputs
    assert drawn.min() == 0
    assert drawn.max() == 4


def test_integers_are_zero_or_one_without_an_embedding(file: str):
    (drawn,) = load_workload(f"{file}:factory", inputs=["100:int64"]).inputs
    assert sorted(drawn.unique().tolist()) == [0, 1]


def test_a_dtype_left_out_is_that_of_the_input_it_replaces(file: str):
    workload = load_workload(f"{file}:masked", inputs=["50", "50", "50:float64"])
    assert [x.dtype for x in workload.inputs] == [torch.bool, torch.float32, torch.float64]
    assert len(workload.inputs[0].unique()) == 2


def test_several_inputs_may_be_named(file: str):
    workload = load_workload(f"{file}:two", inputs=["2x3", "2x3:bfloat16"])
    assert str(workload.signature()) == "2x3:float32, 2x3:bfloat16"


def test_floats_are_standard_normal(file: str):
    (drawn,) = load_workload(f"{file}:factory", inputs=["4000x3"]).inputs
    assert abs(drawn.mean()) < 0.05
    assert abs(drawn.std() - 1) < 0.05


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    dtype=st.sampled_from(
        ["float32", "float16", "bfloat16", "float64", "int64", "int8", "uint8", "bool", "complex64"]
    ),
)
def test_any_shape_and_dtype_is_drawn_as_written(file: str, shape: list[int], dtype: str):
    text = f"{'x'.join(map(str, shape))}:{dtype}"
    (drawn,) = load_workload(f"{file}:factory", inputs=[text]).inputs
    assert (list(drawn.shape), str(drawn.dtype)) == (shape, f"torch.{dtype}")


@pytest.mark.parametrize(
    "text", ["", "x", "64,3", "64x", "x3", "-1x3", "0x3", "3x3:", ":float32", "3.5", "3X4", "3 x 4"]
)
def test_a_malformed_input_is_shown_with_an_example(text: str):
    with pytest.raises(UsageError, match=r"is not a shape: .* such as 64x3x224x224") as caught:
        load_workload("resnet18", inputs=[text])
    assert repr(text) in str(caught.value)


def test_an_unknown_dtype_is_answered_with_near_ones():
    with pytest.raises(UsageError, match=r"'flaot32' \(did you mean float32"):
        load_workload("resnet18", inputs=["1x3x8x8:flaot32"])


def test_an_input_beyond_all_memory_is_a_usage_error(file: str):
    with pytest.raises(UsageError, match=r"input '9{12}x9{12}' cannot be created"):
        load_workload(f"{file}:factory", inputs=["9" * 12 + "x" + "9" * 12])


def test_batch_and_inputs_exclude_each_other():
    with pytest.raises(UsageError, match=r"batch and input cannot be combined: .* 4x3x224x224"):
        load_workload("resnet18", batch=4, inputs=["4x3x224x224"])


def test_a_batch_below_one_is_refused():
    with pytest.raises(UsageError, match="batch size must be at least 1, got 0"):
        load_workload("resnet18", batch=0)


def test_an_unknown_name_is_answered_with_near_ones_and_every_form():
    with pytest.raises(UsageError) as caught:
        load_workload("resnt50")
    message = str(caught.value)
    assert "unknown workload 'resnt50' (did you mean resnet50 or resnet18?)" in message
    for form in ("unet", "torchvision:resnt50", "timm:", "transformers:", "file.py:factory"):
        assert form in message
    assert "\n" not in message


def test_a_misspelt_prefix_is_answered_with_near_ones():
    with pytest.raises(UsageError, match=r"'torchvison' \(did you mean torchvision\?\)"):
        load_workload("torchvison:resnet50")


def test_a_file_without_its_factory_is_explained(file: str):
    with pytest.raises(UsageError, match=r"model\.py needs a factory name: .*:factory"):
        load_workload(file)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "meta", ""])
def test_an_unknown_device_is_a_usage_error(device: str):
    with pytest.raises(UsageError, match=f"unknown device '{device}': use cpu, cuda"):
        load_workload("resnet18", device=device)


def test_a_device_that_is_not_there_is_unsupported():
    with pytest.raises(UnsupportedError, match=r"device cuda:99 not found: .* sees \d+"):
        load_workload("resnet18", device="cuda:99")


def test_nothing_is_printed(file: str, capfd: pytest.CaptureFixture[str]):
    load_workload("mobilenet_v3_large", batch=1)
    load_workload(f"{file}:factory")
    assert capfd.readouterr() == ("", "")


def test_inputs_of_a_workload_with_a_loader_are_its_batches(file: str):
    with pytest.raises(
        UsageError, match=r"'4x3' cannot be used: .*fed takes its inputs from a load"
    ):
        load_workload(f"{file}:fed", inputs=["4x3"])
