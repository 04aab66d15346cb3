"""An untouched model and a tuned executor on one fake clock."""

from __future__ import annotations

from random import Random

import torch

from steadytorch.measure.clock import FakeClock
from steadytorch.runtime.canary import Canary

X = torch.linspace(-1, 1, 8)
EXPECTED = X * 2


class Bench:
    """An untouched model and a tuned executor on one fake clock, with the calls of each counted."""

    def __init__(self, tuned=None, untouched=None, tuned_ns=800, untouched_ns=1000, seed=1):
        self.clock, self.noise = FakeClock(), Random(seed)
        self.tuned_model = tuned or (lambda: X * 2)
        self.untouched_model = untouched or (lambda: X * 2)
        self.tuned_ns, self.untouched_ns = tuned_ns, untouched_ns
        self.calls = []

    def _run(self, name, model, nanoseconds):
        self.calls.append(name)
        self.clock.advance(int(nanoseconds * 1000 * (1 + self.noise.gauss(0, 0.01))))
        return model()

    def tuned(self):
        return self._run("tuned", self.tuned_model, self.tuned_ns)

    def untouched(self):
        return self._run("untouched", self.untouched_model, self.untouched_ns)

    def canary(self, **options):
        options.setdefault("rng", Random(0))
        return Canary(1e-4, clock=self.clock, **options)

    def until_settled(self, canary, most=500, inputs=()):
        """The verdict, and every result on the way to it."""
        results = []
        for _ in range(most):
            result, verdict = canary.step(self.tuned, self.untouched, "cpu", inputs)
            results.append(result)
            if verdict is not None:
                return verdict, results
        raise AssertionError("never settled")


def once(bench, canary, inputs=()):
    return canary.step(bench.tuned, bench.untouched, "cpu", inputs)
