from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.dispatch import NEEDS_GRADIENT, Resolution
from steadytorch.runtime.entries import ServingOptions
from steadytorch.runtime.trained import CHANGED, NO_GRADIENTS, TrainedModule

from .conftest import NO_PLAN, Failing, replace_executor

LAYOUT = TransformSpec("channels_last")
HALF = TransformSpec("autocast", (("dtype", "bf16"),))
COMPILED = TransformSpec("compile", (("mode", "default"), ("freezing", False)))
THREADS = TransformSpec("threads", (("count", 1),))
STEPS = 20
MODE = "untouched: the model was switched between train and eval"
OFF = f"untouched: {CHANGED} after the plan was applied; refresh() serves tuned again"


class Net(nn.Module):
    """A convolution, a batch norm and a head, without kinks."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(F.silu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().train()


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 3, 8, 8, generator=generator), torch.randint(4, (8,), generator=generator))
        for _ in range(STEPS)
    ]


@pytest.fixture
def x(batches):
    return batches[0][0]


def served(model, *candidate, signature=None):
    def resolve(context):
        fits = signature is None or str(context.signature) == signature
        return Resolution(candidate if fits else None)

    return TrainedModule(model, resolve, None, ServingOptions(trains=True))


def train(model, batches, at=None):
    """Runs the caller's own loop; `at` maps a step to an action before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for number, (images, targets) in enumerate(batches):
        for do in (at or {}).get(number, ()):
            do(model)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def assert_alike(found, expected, tolerance=1e-5):
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    largest = max(float(t.double().norm()) for t in expected.values())
    for name, tensor in expected.items():
        error = float((found[name].double() - tensor.double()).norm())
        assert error <= tolerance * max(float(tensor.double().norm()), 1e-2 * largest), name


