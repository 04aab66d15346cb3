"""Takes the place of `steadytorch.tune.sweep_worker`: the name of a workload says how it ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from steadytorch.errors import UnsupportedError

GAIN = {
    "estimate": 1.32,
    "low": 1.28,
    "high": 1.36,
    "claim": "process",
    "verdict": "faster",
    "pairs": 9,
}


class Handler:
    def __init__(self, directory):
        self.scratch = directory

    def check(self, *, device):
        if device == "cuda:7":
            raise UnsupportedError("no GPU here")

    def tune(self, *, workload, shape, options, device, store, mode, bundle):
        with Path("tuned.log").open("a") as log:
            print(workload, shape["batch"], options["budget_s"], device, mode, file=log)
        if workload == "raises":
            raise RuntimeError("the data are missing\nin two lines")
        if workload == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if workload == "unable":
            return {"unable": "the plan was not stored"}
        if workload == "sleeps":
            (self.scratch / "left").touch()
            Path("sleeping").write_text(str(self.scratch))
            time.sleep(600)
        plan = {"id": "abcdef012345", "path": "p.json", "transforms": ["cuda_graph"]}
        return {
            "plan": plan | {"objective": "latency"},
            "speedup": GAIN,
            "replayed": False,
            "device": "a device",
        }
