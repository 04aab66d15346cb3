"""What each rank of `test_ranks` runs: a training loop under DDP, served by a stored plan.

Started by torchrun with the store, the folder for what it finds, and what rank 1 has: `plan`,
`no plan`, `another plan`, `another model`, `is off`, or `killed` for a rank that dies once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import steadytorch as steady
from steadytorch.tune.session import Session

STEPS = 3
MANY_STEPS = 200


def make_net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    return nn.Sequential(*layers).train()


def make_workload() -> steady.Workload:
    return steady.Workload.training(make_net(), torch.ones(2, 3, 8, 8), torch.sum, torch.optim.SGD)


def train(model: nn.Module, rank: int, steps: int) -> torch.Tensor:
    """The weights after some steps on batches of the rank's own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def settings_of(case: str, rank: int, store: str, folder: Path) -> tuple[str, nn.Module]:
    """The store and the network of a rank."""
    net = make_net()
    if rank != 1 or case in ("plan", "killed"):
        return store, net
    if case == "no plan":
        return str(folder / "empty"), net
    if case == "another plan":
        return str(folder / "other"), net
    if case == "another model":
        return store, net.append(nn.ReLU())
    assert case == "is off"
    os.environ["STEADYTORCH_MODE"] = "off"
    return store, net


def infer(store: str, rank: int) -> dict[str, object]:
    """What `optimize` serves to two ranks, and to one that calls alone."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    together = steady.optimize(model, store=store)
    alone = steady.optimize(model, store=store, agree=False)
    together(torch.ones(1, 3, 8, 8))
    alone(torch.ones(1, 3, 8, 8))
    return {"together": str(together.report()), "alone": str(alone.report())}


def searched_by_one(rank: int, folder: Path) -> None:
    """Tunes on empty stores, one for each rank."""
    searches: list[Session] = []
    search = Session.search
    Session.search = lambda self, watcher=None: searches.append(self) or search(self, watcher)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    plan = steady.tune((model, torch.ones(1, 3, 8, 8)), store=folder / f"plans{rank}", budget="20s")
    found = {
        "id": plan.id,
        "transforms": list(map(str, plan.candidate)),
        "speedup": plan.evidence.speedup.estimate,
        "searched": bool(searches),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def main(store: str, folder: Path, case: str) -> None:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    # Gloo would read the addresses of the run before a restart, as torchrun's store keeps them.
    kept = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(attempt, kept),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    rank = dist.get_rank()
    if case == "search":
        searched_by_one(rank, folder)
    mine, net = settings_of(case, rank, store, folder)
    plan = steady.tune(make_workload(), store=mine, mode="replay")
    if case == "killed" and rank == 1 and attempt == "0":
        os.kill(os.getpid(), signal.SIGKILL)  # while rank 0 waits for it
    fast = plan.apply(net)
    steps = MANY_STEPS if case == "killed" else STEPS
    wrapped = DistributedDataParallel(make_net())
    tuned = train(DistributedDataParallel(fast), rank, steps)
    untouched = train(DistributedDataParallel(make_net()), rank, steps)
    found = {
        "attempt": attempt,
        "id": plan.id,
        "transforms": list(map(str, plan.candidate)),
        "calls": fast.report().calls,
        "off": fast.is_off,
        "wrapped": plan.apply(wrapped).is_off,
        "weights": tuned.tolist(),
        "untouched": untouched.tolist(),
        "infer": infer(store, rank),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    # PyTorch's own end of a group over gloo aborts about once in 45 times, without us as well.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
