"""Whole training steps as CUDA graphs: what they compute is what the eager step computes."""

from __future__ import annotations

import copy
import gc
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from steadytorch.graphs.checks import Snapshot
from steadytorch.graphs.step import (
    ANOMALY,
    BACKWARD,
    CHANGING,
    ELSEWHERE,
    HOST_RANDOM,
    KEEPS_STATE,
    MOVED,
    SAVED,
    STEP,
    UPDATE,
    WARM_UP,
    WARM_UP_AGAIN,
    WARMING,
    CapturedStep,
)
from steadytorch.workload.compiled_loss import CompiledLoss
from steadytorch.workload.step import EagerStep
from steadytorch.workload.update import Update

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "plain sgd": partial(torch.optim.SGD, lr=0.05),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "adam": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16 * 36, 10)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


def batches(count, size=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 3, 8, 8, generator=generator).cuda(),
            torch.randint(10, (size,), generator=generator).cuda(),
        )
        for _ in range(count)
    ]


def made(
    optimizer="adamw",
    scope=STEP,
    implementation="fused",
    model=Net,
    loss=None,
    check=False,
    compiles=False,
    **options,
):
    """A captured step on a fresh model; without a scope the eager step that it is to equal."""
    torch.manual_seed(0)
    net = model().cuda()
    inner = OPTIMIZERS[optimizer](net.parameters())
    eager = EagerStep(
        net,
        loss or functional.cross_entropy,
        inner,
        update=Update(inner, implementation),
        compiled_loss=CompiledLoss(loss or functional.cross_entropy) if compiles else None,
        **options,
    )
    step = eager if scope is None else CapturedStep(eager, scope, [net], check=check)
    return step, net, inner


def train(step, data, between=lambda i: None):
    torch.manual_seed(7)
    losses = []
    for i, (x, y) in enumerate(data):
        losses.append(step((x,), {}, (y,)))
        between(i)
    return torch.stack(losses), torch.cuda.get_rng_state()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("scope", [None, BACKWARD, UPDATE, STEP])
def test_a_compiled_loss_trains_as_the_loss_does(scope):
    """In the middle, a weight that the loss reads changes: graphs are recorded anew."""
    held = {"weight": 1.0}

    def loss(output, targets):
        return functional.cross_entropy(output, targets) * held["weight"]

    def double(i):
        held["weight"] = 1.0 if i < 9 else 2.0

    found = []
    for given, compiles in ((None, False), (scope, True)):
        held["weight"] = 1.0
        step, net, _ = made("sgd", given, loss=loss, compiles=compiles)
        found.append((net, train(step, batches(24), double)))
        eager = step.step if isinstance(step, CapturedStep) else step
        assert not compiles or eager.compiled_loss.fallback is None
    (net, (losses, random)), (net2, (losses2, random2)) = found
    torch.testing.assert_close(losses, losses2, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.state_dict(), net2.state_dict(), rtol=1e-3, atol=2e-4)
    assert torch.equal(random, random2)
    assert scope is None or step.replays > 10


def assert_same(one, other):
    (_, net, inner, (losses, random)), (_, net2, inner2, (losses2, random2)) = one, other
    torch.testing.assert_close(losses, losses2, rtol=0, atol=0)
    torch.testing.assert_close(net.state_dict(), net2.state_dict(), rtol=0, atol=0)
    assert torch.equal(random, random2)
    for state, state2 in zip(
        inner.state_dict()["state"].values(), inner2.state_dict()["state"].values(), strict=True
    ):
        assert state.keys() == state2.keys()
        for name in state:
            if state[name] is not None:
                torch.testing.assert_close(state[name].cpu(), state2[name].cpu(), rtol=0, atol=0)


def both(data, between=lambda inner: lambda i: None, **options):
    found = []
    for scope in (options.pop("scope", STEP), None):
        step, net, inner = made(scope=scope, **options)
        found.append((step, net, inner, train(step, data, between(inner))))
    return found


