from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.transforms.base import Applicable, NotApplicable
from steadytorch.transforms.prefetch import Delivered, Prefetch, Prefetched
from steadytorch.workload.workload import Workload

CPU = torch.device("cpu")


def fed() -> Workload:
    loader = [torch.full((2, 4), float(i)) for i in range(3)]
    return Workload.from_loader(nn.Linear(4, 2).eval(), loader)


def test_it_is_for_loaders_on_the_host_and_a_gpu(gpu):
    assert Prefetch().applies_to(fed(), gpu) == Applicable()


def test_training_steps_are_fed_ahead_as_well(gpu):
    loader = [(torch.ones(2, 4), torch.ones(2, 2))]
    training = Workload.from_loader(
        nn.Linear(4, 2), loader, nn.functional.mse_loss, torch.optim.SGD
    )
    assert Prefetch().applies_to(training, gpu) == Applicable()


def test_a_workload_without_a_loader_has_nothing_to_take_ahead(gpu, conv_workload):
    answer = Prefetch().applies_to(conv_workload, gpu)
    assert answer == NotApplicable(
        "the workload has no loader: create it with Workload.from_loader"
    )


def test_on_a_cpu_there_is_nothing_to_copy(cpu):
    assert Prefetch().applies_to(fed(), cpu) == NotApplicable("no CUDA device")


def test_batches_that_are_on_the_device_need_no_copy(gpu):
    there = Workload.from_loader(torch.neg, [torch.ones(1, device="meta")])
    answer = Prefetch().applies_to(there, gpu)
    assert answer == NotApplicable("the loader yields no tensors in host memory")


def test_model_and_inputs_stay_as_they_are_and_the_loader_is_taken_ahead():
    given = fed()
    with Prefetch().applied(given) as changed:
        assert changed.model is given.model
        assert changed.inputs is given.inputs
        assert changed.feed is not None
        assert isinstance(changed.feed.loader, Prefetched)
    assert given.feed is not None
    assert isinstance(given.feed.loader, list)


def test_steps_get_the_same_batches_in_the_same_order():
    given = fed()
    step = given.step_function()
    with Prefetch().applied(given) as changed:
        ahead = changed.step_function()
        for _ in range(5):
            assert torch.equal(ahead(), step())


def test_a_model_alone_is_left_as_it_is(conv_workload):
    with Prefetch().applied(conv_workload) as changed:
        assert changed is conv_workload


# -- batches on the device when asked for -------------------------------------------------------


def test_batches_are_moved_when_asked_for():
    asked = []

    class Watched:
        def __iter__(self):
            for i in range(3):
                asked.append(i)
                yield {"x": [torch.zeros(1)], "index": i}

    coming = iter(Delivered(Watched(), torch.device("meta")))
    first = next(coming)
    assert asked == [0]
    assert (first["x"][0].device.type, first["index"]) == ("meta", 0)
    assert [batch["index"] for batch in coming] == [1, 2]


@pytest.mark.parametrize("kind", [Delivered, Prefetched])
def test_each_iteration_starts_anew_and_the_length_is_the_loaders(kind):
    loader = kind([torch.tensor(1), torch.tensor(2)], CPU)
    assert [b.item() for b in loader] == [b.item() for b in loader] == [1, 2]
    assert len(loader) == 2


@pytest.mark.parametrize("kind", [Delivered, Prefetched])
def test_a_loader_without_a_length_gives_none(kind):
    with pytest.raises(TypeError, match="has no len"):
        len(kind(iter([1]), CPU))
