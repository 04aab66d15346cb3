from __future__ import annotations

import functools
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steadytorch.plan.description import describe
from steadytorch.workload.workload import Workload

SOURCE = """
import torch
from torch import nn

def neighbour(x):
    return x.relu()

def unrelated(x):
    return x

def scaled(factor):
    def scale(x):
        return x * factor
    return scale

class Base(nn.Module):
    def forward(self, x):
        return x - 1

class Model(Base):
    limit = 3

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.switch = False

    def forward(self, x):
        if self.ready:
            x = self.helper(x)
        return super().forward(neighbour(x) + 1)

    @property
    def ready(self):
        return True

    def helper(self, x, times=2):
        return self.layer(x)

    def unused(self):
        return 0
"""
_numbers = itertools.count()


def load(folder: Path, source: str) -> Any:
    """Imports the text as a module that has a file, as a user's would."""
    name = f"described_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(source: str, file_name: str = "<string>") -> dict[str, Any]:
    """Runs the text without a file, as `python -c` does."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file_name, "exec"), names)
    return names


def lines(model: Any) -> list[str]:
    return describe(Workload(model))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("neighbour(x) + 1", "neighbour(x) + 2"),
        ("x.relu()", "x.sigmoid()"),
        ("return x - 1", "return x - 2"),
        ("self.layer(x)", "self.layer(-x)"),
        ("times=2", "times=3"),
        ("return True", "return False"),
        ("nn.Linear(4, 4)", "nn.Linear(4, 5)"),
        ("nn.Linear(4, 4)", "nn.Linear(4, 4, dtype=torch.float64)"),
        ("nn.Linear(4, 4)", "nn.Linear(4, 4).eval()"),
        ("nn.Linear(4, 4)", "nn.Bilinear(4, 4, 4)"),
        ("self.switch = False", "self.switch = True"),
        ("self.switch = False", "self.register_buffer('switch', torch.zeros(1))"),
    ],
)
@pytest.mark.parametrize("from_file", [True, False])
def test_changes_of_the_computation_change_the_lines(
    tmp_path: Path, old: str, new: str, from_file: bool
) -> None:
    assert SOURCE.count(old) == 1
    if from_file:
        before, after = (load(tmp_path, s).Model() for s in (SOURCE, SOURCE.replace(old, new)))
    else:
        before, after = (run(s)["Model"]() for s in (SOURCE, SOURCE.replace(old, new)))
    assert lines(before) != lines(after)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def unrelated(x):\n    return x", "def unrelated(x):\n    return -x"),
        ("return 0", "return 1"),
        ("import torch\n", "\n\n\nimport torch\n"),
    ],
)
@pytest.mark.parametrize("from_file", [True, False])
def test_code_that_does_not_run_does_not_change_the_lines(
    tmp_path: Path, old: str, new: str, from_file: bool
) -> None:
    assert old in SOURCE
    if from_file:
        before, after = (load(tmp_path, s).Model() for s in (SOURCE, SOURCE.replace(old, new, 1)))
    else:
        before, after = (
            run(s, name)["Model"]()
            for s, name in ((SOURCE, "<string>"), (SOURCE.replace(old, new, 1), "<stdin>"))
        )
    assert lines(before) == lines(after)


def test_weights_do_not_count(tmp_path: Path) -> None:
    module = load(tmp_path, SOURCE)
    model, other = module.Model(), module.Model()
    assert not torch.equal(model.layer.weight, other.layer.weight)
    assert lines(model) == lines(other)


def test_the_device_does_not_count() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.ParameterList([torch.zeros(3)]))

    assert lines(model()) == lines(model().to("meta"))


class DeviceShown(nn.Linear):
    shown = "cuda:0"

    def extra_repr(self) -> str:
        return f"at {id(self):#x} on {self.shown} (GPU 3)"


@pytest.mark.parametrize("shown", ["cuda:1", "cpu", "device(type='cuda', index=1)"])
def test_addresses_and_devices_in_a_repr_do_not_count(shown: str) -> None:
    other = DeviceShown(1, 1)
    vars(other)["shown"] = shown
    assert repr(other) != repr(DeviceShown(1, 1))
    assert lines(other) == lines(DeviceShown(1, 1))


def test_training_differs_from_inference() -> None:
    model = nn.Linear(2, 1)
    training = Workload.training(model, torch.zeros(1, 2), torch.sum, torch.optim.SGD)
    assert describe(training) != lines(model)


def training(loss: Any, optimizer: Any, model: nn.Module | None = None) -> list[str]:
    model = model or nn.Linear(2, 1)
    if isinstance(optimizer, dict):
        optimizer = torch.optim.SGD(model.parameters(), **optimizer)
    return describe(Workload.training(model, torch.zeros(1, 2), loss, optimizer))


def test_the_loss_counts_in_training() -> None:
    assert training(lambda y: y.sum(), {"lr": 1.0}) != training(lambda y: y.mean(), {"lr": 1.0})


def test_the_shape_of_targets_counts_and_their_values_do_not() -> None:
    def loss(targets: torch.Tensor) -> Any:
        return lambda y: (y - targets).sum()

    sgd = {"lr": 1.0}
    assert training(loss(torch.zeros(1)), sgd) == training(loss(torch.ones(1)), sgd)
    assert training(loss(torch.zeros(1)), sgd) != training(loss(torch.zeros(2)), sgd)


def test_switches_of_the_optimizer_count_and_rates_do_not() -> None:
    assert training(torch.sum, {"lr": 1.0}) == training(torch.sum, {"lr": 0.5})
    assert training(torch.sum, {"lr": 1.0}) != training(torch.sum, {"lr": 1.0, "foreach": True})
    assert training(torch.sum, torch.optim.SGD) != training(torch.sum, torch.optim.Adam)


def test_frozen_parameters_count_in_training_only() -> None:
    model, frozen = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
    assert lines(model) == lines(frozen)
    assert training(torch.sum, torch.optim.SGD, model) != training(
        torch.sum, torch.optim.SGD, frozen
    )


def test_the_untouched_model_counts_not_the_transformed_one() -> None:
    model = nn.Linear(2, 2)
    workload = Workload(model, torch.zeros(1, 2))
    assert describe(workload.with_model(torch.relu)) == describe(workload)


def test_a_forward_set_on_the_instance_counts() -> None:
    model, patched = nn.Linear(2, 2), nn.Linear(2, 2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert lines(model) != lines(patched)


class Relu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


class Tanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


def test_traced_models_are_told_apart_by_their_program() -> None:
    first, second = (torch.fx.symbolic_trace(model()) for model in (Relu, Tanh))
    assert type(first).__qualname__ == type(second).__qualname__
    assert lines(first) != lines(second)


def test_lambdas_of_one_line_are_told_apart() -> None:
    first, second = (lambda x: x + 1, lambda x: x + 2)
    assert lines(first) != lines(second)


@pytest.mark.parametrize(("new", "same"), [("return -x", False), ("return x", True)])
def test_methods_called_behind_a_decorator_count(new: str, same: bool) -> None:
    text = """
