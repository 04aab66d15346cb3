from __future__ import annotations

import copy
import pickle
import statistics

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset, dataloader

from steadytorch.findings.watched_steps import SteppedOptimizer
from steadytorch.watching.clock import LOADER, MODULE, OPTIMIZING, SLICES, StepClock
from steadytorch.watching.flight import FlightRecorder
from steadytorch.watching.probes import Probes, probe_cost

SWAPPED = (
    nn.Module.__call__,
    dataloader._BaseDataLoaderIter.__next__,
    graph._engine_run_backward,
)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), nn.Linear(16, 2)
    )


def train(steps=6, probes=None, optimizer=torch.optim.Adam, **loading):
    model = network()
    chosen = optimizer(model.parameters())
    data = TensorDataset(torch.randn(4 * steps, 8), torch.randint(0, 2, (4 * steps,)))
    for x, y in DataLoader(data, 4, shuffle=True, **loading):
        loss = nn.functional.cross_entropy(model(x), y)
        chosen.zero_grad()
        loss.backward()
        chosen.step()
    return [p.detach().clone() for p in model.parameters()], torch.rand(3)


@pytest.fixture
def probed():
    clock = StepClock()
    probes = Probes(clock)
    probes.install()
    yield clock
    probes.remove()


def test_training_is_cut_into_its_parts(probed):
    train()
    assert probed.unit == OPTIMIZING
    assert probed.steps == 5
    found = {name for name, column in zip(SLICES, probed.slices_ns, strict=True) if sum(column)}
    # Earlier tests may have left so much garbage that a collection falls into the steps.
    assert found - {"collection"} == {"input_wait", "forward", "backward", "optimizer", "rest"}
    for step, total in enumerate(probed.durations_ns):
        assert sum(column[step] for column in probed.slices_ns) == total


def test_results_and_random_numbers_are_the_same():
    plain = train()
    probes = Probes(StepClock())
    probes.install()
    try:
        watched = train()
    finally:
        probes.remove()
    torch.testing.assert_close(watched, plain, rtol=0, atol=0)


def test_evaluation_without_gradients_has_its_own_slice(probed):
    model = network()
    for x in DataLoader(torch.randn(12, 8), 4):
        with torch.no_grad():
            model(x)
    assert probed.unit == LOADER
    assert probed.steps == 3
    assert sum(probed.slices_ns[SLICES.index("evaluation")]) > 0


def test_model_calls_alone_are_steps(probed):
    model = network()
    for _ in range(4):
        model(torch.randn(2, 8))
    assert (probed.unit, probed.steps) == (MODULE, 3)


def test_lbfgs_closures_are_cut_too(probed):
    model = network()
    chosen = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        chosen.zero_grad()
        loss = model(torch.ones(2, 8)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        chosen.step(closure)
    assert probed.steps == 2
    assert all(sum(probed.slices_ns[SLICES.index(name)]) > 0 for name in ("forward", "backward"))


def test_an_error_in_a_step_leaves_the_clock_usable(probed):
    model = network()
    chosen = torch.optim.SGD(model.parameters(), 0.1)

    def fail():
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="mat1"):
            model(torch.ones(2, 7))
        with pytest.raises(RuntimeError, match="no"):
            chosen.step(fail)
    chosen.step()
    chosen.step()
    assert probed.steps == 1
    assert sum(probed.slices_ns[SLICES.index("optimizer")]) > 0


def test_everything_is_put_back():
    code = [function.__code__ for function in SWAPPED]
    spaces = [dict(function.__globals__) for function in SWAPPED]
    probes = Probes(StepClock())
    probes.install()
    probes.watch_tensors()
    assert [function.__code__ for function in SWAPPED] != code
    probes.remove()
    assert [function.__code__ for function in SWAPPED] == code
    assert [set(f.__globals__) for f in SWAPPED] == [set(space) for space in spaces]
    assert not _global_optimizer_pre_hooks
    assert not {"to", "item", "cpu"} & set(vars(torch.Tensor))


def test_models_can_be_copied_and_pickled_meanwhile(probed):
    model = network()
    model(torch.ones(1, 8))
    assert not model._forward_hooks
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert b"steadytorch" not in pickle.dumps(again)


def test_copies_and_waits_are_timed_on_request():
    clock = StepClock()
    probes = Probes(clock)
    probes.install()
    probes.watch_tensors()
    try:
        train()
        clock.boundary(OPTIMIZING, clock._leader)
        x = torch.ones(()).to(torch.float64)
        assert x.item() == 1.0
        clock.boundary(OPTIMIZING, clock._leader)
    finally:
        probes.remove()
    last = {name: column[-1] for name, column in zip(SLICES, clock.slices_ns, strict=True)}
    assert last["copies"] > 0
    assert last["synchronisation"] > 0


def test_cost_is_measured_and_leaves_nothing():
    code = nn.Module.__call__.__code__
    costs = [probe_cost() for _ in range(5)]
    timed_ns = statistics.median(cost.timed_ns for cost in costs)
    assert timed_ns > statistics.median(cost.nested_ns for cost in costs) >= 0
    assert nn.Module.__call__.__code__ is code


@pytest.mark.slow
@pytest.mark.parametrize("flight", [None, FlightRecorder(3)])
def test_compiled_code_is_the_same(flight):
    import torch._dynamo.utils as seen

    def counted():
        torch._dynamo.reset()
        seen.counters.clear()
        model = network().eval()
        model[1].register_forward_hook(lambda *_: None)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(3):
            compiled(torch.ones(2, 8)).sum().backward()

        @torch.compile(backend="eager")
        def broken(x):
            return model(x).sum().detach() * x.max().item() + x.to(torch.float64).sum()

        broken(torch.ones(2, 8))
        update = torch.optim.SGD(model.parameters(), 0.1)

        @torch.compile(backend="eager")
        def clipped(x):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            update.zero_grad()
            return x * norm

        clipped(torch.ones(2))
        return {k: dict(v) for k, v in seen.counters.items() if k in ("frames", "stats")}

    plain = counted()
    probes = Probes(StepClock(flight=flight))
    probes.install()
    probes.watch_tensors()
    try:
        assert counted() == plain
    finally:
        probes.remove()


def stepped(**options):
    """What probes tell of AdamW over 30 parameters, one of them frozen."""
    probes = Probes(StepClock())
    probes.install()
    try:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(15)))
        model[0].weight.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    finally:
        probes.remove()
    return probes.stepped()


@pytest.mark.parametrize(
    ("options", "fused", "parameters", "single"),
    [
        ({}, False, 29, True),
        ({"foreach": False}, False, 29, True),
        ({"foreach": True}, False, 29, False),
        ({"fused": True}, True, 0, False),
    ],
)
def test_how_an_optimizer_updates_is_noted(options, fused, parameters, single):
    assert stepped(**options) == [SteppedOptimizer("AdamW", fused, parameters, single)]


def test_a_fused_optimizer_does_not_hide_another_of_its_class():
    probes = Probes(StepClock())
    probes.install()
    try:
        for fused in (False, True):
            train(1, optimizer=lambda p, fused=fused: torch.optim.Adam(p, fused=fused))
    finally:
        probes.remove()
    assert probes.stepped() == [SteppedOptimizer("Adam", False, 4, True)]
