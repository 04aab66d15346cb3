"""What each rank of `test_devices` runs: a search for all ranks.

Started by torchrun with the folder for what it finds.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import steadytorch as steady


def main(folder: Path) -> None:
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    said: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("steadytorch").addHandler(heard)
    logging.getLogger("steadytorch").setLevel(logging.INFO)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()]
    model = nn.Sequential(*layers).eval().cuda()
    x = torch.randn(8, 3, 64, 64, device="cuda")
    plan = steady.tune(steady.Workload(model, x), budget="60s", store=folder / f"store{rank}")
    with torch.no_grad():
        fast = plan.apply(model)
        close = torch.allclose(fast(x), model(x), rtol=1e-3, atol=1e-4)
    found = {"plan": plan.id, "close": close, "said": said}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
