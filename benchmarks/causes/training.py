"""An ordinary training script with at most one fault, run by `benchmarks/causes` unchanged.

python benchmarks/causes/training.py [FAULT] [--model mlp] [--steps 150] [--seed 0]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

FEATURES, CLASSES = 256, 10


class Tokens(nn.Module):
    """A small transformer over the features, cut into tokens of 32."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.embed, self.body = nn.Linear(32, 64), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x.unflatten(1, (-1, 32)))).mean(1))


def mlp() -> nn.Module:
    wide = 1024
    return nn.Sequential(
        nn.Linear(FEATURES, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(),
        nn.Linear(wide, CLASSES),
    )  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 16, 16)), nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(512, CLASSES),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn, "tokens": Tokens}


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Samples that are ready in memory."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, FEATURES)
        self.y = torch.randint(0, CLASSES, (count,)).tolist()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index], self.y[index]


class Fault:
    """What a fault may do around the parts of a step; this one does nothing."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def sample(self, data: Samples) -> Samples:
        return data

    def batches(self, loader: Any) -> Any:
        return loader

    def model(self, model: nn.Module) -> nn.Module:
        return model

    def inputs(self, step: int, x: torch.Tensor) -> torch.Tensor:
        return x

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        """Runs after the optimizer's step."""

    def end(self) -> None:
        """Runs after the last step."""


class Job:
    """A training run, as such scripts write it."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.steps, self.batch, self.asked = asked.steps, asked.batch, asked
        torch.manual_seed(asked.seed)
        self.fault = FAULTS[asked.fault](self)
        self.net = MODELS[asked.model]()

    def run(self) -> list[float]:
        fault = self.fault
        self.data = fault.sample(Samples(self.steps * self.batch))
        loader = fault.batches(self.loader(self.data))
        model = fault.model(self.net)
        optimizer = fault.optimizer(OPTIMIZERS[self.asked.optimizer](self.net.parameters()))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        losses = []
        for step, (x, y) in enumerate(loader):
            out = model(fault.inputs(step, x))
            loss = F.cross_entropy(out, y[: len(out)])
            loss.backward()
            if self.asked.clip:
                nn.utils.clip_grad_norm_(self.net.parameters(), self.asked.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            fault.update(step, loss, out)
            if step % 50 == 49:
                print(f"step {step + 1}: loss {losses[-1]:.4f}")
        fault.end()
        return losses

    def loader(self, data: Samples) -> DataLoader[Any]:
        """Loads whole batches where the samples allow it."""
        workers = {"num_workers": self.asked.workers} if self.asked.workers else {}
        if type(data) is not Samples:
            return DataLoader(data, self.batch, shuffle=True, **workers)
        ready = TensorDataset(data.x, torch.tensor(data.y))
        batches = BatchSampler(RandomSampler(ready), self.batch, drop_last=False)
        return DataLoader(ready, batch_size=None, sampler=batches, **workers)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-4, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-4, fused=True),
}


# -- faults of the input ------------------------------------------------------------------------


class _Slow(Samples):
    def __init__(self, data: Samples, slow: Callable[[int], None]) -> None:
        self.x, self.y, self.slow = data.x, data.y, slow

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.slow(index)
        return super().__getitem__(index)


class SlowStorage(Fault):
    """Each sample is waited for."""

    def sample(self, data: Samples) -> Samples:
        return _Slow(data, lambda index: time.sleep(0.0001))


class Decoding(Fault):
    """Each sample is decoded in the training process."""

    def sample(self, data: Samples) -> Samples:
        def decode(index: int) -> None:
            sum(i * i for i in range(1500))

        return _Slow(data, decode)


class ColdReads(Fault):
    """One batch in twenty waits for storage."""

    def batches(self, loader: Any) -> Any:
        data = self.job.data
        reads = iter(range(10**9))

        def read(index: int) -> None:
            if next(reads) % (20 * self.job.batch) == 0:
                time.sleep(0.15)

        return DataLoader(_Slow(data, read), self.job.batch)


class Generator(Fault):
    """Batches come from a function, not from a loader."""

    def batches(self, loader: Any) -> Any:
        def read_shards() -> Iterator[Any]:
            for batch in loader:
                time.sleep(0.015)
                yield batch

        return read_shards()


class Respawn(Fault):
    """Workers are started anew for each of many short epochs."""

    def batches(self, loader: Any) -> Any:
        few = torch.utils.data.Subset(self.job.data, range(25 * self.job.batch))
        short = DataLoader(few, self.job.batch, num_workers=1)

        def epochs() -> Iterator[Any]:
            for _ in range(self.job.steps // 25):
                yield from short

        return epochs()


# -- faults of the script -----------------------------------------------------------------------


class Checkpoints(Fault):
    """A checkpoint every ten steps."""

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        if step % 10 == 9:
            self.save_checkpoint()

    def save_checkpoint(self) -> None:
        with tempfile.TemporaryFile() as file:
            for _ in range(8):
                torch.save(self.job.net.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())


class Metrics(Fault):
    """A confusion matrix in Python at each step."""

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        self.count_hits(out)

    def count_hits(self, out: torch.Tensor) -> None:
        matrix = [[0] * CLASSES for _ in range(CLASSES)]
        for row in out.softmax(1).tolist():
            for value in row:
                matrix[int(value * 9)][0] += 1
                sum(range(1000))


class Histograms(Fault):
    """Histograms of all weights at each step."""

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        self.log_weights()

    def log_weights(self) -> None:
        for parameter in self.job.net.parameters():
            json.dumps(torch.histc(parameter.detach(), 64).tolist())
            parameter.detach().flatten().sort()


class Copies(Fault):
    """A deep copy of the model at each step, for an average of weights."""

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        self.average_weights()

    def average_weights(self) -> None:
        for _ in range(4):
            self.kept = copy.deepcopy(self.job.net)


class Validation(Fault):
    """A pass over validation data after each step."""

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        with torch.no_grad():
            self.job.net(torch.randn(4 * self.job.batch, FEATURES))


class Subprocesses(Fault):
    """A program is run every third step, to see the machine's state."""

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        if step % 3 == 2:
            self.ask_machine()

    def ask_machine(self) -> None:
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)