@pytest.mark.parametrize("scope", [BACKWARD, UPDATE, STEP])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_steps_are_those_of_the_eager_loop_bit_by_bit(scope, optimizer, accumulate):
    def schedule(inner):
        def lower(i):
            for group in inner.param_groups:
                group["lr"] = group["lr"] * 0.97

        return lower

    one, other = both(
        batches(40),
        schedule,
        scope=scope,
        optimizer=optimizer,
        accumulate=accumulate,
        clip=1.0,
    )
    assert one[0].replays >= 24, one[0].eager
    assert_same(one, other)


def test_switches_and_rates_of_the_optimizer_stay_the_callers():
    step, _, inner = made()
    before = {k: v for k, v in inner.param_groups[0].items() if k != "params"}
    train(step, batches(8))
    assert {k: v for k, v in inner.param_groups[0].items() if k != "params"} == before
    assert step.replays


def test_a_changed_hyper_parameter_is_recorded_anew():
    def change(inner):
        def at(i):
            if i == 9:
                inner.param_groups[0]["betas"] = (0.5, 0.9)

        return at

    one, other = both(batches(20), change)
    assert one[0].replays >= 12
    assert_same(one, other)


def test_momentum_that_is_switched_on_starts_from_its_own_first_step():
    def change(inner):
        def at(i):
            if i == 9:
                inner.param_groups[0]["momentum"] = 0.9

        return at

    one, other = both(batches(20), change, optimizer="plain sgd")
    assert one[0].replays >= 12
    assert_same(one, other)


def test_hyper_parameters_that_always_change_leave_the_update_to_the_host():
    def cycle(inner):
        def at(i):
            inner.param_groups[0]["betas"] = (0.9 - 0.001 * i, 0.999)

        return at

    one, other = both(batches(30), cycle)
    assert one[0].update_reason == CHANGING
    assert one[0].replays >= 10
    assert_same(one, other)


def test_a_loaded_checkpoint_is_what_training_goes_on_from():
    data, kept = batches(24), {}

    def resume(step, net, inner):
        def at(i):
            if i == 7:
                kept[net] = copy.deepcopy((net.state_dict(), inner.state_dict()))
            if i == 15:
                net.load_state_dict(kept[net][0])
                inner.load_state_dict(copy.deepcopy(kept[net][1]))

        return at

    found = []
    for scope in (STEP, None):
        step, net, inner = made(scope=scope)
        found.append((step, net, inner, train(step, data, resume(step, net, inner))))
    assert found[0][0].replays >= 18
    assert_same(*found)


def test_an_optimizer_set_back_to_its_beginning_begins_anew():
    data = batches(16)
    found = []
    for scope in (STEP, None):
        step, net, inner = made("sgd", scope=scope)
        empty = copy.deepcopy(inner.state_dict())

        def at(i, inner=inner, empty=empty):
            if i == 9:
                inner.load_state_dict(copy.deepcopy(empty))

        found.append((step, net, inner, train(step, data, at)))
    assert found[0][0].replays >= 10
    assert_same(*found)


def test_other_shapes_run_and_return():
    data = [b for i in range(12) for b in (*batches(2, 8, i), *batches(1, 5, i))]
    one, other = both(data)
    assert one[0].replays >= 28
    assert_same(one, other)


def test_another_shape_within_an_accumulation_adds_to_the_same_gradients():
    data = [b for i in range(12) for b in (*batches(2, 8, i), *batches(1, 5, i))]
    one, other = both(data, accumulate=3)
    assert one[0].replays >= 16, one[0].eager
    assert_same(one, other)


def test_gradients_dropped_by_the_caller_are_put_back():
    def drop(inner):
        return lambda i: inner.zero_grad(set_to_none=i % 2 == 0)

    one, other = both(batches(14), drop)
    assert one[0].replays >= 10
    assert_same(one, other)


def test_weights_that_move_are_recorded_anew():
    step, net, _ = made()
    train(step, batches(6))
    net.head.weight.data = net.head.weight.data.clone()
    train(step, batches(8))
    assert step.eager[MOVED] == 1
    assert step.replays >= 6


def test_the_loss_is_the_callers_own():
    step, _, _ = made()
    data = batches(10)
    losses = [step((x,), {}, (y,)) for x, y in data]
    assert step.replays
    assert len({float(loss) for loss in losses}) == 10


