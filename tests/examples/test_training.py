"""Training through a plan's step: the example scripts, and recipes around the step.

Each trains to the losses of the same loop in plain PyTorch.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from functools import partial

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint

import steadytorch as steady
from steadytorch.device.facts import load_facts
from steadytorch.plan.fingerprint import make_key, trained_fingerprint
from steadytorch.plan.record import Evidence, Speedup, Timing
from steadytorch.results.candidate import TransformSpec
from steadytorch.serve.plan import Plan
from steadytorch.transforms import ambient

from . import provoked

FUSED = TransformSpec("optimizer", (("implementation", "fused"), ("merge", False)))
MERGED = TransformSpec("optimizer", (("implementation", "fused"), ("merge", True)))
LAYOUT = TransformSpec("channels_last")
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def of_one_thread():
    """Tiny layers gain nothing from several, and wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plan_of(workload, *candidate):
    """A plan of this candidate, as a search would have made it here."""
    key = make_key(
        workload,
        workload.signature(),
        load_facts("cpu"),
        objective="latency",
        precision="same",
        tolerance=None,
        max_memory_bytes=None,
        ambient=ambient(),
    )
    timing = Timing("latency", 1e6, (0.9e6, 1.1e6), 1.2e6, None, 150)
    evidence = Evidence(
        baseline=timing,
        winner=timing,
        speedup=Speedup(1.5, 1.4, 1.6, "process", "faster", 20),
        break_even_calls=1000,
        regime="launch-bound",
        reference="float64",
        trials=(),
        not_applicable={},
        not_tried={},
        search_s=1.0,
    )
    return Plan(
        name=workload.name,
        signature=workload.signature(),
        candidate=candidate,
        evidence=evidence,
        key=key,
        created="2026-01-01T00:00:00+00:00",
        version="0.1.0",
        trains=trained_fingerprint(workload.untouched),
    )


def plain(model, optimizer, loss, clip=None, accumulate=1, scaler=None):
    """The step as it is written without a plan."""
    calls = 0

    def step(inputs, *targets):
        nonlocal calls
        if calls % accumulate == 0:
            optimizer.zero_grad()
        calls += 1
        value = loss(model(inputs), *targets)
        share = value / accumulate
        (share if scaler is None else scaler.scale(share)).backward()
        if calls % accumulate == 0:
            if clip is not None:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        return value.detach()

    return step


# -- the scripts --------------------------------------------------------------------------------

SIZES = {"vocabulary": 64, "context": 16, "layers": 2, "width": 32, "heads": 2}
TINY = {
    "image-classifier": {"batch": 4, "size": 32, "count": 16},
    "gpt2": {"batch": 2, "tokens": 16, **SIZES},
    "masked-lm": {"batch": 4, "tokens": 16, **SIZES},
}
CANDIDATES = {
    "image-classifier": (LAYOUT, FUSED),
    "gpt2": (FUSED,),
    "masked-lm": (FUSED,),
}
MOST = {"image-classifier": 5, "gpt2": 6, "masked-lm": 24}
"""Steps; of GPT-2, updates of four micro-batches."""
each = pytest.mark.parametrize("name", TINY)


@pytest.fixture
def module(name):
    found = provoked.module_of(f"train-{name}")
    if name == "image-classifier":  # at the script's rate, rounding grows tenfold a step
        found.RATE = 1e-3
    return found


def parts_of(module, name):
    """Workload, step options, optimizer factory, loss and batches of a script."""
    workload = module.factory(**TINY[name])
    if name == "image-classifier":
        return workload, {}, module.sgd, F.cross_entropy, workload.feed.loader
    sizes = (TINY[name]["batch"], TINY[name]["tokens"], TINY[name]["vocabulary"])
    source = (module.stream if name == "gpt2" else module.masked)(*sizes)
    options = {"clip": module.CLIP, "accumulate": module.ACCUMULATE} if name == "gpt2" else {}
    return workload, options, module.adamw, module.loss_of, source


def losses_of(module, name, candidate):
    """Losses and weights after training with a plan, or in plain PyTorch for None."""
    workload, options, make_optimizer, loss, batches = parts_of(module, name)
    model = workload.model
    optimizer = make_optimizer(model.parameters())
    step = plain(model, optimizer, loss, **options)
    if candidate is not None:
        step = plan_of(workload, *candidate).step(model, optimizer, loss, **options)
    more = {"window": 2} if name == "masked-lm" else {}
    torch.manual_seed(7)
    losses = module.train(step, optimizer, batches, MOST[name], **more)
    return torch.stack(losses), model.state_dict(), optimizer, step


