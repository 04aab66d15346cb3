"""What each rank of `test_ddp` runs: steps of a plan around DDP, over NCCL.

Started by torchrun with the folder for what it finds, the network, the scope and the case.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import steadytorch as steady
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session

STEPS = 200
FAULT_AT = 60


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean(1))


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "conv": (Conv, (8, 3, 16, 16)),
    "transformer": (Transformer, (8, 12, 64)),
}


def make_net(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name][0]().cuda().train()


def make_optimizer(net: nn.Module, **switches: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9, **switches)


def batch(name: str, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(NETS[name][1], generator=generator).cuda()
    return x, torch.randint(10, (8,), generator=generator).cuda()


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def plan_of(name: str, scope: str) -> steady.Plan:
    """A plan with the transforms of the test, which no search has chosen."""
    net, (x, y) = make_net(name), batch(name, 0, 0)
    workload = steady.Workload.training(
        net, x, functional.cross_entropy, make_optimizer(net), targets=y
    )
    session = Session(workload, SearchOptions(), store="unused")
    candidate = [TransformSpec("optimizer", (("implementation", "fused"), ("merge", False)))]
    if scope.startswith("compiled "):
        candidate.insert(0, TransformSpec("compile"))
    candidate.append(TransformSpec("step_graph", (("scope", scope.split()[-1]),)))
    return msgspec.structs.replace(session.untouched("made by hand"), candidate=tuple(candidate))


def plain(name: str, rank: int) -> torch.Tensor:
    """The weights after the same steps by hand."""
    net = make_net(name)
    ddp, optimizer = DistributedDataParallel(net), make_optimizer(net, fused=True)
    torch.manual_seed(7 + rank)
    for number in range(STEPS):
        x, y = batch(name, number, rank)
        optimizer.zero_grad()
        functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    return weights(net)


def main(folder: Path, name: str, scope: str, case: str) -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.backends.cudnn.deterministic = True
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    rank, net = dist.get_rank(), make_net(name)
    by_hand = plain(name, rank)
    plan = plan_of(name, scope)
    step = plan.step(DistributedDataParallel(net), make_optimizer(net), functional.cross_entropy)
    torch.manual_seed(7 + rank)
    off: list[str | None] = []
    for number in range(STEPS):
        if case == "fault" and rank == 1 and number == FAULT_AT:
            list(net.children())[-1].register_forward_hook(lambda *arguments: None)
        size = 4 if case == "shapes" and rank == 1 and number % 5 == 4 else 8
        x, y = batch(name, number, rank)
        step(x[:size], y[:size])
        off.append(step._fast.is_off)
    mine = weights(net)
    first = mine.clone()
    dist.broadcast(first, 0)
    report = step.report()
    found = {
        "equal": torch.equal(mine, first),
        "error": float((mine - by_hand).norm() / by_hand.norm()),
        "replays": report.replays,
        "eager": report.eager,
        "report": str(report),
        "off": off[-1],
        "off_since": next((n for n, reason in enumerate(off) if reason), None),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # graphs that hold NCCL's work need not be taken apart


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
