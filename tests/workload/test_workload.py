from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from steadytorch.errors import UsageError
from steadytorch.workload.workload import Workload, without_gradients

sgd = functools.partial(torch.optim.SGD, lr=0.1)


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def test_a_model_that_cannot_be_called_is_refused():
    with pytest.raises(UsageError, match="needs a callable model, got list"):
        Workload([nn.Linear(1, 1)])


def test_a_lone_input_becomes_a_tuple():
    x = torch.zeros(1)
    assert Workload(torch.relu, x).inputs == (x,)


def test_a_list_of_inputs_becomes_a_tuple():
    assert Workload(torch.add, [1, 2]).inputs == (1, 2)


def test_a_mapping_of_inputs_becomes_keyword_arguments():
    x = torch.ones(2)
    workload = Workload(torch.sum, {"input": x}, {"dim": 0})
    assert workload.inputs == ()
    assert workload.step_function()() == 2


@pytest.mark.parametrize(
    ("model", "name"),
    [(nn.Linear(1, 1), "Linear"), (torch.relu, "relu"), (functools.partial(mean), "partial")],
)
def test_the_name_is_by_default_that_of_the_model(model: object, name: str):
    assert Workload(model).name == name


def test_a_function_has_no_module():
    assert Workload(torch.relu).module is None
    assert Workload(nn.ReLU()).module is not None


@pytest.mark.parametrize(
    ("model", "inputs", "device"),
    [
        (nn.Linear(1, 1, device="meta"), torch.zeros(1), "meta"),
        (nn.ReLU(), torch.zeros(1, device="meta"), "meta"),
        (nn.ReLU(), (), "cpu"),
    ],
    ids=["parameter", "input", "neither"],
)
def test_device_is_that_of_the_first_thing_that_has_one(
    model: nn.Module, inputs: object, device: str
):
    assert Workload(model, inputs).device == torch.device(device)


@pytest.mark.parametrize(
    ("model", "inputs", "dtype"),
    [
        (nn.Linear(1, 1, dtype=torch.float64), torch.zeros(1), torch.float64),
        (nn.ReLU(), (torch.zeros(1, dtype=torch.int64), torch.zeros(1).half()), torch.float16),
        (nn.ReLU(), torch.zeros(1, dtype=torch.int64), torch.float32),
    ],
    ids=["parameter", "input", "neither"],
)
def test_dtype_is_that_of_the_first_floating_point_tensor(
    model: nn.Module, inputs: object, dtype: torch.dtype
):
    assert Workload(model, inputs).dtype == dtype


def test_to_moves_model_inputs_and_a_loss_that_is_a_module():
    loss = nn.CrossEntropyLoss(torch.ones(2))
    workload = Workload.training(
        nn.Linear(2, 2), torch.zeros(1, 2), loss, sgd, kwargs={"mask": [torch.zeros(1)]}
    ).to("meta")
    assert loss.weight is not None
    moved = (*workload.model.parameters(), *workload.inputs, *workload.kwargs["mask"], loss.weight)
    assert {tensor.device.type for tensor in moved} == {"meta"}


def test_to_leaves_the_inputs_of_the_original_alone():
    workload = Workload(torch.relu, torch.zeros(1))
    workload.to("meta")
    assert workload.device.type == "cpu"


def test_an_inference_step_returns_the_output():
    model, x = nn.Linear(2, 3), torch.randn(4, 2)
    assert torch.equal(Workload(model, x).step_function()(), model(x))


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_are_not_recorded_and_the_mode_is_put_back(enabled):
    layer = nn.Linear(2, 2)
    with torch.set_grad_enabled(enabled):
        assert not without_gradients(layer, (torch.ones(2),), {}).requires_grad
        assert torch.is_grad_enabled() == enabled
        with pytest.raises(RuntimeError):
            without_gradients(layer, (torch.ones(3),), {})
        assert torch.is_grad_enabled() == enabled