CANDIDATES = {
    "channels_last": (LAYOUT,),
    "threads": (THREADS,),
    "both": (LAYOUT, THREADS),
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_training_through_it_is_training_the_model(model, batches, name):
    own = copy.deepcopy(model)
    fast = served(model, *CANDIDATES[name])
    assert train(fast, batches) == pytest.approx(train(own, batches), rel=1e-5)
    assert_alike(fast, own)
    assert fast.report().calls == {"tuned": STEPS}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_training_through_a_compiled_model_is_training_the_model(model, batches):
    own = copy.deepcopy(model)
    fast = served(model, LAYOUT, COMPILED)
    middle = {10: [lambda m: m.eval(), lambda m: m(batches[0][0]), lambda m: m.train()]}
    assert train(fast, batches, middle) == pytest.approx(train(own, batches), rel=1e-5)
    assert_alike(fast, own)
    assert fast.report().calls == {"tuned": STEPS, MODE: 1}


def test_training_in_half_precision_comes_near(model, batches):
    own = copy.deepcopy(model)
    fast = served(model, LAYOUT, HALF)
    train(fast, batches)
    train(own, batches)
    assert_alike(fast, own, 5e-2)
    assert fast.report().calls == {"tuned": STEPS}


def test_weights_that_are_loaded_on_the_way_are_trained_from_there(model, batches):
    torch.manual_seed(9)
    others = Net().state_dict()
    own = copy.deepcopy(model)
    fast = served(model, LAYOUT)
    held = {f"0.{name}": tensor for name, tensor in others.items()}
    load = {
        5: [lambda m: m.load_state_dict(others)],
        12: [lambda m: nn.Sequential(m).load_state_dict(held)],
    }
    train(fast, batches, load)
    train(own, batches, load)
    assert_alike(fast, own)
    assert fast.report().calls == {"tuned": STEPS}


def test_gradients_accumulate_over_calls(model, x):
    own, fast = copy.deepcopy(model), served(model, LAYOUT)
    for m in (own, fast):
        m(x).sum().backward()
        m(x.flip(0)).square().sum().backward()
    for mine, theirs in zip(fast.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_evaluation_runs_untouched_and_training_goes_on(model, batches, x):
    own, fast = copy.deepcopy(model), served(model, LAYOUT)
    for m in (own, fast):
        train(m, batches[:3])
        m.eval()
    assert torch.equal(fast(x), model(x))
    for m in (own, fast):
        m.train()
        train(m, batches[3:])
    assert_alike(fast, own)
    assert fast.report().calls == {"tuned": STEPS, MODE: 1}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_that_record_no_gradients_run_untouched(model, x, mode):
    fast, own = served(model, LAYOUT), copy.deepcopy(model)
    with mode():
        assert torch.equal(fast(x), own(x))
    fast(x)
    assert fast.report().calls == {f"untouched: {NO_GRADIENTS}": 1, "tuned": 1}


def test_autocast_and_gradients_of_inputs_run_untouched(model, x):
    fast = served(model, LAYOUT)
    fast(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(x).dtype == torch.bfloat16
    wanted = x.clone().requires_grad_()
    fast(wanted).sum().backward()
    assert wanted.grad is not None
    assert fast.report().calls == {
        "tuned": 1,
        "untouched: called under autocast": 1,
        f"untouched: {NEEDS_GRADIENT}": 1,
    }


def test_other_inputs_run_untouched(model, x):
    fast = served(model, LAYOUT, signature="[0]: 8")
    assert fast(x[:2]).requires_grad
    assert fast.report().calls == {NO_PLAN: 1}


def test_statistics_are_updated_once_a_call(model, x):
    own, fast = copy.deepcopy(model), served(model, LAYOUT)
    for _ in range(3):
        fast(x)
        own(x)
    assert model.norm.num_batches_tracked == 3
    torch.testing.assert_close(model.norm.running_var, own.norm.running_var)


CHANGES = {
    "a layer": lambda model: setattr(model, "head", nn.Linear(8, 4)),
    "a weight": lambda model: setattr(model.head, "bias", nn.Parameter(torch.zeros(4))),
    "a hook": lambda model: model.conv.register_forward_hook(lambda *given: None),
    "a backward hook": lambda model: model.norm.register_full_backward_hook(lambda *given: None),
    "a mode": lambda model: model.norm.eval(),
    "frozen": lambda model: model.conv.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("hooked_anyway")
def test_another_model_runs_untouched_until_it_is_refreshed(model, x, change, caplog):
    fast = served(model, LAYOUT)
    fast(x)
    CHANGES[change](model)
    own = copy.deepcopy(model)
    assert torch.equal(fast(x), own(x))
    assert fast.report().calls == {"tuned": 1, OFF: 1}
    assert caplog.text.count(CHANGED) == 1
    fast.refresh()
    torch.testing.assert_close(fast(x), own(x))
    assert fast.report().calls["tuned"] == 2


def test_a_fault_of_the_first_step_reaches_nobody(model, x, caplog):
    own, fast = copy.deepcopy(model), served(model, LAYOUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "steadytorch.rewrite.conversion.Converting.forward",
            lambda self, x: self.inner(x).detach().requires_grad_(),
        )
        found = fast(x)
    found.sum().backward()
    own(x).sum().backward()
    assert_alike(fast, own)
    for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    fault = "wrong: gives conv.weight no gradient"
    assert fast.report().calls == {f"untouched: {fault}": 1}
    assert fault in caplog.text


def test_an_executor_that_fails_later_is_not_called_again(model, x):
    fast = served(model, LAYOUT)
    fast(x)
    failing = Failing(model, good=1)
    replace_executor(fast, failing)
    for _ in range(4):
        fast(x).sum().backward()
    assert failing.calls == 2
    assert fast.report().calls["untouched: the tuned executor failed"] == 3
    assert fast.report().hits == 2


def test_a_deep_copy_trains_weights_of_its_own(model, batches):
    fast = served(model, LAYOUT)
    fast(batches[0][0])
    other, before = copy.deepcopy(fast), copy.deepcopy(model.state_dict())
    train(other, batches)
    assert isinstance(other, TrainedModule)
    assert other.report().calls == {"tuned": STEPS}
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_a_pickled_one_trains_untouched(model, x):
    opened = pickle.loads(pickle.dumps(served(model, LAYOUT)))
    opened(x).sum().backward()
    assert opened.report().hits == 0
    assert all(p.grad is not None for p in opened.parameters())


def test_closed_it_runs_untouched(model, x):
    fast = served(model, LAYOUT)
    fast(x)
    fast.close()
    assert fast(x).requires_grad
    assert fast.report().calls == {"tuned": 1, "untouched: closed": 1}
