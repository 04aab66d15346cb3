"""What a step needs of DDP, in a process group of one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steadytorch.graphs.data_parallel import ServedInside, ddp_of, layout, make_anew, objection


@pytest.fixture(autouse=True)
def _group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(**options):
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), **options)


class Served(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.held, self.calls = [model], 0

    def forward(self, x):
        self.calls += 1
        return self.held[0](x)


def test_only_ddp_is_ddp():
    ddp = made()
    assert ddp_of(ddp) is ddp
    assert ddp_of(ddp.module) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"gradient_as_bucket_view": True, "bucket_cap_mb": 1}, None),
        ({"find_unused_parameters": True}, "find_unused_parameters=True"),
        ({"static_graph": True}, "static_graph=True"),
    ],
)
def test_options_that_change_what_ranks_exchange_are_refused(options, reason):
    found = objection(made(**options))
    assert found is None if reason is None else reason in found


def test_a_communication_hook_is_refused():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp = made()
    ddp.register_comm_hook(None, allreduce_hook)
    assert objection(ddp) == "DDP has a communication hook"


def test_the_served_module_is_called_inside_ddp_and_leaves_it_as_it_was():
    ddp = made()
    inner, served = ddp.module, Served(ddp.module)
    ServedInside(ddp, served)(torch.ones(3, 4)).sum().backward()
    assert (ddp.module, served.calls) == (inner, 1)
    assert inner[0].weight.grad is not None


def test_a_failing_call_leaves_ddp_as_it_was():
    ddp = made()
    inner = ddp.module
    with pytest.raises(RuntimeError):
        ServedInside(ddp, Served(inner))(torch.ones(3, 5))
    assert ddp.module is inner


def test_a_reducer_made_anew_reduces_and_keeps_the_layout():
    ddp, other = made(), made()
    for _ in range(3):
        for each in (ddp, other):
            each.zero_grad()
            each(torch.ones(3, 4)).sum().backward()
    before = layout(ddp)
    for parameter in ddp.parameters():
        parameter.grad = None
    old = ddp.reducer
    make_anew(ddp)
    assert ddp.reducer is not old
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(3, 4)).sum().backward()
    assert layout(ddp) == before
    for one, two in zip(ddp.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