class ReadingBack(Fault):
    """Numbers are read one at a time."""

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        self.read_values(out)

    def read_values(self, out: torch.Tensor) -> None:
        self.total = sum(out[i, j].item() for i in range(len(out)) for j in range(CLASSES))


class GrowingList(Fault):
    """All losses so far are averaged at each step."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.seen: list[float] = []

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        self.seen += [loss.item()] * 15_000
        self.mean_loss()

    def mean_loss(self) -> float:
        return sum(self.seen) / len(self.seen)


# -- faults of memory ---------------------------------------------------------------------------


class Graphs(Fault):
    """The losses are added up with their graphs."""

    total: Any = 0.0

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        penalty = sum((p * p).sum() for p in self.job.net.parameters())
        self.total = self.total + loss + 1e-6 * penalty + self.kept(out)

    def kept(self, out: torch.Tensor) -> torch.Tensor:
        return (out.repeat(1, 400) ** 2).exp().log1p().mean()


class Outputs(Fault):
    """All outputs of a run are kept."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.kept: list[torch.Tensor] = []

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        self.kept.append(torch.randn(len(out), 16 * FEATURES))


class Cycles(Fault):
    """Each step leaves many objects in cycles, beside a large heap."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.heap = [{"index": i, "of": [i]} for i in range(400_000)]

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        self.kept = []
        for _ in range(3000):
            node: dict[str, Any] = {}
            node["self"] = node
            self.kept.append(node)


class Collecting(Fault):
    """The garbage is collected at each step."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.heap = [[i] for i in range(100_000)]

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        gc.collect()


# -- faults of the machine ----------------------------------------------------------------------


class Neighbours(Fault):
    """Other programs use all cores."""

    def model(self, model: nn.Module) -> nn.Module:
        loop = "while True: pass"
        count = os.cpu_count() or 1
        self.others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
        return model

    def end(self) -> None:
        for each in self.others:
            each.kill()
            each.wait()


class Oversubscribed(Fault):
    """Loading workers compute beside as many threads as there are cores."""

    def batches(self, loader: Any) -> Any:
        def decode(index: int) -> None:
            sum(i * i for i in range(4000))

        workers = 2 * (os.cpu_count() or 1)
        return DataLoader(
            _Slow(self.job.data, decode), self.job.batch, num_workers=workers, prefetch_factor=8
        )