def test_a_call_that_waits_for_the_gpu_is_named_with_its_line():
    def loss(output, target):
        value = functional.cross_entropy(output, target)
        if value.item() > 1e9:
            return value * 2
        return value

    one, other = both(batches(10), loss=loss)
    (reason,) = [r for r in one[0].eager if r != WARMING]
    assert reason.startswith("test_step_graph.py:")
    assert "value.item()" in reason
    assert one[0].replays == 0
    assert_same(one, other)


def test_what_cannot_be_recorded_runs_eagerly_and_random_numbers_go_on():
    def loss(output, target):
        torch.cuda.synchronize()
        return functional.cross_entropy(output, target)

    one, other = both(batches(12), loss=loss)
    assert one[0].replays == 0
    assert any(reason.startswith("cannot be recorded") for reason in one[0].eager)
    assert_same(one, other)


def halved(saved):
    return saved / 2 if saved.is_floating_point() else saved


@pytest.mark.parametrize(
    ("around", "reason"),
    [
        (torch.autograd.detect_anomaly, ANOMALY),
        (partial(torch.autograd.graph.saved_tensors_hooks, torch.clone, halved), SAVED),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_context_that_backward_passes_heed_is_heeded(around, reason):
    found = []
    for scope in (STEP, None):
        step, net, inner = made(scope=scope)
        numbers = itertools.count()

        def within(*given, step=step, numbers=numbers):
            with around() if next(numbers) > 8 else nullcontext():
                return step(*given)

        found.append((step, net, inner, train(within, batches(12))))
    step = found[0][0]
    assert (step.replays, step.eager[reason]) == (6, 3)
    assert_same(*found)


def test_a_recording_belongs_to_the_process_wide_settings():
    def between(inner):
        return lambda i: torch.set_float32_matmul_precision("high" if 8 < i < 18 else "highest")

    try:
        one, other = both(batches(24), between)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (one[0].graphs, one[0].replays) == (2, 24 - WARM_UP - WARM_UP_AGAIN)
    assert_same(one, other)


def test_an_attribute_of_a_layer_is_not_fixed():
    def between(inner):
        return lambda i: setattr(one_model[-1].norm, "eps", 1e-5 if i < 8 else 0.5)

    one_model = []

    class Kept(Net):
        def __init__(self):
            super().__init__()
            one_model.append(self)

    one, other = both(batches(14), between, model=Kept)
    assert one[0].graphs == 2
    assert_same(one, other)


def test_python_state_is_not_frozen():
    class Counting(Net):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1 + self.calls / 100)

    one, other = both(batches(10), model=Counting)
    assert one[0].eager[KEEPS_STATE]
    assert_same(one, other)


def test_an_exception_of_the_caller_leaves_the_state_intact():
    data, found = batches(12), []
    for scope in (STEP, None):
        step, net, inner = made(scope=scope)
        train(step, data)
        with pytest.raises(ValueError, match="batch"):
            step((data[0][0],), {}, (data[0][1][:3],))
        found.append((step, net, inner, train(step, data)))
    assert found[0][0].replays >= 18
    assert_same(*found)


@pytest.mark.parametrize("scope", [UPDATE, STEP])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_new_graphs_agree_with_the_eager_step(scope, accumulate):
    found = []
    for chosen in (scope, None):
        torch.manual_seed(0)
        net = Net().cuda()
        inner = OPTIMIZERS["sgd"](net.parameters())
        step = EagerStep(
            net,
            functional.cross_entropy,
            inner,
            update=Update(inner, "fused"),
            accumulate=accumulate,
        )
        if chosen is not None:
            step = CapturedStep(step, chosen, [net], check=True)
        found.append((step, net, inner, train(step, batches(20))))
    assert found[0][0].replays >= 12, found[0][0].eager
    assert_same(*found)


def test_a_graph_that_is_not_the_eager_step_does_not_serve(monkeypatch):
    step, net, inner = made(check=True)
    record = step._record

    def wrong(entry, update, backward=True):
        kept = step.step.loss
        step.step.loss = lambda *given: kept(*given) * 1.05
        try:
            return record(entry, update, backward)
        finally:
            step.step.loss = kept

    monkeypatch.setattr(step, "_record", wrong)
    found = (step, net, inner, train(step, batches(12)))
    plain, net2, inner2 = made(scope=None)
    assert step.replays == 0
    assert any("differ in" in reason for reason in step.eager)
    assert_same(found, (plain, net2, inner2, train(plain, batches(12))))


def test_optimizers_that_cannot_be_recorded_step_eagerly():
    torch.manual_seed(0)
    net = Net().cuda()
    inner = torch.optim.Adagrad(net.parameters(), lr=1e-2)
    step = CapturedStep(EagerStep(net, functional.cross_entropy, inner), STEP, [net])
    train(step, batches(14))
    assert step.update_reason is not None
    assert step.replays >= 8


def test_a_scaler_steps_on_the_host_over_recorded_passes():
    found = []
    for scope in (STEP, None):
        torch.manual_seed(0)
        net = Net().cuda()
        inner = OPTIMIZERS["adamw"](net.parameters())
        step = EagerStep(
            net, functional.cross_entropy, inner, clip=1.0, scaler=torch.amp.GradScaler("cuda")
        )
        step = step if scope is None else CapturedStep(step, scope, [net])
        found.append((step, net, inner, train(step, batches(14))))
    assert found[0][0].replays >= 8
    assert_same(*found)


class Convolutions(nn.Module):
    """Its activations take about 600 MB at batch 64, its weights little."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(
                layer
                for i in range(4)
                for layer in (nn.Conv2d(3 if i == 0 else 32, 32, 3, 1, 1), nn.ReLU())
            ),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def forward(self, x):
        return self.layers(torch.nn.functional.interpolate(x, scale_factor=12.0))


@pytest.mark.parametrize("ascending", [False, True])
def test_memory_grows_little_with_the_number_of_shapes(ascending):
    def reserved(sizes):
        gc.collect()
        torch.cuda.empty_cache()
        step, _, _ = made(model=Convolutions)
        for size in sizes:
            train(step, batches(6, size))
        assert step.replays
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()

    sizes = sorted(range(24, 65, 4), reverse=not ascending)
    alone = reserved([64])
    assert reserved(sizes * 2) <= 1.3 * alone


def test_a_step_is_recorded_where_memory_has_room_for_it_once():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step, _, _ = made(scope=None, model=Convolutions)
    train(step, batches(4, 64))
    share = torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    del step
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.5 * share)
    try:
        step, _, _ = made(model=Convolutions, check=True)
        train(step, [*batches(8, 64), *batches(2, 60), *batches(8, 64)])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert step.replays >= 8, step.eager


def test_merged_groups_whose_rates_part_are_recorded_anew():
    found = []
    for scope in (STEP, None):
        torch.manual_seed(0)
        net = Net().cuda()
        inner = OPTIMIZERS["sgd"]([{"params": [p]} for p in net.parameters()])
        step = EagerStep(
            net, functional.cross_entropy, inner, update=Update(inner, "fused", merge=True)
        )
        step = step if scope is None else CapturedStep(step, scope, [net], check=True)

        def part(i, inner=inner):
            if i == 8:
                inner.param_groups[0]["lr"] = 0.0

        found.append((step, net, inner, train(step, batches(18), part)))
    assert found[0][0].replays >= 12, found[0][0].eager
    assert_same(*found)


def test_groups_are_added_when_layers_are_unfrozen():
    found = []
    for scope in (STEP, None):
        torch.manual_seed(0)
        net = Net().cuda()
        net.conv.requires_grad_(False)
        inner = OPTIMIZERS["sgd"]([*net.norm.parameters(), *net.head.parameters()])
        step = EagerStep(net, functional.cross_entropy, inner, update=Update(inner, "fused"))
        step = step if scope is None else CapturedStep(step, scope, [net], check=True)

        def unfreeze(i, net=net, inner=inner):
            if i == 8:
                net.conv.requires_grad_(True)
                inner.add_param_group({"params": list(net.conv.parameters()), "lr": 0.05})

        found.append((step, net, inner, train(step, batches(20), unfreeze)))
    assert found[0][0].replays >= 12, found[0][0].eager
    assert_same(*found)


@pytest.mark.parametrize("accumulate", [2, 3, 4])
def test_the_first_update_within_the_warm_up_keeps_the_update_recorded(accumulate):
    step, _, _ = made("sgd", accumulate=accumulate)
    train(step, batches(6 * accumulate))
    assert step.update_reason is None
    assert step.replays >= 3 * accumulate


def test_a_learning_rate_on_the_cpu_does_not_wait():
    def change(inner):
        def at(i):
            inner.param_groups[0]["lr"] = torch.tensor(1e-3 * (1 + i))

        return at

    one, other = both(batches(12), change)
    assert one[0].update_reason is None
    assert one[0].replays >= 8
    assert_same(one, other)


def test_an_optimizer_that_steps_eagerly_again_counts_on_the_cpu():
    def cycle(inner):
        def at(i):
            inner.param_groups[0]["betas"] = (0.9 - 0.001 * i, 0.999)

        return at

    step, _, inner = made(implementation="own")
    train(step, batches(20), cycle(inner))
    assert step.update_reason == CHANGING
    assert {state["step"].device.type for state in inner.state.values()} == {"cpu"}


def test_a_scaler_that_overflows_at_first_is_stepped_once_a_step():
    found = []
    for scope in (STEP, None):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**127, growth_interval=4)
        torch.manual_seed(0)
        net = Net().cuda()
        inner = OPTIMIZERS["sgd"](net.parameters())
        step = EagerStep(net, functional.cross_entropy, inner, scaler=scaler)
        step = step if scope is None else CapturedStep(step, scope, [net], check=True)
        found.append((step, net, inner, train(step, batches(16))))
        found[-1] += (scaler.state_dict(),)
    assert found[0][0].replays >= 10, found[0][0].eager
    assert found[0][4] == found[1][4]
    assert_same(found[0][:4], found[1][:4])


def test_random_numbers_of_the_host_are_not_fixed():
    def loss(output, target):
        return functional.cross_entropy(output, target) * float(torch.rand(()))

    one, other = both(batches(10), loss=loss)
    assert one[0].eager[HOST_RANDOM]
    assert_same(one, other)


def test_a_parameter_on_the_cpu_is_not_fixed():
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.calls = nn.Buffer(torch.ones(()))

        def _apply(self, fn, recurse=True):
            kept = self.calls
            super()._apply(fn, recurse)
            self.calls = kept
            return self

        def forward(self, x):
            return super().forward(x) * self.calls

    one, other = both(batches(10), model=Scaled)
    assert one[0].eager[ELSEWHERE]
    assert_same(one, other)


@pytest.mark.parametrize("register", [nn.Buffer, nn.Parameter, lambda tensor: tensor])
def test_a_tensor_on_the_cpu_that_the_step_writes_is_not_fixed(register):
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.calls = register(torch.ones(()))
            self.calls.requires_grad_(False)

        def _apply(self, fn, recurse=True):
            super()._apply(fn, recurse)
            self.calls = register(torch.ones(()))  # anew, since a parameter is moved in place
            self.calls.requires_grad_(False)
            return self

        def forward(self, x):
            self.calls += 0.1
            return super().forward(x) * self.calls

    one, other = both(batches(10), model=Scaled)
    assert one[0].eager[KEEPS_STATE] or one[0].eager[ELSEWHERE]
    assert_same(one, other)


def test_memory_that_runs_out_in_a_comparison_takes_no_step(monkeypatch):
    taken, calls = Snapshot.taken, []

    def failing(self, *args):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("full")
        return taken(self, *args)

    monkeypatch.setattr(Snapshot, "taken", failing)
    step, net, inner = made(check=True)
    found = (step, net, inner, train(step, batches(10)))
    plain, net2, inner2 = made(scope=None)
    assert any("too little memory" in reason for reason in step.eager)
    assert_same(found, (plain, net2, inner2, train(plain, batches(10))))
