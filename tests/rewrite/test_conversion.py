from __future__ import annotations

import pytest
import torch

from steadytorch.rewrite.conversion import Converting, cast, cloned, own_device, own_dtype
from steadytorch.workload.workload import Workload


class Recording(torch.nn.Module):
    def forward(self, *args, **kwargs):
        return args, kwargs


def double(tensor):
    return tensor * 2


def test_arguments_are_converted_at_each_call_and_the_callers_are_left_alone():
    x, mask = torch.ones(1), torch.ones(1)
    seen = []

    class Seeing(torch.nn.Module):
        def forward(self, x, items, mask, causal):
            seen.append(
                ((x.clone(), [items[0].clone(), items[1]]), {"mask": mask, "causal": causal})
            )

    model = Converting(Seeing(), double)
    for _ in range(2):
        model(x, [mask, 7], mask=mask, causal=True)
        args, kwargs = seen[-1]
        assert (args[0].item(), args[1][0].item(), args[1][1]) == (2.0, 2.0, 7)
        assert (kwargs["mask"].item(), kwargs["causal"]) == (2.0, True)
    assert (x.item(), mask.item()) == (1.0, 1.0)


def test_it_is_in_the_mode_of_the_model():
    assert Converting(Recording(), double).training
    assert not Converting(Recording().eval(), double).training


def test_the_untouched_model_decides_on_the_type_and_the_device():
    workload = Workload(torch.nn.Linear(2, 2), torch.ones(1, 2))
    changed = workload.with_model(str, (torch.ones(1, 2).bfloat16(),))
    assert changed.dtype == torch.bfloat16
    assert own_dtype(changed) == torch.float32
    assert own_device(changed) == torch.device("cpu")


def halve(tensor):
    return tensor / 2


def test_what_the_model_hands_through_is_the_callers_own():
    x, items = torch.ones(1), [torch.ones(1)]
    (found, same), _ = Converting(Recording(), double)(x, items)
    assert found is x
    assert same is items


class Filling(torch.nn.Module):
    def forward(self, batch):
        batch["sum"] = batch["x"].sum()
        batch["x"] = batch["x"] + 1
        del batch["old"]
        batch["inner"].append(batch["x"])
        batch["first"] = batch["inner"][0]
        return batch


def test_what_the_model_writes_to_a_container_is_converted_back_and_reaches_the_caller():
    item = torch.ones(1)
    batch = {"old": item, "x": torch.ones(2), "inner": [item]}
    inner = batch["inner"]
    returned = Converting(Filling(), double, halve)(batch)
    assert returned is batch
    assert list(batch) == ["x", "inner", "sum", "first"]
    assert batch["inner"] is inner
    assert batch["first"] is inner[0] is item
    assert (batch["sum"].item(), batch["x"].tolist(), inner[1].tolist()) == (
        2,
        [1.5, 1.5],
        [1.5] * 2,
    )


STRIDED = {
    "dense": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "a slice": lambda t: t[:, 0],
    "every other": lambda t: t[::2, :, ::2],
    "expanded": lambda t: t[:1].expand(6, -1, -1),
    "expanded within": lambda t: t[:, :1].expand(-1, 7, -1),
    "empty": lambda t: t[:0],
    "a number": lambda t: t[0, 0, 0],
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides_survive_copies_and_conversions(name):
    tensor = STRIDED[name](torch.randn(4, 5, 6))
    for made in (cloned(tensor), cast(tensor, torch.float64)):
        assert made.stride() == tensor.stride()
        assert torch.equal(made.float(), tensor)
        assert made.data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_memory_that_overlaps_is_copied_without_strides():
    windows = torch.arange(5.0).unfold(0, 3, 1)
    assert torch.equal(cloned(windows), windows)