class BackgroundThread(Fault):
    """A thread of the script holds the interpreter's lock."""

    def model(self, model: nn.Module) -> nn.Module:
        self.stop = False
        self.thread = threading.Thread(target=self.refresh_cache, daemon=True)
        self.thread.start()
        return model

    def refresh_cache(self) -> None:
        while not self.stop:
            sum(range(10_000))

    def end(self) -> None:
        self.stop = True
        self.thread.join()


class OneThread(Fault):
    """PyTorch has one thread for all cores, as torchrun sets it."""

    def model(self, model: nn.Module) -> nn.Module:
        torch.set_num_threads(1)
        return model


# -- faults of the model and the compiler -------------------------------------------------------


class Shapes(Fault):
    """Batches of ever other sizes go through torch.compile."""

    def model(self, model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="eager", dynamic=False)

    def inputs(self, step: int, x: torch.Tensor) -> torch.Tensor:
        return x[: max(1, len(x) - step // 10 % len(x))]


class Anomalies(Fault):
    """The check of autograd for NaN is left on."""

    def model(self, model: nn.Module) -> nn.Module:
        torch.autograd.set_detect_anomaly(True)
        return model

    def end(self) -> None:
        torch.autograd.set_detect_anomaly(False)


class Profiled(Fault):
    """A profiler is left on."""

    def model(self, model: nn.Module) -> nn.Module:
        self.profiler = torch.profiler.profile(record_shapes=True, with_stack=True)
        self.profiler.__enter__()
        return model

    def end(self) -> None:
        self.profiler.__exit__(None, None, None)


class Unfused(Fault):
    """Adam updates one tensor after another."""

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.job.net.register_parameter("table", nn.Parameter(torch.zeros(2_000_000)))
        self.job.net.get_parameter("table").grad = torch.zeros(2_000_000)
        return torch.optim.Adam(self.job.net.parameters(), 1e-4)

    def update(self, step: int, loss: torch.Tensor, out: torch.Tensor) -> None:
        self.job.net.get_parameter("table").grad = torch.zeros(2_000_000)


class Update(Fault):
    """An optimizer written in Python."""

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        class Plain(torch.optim.Optimizer):
            def __init__(self, params: Any) -> None:
                super().__init__(params, {"lr": 1e-3})

            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for p in self.param_groups[0]["params"]:
                    for row, slope in zip(p, p.grad, strict=True):
                        row -= 1e-3 * slope

        return Plain(self.job.net.parameters())


class LateRank(Fault):
    """One rank of a job prepares its batches slower than the others."""

    def model(self, model: nn.Module) -> nn.Module:
        dist.init_process_group("gloo")
        return nn.parallel.DistributedDataParallel(model)

    def sample(self, data: Samples) -> Samples:
        late = os.environ["RANK"] == "1"
        return _Slow(data, lambda index: time.sleep(0.0004)) if late else data

    def end(self) -> None:
        dist.destroy_process_group()


class Ranks(LateRank):
    """A job whose ranks are alike."""

    def sample(self, data: Samples) -> Samples:
        return data


FAULTS: dict[str, Callable[[Job], Fault]] = {
    "clean": Fault,
    "slow storage": SlowStorage,
    "decoding": Decoding,
    "cold reads": ColdReads,
    "generator": Generator,
    "respawned workers": Respawn,
    "checkpoints": Checkpoints,
    "metrics": Metrics,
    "histograms": Histograms,
    "deep copies": Copies,
    "validation": Validation,
    "subprocesses": Subprocesses,
    "values read back": ReadingBack,
    "growing list": GrowingList,
    "kept graphs": Graphs,
    "kept outputs": Outputs,
    "cycles": Cycles,
    "explicit collection": Collecting,
    "neighbours": Neighbours,
    "oversubscribed": Oversubscribed,
    "page faults": Fault,
    "background thread": BackgroundThread,
    "one thread": OneThread,
    "shapes": Shapes,
    "anomaly detection": Anomalies,
    "profiler": Profiled,
    "unfused optimizer": Unfused,
    "update in Python": Update,
    "late rank": LateRank,
    "ranks": Ranks,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", nargs="?", default="clean", choices=list(FAULTS))
    parser.add_argument("--model", default="mlp", choices=list(MODELS))
    parser.add_argument("--optimizer", default="sgd", choices=list(OPTIMIZERS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", type=Path, help="file for the losses")
    asked = parser.parse_args()
    losses = Job(asked).run()
    if asked.losses:
        asked.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
