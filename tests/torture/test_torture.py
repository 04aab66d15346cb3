"""Combinations of models, candidates and what callers do, each compared with the untouched model.

Draws are of fixed seeds: `TORTURE_SEED=1234 pytest -m slow tests/torture -k one` runs one.
"""

from __future__ import annotations

import os
import time
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from steadytorch.device.facts import load_facts
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.runtime.device_samples import INTERVAL_NS
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.entries import ServingOptions
from steadytorch.runtime.module import TunedModule
from steadytorch.transforms import all_variants, conflict, create, order
from steadytorch.transforms.precision import precision_of

from .actions import ACTIONS, CHANGES, NOTHINGS
from .compare import WAYS, difference, seen
from .models import BODIES, HOOKS, OUTPUTS, WRITES, Caller, Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHEAP, COMPILED = 2400, 40
"""Combinations; those that compile take seconds each."""
BLOCK = 100
CALLS = 3
"""Calls before each action and after the last one."""
MOST_ACTIONS = 2
SLICE = 60
"""Combinations that run with every test."""


class Draw(NamedTuple):
    """One combination, by its seed."""

    seed: int
    body: str
    output: str
    write: str
    hook: str | None
    candidate: Candidate
    actions: tuple[str, ...]
    ways: tuple[str, ...]
    canary: bool
    last: bool

    def __str__(self) -> str:
        plan = " + ".join(map(str, self.candidate))
        return (
            f"seed {self.seed}: {self.body}, returns {self.output}, writes {self.write}, "
            f"{self.hook or 'no'} hook, {'channels last input, ' if self.last else ''}{plan}, "
            f"canary {self.canary}, {' then '.join(self.actions)}, called {', '.join(self.ways)}"
        )


def drawn_plan(random: Random, transforms: list[Any], compiles: bool) -> Candidate:
    """Some transforms that can be combined; with `compiles`, `compile` is among them."""
    compilers = [t for t in transforms if t.name == "compile"]
    others = [t for t in transforms if t.name != "compile"]
    while True:
        some = random.sample(others, random.choice((1, 1, 2, 3)))
        some += [random.choice(compilers[:2])] if compiles else []
        plan = order([t.spec for t in some])
        if not conflict(plan):
            return plan


def drawn(seed: int, compiles: bool = False) -> Draw:
    """The combination of a seed, whatever the number of threads in this process."""
    random, facts = Random(seed), load_facts(DEVICE)
    # These models call functions of their caller, which engines refuse.
    left_out = ("prefetch", "threads", "openvino", "onnxruntime")
    transforms = [t for t in all_variants(facts) if t.name not in left_out and not t.of_step]
    if DEVICE == "cpu":
        transforms += [create(TransformSpec("threads", (("count", n),))) for n in (1, 2)]
    plan = drawn_plan(random, transforms, compiles)
    ways = [w for w in WAYS if DEVICE == "cpu" or w != "in a forked child"]
    count = random.randint(1, MOST_ACTIONS)
    return Draw(
        seed,
        random.choice(list(BODIES)),
        random.choice(list(OUTPUTS)),
        random.choice(["nothing", *WRITES]),
        random.choice([None, None, None, *HOOKS]),
        plan,
        tuple(random.choices(list(ACTIONS), k=count)),
        ("plain", *random.choices(["plain"] * len(ways) + ways, k=count)),
        random.random() < 0.5,
        random.random() < 0.2,
    )


def _input(draw: Draw, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw.seed * 100 + step)
    x = torch.randn(2, 3, 8, 8, generator=generator).to(DEVICE)
    return x.contiguous(memory_format=torch.channels_last) if draw.last else x


def _model(draw: Draw, caller: Caller) -> Case:
    torch.manual_seed(draw.seed)
    model = Case(draw.body, draw.output, draw.write, caller, draw.hook).to(DEVICE).eval()
    model.body.scale = model.body.scale.to(DEVICE)
    model.body.table = {"k": model.body.table["k"].to(DEVICE)}
    model.body.rows = [model.body.rows[0].to(DEVICE)]
    return model


