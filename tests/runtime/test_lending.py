"""Writes to the caller's containers happen once, whether model or executor answers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.entries import STALE, ServingOptions
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.trained import TrainedModule

from .conftest import CANDIDATES, FAILED, Failing, always, replace_executor


class Detector(nn.Module):
    """Stores features with the caller, and attends to what earlier calls have stored."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, batch, cache=None):
        batch["feature"] = self.norm(self.convolution(batch["image"]))
        if cache is not None:
            cache.append(batch["feature"].mean((2, 3)))
            return torch.stack(cache).sum(0)
        return batch


COMPILED = (TransformSpec("compile", (("mode", "default"), ("freezing", False))),)
PLANS = {
    **{name: CANDIDATES[name] for name in ("cast_weights", "channels_last", "inference_mode")},
    "autocast": (TransformSpec("autocast", (("dtype", "bf16"),)),),
    "threads": (TransformSpec("threads", (("count", 1),)),),
    "compile": COMPILED,
    "cast and compile": (*CANDIDATES["cast_weights"], *COMPILED),
}
every_plan = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if "compile" in n else ()) for n in PLANS],
)


@pytest.fixture
def detector():
    torch.manual_seed(0)
    return Detector().eval()


def make_batch():
    return {"image": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


def assert_alike(found, expected):
    loose = {"rtol": 0.1, "atol": 0.1}
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, **loose)
        assert found[key].stride() == tensor.stride()


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@every_plan
@pytest.mark.parametrize("canary", [False, True])
def test_each_call_writes_once(detector, name, canary):
    tuned = TunedModule(detector, always(PLANS[name]), options=ServingOptions(canary=canary))
    with torch.no_grad():
        for _ in range(6):
            batch, expected = make_batch(), make_batch()
            assert tuned(batch) is batch
            detector(expected)
            assert_alike(batch, expected)
            cache, due = [torch.ones(2, 4)], [torch.ones(2, 4)]
            found = tuned(make_batch(), cache)
            torch.testing.assert_close(found, detector(make_batch(), due), rtol=0.1, atol=0.1)
            assert len(cache) == len(due) == 2
            torch.testing.assert_close(cache[1], due[1], rtol=0.1, atol=0.1)
    assert tuned.report().hits >= 8, str(tuned.report())
    tuned.close()


def test_building_writes_nothing(x):
    class Taking(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 3)

        def forward(self, x, box):
            box.pop("once")
            return self.convolution(x)

    tuned = TunedModule(Taking().eval(), always((TransformSpec("cudnn_engines"),)))
    for _ in range(2):
        box = {"once": 1}
        tuned(x, box)
        assert box == {}


def test_a_stale_answer_writes_nothing(detector):
    tuned = TunedModule(detector, always(CANDIDATES["channels_last"]))
    with torch.no_grad():
        tuned(make_batch(), [])
        detector.convolution.weight.mul_(2)
        cache: list[torch.Tensor] = []
        tuned(make_batch(), cache)
    assert len(cache) == 1
    assert tuned.report().fallbacks == {STALE: 1}


def test_an_executor_that_fails_late_has_written_nothing(detector):
    class Late(Failing):
        def __call__(self, *args, **kwargs):
            detector(*args, **kwargs)
            return super().__call__(*args, **kwargs)

    tuned = TunedModule(detector, always(CANDIDATES["inference_mode"]))
    with torch.no_grad():
        tuned(make_batch(), [])
        replace_executor(tuned, Late(detector))
        cache: list[torch.Tensor] = []
        tuned(make_batch(), cache)
    assert len(cache) == 1
    assert tuned.report().calls[FAILED] == 1


def test_what_is_left_in_a_container_under_inference_mode_is_ordinary(detector):
    tuned = TunedModule(detector, always(CANDIDATES["inference_mode"]))
    batch = make_batch()
    tuned(batch)
    assert not batch["feature"].is_inference()
    (batch["feature"] * torch.ones(1, requires_grad=True)).sum().backward()


def test_a_training_step_writes_once(detector):
    tuned = TrainedModule(
        detector.train(),
        lambda context: Resolution((TransformSpec("channels_last"),)),
        options=ServingOptions(trains=True),
    )
    for _ in range(2):
        cache: list[torch.Tensor] = []
        batch = make_batch()
        tuned(batch, cache).sum().backward()
        assert len(cache) == 1
        assert batch["feature"].is_contiguous()
        assert batch["feature"].grad_fn is not None
    assert tuned.report().hits == 2


class Segments(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = self.convolution(x)
        return y, torch.relu(y).flatten(1)[:, :5], [y.flatten(1)[:, :1].expand(-1, 3)]


def strides(outputs):
    first, second, (third,) = outputs
    return [tensor.stride() for tensor in (first, second, third)]


@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
@every_plan
def test_outputs_have_the_strides_of_the_untouched_model(x, name):
    model = Segments().eval()
    tuned = TunedModule(model, always(PLANS[name]), options=ServingOptions(canary=True))
    with torch.no_grad():
        for given in (x, x.contiguous(memory_format=torch.channels_last)):
            for _ in range(2):
                assert strides(tuned(given)) == strides(model(given))
    # Inductor gives an expanded copy strides of its own; such a plan is not served.
    assert tuned.report().hits == (0 if name == "cast and compile" else 4), str(tuned.report())
    tuned.close()
