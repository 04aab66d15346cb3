"""`plan.step` trains as the loop that it stands for, where nothing can be recorded too."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.errors import UsageError
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.entries import ServingOptions
from steadytorch.runtime.step import NO_GRAPH, TunedStep
from steadytorch.runtime.trained import TrainedModule

LAYOUT = TransformSpec("channels_last", ())
FUSED = TransformSpec("optimizer", (("implementation", "fused"), ("merge", False)))
MERGED = TransformSpec("optimizer", (("implementation", "foreach"), ("merge", True)))
COMPILED = TransformSpec("optimizer", (("implementation", "compiled"), ("merge", False)))
LOSS = TransformSpec("compile_loss", ())
HALF = TransformSpec("autocast", (("dtype", "bf16"),))
GRAPH = TransformSpec("step_graph", (("scope", "step"),))
STEPS = 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 4)

    def forward(self, x, scale=1.0):
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3)))) * scale


def made(*candidate, model=None, optimizer=None, misfit=None, loss=F.cross_entropy, **options):
    torch.manual_seed(0)
    model = model or Net().train()
    optimizer = optimizer or torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    fast = TrainedModule(
        model, lambda context: Resolution(candidate), misfit, ServingOptions(trains=True)
    )
    return TunedStep(fast, model, optimizer, loss, candidate, **options), model, optimizer


def batches(size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 3, 8, 8, generator=generator),
            torch.randint(4, (size,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def train(step, data):
    torch.manual_seed(3)
    return torch.stack([step(x, y) for x, y in data])


def by_hand(data, clip=None, accumulate=1):
    torch.manual_seed(0)
    model = Net().train()
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    torch.manual_seed(3)
    losses = []
    for i, (x, y) in enumerate(data):
        if i % accumulate == 0:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss / accumulate).backward()
        losses.append(loss.detach())
        if (i + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return torch.stack(losses), model, optimizer


CANDIDATES = {
    "nothing": (),
    "fused": (FUSED,),
    "merged": (MERGED,),
    "layout": (LAYOUT, FUSED),
    "graph": (LAYOUT, MERGED, GRAPH),
}


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.5, 1), (0.5, 5)])
def test_it_trains_as_the_loop_does(name, clip, accumulate):
    step, model, optimizer = made(*CANDIDATES[name], clip=clip, accumulate=accumulate)
    found = train(step, batches())
    expected, right, other = by_hand(batches(), clip, accumulate)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), right.state_dict(), rtol=1e-3, atol=1e-4)
    assert len(optimizer.param_groups) == len(other.param_groups)
    assert step.report().micro_batches == STEPS
    assert step.report().eager == {NO_GRAPH: STEPS}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_plan_that_compiles_the_loss_trains_as_the_loop_does(monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph)
    step, model, _ = made(FUSED, LOSS)
    found = train(step, batches())
    expected, right, _ = by_hand(batches())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), right.state_dict(), rtol=1e-3, atol=1e-4)
    assert step.report().loss == "compiled"
    assert "  loss: compiled" in str(step.report()).splitlines()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_loss_takes_16_bit_outputs_of_a_plan_that_is_checked(monkeypatch):
    """The check of the first call compares outputs that are converted."""
    dtypes = []

    def loss(output, targets):
        return F.cross_entropy(output, targets)

    def traced(graph, inputs, **_):
        dtypes.append(inputs[0].dtype)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", traced)
    model = Net().train()
    model.drop = nn.Identity()  # of steps that draw, only sizes are compared
    step, _, _ = made(LOSS, HALF, FUSED, model=model, loss=loss)
    losses = [step(x, y) for x, y in batches()]
    assert dtypes == [torch.bfloat16]
    assert f"{STEPS} of {STEPS} calls tuned" in step.report().model
    assert {found.dtype for found in losses} == {torch.float32}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_loss_that_cannot_be_compiled_is_called_and_the_report_says_why():
    step, _, _ = made(FUSED, LOSS, loss=lambda o, t: F.cross_entropy(o, t) + float(o.sum() > 1e9))
    train(step, batches())
    assert step.report().loss.startswith("called as it is: it cannot be compiled: ")
    assert made(FUSED)[0].report().loss == "called as it is"
    assert (
        made(FUSED, LOSS, misfit=lambda model: "another machine")[0].report().loss
        == "called as it is"
    )


def test_the_loss_is_detached_and_its_own():
    step, _, _ = made(FUSED)
    losses = [step(x, y) for x, y in batches()]
    assert not any(loss.requires_grad for loss in losses)
    assert len({float(loss) for loss in losses}) == STEPS


def test_several_inputs_are_a_tuple_and_keywords_a_mapping():
    data = batches()
    x, y = data[0]
    losses = []
    for inputs in ((x, 2.0), {"x": x, "scale": 2.0}):
        step, _, _ = made(FUSED)
        torch.manual_seed(5)
        losses.append(step(inputs, y))
    assert torch.equal(*losses)


def test_other_shapes_and_dtypes_in_mid_epoch_train_too():
    step, _, _ = made(LAYOUT, FUSED)
    for size in (8, 8, 3, 8):
        x, y = batches(size)[0]
        assert step(x, y).isfinite()


def test_checkpoints_resume():
    data = batches()
    step, model, optimizer = made(FUSED)
    train(step, data)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    torch.manual_seed(9)
    expected = torch.stack([step(x, y) for x, y in data])
    resumed, model2, optimizer2 = made(FUSED)
    model2.load_state_dict(kept[0])
    optimizer2.load_state_dict(kept[1])
    torch.manual_seed(9)
    assert torch.equal(torch.stack([resumed(x, y) for x, y in data]), expected)


def test_an_exception_of_the_loss_is_raised_with_the_state_intact():
    calls = []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 5:
            raise ZeroDivisionError("the caller's")
        return F.cross_entropy(output, target)

    step, model, _ = made(FUSED, loss=loss)
    data = batches()
    for x, y in data[:4]:
        step(x, y)
    before = copy.deepcopy(dict(model.named_parameters()))
    with pytest.raises(ZeroDivisionError, match="the caller's"):
        step(*data[4])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert step(*data[5]).isfinite()


def test_a_loss_that_is_no_scalar_raises_as_the_loop_does():
    step, _, _ = made(FUSED, loss=lambda output, target: output)
    with pytest.raises(RuntimeError, match="scalar"):
        step(*batches()[0])


def test_a_plan_that_does_not_fit_trains_untouched_and_says_so():
    step, model, _ = made(LAYOUT, FUSED, GRAPH, misfit=lambda model: "another machine")
    found = train(step, batches())
    expected, right, _ = by_hand(batches())
    assert torch.equal(found, expected)
    torch.testing.assert_close(model.state_dict(), right.state_dict(), rtol=0, atol=0)
    assert step.report().eager == {"another machine": STEPS}
    assert "another machine" in step.report().optimizer


def test_a_plan_with_an_unknown_transform_trains_untouched():
    unknown = TransformSpec("of_a_later_version", ())
    step, _, _ = made(unknown, FUSED, misfit=lambda model: "plan 1 is of a later version")
    train(step, batches())
    assert step.report().eager == {"plan 1 is of a later version": STEPS}


def test_a_learning_rate_may_be_a_tensor():
    model = Net().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    step, _, _ = made(MERGED, model=model, optimizer=optimizer)
    assert train(step, batches()).isfinite().all()


def test_groups_added_in_mid_training_are_updated():
    torch.manual_seed(0)
    model = Net().train()
    model.conv.requires_grad_(False)
    optimizer = torch.optim.AdamW([*model.norm.parameters(), *model.head.parameters()])
    step, _, _ = made(MERGED, GRAPH, model=model, optimizer=optimizer)
    train(step, batches())
    before = model.conv.weight.detach().clone()
    model.conv.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.conv.parameters()), "lr": 1e-3})
    train(step, batches())
    assert not torch.equal(model.conv.weight, before)


def test_an_optimizer_without_the_implementation_takes_its_own_step():
    model = Net().train()
    optimizer = torch.optim.Rprop(model.parameters(), lr=1e-3)
    step, _, _ = made(FUSED, model=model, optimizer=optimizer)
    assert step(*batches()[0]).isfinite()
    assert "Rprop" in step.report().optimizer


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": "sgd"}, "got str"),
        ({"optimizer": torch.optim.LBFGS(nn.Linear(2, 2).parameters())}, "closure"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)}, "no parameter"),
        ({"loss": 3}, "got int"),
        ({"clip": 0}, "got 0"),
        ({"accumulate": 0}, "got 0"),
        ({"accumulate": 2.0}, "got 2.0"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(change, said):
    with pytest.raises(UsageError) as caught:
        made(FUSED, **change)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_report_reads_well():
    step, _, _ = made(FUSED, plan="0123456789ab", saved_per_step_ns=1e6, break_even_steps=3)
    train(step, batches())
    text = str(step.report())
    assert text.startswith("10 calls: 0 replayed")
    assert "optimizer: fused" in text


def test_the_report_says_why_a_compiled_update_runs_eagerly():
    step, _, _ = made(COMPILED)
    step._eager.update.fallback = "it changes"
    assert step.report().optimizer == "compiled, eager: it changes"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_step_is_not_copied(copied):
    step, *_ = made()
    with pytest.raises(TypeError, match="make another step with"):
        copied(step)