def test_a_training_step_is_forward_backward_and_update():
    torch.manual_seed(0)
    model, x, target = nn.Linear(2, 1), torch.randn(8, 2), torch.randn(8, 1)
    reference = nn.Linear(2, 1)
    reference.load_state_dict(model.state_dict())
    workload = Workload.training(model, x, lambda y: functional.mse_loss(y, target), sgd)
    step = workload.step_function()
    optimizer = sgd(reference.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss = functional.mse_loss(reference(x), target)
        loss.backward()
        optimizer.step()
        assert torch.equal(step(), loss)
    for trained, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(trained, expected)


def test_an_optimizer_that_exists_is_used():
    model = nn.Linear(1, 1)
    optimizer = sgd(model.parameters(), momentum=0.9)
    Workload.training(model, torch.ones(1, 1), mean, optimizer).step_function()()
    assert optimizer.state


def test_the_loss_of_a_step_holds_no_graph():
    step = Workload.training(nn.Linear(1, 1), torch.ones(1, 1), mean, sgd).step_function()
    assert not step().requires_grad


def test_an_optimizer_factory_needs_a_module():
    with pytest.raises(UsageError, match="optimizer cannot be made for a function: pass an nn"):
        Workload.training(mean, torch.ones(1), mean, sgd)  # type: ignore[arg-type]


def test_with_model_keeps_the_rest_and_remembers_the_untouched_model():
    model = nn.Linear(1, 1)
    workload = Workload.training(model, torch.ones(1, 1), mean, sgd, name="mine")
    calls = []

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return model(x)

    changed = workload.with_model(wrapped)
    before = model.weight.clone()
    changed.step_function()()
    assert (changed.name, changed.untouched, len(calls)) == ("mine", model, 1)
    assert not torch.equal(model.weight, before)


def test_with_model_can_replace_the_inputs():
    x = torch.ones(3)
    assert Workload(torch.relu, torch.ones(1)).with_model(torch.relu, (x,)).inputs == (x,)


def test_the_signature_covers_inputs_and_keyword_arguments():
    found = Workload(torch.sum, torch.ones(2), {"dim": 0}).signature()
    assert str(found) == "2:float32, ['dim']=0"


# -- batches of a loader --------------------------------------------------------------------------


def test_with_a_loader_each_step_takes_the_next_batch():
    workload = Workload.from_loader(torch.neg, [torch.tensor([1.0]), torch.tensor([2.0])])
    step = workload.step_function()
    assert [step().item() for _ in range(3)] == [-1.0, -2.0, -1.0]


def test_two_step_functions_take_batches_of_their_own():
    workload = Workload.from_loader(torch.neg, [torch.tensor([1.0]), torch.tensor([2.0])])
    one, other = workload.step_function(), workload.step_function()
    assert [one().item(), one().item(), other().item()] == [-1.0, -2.0, -1.0]


def test_inputs_are_the_first_batch_and_all_else_goes_by_them():
    workload = Workload.from_loader(nn.Linear(2, 1), [{"input": torch.ones(3, 2)}], name="mine")
    assert str(workload.signature()) == "3x2:float32"
    assert (workload.name, workload.inputs, workload.is_training) == ("mine", (), False)
    assert torch.equal(workload.kwargs["input"], torch.ones(3, 2))


def test_batches_go_to_where_the_model_is():
    seen = []

    class Looking(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(input.device.type)
            return super().forward(input)

    model = Looking(2, 1, device="meta")
    workload = Workload.from_loader(model, [torch.ones(3, 2)])
    assert workload.feed is not None
    assert workload.feed.on_host
    assert workload.inputs[0].device.type == "meta"
    workload.step_function()()
    assert seen == ["meta"]


def test_moving_a_workload_moves_what_its_loader_gives():
    workload = Workload.from_loader(torch.neg, [torch.ones(1)]).to("meta")
    assert workload.step_function()().device.type == "meta"


def test_a_loader_that_gives_tensors_on_the_device_is_known_as_such():
    workload = Workload.from_loader(torch.neg, [torch.ones(1, device="meta")])
    assert workload.feed is not None
    assert not workload.feed.on_host


def test_with_a_loader_a_training_step_takes_its_targets_too():
    torch.manual_seed(0)
    loader = [(torch.randn(8, 2), torch.randn(8, 1)) for _ in range(3)]
    model, reference = nn.Linear(2, 1), nn.Linear(2, 1)
    reference.load_state_dict(model.state_dict())
    step = Workload.from_loader(model, loader, functional.mse_loss, sgd).step_function()
    optimizer = sgd(reference.parameters())
    for x, target in loader * 2:
        optimizer.zero_grad()
        loss = functional.mse_loss(reference(x), target)
        loss.backward()
        optimizer.step()
        assert torch.equal(step(), loss)
    for trained, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(trained, expected)


def test_without_its_loader_it_trains_on_the_first_batch():
    loader = [(torch.ones(1, 1), torch.full((1, 1), target)) for target in (2.0, 5.0)]
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    workload = Workload.from_loader(
        model, loader, functional.mse_loss, functools.partial(sgd, lr=0)
    )
    step = replace(workload, feed=None).step_function()
    assert [step().item(), step().item()] == [1.0, 1.0]


@pytest.mark.parametrize("given", [{"loss": mean}, {"optimizer": sgd}], ids=["loss", "optimizer"])
def test_a_loss_and_an_optimizer_come_together(given: dict[str, object]):
    with pytest.raises(UsageError, match="needs both a loss and an optimizer"):
        Workload.from_loader(nn.Linear(1, 1), [torch.ones(1, 1)], **given)  # type: ignore[arg-type]
