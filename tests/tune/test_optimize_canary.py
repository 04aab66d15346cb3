"""The first calls of a stored plan: sound plans are served, wrong or slow ones are not."""

from __future__ import annotations

import pytest
import torch
from stored import equal, make_plan, store_plan
from torch import nn

from steadytorch.measure.clock import FakeClock
from steadytorch.tune.optimize import optimize


def test_the_canary_lets_a_sound_plan_pass(model, x, store):
    tuned = optimize(model, store=store)
    for _ in range(200):
        assert equal(tuned, model, x)
    (served,) = tuned.report().signatures
    assert served.finding
    assert "wrong" not in served.finding


def test_the_canary_demotes_a_plan_that_is_wrong(model, x, store, monkeypatch, caplog):
    monkeypatch.setattr(
        "steadytorch.transforms.base.Scoped.__call__",
        lambda self, *args: self.model(*args) * 1.01,
    )
    tuned = optimize(model, store=store)
    for _ in range(3):
        assert equal(tuned, model, x)
    assert tuned.report().hits == 0
    (served,) = tuned.report().signatures
    assert "demoted: wrong" in served.reason
    assert caplog.text.count("demoted: wrong") == 1


class Pausing(nn.Linear):
    def __init__(self, pause):
        super().__init__(8, 4)
        self.pause = pause

    def forward(self, x):
        self.pause(2_000_000)
        return super().forward(x)


@pytest.mark.parametrize("pause_ns", [0, 4_000_000], ids=["faster", "slower"])
def test_the_canary_demotes_a_stored_plan_that_has_become_slow_and_no_other(
    x, tmp_path, monkeypatch, caplog, pause_ns
):
    clock = FakeClock()

    def serve(self, *args):
        clock.advance(pause_ns)
        return nn.Linear.forward(self.model, *args)

    monkeypatch.setattr("steadytorch.runtime.canary.HostClock", lambda: clock)
    monkeypatch.setattr("steadytorch.transforms.base.Scoped.__call__", serve)
    model = Pausing(clock.advance).eval()
    tuned = optimize(model, store=store_plan(tmp_path, make_plan(model, x)))
    for _ in range(150):
        assert equal(tuned, model, x)
    report = tuned.report()
    (served,) = report.signatures
    if not pause_ns:
        assert (report.hits, served.reason) == (150, None)
        assert served.finding.startswith("faster")
        return
    assert served.executor is None
    assert served.reason.startswith("demoted: slower than the untouched model: +")
    assert served.reason in str(report)
    assert 0 < report.hits < 150
    assert caplog.text.count("demoted: slower") == 1


class Remembering(nn.Linear):
    def __init__(self):
        super().__init__(8, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * 0 + self.calls


@pytest.mark.parametrize("canary", [True, False])
def test_a_model_with_a_memory_runs_untouched_and_each_call_counts_once(x, tmp_path, canary):
    model = Remembering().eval()
    tuned = optimize(model, store=store_plan(tmp_path, make_plan(model, x)), canary=canary)
    assert [tuned(x).max().item() for _ in range(4)] == [1, 2, 3, 4]
    assert "untouched: the model keeps state between its calls" in tuned.report().calls


class Noisy(nn.Linear):
    def __init__(self):
        super().__init__(8, 4)

    def forward(self, x):
        return super().forward(x) + torch.randn(4)


@pytest.mark.parametrize("canary", [True, False])
def test_a_model_that_draws_random_numbers_draws_the_same_ones(x, tmp_path, canary):
    model = Noisy().eval()
    tuned = optimize(model, store=store_plan(tmp_path, make_plan(model, x)), canary=canary)
    torch.manual_seed(4)
    found = [tuned(x) for _ in range(3)]
    torch.manual_seed(4)
    for each in found:
        torch.testing.assert_close(each, model(x), rtol=0, atol=0)
