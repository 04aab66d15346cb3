from __future__ import annotations

from threading import Thread

import pytest
import torch

from steadytorch.compiled import prebuilt
from steadytorch.compiled.prebuilt import Task, supplied
from steadytorch.transforms.compile import Compile
from steadytorch.workload.workload import Workload


def _task() -> Task:
    return Task(Workload(torch.relu, torch.ones(1)), dict, lambda: torch.relu)


def test_nothing_is_found_unless_supplied():
    assert prebuilt.find(_task()) is None
    with supplied(None):
        assert prebuilt.find(_task()) is None


def test_what_is_supplied_is_found_until_it_is_withdrawn():
    with supplied(lambda task: torch.neg):
        with supplied(lambda task: torch.abs):
            assert prebuilt.find(_task()) is torch.abs
        assert prebuilt.find(_task()) is torch.neg
    assert prebuilt.find(_task()) is None


def test_it_is_withdrawn_after_an_error():
    with pytest.raises(ZeroDivisionError), supplied(lambda task: torch.neg):
        raise ZeroDivisionError
    assert prebuilt.find(_task()) is None


def test_other_threads_do_not_see_it():
    found = []
    with supplied(lambda task: torch.neg):
        thread = Thread(target=lambda: found.append(prebuilt.find(_task())))
        thread.start()
        thread.join()
    assert found == [None]


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_compile_takes_what_is_supplied_and_compiles_nothing(mode, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: 1 / 0)
    workload, tasks = Workload(torch.relu, torch.ones(1)), []

    def source(task):
        tasks.append(task)
        return torch.neg

    part = Compile(Compile.Parameters(mode))
    with supplied(source), part.applied(workload) as applied:
        assert applied.model is torch.neg
    assert [task.workload for task in tasks] == [workload]


def test_the_options_say_how_compile_would_compile():
    tasks = []
    part = Compile(Compile.Parameters("max-autotune", True))
    with supplied(lambda task: tasks.append(task) or torch.neg):
        part.applied(Workload(torch.nn.ReLU(), torch.ones(1))).__enter__()
    options = tasks[0].options()
    assert options["freezing"] is True
    assert options["max_autotune"] is True
    assert not options.get("triton.cudagraphs")


@pytest.mark.parametrize(
    ("mode", "workload"),
    [
        ("reduce-overhead", Workload(torch.relu, torch.ones(1))),
        (
            "default",
            Workload.training(torch.nn.Linear(1, 1), torch.ones(1), torch.sum, torch.optim.SGD),
        ),
    ],
)
def test_own_graphs_and_training_steps_are_not_supplied(mode, workload):
    part = Compile(Compile.Parameters(mode))
    with supplied(lambda task: pytest.fail("asked")), part.applied(workload) as applied:
        assert applied.model is not workload.model
