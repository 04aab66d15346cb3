"""The bundled architectures against reference implementations with the same weights."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from steadytorch.workload import bundled

CONVOLUTIONAL = ("resnet18", "resnet50", "mobilenet_v3_large")
IMAGE_MODELS = (*CONVOLUTIONAL, "vit_b_16")


def import_or_skip(name: str) -> ModuleType:
    # Ignore warnings of other projects' imports.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name, reason=f"needs {name}, to compare its outputs with ours")
        return importlib.import_module(name)


def build_with_full_state(name: str) -> nn.Module:
    """The bundled model with non-zero biases and non-identity normalisation."""
    torch.manual_seed(0)
    model = bundled.build(name)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 1:
                # Positive, so that variances stay valid.
                tensor.add_(torch.rand_like(tensor), alpha=0.2)
    return model


def torchvision_twin(name: str, ours: nn.Module) -> nn.Module:
    """The torchvision model of that name with our state: same tensors in the same order."""
    models: dict[str, Callable[..., nn.Module]] = vars(import_or_skip("torchvision").models)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = models[name](weights=None)
    keys = twin.state_dict().keys()
    twin.load_state_dict(dict(zip(keys, ours.state_dict().values(), strict=True)))
    return twin.eval()


def images(name: str) -> Tensor:
    (inputs,) = bundled.example_inputs(name, 2, torch.Generator().manual_seed(0))
    return inputs


def assert_equal_up_to_rounding(actual: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().item()
    assert scale > 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", IMAGE_MODELS)
@torch.inference_mode()
def test_image_model_agrees_with_torchvision(name):
    ours = build_with_full_state(name)
    twin = torchvision_twin(name, ours)
    assert_equal_up_to_rounding(ours(images(name)), twin(images(name)))


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_running_statistics_move_as_in_torchvision(name):
    ours = build_with_full_state(name)
    twin = torchvision_twin(name, ours)
    with torch.no_grad():
        for model in (ours, twin):
            model.train()(images(name))
    for mine, theirs in zip(ours.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_dropout_rates_are_those_of_torchvision(name):
    ours = bundled.build(name)
    twin = torchvision_twin(name, ours)
    assert active_dropout_rates(ours) == active_dropout_rates(twin)


def active_dropout_rates(model: nn.Module) -> list[float]:
    return [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout) and layer.p > 0]


@torch.inference_mode()
def test_gpt2_agrees_with_transformers():
    transformers = import_or_skip("transformers")
    ours = build_with_full_state("gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    # Iterating over parameters counts the tied head once in both.
    for mine, (key, theirs) in zip(ours.parameters(), twin.named_parameters(), strict=True):
        # The reference stores projection weights as (inputs, outputs).
        transposed = ".h." in key and theirs.dim() == 2
        theirs.copy_(mine.T if transposed else mine)
    (ids,) = bundled.example_inputs("gpt2", 2, torch.Generator().manual_seed(0))
    assert_equal_up_to_rounding(ours(ids), twin(ids).logits)