def run(draw: Draw) -> tuple[str | None, int]:
    """Goes through a combination.

    Returns:
        Where the tuned module differed from the untouched one, None if nowhere; how many calls it
        served tuned at first.
    """
    callers = Caller(), Caller()
    model, twin = _model(draw, callers[0]), _model(draw, callers[1])
    resolution = Resolution(draw.candidate)
    options = ServingOptions(canary=draw.canary)
    tuned: Any = TunedModule(model, lambda a: resolution, options=options)
    plain: Any = twin
    opened, precision, calls = [tuned], precision_of(draw.candidate), 0
    make, first, is_as_it_was = WRITES[draw.write][0], 0, True
    try:
        for action, named in zip((*draw.actions, "nothing"), draw.ways, strict=True):
            way, before = WAYS[named], tuned.report().hits
            for number in range(CALLS):
                x, calls = _input(draw, calls), calls + 1
                torch.manual_seed(calls)
                other = x.clone(memory_format=torch.preserve_format)
                expected = seen(plain, other, make(), way, callers[1].collected)
                torch.manual_seed(calls)
                found = seen(tuned, x, make(), way, callers[0].collected)
                # What is built or checked first runs hooks as well, as is documented.
                counts = number > 0 and not draw.canary
                if (fault := difference(found, expected, precision, counts)) is not None:
                    return f"call {calls}, {named}: {fault}", first
            served = tuned.report().hits - before
            first = first or served
            if first and is_as_it_was and named == "plain" and not served:
                return f"call {calls}: the plan ended; {tuned.report()}", first
            is_as_it_was = is_as_it_was and action in NOTHINGS
            if action == "pickle" and draw.hook is not None:
                continue  # a hook that closes over something is not pickled
            plain = ACTIONS[action](plain, twin, callers[1])
            tuned = ACTIONS[action](tuned, model, callers[0])
            if DEVICE == "cuda":
                time.sleep(2e-9 * INTERVAL_NS)  # a write sooner after a call may be found later
            opened.append(tuned)
        return None, first
    finally:
        for each in opened:
            each.close()


def check(seeds: range, compiles: bool = False) -> None:
    """Goes through the combinations of these seeds; fails with those that differ."""
    faults, served = [], 0
    for seed in seeds:
        draw = drawn(seed, compiles)
        fault, hits = run(draw)
        if fault is not None:
            faults.append(f"{draw}\n    {fault}")
        served += hits > 0
    print(f"{len(seeds)} combinations, {served} served tuned")
    assert not faults, f"{len(faults)} of {len(seeds)} differ:\n" + "\n".join(faults)
    assert served >= (0.1 if compiles else 0.4) * len(seeds), "too few were served tuned"


@pytest.mark.filterwarnings("ignore")
def test_a_slice_of_all():
    check(range(SLICE))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(SLICE, SLICE + CHEAP, BLOCK))
def test_combinations(first):
    check(range(first, first + BLOCK))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(100_000, 100_000 + COMPILED, 10))
def test_combinations_that_compile(first):
    check(range(first, first + 10), compiles=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif("TORTURE_SEED" not in os.environ, reason="TORTURE_SEED names one combination")
def test_one():
    seed = int(os.environ["TORTURE_SEED"])
    fault, _ = run(drawn(seed, compiles=seed >= 100_000))
    assert fault is None, fault


def test_every_change_is_a_change():
    """Else the suite would not see what it misses."""
    x = torch.randn(2, 3, 8, 8)
    for name, act in CHANGES.items():
        torch.manual_seed(0)
        model = Case("depthwise", "tuple", "nothing").eval()
        with torch.no_grad():
            before = model(x)
            after = act(model, model, Caller())(x)
        assert not all(
            torch.allclose(a, b, rtol=1e-2) for a, b in zip(before, after, strict=True)
        ), name
