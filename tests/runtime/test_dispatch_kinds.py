from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.entries import ServingOptions
from steadytorch.runtime.module import TunedModule

from .conftest import CANDIDATES, FROZEN, NOT_APPLIED, answer


class Batch:
    def __init__(self, images, scale):
        self.images, self.scale = images, scale


class Result:
    def __init__(self, scores):
        self.scores = scores


class Odd(nn.Module):
    """Layers that every transform finds its own among, a branch on data, and an opaque result."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        nn.init.uniform_(self.norm.running_mean, -1, 1)

    def forward(self, batch, *, twice=False):
        images = batch.images if isinstance(batch, Batch) else batch
        scores = self.norm(self.convolution(images))
        # Which way it goes depends on the data.
        if images.sum() > 0:
            scores = 1 - scores
        return Result(scores * 2 if twice else scores)


class Scores(nn.Module):
    def forward(self, result):
        return result.scores


@pytest.fixture
def odd():
    torch.manual_seed(0)
    return Odd().eval()


@pytest.fixture
def images():
    return torch.ones(2, 3, 8, 8)


def test_an_opaque_input_runs_untouched_with_the_reason(odd, images, serving, caplog):
    tuned = TunedModule(odd, serving(CANDIDATES["inference_mode"], torch.zeros(2, 3)))
    batch = Batch(images, 1.0)
    for _ in range(2):
        assert torch.equal(answer(tuned, batch).scores, answer(odd, batch).scores)
    assert tuned.report().calls == {"untouched: these inputs have no signature": 2}
    assert caplog.text.count("Batch") == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_an_opaque_output_and_branches_on_data_are_served(odd, images, serving, sign):
    x = sign * images
    tuned = TunedModule(odd, serving(CANDIDATES["inference_mode"], x, twice=True))
    for inputs in (x, -x, x):
        found = tuned(inputs, twice=True)
        assert isinstance(found, Result)
        assert torch.equal(found.scores, answer(odd, inputs, twice=True).scores)
    assert tuned.report().calls == {"tuned": 3}


CHANGING = {
    **CANDIDATES,
    "autocast": (TransformSpec("autocast", (("dtype", "bf16"),)),),
    "cudnn_engines": (TransformSpec("cudnn_engines"),),
    "fused_kernels": (TransformSpec("fused_kernels"),),
    "frozen": FROZEN,
}
HALF = ("autocast", "cast_weights")
COMPILED = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NAMES = [pytest.param(name, marks=COMPILED if name == "frozen" else ()) for name in CHANGING]


@pytest.mark.parametrize("canary", [True, False])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", NAMES)
def test_both_branches_answer_as_the_model_whichever_comes_first(
    odd, images, serving, name, sign, canary
):
    model, x = nn.Sequential(odd, Scores()).eval(), sign * images
    tuned = TunedModule(model, serving(CHANGING[name], x), options=ServingOptions(canary=canary))
    loose = {"rtol": 0.05, "atol": 0.05} if name in HALF else {}
    for inputs in (x, -x) * 3:
        torch.testing.assert_close(answer(tuned, inputs), answer(model, inputs), **loose)
    # These work on the model's graph, which has no branches.
    untraceable = name in ("fold_batch_norm", "all", "cudnn_engines", "fused_kernels")
    assert tuned.report().calls == ({NOT_APPLIED: 6} if untraceable else {"tuned": 6})


class Remembers(nn.Module):
    """Counts the calls with positive inputs, in everything a module can count in."""

    def __init__(self, holders):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        nn.init.zeros_(self.convolution.weight)
        nn.init.zeros_(self.convolution.bias)
        self.holders = holders
        self.register_buffer("whole", torch.zeros((), dtype=torch.int64))
        self.register_buffer("real", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.number, self.listed, self.plain = 0, [], torch.zeros(())

    def forward(self, images):
        scores = self.norm(self.convolution(images))
        if images.sum() > 0:
            for holder in self.holders:
                getattr(self, f"count_{holder}")()
        return scores + self.total()

    def total(self):
        counts = self.whole, self.real, self.replaced, self.number, len(self.listed), self.plain
        return sum(map(float, counts))

    def count_whole(self):
        self.whole.add_(1)

    def count_real(self):
        self.real.add_(1)

    def count_replaced(self):
        self.replaced = self.replaced + 1

    def count_number(self):
        self.number += 1

    def count_listed(self):
        self.listed.append(None)

    def count_plain(self):
        self.plain += 1


HOLDERS = ("whole", "real", "replaced", "number", "listed", "plain")


@pytest.mark.parametrize("canary", [True, False])
@pytest.mark.parametrize("holders", [*[(h,) for h in HOLDERS], HOLDERS], ids="-".join)
@pytest.mark.parametrize(
    "name",
    [
        *("inference_mode", "channels_last", "cast_weights", "autocast"),
        pytest.param("frozen", marks=COMPILED),
    ],
)
def test_state_of_a_late_branch_is_updated_once(images, serving, name, holders, canary):
    model = Remembers(holders).eval()
    tuned = TunedModule(
        model, serving(CHANGING[name], images), options=ServingOptions(canary=canary)
    )
    for x in (-images,) * 3:
        assert answer(tuned, x).max() == 0
    assert tuned.report().hits == 3
    for count in range(1, 12):
        assert answer(tuned, images).max() == count * len(holders) == model.total()
    if name in ("channels_last", "cast_weights", "frozen"):
        assert tuned.report().hits == 3
        assert all("untouched" in outcome for outcome in tuned.report().calls if outcome != "tuned")


@pytest.mark.parametrize("name", NAMES)
def test_opaque_outputs_run_untouched_with_the_reason(odd, images, serving, name):
    tuned = TunedModule(odd, serving(CHANGING[name], images), options=ServingOptions(canary=True))
    for inputs in (images, -images, images):
        assert torch.equal(answer(tuned, inputs).scores, answer(odd, inputs).scores)
    assert tuned.report().hits == 0
    (served,) = tuned.report().signatures
    unverified = "cannot be verified: output 0 is a Result, which cannot be compared"
    assert unverified in served.reason or NOT_APPLIED.endswith(served.reason)
