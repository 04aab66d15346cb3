"""Sound transforms pass verification, on training steps that nobody chose."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch
from torch import nn
from torch.nn import functional

from steadytorch import transforms
from steadytorch.device.facts import load_facts
from steadytorch.training.reference import make_reference
from steadytorch.training.verify import verify_training
from steadytorch.transforms.base import Applicable, applied_in_order
from steadytorch.transforms.precision import precision_of
from steadytorch.verification.verdict import decide
from steadytorch.workload.start import Start, with_optimizer
from steadytorch.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
KINK, BIAS = 246, 190
"""A step where rounding seldom moves an activation across a kink, and one with a bias before a
batch norm, whose gradient is only rounding of the backward pass."""
DRAWS = [KINK, BIAS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12))]
LEFT_OUT = ("compile", "openvino", "onnxruntime", "threads", "prefetch")
CLASSES = 5


def _activation(random: Random) -> nn.Module:
    return random.choice((nn.ReLU, nn.GELU, nn.Hardswish, nn.SiLU, nn.LeakyReLU))()


def _norm(random: Random, width: int, dims: int) -> nn.Module:
    batch = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    return random.choice((lambda: batch(width), lambda: nn.GroupNorm(2, width), nn.Identity))()


def _drop(random: Random) -> nn.Module:
    return nn.Dropout(random.choice((0.0, 0.1, 0.5)))


def _convolutions(random: Random, dims: int) -> tuple[nn.Module, torch.Tensor]:
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    width, channels = random.choice((4, 8, 16)), random.choice((1, 3, 4))
    layers: list[nn.Module] = []
    before = channels
    for _ in range(random.randint(1, 6)):
        grouped = before == width and random.random() < 0.3
        bias = random.random() < 0.5
        layers.append(make(before, width, 3, 1, 1, groups=width if grouped else 1, bias=bias))
        layers += [_norm(random, width, dims), _activation(random)]
        before = width
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1]
    head = [pool(1), nn.Flatten(), _drop(random), nn.Linear(width, CLASSES)]
    size = (8, 8, 4)[dims - 1]
    return nn.Sequential(*layers, *head), torch.randn(_batch(random), channels, *[size] * dims)


def _perceptron(random: Random) -> tuple[nn.Module, torch.Tensor]:
    widths = [12, *[random.choice((8, 32)) for _ in range(random.randint(0, 4))]]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), _activation(random), _drop(random)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES)), torch.randn(_batch(random), 12)


class _Words(nn.Module):
    """An embedding, layers over a sequence, and the mean of what they return."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        rate = random.choice((0.0, 0.1))
        self.layers: nn.Module = random.choice(
            (
                lambda: nn.TransformerEncoderLayer(16, 2, 32, rate, batch_first=True),
                lambda: nn.LSTM(16, 16, batch_first=True),
                lambda: nn.GRU(16, 16, batch_first=True),
            )
        )()
        self.head = nn.Linear(16, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.layers(self.words(ids))
        return self.head((found[0] if isinstance(found, tuple) else found).mean(1))


def _words(random: Random) -> tuple[nn.Module, torch.Tensor]:
    return _Words(random), torch.randint(20, (_batch(random), 6))


def _batch(random: Random) -> int:
    return random.choice((2, 4, 8, 32))


BODIES = {
    "convolutions 1d": lambda random: _convolutions(random, 1),
    "convolutions": lambda random: _convolutions(random, 2),
    "convolutions 3d": lambda random: _convolutions(random, 3),
    "perceptron": _perceptron,
    "words": _words,
}
OPTIMIZERS = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=1e-2),
    "Adam": torch.optim.Adam,
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
}


def drawn(seed: int) -> tuple[str, Workload]:
    """A training step of a seed, and what it is."""
    random = Random(seed)
    torch.manual_seed(seed)
    body, optimizer = random.choice(list(BODIES)), random.choice(list(OPTIMIZERS))
    rate, scale = 10 ** random.uniform(-6, -1), random.choice((1.0, 1.0, 0.1, 4.0))
    model, x = BODIES[body](random)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    if random.random() < 0.3:
        # Not the first layers: PyTorch 2.13 crashes in the backward pass of a group norm whose
        # channels-last input on a CPU needs no gradient.
        list(model.parameters())[-1].requires_grad_(False)
    targets = torch.randint(CLASSES, (len(x),))
    smooth = random.choice((0.0, 0.1))
    made = Workload.training(
        model,
        x,
        lambda out, y: functional.cross_entropy(out, y, label_smoothing=smooth),
        lambda p: OPTIMIZERS[optimizer]([t for t in p if t.requires_grad], rate),
        targets=targets,
    )
    return f"{body}, {tuple(x.shape)}, {optimizer} at {rate:.1e}, weights x {scale}", made


def rejections(seed: int) -> list[str]:
    """Transforms that verification rejects, alone or together, on the step of a seed."""
    what, made = drawn(seed)
    made = with_optimizer(made)
    start, facts = Start(made), load_facts("cpu")
    data, reference = make_reference(made, 0, start)
    if data["fault"] is not None:
        return []
    every = [t for t in transforms.all_variants(facts) if t.name not in LEFT_OUT]
    every = [t for t in every if dict(t.spec.parameters).get("implementation") != "compiled"]
    fit = [t for t in every if isinstance(t.applies_to(made, facts), Applicable)]
    random = Random(seed)
    groups = [[t.spec] for t in fit]
    groups += [[t.spec for t in random.sample(fit, min(3, len(fit)))] for _ in range(3)]
    found = []
    for group in groups:
        candidate = transforms.order(group)
        if transforms.conflict(candidate, made) or len({s.name for s in group}) < len(group):
            continue
        parts, precision = [transforms.create(spec) for spec in candidate], precision_of(candidate)
        with applied_in_order(parts, made) as applied:
            step = applied.step_function()
            seen = verify_training(applied.model, step, made, data, start, precision)
        reason = decide(seen, reference, precision, None)
        if reason is not None and not reason.startswith("cannot be verified"):
            found.append(f"{what}: {candidate}: {reason}")
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", DRAWS)
def test_sound_transforms_pass(seed):
    assert rejections(seed) == []
