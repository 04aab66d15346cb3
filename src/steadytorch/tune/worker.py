"""What a tuning worker can do beside timing: make the reference, verify, say what bounds it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from steadytorch.device.facts import load_facts
from steadytorch.device.roofline import matrix_rate
from steadytorch.explain.worker import FEWEST_STEPS, TRACE_FILE, ExplainHandler
from steadytorch.trial.worker import own_errors
from steadytorch.tune.verify import make_reference, verify

REFERENCE = "reference.pt"
_COMPUTE_BOUND = 0.3
"""Share of the measured matrix rate from which on arithmetic, not memory, sets the pace."""
_LAUNCH_BOUND = 0.8
"""Share of the period that the host spends enqueueing from which on launches set the pace."""


class Character(msgspec.Struct, frozen=True):
    """What bounds the untouched workload.

    Attributes:
        regime: launch-, compute- or memory-bound; "unclassified" where its arithmetic could not be
            counted.
        host_share: median enqueue time over median period; 0 on the CPU.
        matrix_share: achieved operations per second over the device's measured matrix rate.
    """

    regime: str
    host_share: float
    matrix_share: float | None


class TuningHandler(ExplainHandler):
    """Answers a tuning parent. Methods take and return msgpack types."""

    def reference(self, seed: int) -> dict[str, Any]:
        """Writes the reference for every verification and returns a `Reference`."""
        data, summary = make_reference(self._workload, seed)
        torch.save(data, self._directory / REFERENCE)
        return msgspec.to_builtins(summary)

    def verify(self) -> dict[str, Any]:
        """Compares the applied candidate with the reference and returns a `Verification`."""
        data = torch.load(
            self._directory / REFERENCE,
            map_location=self._workload.device,
            weights_only=True,
        )
        return msgspec.to_builtins(verify(self._model, self._workload, data))

    @own_errors()
    def characterise(self) -> dict[str, Any]:
        """Says what bounds the workload as it runs now; returns a `Character`."""
        periods, host = self._sampler.periods(self._step, 12)
        period_ns = max(float(np.median(periods)), 1.0)
        on_host = self._workload.device.type == "cpu"
        host_share = 0.0 if on_host else float(np.median(host)) / period_ns
        matrix_share = self._matrix_share(period_ns * 1e-9)
        if host_share >= _LAUNCH_BOUND:
            regime = "launch-bound"
        elif matrix_share is None:
            regime = "unclassified"
        else:
            regime = "compute-bound" if matrix_share >= _COMPUTE_BOUND else "memory-bound"
        return msgspec.to_builtins(Character(regime, host_share, matrix_share))

    @own_errors()
    def findings(self, seconds: float) -> list[Any]:
        """What a few profiled steps of the untouched workload suggest to try, as `Finding`s.

        Rules that need more than a trace abstain. The process is not fit to be timed afterwards.
        """
        # Every candidate's worker loads this file, and only one is asked this.
        from steadytorch.explain.finding import Case
        from steadytorch.explain.ledger import build_ledger
        from steadytorch.explain.rules import findings
        from steadytorch.explain.trace import read_trace

        self.set_up([])
        self.profile(FEWEST_STEPS, seconds)
        trace = read_trace(self._directory / TRACE_FILE)
        facts = load_facts(str(self._workload.device))
        ledger = build_ledger(trace)
        case = Case(trace=trace, ledger=ledger, workload=self._workload, facts=facts)
        found, _ = findings(case)
        return msgspec.to_builtins([f for f in found if f.transforms and not f.information])

    def _matrix_share(self, period_s: float) -> float | None:
        from torch.utils.flop_counter import FlopCounterMode

        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                self._step()
            rate = matrix_rate(str(self._workload.device), self._workload.dtype)
        except Exception:  # operators that cannot be counted, element types without a product
            return None
        return counter.get_total_flops() / period_s / rate
