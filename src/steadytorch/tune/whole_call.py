"""Verifies and times a whole pipeline call with tuned modules against the untouched call."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from steadytorch.measure.race import Judgement
from steadytorch.measure.race import compare as race_pairs
from steadytorch.runtime.agreement import disagreement
from steadytorch.runtime.module import TunedModule
from steadytorch.tune.module_calls import ModuleCalls
from steadytorch.workload.generators import restored
from steadytorch.workload.opened import opened

STEP_OF_8_BITS = 1 / 255
"""Smallest error bound for 8-bit images, because rounding can change a pixel by one step."""


class Outputs(NamedTuple):
    """Copies of a pipeline call's outputs, with 8-bit images as tensors scaled to [0, 1].

    Attributes:
        tree: the outputs.
        others: the outputs with None in place of each 8-bit image.
    """

    tree: Any
    others: Any


class Outcome(NamedTuple):
    """Result of verifying and timing a pipeline call with tuned modules.

    Attributes:
        effect: timing of the call with plans against without; None if it was not timed.
        reason: why the plans must not stay; None if they may.
        unserved: maps the path of each tuned module that served no call to the reason.
        kept: the tuned modules that stay in the pipeline.
    """

    effect: Judgement | None
    reason: str | None
    unserved: dict[str, str]
    kept: tuple[Swap, ...] = ()


@dataclass(frozen=True, eq=False)
class Swap:
    """A module of a pipeline and the tuned module that replaces it."""

    calls: ModuleCalls
    tuned: TunedModule

    @property
    def path(self) -> str:
        """Path of the module within the pipeline."""
        return self.calls.places[0].path

    def put_in(self) -> None:
        """Puts the tuned module into the pipeline."""
        # Into the registries, because setters of pipelines may write to a configuration.
        for place in self.calls.places:
            place.registry[place.name] = self.tuned

    def take_out(self) -> None:
        """Puts the original module back into the pipeline."""
        for place in self.calls.places:
            place.registry[place.name] = self.calls.module


@dataclass(frozen=True)
class WholeCall:
    """A call of a pipeline, always run with the same random seed.

    Attributes:
        call: runs the pipeline and returns its outputs.
        seed: seed of each run.
    """

    call: Callable[[], Any]
    seed: int

    def outputs(self) -> Outputs:
        """Runs the call and copies its outputs."""
        images = list[torch.Tensor]()

        def copied(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.detach().clone()
            if not (isinstance(value, np.ndarray) or hasattr(value, "__array_interface__")):
                return value
            array = torch.as_tensor(np.array(value))  # as images of PIL have it
            if array.dtype != torch.uint8:
                return array
            images.append(array / 255)
            return images[-1]

        with _seeded(self.seed):
            tree = pytree.tree_map(copied, opened(self.call()))
        known = set(map(id, images))
        others = pytree.tree_map(lambda leaf: None if id(leaf) in known else leaf, tree)
        return Outputs(tree, others)

    def check(self, swaps: list[Swap], expected: Outputs, limit: float, seconds: float) -> Outcome:
        """Verifies and times the call with tuned modules; takes the modules out if a check fails.

        Args:
            swaps: the tuned modules; those that serve no call are taken out.
            expected: outputs of the untouched call.
            limit: relative L2 error allowed.
            seconds: time for the timing.

        Raises:
            Exception: exceptions of the call propagate; all modules are then taken out.
        """
        kept: tuple[Swap, ...] = ()
        try:
            for swap in swaps:
                swap.put_in()
            self.outputs()  # builds the executors and checks their first calls
            outcome = self._judged(swaps, expected, limit, seconds)
            kept = outcome.kept
        finally:
            for swap in swaps:
                if swap not in kept:
                    swap.take_out()
                    swap.tuned.close()
        return outcome

    def _judged(
        self, swaps: list[Swap], expected: Outputs, limit: float, seconds: float
    ) -> Outcome:
        before = [swap.tuned.report().hits for swap in swaps]
        fault = difference(self.outputs(), expected, limit)
        if fault is not None:
            return Outcome(None, f"the outputs of the call with plans differ: {fault}", {})
        unserved = {
            swap.path: "; ".join(swap.tuned.report().fallbacks) or "it was not called"
            for swap, hits in zip(swaps, before, strict=True)
            if swap.tuned.report().hits == hits
        }
        serving = [swap for swap in swaps if swap.path not in unserved]
        if not serving:
            return Outcome(None, "no plan served a call", unserved)
        effect = self._timed(serving, seconds)
        if effect.verdict == "slower":
            return Outcome(effect, "the call is slower with plans", unserved)
        return Outcome(effect, None, unserved, tuple(serving))

    def _timed(self, swaps: list[Swap], seconds: float) -> Judgement:
        """Times pairs of calls without and with tuned modules; the modules stay in the pipeline.

        Tuned modules that served no call stay in place in both calls of a pair.
        """
        deadline = time.monotonic() + seconds

        def block(act: Callable[[Swap], None]) -> float:
            for swap in swaps:
                act(swap)
            return self._seconds()

        judgement, _ = race_pairs(
            lambda: block(Swap.take_out),
            lambda: block(Swap.put_in),
            rng=Random(self.seed),
            stop=lambda: time.monotonic() > deadline,
        )
        for swap in swaps:
            swap.put_in()
        return judgement

    def _seconds(self) -> float:
        with _seeded(self.seed):
            _synchronize()
            began = time.perf_counter()
            self.call()
            _synchronize()
            return time.perf_counter() - began


def difference(found: Outputs, expected: Outputs, limit: float) -> str | None:
    """Describes how outputs differ beyond a relative L2 error; None if the outputs agree."""
    fault = disagreement(found.others, expected.others, limit, strides=False)
    return fault or disagreement(
        found.tree, expected.tree, max(limit, STEP_OF_8_BITS), strides=False
    )


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the PyTorch, NumPy and Python generators in the block; restores their states after."""
    with restored():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
