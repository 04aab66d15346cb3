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
from steadytorch.workload.opened import opened

STEP_OF_8_BITS = 1 / 255
"""Smallest error bound for 8-bit images, because rounding can change a pixel by one step."""


class Outputs(NamedTuple):
    """Copies of a pipeline call's outputs, with 8-bit images as tensors scaled to [0, 1].

    Attributes:
        tree: the outputs.
        has_images: whether any output is an 8-bit image.
    """

    tree: Any
    has_images: bool


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
        images: list[bool] = []

        def copied(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.detach().clone()
            if not (isinstance(value, np.ndarray) or hasattr(value, "__array_interface__")):
                return value
            array = torch.as_tensor(np.array(value))  # as images of PIL have it
            images.append(array.dtype == torch.uint8)
            return array / 255 if images[-1] else array

        with _seeded(self.seed):
            tree = pytree.tree_map(copied, opened(self.call()))
        return Outputs(tree, any(images))

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
    least = STEP_OF_8_BITS if expected.has_images else 0.0
    return disagreement(found.tree, expected.tree, max(limit, least), strides=False)


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the PyTorch, NumPy and Python generators in the block; restores their states after."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
