from __future__ import annotations

from steadytorch.findings.watched_steps import Setting
from steadytorch.rules.debug_mode import rule

from ..findings.cases import MS, the, watched


def test_modes_that_are_on_are_named():
    setting = Setting(modes=(("torch.profiler", 1.0), ("torch.autograd.set_detect_anomaly", 0.1)))
    found = the(rule(watched(backward=10 * MS, setting=setting)))
    assert found.title == "a debugging mode is on: torch.profiler"
    assert found.recoverable_ns == (0, 20 * MS)


def test_short_inspections_are_no_fault():
    assert rule(watched(setting=Setting(modes=(("torch.profiler", 0.4),)))) == ()
