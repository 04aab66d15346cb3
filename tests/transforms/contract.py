"""What every transform promises, exercised once per variant; the tests assert on the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms import ambient
from steadytorch.transforms.base import Applicable, Transform, applied_in_order
from steadytorch.workload.signature import tensors_of
from steadytorch.workload.workload import Workload

# The parametrisation must not depend on the machine that collects the tests.
LISTED_FOR = DeviceFacts(device="cuda", compute_capability="9.0", cudnn="9.19.0", triton="3.6.0")
IEEE = dict.fromkeys(
    ("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"), "ieee"
)
SLOW = (pytest.mark.slow, pytest.mark.filterwarnings("ignore"))
TOLERANCE = {"same": 5e-5, "tf32": 5e-3, "fp16": 1e-2, "bf16": 4e-2, "int8": 1e-1}


class ConvNet(nn.Module):
    """Two convolutions with batch norm, a residual, and a head."""

    activation = staticmethod(F.relu)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.stem_norm(self.stem(x)))
        x = self.activation(self.norm(self.conv(x)) + x)
        return self.head(x.mean((2, 3)))


class AttentionNet(nn.Module):
    """One attention layer over embedded tokens; tokens, a keyword argument, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.project = nn.Linear(16, 48)

    def forward(self, tokens: torch.Tensor, *, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        q, k, v = self.project(self.embedding(tokens)).unflatten(-1, (3, 2, 8)).unbind(2)
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        hidden = mixed.transpose(1, 2).flatten(2) + bias
        return {"hidden": hidden, "pooled": hidden.mean(1)}


class PatchNet(nn.Module):
    """A small ConvNeXt and ViT: patches, a depthwise layer, patches again, tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.down = nn.Conv2d(8, 16, 2, 2, bias=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = self.down(x + F.gelu(self.mix(x)))
        tokens = x.reshape(x.shape[0], x.shape[1], -1).permute(0, 2, 1)
        return {"tokens": tokens, "scores": self.head(tokens.mean(1))}


def conv_workload(device: str = "cpu") -> Workload:
    torch.manual_seed(0)
    model = ConvNet().eval()
    for norm in (model.stem_norm, model.norm):
        nn.init.uniform_(norm.running_mean, -1, 1)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        nn.init.uniform_(norm.weight, 0.5, 2)
    return Workload(model, torch.randn(2, 3, 8, 8)).to(device)


def attention_workload(device: str = "cpu") -> Workload:
    torch.manual_seed(0)
    tokens, bias = torch.randint(0, 32, (2, 16)), torch.randn(16)
    return Workload(AttentionNet().eval(), tokens, {"bias": bias}).to(device)


def patch_workload(device: str = "cpu") -> Workload:
    torch.manual_seed(0)
    # At both layers, these sizes leave a remainder after the last whole patch.
    return Workload(PatchNet().eval(), torch.randn(2, 3, 21, 31)).to(device)


class SmoothNet(ConvNet):
    """The same without kinks, so that rounding hardly changes gradients; one layer is unused."""

    activation = staticmethod(F.silu)

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Attends(nn.Module):
    """The attention layer above, trained on its pooled output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = AttentionNet()

    def forward(self, tokens: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens, bias=bias)["pooled"]


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def conv_training(device: str = "cpu") -> Workload:
    torch.manual_seed(0)
    loss = Supervised(torch.randint(4, (8,)))
    inputs = torch.randn(8, 3, 8, 8)
    return Workload.training(SmoothNet().train(), inputs, loss, _optimizer).to(device)


def attention_training(device: str = "cpu") -> Workload:
    torch.manual_seed(0)
    loss = Supervised(torch.randint(16, (2,)))
    tokens, kwargs = torch.randint(0, 32, (2, 16)), {"bias": torch.randn(16)}
    made = Workload.training(Attends().train(), tokens, loss, _optimizer, kwargs=kwargs)
    return made.to(device)


class Supervised(nn.Module):
    """Cross-entropy with its targets in a buffer, so that `.to` moves them."""

    targets: torch.Tensor

    def __init__(self, targets: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("targets", targets)

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, self.targets)


TRAINING = {"conv": conv_training, "attention": attention_training}
WORKLOADS = {
    "conv": conv_workload,
    "attention": attention_workload,
    "patches": patch_workload,
}


@dataclass
class Evidence:
    """Observations while a variant was applied, called three times, and undone."""

    precision: str
    expected: list[torch.Tensor]
    first: list[torch.Tensor]
    first_at_once: list[torch.Tensor]
    original_inputs: list[torch.Tensor]
    expected_other: list[torch.Tensor]
    other: list[torch.Tensor]
    ambient_before: dict[str, str]
    ambient_between: dict[str, str]
    ambient_after: dict[str, str]
    state_kept: bool
    strides_kept: bool
    inputs_kept: bool


def exercise(transforms: list[Transform], workload: Workload) -> Evidence:
    """Applies the transforms, calls the result with several inputs, and undoes them."""
    before = ambient()
    state = {name: t.clone() for name, t in workload.model.state_dict().items()}
    strides = [t.stride() for t in workload.model.state_dict().values()]
    inputs = [t.clone() for t in _inputs(workload)]
    precision = next((t.precision for t in transforms if t.precision != "same"), "same")
    # Int8 clips what exceeds the ranges of its calibration, so it gets the same items reordered.
    other = _other_inputs(workload, *((0, 1.0) if precision == "int8" else (-1, 0.5)))
    expected, expected_other = _call(workload), _call(other)
    with applied_in_order(transforms, workload) as changed:
        first = _call(changed)
        first_at_once = [t.clone() for t in first]
        between = ambient()
        original = _call(workload.with_model(changed.model))
        others = _call(other.with_model(changed.model))
    after_state = workload.model.state_dict()
    return Evidence(
        precision=precision,
        expected=expected,
        first=first,
        first_at_once=first_at_once,
        original_inputs=original,
        expected_other=expected_other,
        other=others,
        ambient_before=before,
        ambient_between=between,
        ambient_after=ambient(),
        state_kept=all(torch.equal(t, after_state[name]) for name, t in state.items()),
        strides_kept=strides == [t.stride() for t in after_state.values()],
        inputs_kept=all(map(torch.equal, inputs, _inputs(workload))),
    )


@dataclass
class TrainingEvidence:
    """Observations while a variant was applied, trained for three steps, and undone."""

    precision: str
    expected: dict[str, torch.Tensor]
    found: dict[str, torch.Tensor]
    ambient_before: dict[str, str]
    ambient_between: dict[str, str]
    ambient_after: dict[str, str]
    strides_kept: bool
    inputs_kept: bool


def exercise_training(
    transforms: list[Transform], own: Workload, other: Workload
) -> TrainingEvidence:
    """Trains one workload untouched and an equal one through the transforms."""
    before, inputs = ambient(), [t.clone() for t in _inputs(other)]
    strides = [t.stride() for t in other.model.state_dict().values()]
    expected = _trained(own, own)
    with applied_in_order(transforms, other) as changed:
        found = _trained(other, changed)
        between = ambient()
    return TrainingEvidence(
        precision=next((t.precision for t in transforms if t.precision != "same"), "same"),
        expected=expected,
        found=found,
        ambient_before=before,
        ambient_between=between,
        ambient_after=ambient(),
        strides_kept=strides == [t.stride() for t in other.model.state_dict().values()],
        inputs_kept=all(map(torch.equal, inputs, _inputs(other))),
    )


def _trained(workload: Workload, changed: Workload) -> dict[str, torch.Tensor]:
    """Losses and gradients of each step, and weights, buffers and optimizer state in the end."""
    step, found = changed.training_step, {}
    assert step is not None
    called = step.called_loss
    optimizer: Any = step.optimizer(workload.model.parameters())  # type: ignore[operator]
    for number in range(3):
        optimizer.zero_grad()
        loss = called(changed.model(*workload.inputs, **workload.kwargs))
        loss.backward()
        found[f"loss {number}"] = loss.detach().clone()
        for name, p in workload.model.named_parameters():
            if p.grad is not None:
                found[f"gradient {number} {name}"] = p.grad.clone()
                assert p.grad.stride() == p.stride()
        optimizer.step()
    fallback = getattr(called, "fallback", None)
    assert fallback is None, fallback
    found.update({name: t.clone() for name, t in workload.model.state_dict().items()})
    for number, held in optimizer.state_dict()["state"].items():
        found[f"momentum {number}"] = held["momentum_buffer"].clone()
    return found


def applicable(variants: list[Transform], workload: Workload, facts: Any) -> list[Transform]:
    """The variants that apply to the workload."""
    return [v for v in variants if isinstance(v.applies_to(workload, facts), Applicable)]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], precision: str) -> None:
    """Same number of tensors, same types and shapes, values within the precision's tolerance."""
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == e.dtype
        assert f.shape == e.shape
        error = (f - e).abs().max() / e.abs().max()
        assert error <= TOLERANCE[precision], f"relative error {error:.2e}"


def assert_trained_alike(evidence: Any, tolerance: float) -> None:
    """Compares tensors; the error of small ones counts relative to the gradients."""
    assert evidence.found.keys() == evidence.expected.keys()
    largest = max(float(t.norm()) for n, t in evidence.expected.items() if "gradient" in n)
    for name, expected in evidence.expected.items():
        found = evidence.found[name]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        scale = max(float(expected.double().norm()), 0.1 * largest)
        error = float((found.double() - expected.double()).norm()) / scale
        assert error <= tolerance, name


def _inputs(workload: Workload) -> list[torch.Tensor]:
    return tensors_of((workload.inputs, dict(workload.kwargs)))


def _other_inputs(workload: Workload, dimension: int, factor: float) -> Workload:
    """The same workload with other values of the same signature."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        flipped = tensor.flip(dimension)
        return flipped * factor if tensor.is_floating_point() else flipped

    return Workload(
        workload.model,
        tuple(other(t) for t in workload.inputs),
        {name: other(t) for name, t in workload.kwargs.items()},
    )


def _call(workload: Workload) -> list[torch.Tensor]:
    # Gradients stay enabled, as callers may leave them.
    return tensors_of(workload.model(*workload.inputs, **workload.kwargs))
