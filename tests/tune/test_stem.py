from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steadytorch.bench.bench_worker import save_payload
from steadytorch.conv.timing import Measured
from steadytorch.kernels.stem import CONFIGS
from steadytorch.process.worker import WorkerFault
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune import stem
from steadytorch.tune.stem import calls_of, choose_config, fastest
from steadytorch.workload.workload import Workload

FUSED = TransformSpec("fused_kernels", (("stem", True), ("residual", False), ("config", "")))
PREFIX = (
    TransformSpec("fold_batch_norm"),
    FUSED,
    TransformSpec("cast_weights", (("dtype", "bf16"),)),
    TransformSpec("channels_last"),
)


def workload() -> Workload:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    return Workload(nn.Sequential(*layers, nn.MaxPool2d(3, 2, 1)).eval(), torch.randn(1, 3, 32, 32))


def test_stems_are_seen_as_they_are_after_the_prefix():
    (call,) = calls_of(workload(), PREFIX)
    x, weight, bias, *_, config = call
    assert (x.dtype, weight.dtype, bias.shape) == (torch.bfloat16, torch.bfloat16, (8,))
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert config == ""


def test_without_a_fused_stem_there_is_nothing_to_see():
    assert calls_of(workload(), ()) == []
    assert fastest([], lambda: False) == ""


def program(name, is_idle):
    return SimpleNamespace(config=SimpleNamespace(name=name), busy_cores=1 if is_idle else 132)


class Clock:
    """A fake device with a fixed time per configuration."""

    def __init__(self, monkeypatch, times, unfit=(), idle=(), usual=""):
        self.times = times
        monkeypatch.setattr(stem, "on_device", lambda calls: True)
        monkeypatch.setattr(
            stem,
            "prepared_program",
            lambda call, name: None if name in unfit else program(name or usual, name in idle),
        )
        monkeypatch.setattr(stem, "make_arm", lambda name, calls: name)
        monkeypatch.setattr(stem, "time_arms", lambda names, calls, stop: self.medians(names))
        self.asked = []

    def medians(self, names):
        self.asked = list(names)
        return {name: self.times.get(name, 100.0) for name in names}


CALL = (torch.empty(1), None, None, 2, 3, 3, 2, 1, False, "")
FIRST, SECOND, *_, LAST = CONFIGS


def test_the_fastest_configuration_is_chosen(monkeypatch):
    Clock(monkeypatch, {LAST: 50.0})
    assert fastest([CALL], lambda: False) == LAST


def test_of_equally_fast_ones_it_is_the_first(monkeypatch):
    Clock(monkeypatch, {SECOND: 50.2, LAST: 50.0})
    assert fastest([CALL], lambda: False) == SECOND


def test_those_without_a_program_are_not_timed(monkeypatch):
    clock = Clock(monkeypatch, {FIRST: 1.0}, unfit={FIRST})
    assert fastest([CALL], lambda: False) == SECOND
    assert FIRST not in clock.asked


def test_those_that_leave_cores_idle_are_tried_last(monkeypatch):
    clock = Clock(monkeypatch, {}, idle={FIRST})
    assert fastest([CALL], lambda: False) == SECOND
    assert clock.asked == [*list(CONFIGS)[1:], FIRST]


def test_where_there_is_no_program_at_all_none_is_named(monkeypatch):
    Clock(monkeypatch, {}, unfit=set(CONFIGS))
    assert fastest([CALL], lambda: False) == ""


def test_where_the_usual_one_is_the_fastest_there_is_nothing_to_name(monkeypatch):
    Clock(monkeypatch, {LAST: 50.0}, usual=LAST)
    assert fastest([CALL, CALL], lambda: False) == ""


def test_one_that_cannot_be_timed_is_not_chosen(monkeypatch):
    def timed(names, calls, stop):
        broken = SimpleNamespace(found=Measured(FIRST, excluded="it raised"), times_ns=[])
        sound = SimpleNamespace(found=Measured(SECOND), times_ns=[7.0, 9.0, 8.0])
        return own({FIRST: broken, SECOND: sound}, calls, stop)

    own, raced = stem.time_arms, []
    Clock(monkeypatch, {})
    monkeypatch.setattr(stem, "Flush", lambda device, tensor: None)
    monkeypatch.setattr(stem, "record_all", lambda arms: [a for a in arms if not a.found.excluded])
    monkeypatch.setattr(stem, "take_rounds", lambda arms, *rest: raced.extend(arms))
    monkeypatch.setattr(stem, "time_arms", timed)
    assert fastest([CALL], lambda: False) == SECOND
    assert [arm.found.choice for arm in raced] == [SECOND]


def test_with_no_time_one_is_taken_all_the_same(monkeypatch):
    clock = Clock(monkeypatch, {LAST: 1.0})
    assert fastest([CALL], lambda: True) == FIRST
    assert clock.asked == [FIRST]


def test_a_worker_chooses_none_where_there_is_no_gpu(tmp_path):
    save_payload(workload(), tmp_path)
    found = choose_config(tmp_path, prefix=PREFIX, device="cpu", deadline_s=5.0)
    assert found == ""


def test_a_worker_that_fails_says_so(tmp_path):
    with pytest.raises(WorkerFault):
        choose_config(tmp_path, prefix=PREFIX, device="cpu", deadline_s=5.0)
