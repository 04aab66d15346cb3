"""Handler of tuning workers: makes the reference, verifies, profiles and finds the bottleneck."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from steadytorch.bench.bench_worker import own_errors
from steadytorch.bench.ramp import LONG_NS
from steadytorch.device.facts import load_facts
from steadytorch.device.roofline import matrix_rate
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.explain.explain_worker import (
    FEWEST_STEPS,
    SETTLING,
    TRACE_FILE,
    ExplainHandler,
    Profiled,
)
from steadytorch.findings.finding import Finding
from steadytorch.training import reference
from steadytorch.training.verify import verify_training
from steadytorch.verification.verify import kept_tf32, make_reference, verify

REFERENCE = "reference.pt"
_COMPUTE_BOUND = 0.3
"""Share of the measured matrix rate above which a workload counts as compute-bound."""
_LAUNCH_BOUND = 0.8
"""Share of the period spent enqueueing above which a workload counts as launch-bound."""


UNCLASSIFIED = "unclassified"


class Character(msgspec.Struct, frozen=True):
    """The bottleneck of the untouched workload.

    Attributes:
        regime: launch-, compute- or memory-bound; `UNCLASSIFIED` if its operations could not be
            counted, and on a CPU if it is not compute-bound.
        host_share: median enqueue time over median period; 0 on the CPU.
        matrix_share: achieved operations per second over the device's measured matrix rate; None
            if unknown.
    """

    regime: str
    host_share: float
    matrix_share: float | None


class Explained(msgspec.Struct, frozen=True):
    """Results of profiling a few steps of the untouched workload.

    Attributes:
        findings: findings that suggest transforms to try.
        product_flops: operations of a step's convolutions, matrix products and attention, including
            those in a loader; None if they could not be counted.
    """

    findings: tuple[Finding, ...]
    product_flops: int | None


CHARACTER_NS = 2e9
"""Time limit in ns for finding what bounds a workload; at least two iterations are timed."""


def load_reference(directory: Path) -> dict[str, Any]:
    """Maps the verification data on the CPU, since all of it may not fit on a device."""
    return torch.load(directory / REFERENCE, map_location="cpu", weights_only=True, mmap=True)


class TuningHandler(ExplainHandler):
    """Worker handler for tuning.

    Its methods take and return types that msgpack can serialise.
    """

    def reference(self, seed: int) -> dict[str, Any]:
        """Writes the verification data to a file and returns a `Reference`."""
        with kept_tf32():  # this process then profiles the workload with the caller's settings
            if self.workload.is_training:
                make = reference.make_reference
                data, summary = make(self.workload, seed, self._start)
            else:
                data, summary = make_reference(self.workload, seed)
        torch.save(data, self.directory / REFERENCE)
        del data
        torch.cuda.empty_cache()  # this worker stays alive, beside others on the device
        return msgspec.to_builtins(summary)

    def verify(self) -> dict[str, Any]:
        """Compares the applied candidate with the reference and returns a `Verification`."""
        data = load_reference(self.directory)
        if self.workload.training_step is not None:
            assert self.applied.training_step is not None
            applied = self.applied.training_step
            step = replace(
                self.workload.training_step,
                compiled_loss=applied.compiled_loss,
                autocast=applied.autocast,
            )
            workload = replace(self.workload, training_step=step)
            found = verify_training(
                self.model, self.step, workload, data, self._start, self._precision
            )
        else:
            found = verify(self.model, self.workload, data)
        torch.cuda.empty_cache()  # this worker stays alive, beside others on the device
        return msgspec.to_builtins(found)

    @own_errors()
    def characterise(self, product_flops: int | None) -> dict[str, Any]:
        """Finds the workload's bottleneck in its current state; returns a `Character`.

        Excludes the data loader from the timing, because separate rules report on loaders.

        Args:
            product_flops: operations of a step; see `Explained`.
        """
        step = self.step
        if self.workload.feed is not None:
            step = replace(self.workload, feed=None).step_function()
        count = int(np.clip(CHARACTER_NS / max(self.iteration_ns, 1), 2, 12))
        periods, host = self.sampler.periods(step, count)
        period_ns = max(float(np.median(periods)), 1.0)
        on_host = self.workload.device.type == "cpu"
        host_share = 0.0 if on_host else float(np.median(host)) / period_ns
        matrix_share = self._matrix_share(product_flops, period_ns * 1e-9)
        if host_share >= _LAUNCH_BOUND:
            regime = "launch-bound"
        elif matrix_share is not None and matrix_share >= _COMPUTE_BOUND:
            regime = "compute-bound"
        elif matrix_share is None or on_host:  # where Python and memory are not told apart
            regime = UNCLASSIFIED
        else:
            regime = "memory-bound"
        return msgspec.to_builtins(Character(regime, host_share, matrix_share))

    @own_errors()
    def explained(self) -> dict[str, Any]:
        """Profiles a few steps of the untouched workload, or one if it is long.

        Rules that need more than a profiler trace report no finding. The process must not be timed
        after profiling.

        Returns:
            An `Explained`.
        """
        # Imported here because every worker loads this file, but only one profiles.
        from steadytorch.findings.finding import Case
        from steadytorch.ledger.ledger import build_ledger
        from steadytorch.rates.roofline import product_flops
        from steadytorch.rules import findings
        from steadytorch.traces.reader import read_trace

        self.set_up([])
        count = 1 if self.iteration_ns >= LONG_NS else FEWEST_STEPS
        profiled = msgspec.convert(self.profile(count, 0.0), Profiled)
        trace = read_trace(self.directory / TRACE_FILE)
        facts = load_facts(str(self.workload.device))
        ledger = build_ledger(trace)
        case = Case(trace=trace, ledger=ledger, workload=self.workload, facts=facts)
        found, _ = findings(case)
        wanted = tuple(f for f in found if f.transforms and not f.information)
        flops, steps = product_flops(trace), SETTLING + len(profiled.periods_ns)
        return msgspec.to_builtins(Explained(wanted, None if flops is None else flops // steps))

    def _matrix_share(self, product_flops: int | None, period_s: float) -> float | None:
        if product_flops is None:
            return None
        try:
            rate = matrix_rate(str(self.workload.device), self.workload.dtype)
        except (UnsupportedError, UsageError):  # dtypes without a matrix product
            return None
        return product_flops / period_s / rate
