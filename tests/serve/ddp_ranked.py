"""What each rank of `test_ddp_step` runs: steps of a plan around DDP, over gloo.

Started by torchrun with the plan's file, the folder for what it finds, and the case.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import steadytorch as steady

STEPS = 80
FAULT_AT = 20


def make_net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    return nn.Sequential(*layers).train()


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target.mean()).square().mean()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, 3, 8, 8, generator=generator), torch.ones(2)


def weights(net: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


def plain(rank: int, accumulate: int) -> list[float]:
    """The weights after the same steps by hand."""
    net = make_net()
    ddp, optimizer = DistributedDataParallel(net), make_optimizer(net)
    for step in range(STEPS):
        x, y = batch(step, rank)
        if step % accumulate == 0:
            optimizer.zero_grad()
        last = step % accumulate == accumulate - 1
        ddp.require_backward_grad_sync = last
        (loss_of(ddp(x), y) / accumulate).backward()
        if last:
            optimizer.step()
    return weights(net)


def wrapped(net: nn.Module, case: str, rank: int) -> nn.Module:
    if case == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        return net
    options = {"static_graph": True} if case == "static graph" else {}
    ddp = DistributedDataParallel(net, **options)
    if case == "made anew":
        from steadytorch.graphs.data_parallel import layout, make_anew

        ddp(torch.randn(2, 3, 8, 8)).sum().backward()
        for parameter in net.parameters():
            parameter.grad = None
        make_anew(ddp)
        assert layout(ddp)["bucket_sizes"]
    return ddp


def main(path: str, folder: Path, case: str) -> None:
    dist.init_process_group("gloo")
    rank, net = dist.get_rank(), make_net()
    accumulate = 2 if case == "accumulated" else 1
    model = wrapped(net, case, rank)
    buffers = [b.clone() for b in net.buffers()]
    if case == "made anew":
        net.load_state_dict(make_net().state_dict())
    optimizer = make_optimizer(net)
    plan = steady.load_plan(path)
    step = plan.step(model, optimizer, loss_of, accumulate=accumulate)
    off: list[str | None] = []
    for number in range(STEPS):
        if case == "fault" and rank == 1 and number == FAULT_AT:
            net[0].register_forward_hook(lambda *arguments: None)
        x, y = batch(number, rank)
        step(x, y)
        off.append(step._fast.is_off)
    del buffers
    found = {
        "off": off[-1],
        "off_since": next((n for n, reason in enumerate(off) if reason), None),
        "optimizer": step.report().optimizer,
        "report": str(step.report()),
        "kept": case == "fsdp" or model.module is net,
        "weights": [] if case == "fsdp" else weights(net),
        "plain": [] if case == "fsdp" else plain(rank, accumulate),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # PyTorch's own end of a group over gloo aborts now and then


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