from torch import nn
def decorated(function):
    return lambda *arguments: function(*arguments)
class Model(nn.Module):
    @decorated
    def forward(self, x):
        return self.helper(x)
    def helper(self, x):
        return x
"""
    changed = text.replace("return x", new)
    assert (lines(run(text)["Model"]()) == lines(run(changed)["Model"]())) is same


def test_constants_of_a_closure_count(tmp_path: Path) -> None:
    scaled = load(tmp_path, SOURCE).scaled
    assert lines(scaled(2.0)) == lines(scaled(2.0))
    assert lines(scaled(2.0)) != lines(scaled(3.0))


class Wrapper:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


small, large = nn.Linear(2, 2), nn.Linear(2, 3)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: lambda x: model(x),
        lambda model: functools.partial(model, 1),
        lambda model: functools.partial(torch.relu, model),
        lambda model: model.forward,
        lambda model: functools.partial(print, [{"nested": model}], end=""),
        Wrapper,
    ],
)
def test_a_model_behind_a_callable_counts(wrap: Any) -> None:
    assert lines(wrap(small)) == lines(wrap(nn.Linear(2, 2)))
    assert lines(wrap(small)) != lines(wrap(large))


def test_a_model_behind_a_global_name_counts() -> None:
    text = "from torch import nn\nmodel = nn.Linear(2, {})\ndef step(x):\n    return model(x)"
    assert lines(run(text.format(2))["step"]) != lines(run(text.format(3))["step"])


def test_builtin_functions_are_told_apart() -> None:
    assert lines(torch.relu) != lines(torch.tanh)


def test_cycles_end() -> None:
    names = run("def f(x):\n    return g(x)\ndef g(x):\n    return f(x)\n")
    names["f"].__defaults__ = ([names["f"]],)
    assert lines(names["f"])


class Unprintable(nn.Linear):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_a_repr_that_raises_still_leaves_the_layout() -> None:
    assert lines(Unprintable(1, 1)) == lines(Unprintable(1, 1))
    assert lines(Unprintable(1, 1)) != lines(Unprintable(1, 2))


class Unready(nn.Module):
    def __init__(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_module_that_was_not_initialised_is_described() -> None:
    assert any("Unready" in line for line in lines(Unready()))


def test_parameters_without_a_shape_are_described() -> None:
    assert any("uninitialised" in line for line in lines(nn.LazyLinear(2)))


def test_the_loss_of_output_and_targets_counts_and_their_values_do_not() -> None:
    def fed(loss: Any, target: float) -> list[str]:
        loader = [(torch.zeros(1, 2), torch.full((1, 1), target))]
        return describe(Workload.from_loader(nn.Linear(2, 1), loader, loss, torch.optim.SGD))

    def squared(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().mean()

    def absolute(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).abs().mean()

    assert fed(squared, 1.0) == fed(squared, 2.0)
    assert fed(squared, 1.0) != fed(absolute, 1.0)
    assert fed(nn.MSELoss(), 1.0) != fed(nn.L1Loss(), 1.0)