def distance(found, expected):
    """Relative L2 error of all weights: Adam turns a gradient of rounding alone into a step."""
    assert found.keys() == expected.keys()
    pairs = [(found[key].double(), expected[key].double()) for key in found]
    wrong = sum(float((a - b).square().sum()) for a, b in pairs)
    return (wrong / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5


@each
def test_a_script_trains_as_its_plain_loop_does(module, name):
    found, weights, optimizer, step = losses_of(module, name, CANDIDATES[name])
    expected, right, other, _ = losses_of(module, name, None)
    bound = 1e-2 if name == "image-classifier" else 1e-3  # batch norms of a few values
    torch.testing.assert_close(found, expected, rtol=bound, atol=0)
    assert len(found.unique()) == len(found)
    assert distance(weights, right) < bound
    rates, others = ([g["lr"] for g in o.param_groups] for o in (optimizer, other))
    assert rates == pytest.approx(others)
    assert step.report().optimizer == "fused"
    assert step.report().micro_batches == len(found)


@each
def test_a_script_prints_the_report_of_its_step(module, name, monkeypatch, capsys):
    monkeypatch.setattr(module, "factory", partial(module.factory, **TINY[name]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = {}

    def tune(workload, **options):
        asked.update(options)
        return plan_of(workload, FUSED)

    monkeypatch.setattr(steady, "tune", tune)
    module.main(["--steps", "2", "--budget", "9s"])
    said = capsys.readouterr().out
    assert asked["budget"] == "9s"
    assert "in 2 " in said
    assert "optimizer: fused" in said


@each
def test_the_docstring_of_a_script_names_its_commands(module, name):
    path = provoked.path_of(f"train-{name}").name
    assert f"steady tune examples/{path}:factory" in module.__doc__
    assert f"python examples/{path}" in module.__doc__


@pytest.mark.slow
@each
def test_a_script_runs_on_its_own(name):
    path = provoked.path_of(f"train-{name}")
    done = subprocess.run(
        [sys.executable, str(path), "--help"],
        capture_output=True,
        text=True,
        env=os.environ,
        check=True,
    )
    assert "--budget" in done.stdout


# -- recipes ------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, checkpoints=False):
        super().__init__()
        self.checkpoints = checkpoints
        self.entry, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x):
        x = torch.tanh(self.entry(x))
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return self.head(x)


STEPS = 12


def batches():
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, 6, 8, generator=generator)
    return [(draw(), torch.randint(4, (6,), generator=generator)) for _ in range(STEPS)]


def both(loop, *, optimizer=torch.optim.AdamW, model=Net, **options):
    """Runs a loop with the step of a plan and with the plain one; returns what both give.

    Args:
        loop: takes step, model and optimizer; returns tensors with any nesting.
        optimizer: makes one from the parameters.
        model: makes one.
        options: of the step; a `scaler` is copied.
    """
    results = []
    for tuned in (True, False):
        torch.manual_seed(0)
        net = model().train()
        own = optimizer([{"params": [p]} for p in net.parameters()], lr=1e-2)
        given = copy.deepcopy(options)
        if tuned:
            workload = steady.Workload.training(
                net, batches()[0][0], F.cross_entropy, own, targets=batches()[0][1]
            )
            step = plan_of(workload, MERGED).step(net, own, F.cross_entropy, **given)
            assert step.report().optimizer == "fused, groups merged"
        else:
            step = plain(net, own, F.cross_entropy, **given)
        torch.manual_seed(3)
        results.append((loop(step, net, own), net.state_dict()))
    return results


def agree(results):
    found, expected = results
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_step_schedule():
    def loop(step, net, optimizer):
        scheduler = StepLR(optimizer, 3, gamma=0.3)
        losses, rates = [], []
        for x, y in batches():
            losses.append(step(x, y))
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        assert len(set(rates)) == 5
        return torch.stack(losses)

    agree(both(loop))


def test_a_schedule_that_waits_for_a_plateau():
    def loop(step, net, optimizer):
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        losses = []
        for x, y in batches():
            losses.append(step(x, y))
            scheduler.step(losses[-1])
        assert optimizer.param_groups[0]["lr"] < 1e-4
        return torch.stack(losses)

    agree(both(loop))


@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_a_cycle_of_learning_rate_and_momentum(make):
    def loop(step, net, optimizer):
        scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
        losses, momenta = [], set()
        for x, y in batches():
            losses.append(step(x, y))
            group = optimizer.param_groups[0]
            momenta.add(group["betas"][0] if "betas" in group else group["momentum"])
            if len(losses) < STEPS:
                scheduler.step()
        assert len(momenta) > 5
        return torch.stack(losses)

    agree(both(loop, optimizer=make))


def test_an_average_of_the_weights():
    def loop(step, net, optimizer):
        mean = torch.optim.swa_utils.AveragedModel(
            net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        losses = []
        for x, y in batches():
            losses.append(step(x, y))
            mean.update_parameters(net)
        assert not torch.equal(mean.module.head.weight, net.head.weight)
        return torch.stack(losses), mean.state_dict()

    agree(both(loop))


def test_activation_checkpointing():
    def loop(step, net, optimizer):
        return torch.stack([step(x, y) for x, y in batches()])

    agree(both(loop, model=partial(Net, checkpoints=True), clip=1.0))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_loss_scaler(clip, accumulate, make):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def loop(step, net, optimizer):
        return torch.stack([step(x, y) for x, y in batches()])

    agree(both(loop, optimizer=make, scaler=scaler, clip=clip, accumulate=accumulate))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_loss_scaler_skips_updates_with_infinite_gradients(clip):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def loop(step, net, optimizer):
        seen = []
        for i, (x, y) in enumerate(batches()):
            before = net.head.weight.detach().clone()
            loss = step(x * torch.inf if i == 4 else x, y)
            assert torch.equal(before, net.head.weight) is (i == 4)
            seen.append(loss)
        return torch.stack(seen[:4] + seen[5:])

    agree(both(loop, scaler=scaler, clip=clip))


def test_the_plan_of_a_test_is_like_one_from_a_file():
    workload = steady.Workload.training(Net(), torch.zeros(2, 8), torch.sum, torch.optim.AdamW)
    plan = plan_of(workload, FUSED)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
