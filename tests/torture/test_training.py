"""Training steps at random: by a plan, beside the same steps of the untouched model."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from steadytorch.device.facts import load_facts
from steadytorch.results.candidate import Candidate
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.entries import ServingOptions
from steadytorch.runtime.trained import TrainedModule
from steadytorch.transforms import all_variants
from steadytorch.transforms.base import Applicable
from steadytorch.transforms.precision import precision_of
from steadytorch.workload.workload import Workload

from .models import BODIES, HOOKS, Caller, Case
from .test_torture import DEVICE, drawn_plan

COMBINATIONS, COMPILED, SLICE = 400, 20, 20
STEPS = 4
BOUNDS = {"same": 1e-3, "tf32": 2e-2, "bf16": 0.1}
"""Relative difference of losses, and (same) of how far weights moved."""

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3, fused=True),
    "Adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-3, foreach=True),
}


class Net(nn.Module):
    """A case whose body may be checkpointed; its only output is what the loss needs."""

    def __init__(self, case: Case, reentrant: bool | None) -> None:
        super().__init__()
        self.case, self.reentrant = case, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body = self.case.body
        y = body(x) if self.reentrant is None else checkpoint(body, x, use_reentrant=self.reentrant)
        return body.head(y.mean((2, 3)))


class Draw(NamedTuple):
    """One combination, by its seed."""

    seed: int
    body: str
    hook: str | None
    candidate: Candidate
    reentrant: bool | None
    around: bool
    optimizer: str
    accumulate: int
    interlude: str

    def __str__(self) -> str:
        plan = " + ".join(map(str, self.candidate))
        return (
            f"seed {self.seed}: {self.body}, {self.hook or 'no'} hook, {plan}, checkpointed "
            f"within {self.reentrant}, around {self.around}, {self.optimizer}, "
            f"{self.accumulate} passes a step, {self.interlude} between steps"
        )


INTERLUDES = ("nothing", "evaluation", "state saved and loaded", "to", "raise", "autocast")


def drawn(seed: int, compiles: bool = False) -> Draw:
    """The combination of a seed."""
    random, facts = Random(seed), load_facts(DEVICE)
    body = random.choice(list(BODIES))
    net = Net(Case(body, "tensor", "nothing").train(), None)
    made = Workload.training(net, torch.ones(2, 3, 8, 8), torch.sum, torch.optim.SGD)
    usable = [
        t
        for t in all_variants(facts)
        if t.name != "prefetch" and isinstance(t.applies_to(made, facts), Applicable)
    ]
    plan = drawn_plan(random, usable, compiles)
    hook = random.choice([None] * 9 + ["collecting", "stopping", "expiring"])
    reentrant, around = random.choice([None, None, False, True]), random.random() < 0.3
    if DEVICE == "cuda" and hook != "collecting" and (around or reentrant is not None):
        hook = None  # hooks that raise would do so in a thread of autograd's
    return Draw(
        seed,
        body,
        hook,
        plan,
        reentrant,
        around,
        random.choice(list(OPTIMIZERS)),
        random.choice((1, 1, 2)),
        random.choice(INTERLUDES),
    )


class Side:
    """The untouched model or the tuned one, and its caller's loop."""

    def __init__(self, draw: Draw, tunes: bool) -> None:
        torch.manual_seed(draw.seed)
        self.draw, self.caller = draw, Caller()
        case = Case(draw.body, "tensor", "nothing")
        for name in ("scale", "table", "rows"):
            held = getattr(case.body, name)
            setattr(case.body, name, torch.utils._pytree.tree_map(lambda t: t.to(DEVICE), held))
        self.net: nn.Module = Net(case, draw.reentrant).to(DEVICE).train()
        if draw.hook is not None:
            case.body.norm.register_forward_hook(HOOKS[draw.hook](self.caller))
        self.start = [p.detach().clone() for p in self.net.parameters()]
        self.optimizer = OPTIMIZERS[draw.optimizer](self.net.parameters())
        resolution = Resolution(draw.candidate)
        self.fast: Any = self.net
        if tunes:
            options = ServingOptions(trains=True)
            self.fast = TrainedModule(self.net, lambda a: resolution, options=options)

    def called(self, x: torch.Tensor) -> torch.Tensor:
        if self.draw.around:
            return checkpoint(self.fast, x, use_reentrant=False)
        return self.fast(x)

    def step(self, number: int) -> tuple[list[float], str | None]:
        """One step: losses, and what was raised."""
        losses = []
        generator = torch.Generator().manual_seed(1000 * self.draw.seed + number)
        try:
            for _ in range(self.draw.accumulate):
                x = torch.randn(4, 3, 8, 8, generator=generator).to(DEVICE)
                y = torch.randint(6, (4,), generator=generator).to(DEVICE)
                loss = F.cross_entropy(self.called(x), y)
                loss.backward()
                losses.append(float(loss))
            self.optimizer.step()
        except Exception as error:
            return losses, f"{type(error).__name__}: {error}"
        finally:
            self.optimizer.zero_grad()
        return losses, None

    def interlude(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What callers do between steps; returns what it showed."""
        kind, fast = self.draw.interlude, self.fast
        if kind == "evaluation":
            fast.eval()
            with torch.no_grad():
                shown = fast(x)
            fast.train()
            return [shown]
        if kind == "state saved and loaded":
            fast.load_state_dict({n: t.clone() for n, t in fast.state_dict().items()})
        elif kind == "to":
            fast.to(x.device)
        elif kind == "raise":
            self.caller.raises = True
        elif kind == "autocast":
            with torch.autocast(DEVICE, torch.bfloat16), torch.no_grad():
                return [fast(x).float()]
        return []


def run(draw: Draw) -> tuple[str | None, int]:
    """Goes through a combination: where the two sides differ, and how many calls ran tuned."""
    plain, tuned = Side(draw, False), Side(draw, True)
    bound = BOUNDS[precision_of(draw.candidate)]
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(draw.seed)).to(DEVICE)
    try:
        for number in range(STEPS):
            (due, raised), (found, error) = plain.step(number), tuned.step(number)
            if raised != error or len(due) != len(found):
                return f"step {number}: raised {error}, expected {raised}", 0
            if not torch.allclose(torch.tensor(found), torch.tensor(due), rtol=bound, atol=1e-4):
                return f"step {number}: losses {found}, expected {due}", 0
            shown = zip(tuned.interlude(x), plain.interlude(x), strict=True)
            if not all(torch.allclose(a, b, rtol=4 * bound, atol=4 * bound) for a, b in shown):
                return f"step {number}: {draw.interlude} differs", 0
        return _state_fault(plain, tuned, bound), tuned.fast.report().hits
    finally:
        tuned.fast.close()


def _state_fault(plain: Side, tuned: Side, bound: float) -> str | None:
    counts = [int(side.net.case.body.norm.num_batches_tracked) for side in (plain, tuned)]
    if counts[0] != counts[1]:
        return f"{counts[1]} batches were tracked, expected {counts[0]}"
    if bound > BOUNDS["same"]:
        return None  # what the losses say is all that can be asked for
    for start, one, other in zip(
        plain.start, tuned.net.parameters(), plain.net.parameters(), strict=True
    ):
        moved = float((other - start).norm())
        if float((one - other).norm()) > 0.02 * moved + 1e-4:
            return f"a weight of shape {tuple(one.shape)} went elsewhere"
    return None


def check(seeds: range, compiles: bool = False) -> None:
    """Goes through the combinations of these seeds; fails with those that differ."""
    faults, served = [], Counter[bool]()
    for seed in seeds:
        draw = drawn(seed, compiles)
        fault, hits = run(draw)
        served[hits > 0] += 1
        if fault is not None:
            faults.append(f"{draw}\n    {fault}")
    print(f"{len(seeds)} combinations, served tuned: {dict(served)}")
    assert not faults, f"{len(faults)} of {len(seeds)} differ:\n" + "\n".join(faults)
    assert served[True] >= (0.1 if compiles else 0.3) * len(seeds), "too few were served tuned"


@pytest.mark.filterwarnings("ignore")
def test_a_slice_of_all():
    check(range(SLICE))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(SLICE, SLICE + COMBINATIONS, 100))
def test_combinations(first):
    check(range(first, first + 100))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_combinations_that_compile():
    check(range(100_000, 100_000 + COMPILED), compiles=True)
