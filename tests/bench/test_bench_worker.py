from __future__ import annotations

import gc
import threading
import time
import weakref

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadytorch import transforms
from steadytorch.bench import bench_worker as module
from steadytorch.bench.bench_worker import (
    CHUNK_NS,
    LOOKS,
    STOP,
    BrokenOff,
    Series,
    WorkloadHandler,
    next_count,
    save_payload,
)
from steadytorch.device.recording import Recording
from steadytorch.errors import UsageError
from steadytorch.measure import sampler
from steadytorch.process.messages import encode
from steadytorch.transforms.prefetch import Prefetched
from steadytorch.workload.workload import Workload


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch):
    """Skips warm-up, which would take half a second per test."""
    monkeypatch.setattr(
        module, "warm_up", lambda step, timer: sampler.warm_up(step, timer, min_ns=1_000_000)
    )


@pytest.fixture
def loaded(tmp_path):
    """A handler in this process, with a small workload in its directory."""
    save_payload(Workload(nn.Linear(8, 8).eval(), torch.randn(2, 8)), tmp_path)
    handler = WorkloadHandler(tmp_path)
    handler.load("cpu", transforms.ambient())
    yield handler
    handler.close()


class Step:
    """A step that counts its calls, takes a given time, and may raise at a given call."""

    def __init__(self, seconds=0.0, fails_at=None, at_each=lambda: None):
        self.seconds, self.fails_at, self.at_each = seconds, fails_at, at_each
        self.calls = 0

    def __call__(self, *inputs):
        self.calls += 1
        self.at_each()
        if self.calls == self.fails_at:
            raise RuntimeError("the data ended\nfor good")
        if self.seconds:
            time.sleep(self.seconds)


def _series(handler, step, *, metric="period", seconds=0.05, group=1, iteration_ns=1000):
    handler.step, handler.group, handler.iteration_ns = step, group, iteration_ns
    return msgspec.convert(handler.series(metric, seconds), Series)


def test_a_workload_that_cannot_be_pickled_is_a_usage_error(workload, tmp_path):
    with pytest.raises(UsageError, match="cannot be sent to a worker process") as caught:
        save_payload(workload("unpicklable"), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_a_usage_error(tmp_path):
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"TorchScript module.*pass the module that it was made"):
        save_payload(Workload(scripted, torch.randn(1, 2)), tmp_path)


@pytest.mark.parametrize("metric", ["latency", "period"])
def test_every_iteration_of_a_series_is_a_sample(loaded, metric):
    step = Step(0.001)
    found = _series(loaded, step, metric=metric)
    assert len(found.durations_ns) == step.calls
    assert min(found.durations_ns) >= 1_000_000
    assert (found.failed, found.stopped) == (None, False)
    assert len(found.host_ns) == (step.calls if metric == "period" else 0)


def test_a_series_fits_into_a_message_with_its_recording(loaded):
    loaded.set_up([])
    answer = loaded.series("period", 0.02)
    encode(answer)
    assert len(msgspec.convert(answer["recording"], Recording).at_ns) >= 2


def test_a_series_of_no_time_has_samples_all_the_same(loaded):
    assert _series(loaded, Step(0.001), seconds=1e-9).durations_ns


def test_a_slow_workload_is_not_run_ten_times_for_a_first_idea(loaded):
    step = Step(0.05)
    _series(loaded, step, seconds=0.06, iteration_ns=50_000_000)
    assert step.calls <= 3


def test_a_step_that_raises_ends_the_series_and_keeps_what_was_timed(loaded):
    found = _series(loaded, Step(0.0001, fails_at=500), seconds=30)
    assert len(found.durations_ns) == 499 == len(found.host_ns)
    assert found.failed == "RuntimeError: the data ended"
    assert sum(count for _, count in found.stretches) == 499


def test_of_a_failing_group_the_whole_ones_are_kept_at_the_scale_of_one(loaded):
    found = _series(loaded, Step(0.001, fails_at=48), group=5, seconds=30)
    assert len(found.durations_ns) == 9
    assert min(found.durations_ns) < 5_000_000 <= sum(found.durations_ns)


def test_what_the_probe_adds_is_told_for_one_iteration(loaded, monkeypatch):
    monkeypatch.setattr(module, "probe_overhead", lambda timer, count: 100.0)
    assert _series(loaded, Step(), seconds=0.01, group=50).overhead_ns == 2.0


def test_a_file_ends_the_series(loaded, tmp_path):
    step = Step(0.001, at_each=lambda: step.calls == 30 and (tmp_path / STOP).touch())
    found = _series(loaded, step, seconds=60)
    assert found.stopped
    assert 30 <= len(found.durations_ns) == step.calls < 2000


def test_a_series_ends_when_its_median_is_precise(loaded, monkeypatch):
    monkeypatch.setattr(module, "is_resolved", lambda durations, share: len(durations) == LOOKS[1])
    step = Step()
    found = _series(loaded, step, seconds=60)
    assert found.resolved
    assert len(found.durations_ns) == step.calls == LOOKS[1]


def test_a_series_without_a_steady_state_is_never_precise():
    count = next(look for look in LOOKS if look >= 2000)
    noise = 1 + 0.001 * np.random.default_rng(0).standard_normal(count)
    assert module.is_resolved((400_000 * noise).tolist(), 1.0)
    # Two lasting states; the median is that of the more frequent one.
    states = np.where(np.arange(count) // 100 % 5 < 2, 1.5, 1.0)
    assert not module.is_resolved((400_000 * noise * states).tolist(), 1.0)


def test_a_stretch_is_planned_by_the_mean_which_knows_of_long_samples(loaded, monkeypatch):
    planned = []
    monkeypatch.setattr(
        module,
        "next_count",
        lambda taken, sample_ns, left: (
            planned.append((taken, sample_ns)) or next_count(taken, sample_ns, left)
        ),
    )
    step = Step(0.0002, at_each=lambda: step.calls % 10 == 0 and time.sleep(0.01))
    found = _series(loaded, step, seconds=0.3)
    for taken, sample_ns in planned[1:]:
        assert sample_ns == pytest.approx(np.mean(found.durations_ns[:taken]))


def test_samples_are_placed_where_they_happened_whatever_lies_between_stretches(loaded):
    """Host work between two stretches must not shift later samples."""
    began = []
    step = Step(0.0005, at_each=lambda: began.append(time.perf_counter_ns()))
    found = _series(loaded, step, seconds=0.2)
    assert len(found.stretches) >= 3
    late = np.asarray(began) - found.starts_ns()
    firsts = np.cumsum([0, *(count for _, count in found.stretches)])[:-1]
    assert [int(found.starts_ns()[i]) for i in firsts] == [at for at, _ in found.stretches]
    # Steps begin within their own sample. If this process lost its core between reading the clock
    # and the first boundary, a stretch is off by that time.
    assert (late >= 0).all()
    assert (late < np.asarray(found.durations_ns)).mean() > 0.5


def test_a_collection_of_the_workload_lies_within_its_sample(loaded):
    step = Step(0.0005, at_each=lambda: step.calls % 50 == 0 and gc.collect())
    found = _series(loaded, step, seconds=0.2)
    recording = msgspec.convert(found.recording, Recording)
    starts, durations = found.starts_ns(), np.asarray(found.durations_ns)
    within = [
        bool(((starts <= at) & (at < starts + durations))[49::50].any())
        for at in recording.gc_start_ns
    ]
    assert sum(within) >= len(durations) // 50 >= 1


def test_what_was_left_behind_before_a_series_is_not_collected_within_it(loaded):
    alive: list[bool] = []
    step = Step(at_each=lambda: alive.append(gone.alive))
    gc.disable()  # garbage stays until collected explicitly
    try:
        holder = _Cycle()
        gone = weakref.finalize(holder, lambda: None)
        del holder
        assert gone.alive
        _series(loaded, step)
    finally:
        gc.enable()
    assert alive
    assert not any(alive)


class _Cycle:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self):
        self.own = self


def test_starts_of_grouped_samples_are_those_of_the_groups():
    found = Series([10, 20, 30], [(1000, 2), (5000, 1)], [], 0.0, 100, True, None)
    assert found.starts_ns().tolist() == [1000, 2000, 5000]


def test_a_reading_before_a_sample_makes_it_start_later():
    found = Series([10, 20, 30, 5], [(1000, 3), (5000, 1)], [], 0.0, 1, True, None)
    read = msgspec.structs.replace(found, gaps_ns=[0, 3, 4, 2])
    assert found.starts_ns().tolist() == [1000, 1010, 1030, 5000]
    assert read.starts_ns().tolist() == [1000, 1013, 1037, 5002]


def test_outliers_are_put_down_to_the_clock_that_was_counted_over_them():
    times, clocks = [4_000_000] * 100, [1700.0] * 100
    times[40], clocks[40] = 5_000_000, 1360.0
    seen = Recording(device="cuda", interval_ns=0, at_ns=())
    found = Series(times, [(1000, 100)], [20_000] * 100, 0.0, 1, True, msgspec.to_builtins(seen))
    counted = msgspec.structs.replace(found, clocks_mhz=clocks)
    assert [each.cause for each in found.summary("period").outliers] == ["unattributed"]
    assert [each.cause for each in counted.summary("period").outliers] == ["clock"]


def test_what_was_timed_before_warming_up_failed_is_kept(loaded):
    step = Step(fails_at=4)  # it takes this many calls however long they are
    loaded.workload = loaded.workload.with_model(step)
    with pytest.raises(RuntimeError, match="the data ended"):
        loaded.set_up([])
    broken = msgspec.convert(loaded.broken_off(), BrokenOff)
    assert len(broken.series.durations_ns) == 2 == broken.set_up.warm_up.calls
    assert broken.series.failed == "RuntimeError: the data ended"


@pytest.mark.parametrize("call", [1, 2])
def test_a_workload_that_fails_at_once_leaves_nothing(loaded, call):
    loaded.workload = loaded.workload.with_model(Step(fails_at=call))
    with pytest.raises(RuntimeError, match="the data ended"):
        loaded.set_up([])
    assert loaded.broken_off() is None


@given(
    st.integers(0, 300_000),
    st.floats(1, 1e12),
    st.floats(-1, 1e6),
)
def test_a_stretch_is_short_and_ends_at_a_look(taken, sample_ns, seconds_left):
    count = next_count(taken, sample_ns, seconds_left)
    assert count >= 1
    assert (count - 1) * sample_ns <= CHUNK_NS
    assert (count - 1) * sample_ns <= max(0, seconds_left * 1e9)
    assert not [look for look in LOOKS if taken < look < taken + count]


# -- workloads with a loader ----------------------------------------------------------------------


class Numbers:
    """A loader of three batches."""

    def __iter__(self):
        return (torch.full((1,), float(i)) for i in range(3))


@pytest.fixture
def fed(tmp_path):
    """A handler whose workload takes a batch per step."""
    save_payload(Workload.from_loader(torch.neg, Numbers()), tmp_path)
    handler = WorkloadHandler(tmp_path)
    handler.load("cpu", transforms.ambient())
    yield handler
    handler.close()


def test_each_step_takes_the_next_batch(fed):
    fed.set_up([])
    found = [fed.step().item() for _ in range(4)]
    assert sorted(found[:3]) == [-2.0, -1.0, 0.0]
    assert found[3] == found[0]


def test_the_loader_of_a_transform_is_the_one_that_is_timed(fed, monkeypatch):
    begun = []
    own = Prefetched.__iter__
    monkeypatch.setattr(Prefetched, "__iter__", lambda self: begun.append(self) or own(self))
    fed.set_up([{"name": "prefetch", "parameters": []}])
    assert begun
    assert {fed.step().item() for _ in range(3)} == {-2.0, -1.0, 0.0}


def test_a_loader_that_cannot_travel_is_named(tmp_path):
    loader = Numbers()
    vars(loader)["lock"] = threading.Lock()
    with pytest.raises(UsageError, match="its contents, including the loader, picklable") as caught:
        save_payload(Workload.from_loader(torch.neg, loader), tmp_path)
    assert "\n" not in str(caught.value)


# -- training ---------------------------------------------------------------------------------


def _sum_of_squares(output):
    return output.square().sum()


@pytest.fixture
def training(tmp_path):
    """A handler of a training workload that would overflow within a few hundred steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).train()
    made = Workload.training(
        model, torch.randn(4, 8), _sum_of_squares, lambda p: torch.optim.SGD(p, lr=2.0)
    )
    save_payload(made, tmp_path)
    handler = WorkloadHandler(tmp_path)
    handler.load("cpu", transforms.ambient())
    yield handler
    handler.close()


def test_each_block_of_training_begins_at_the_weights_that_came(training):
    training.set_up([])
    training.group, ends = 1, []
    for _ in range(3):
        training.block("latency", 1)
        ends.append({n: t.clone() for n, t in training.workload.model.state_dict().items()})
    assert ends[0]["2.weight"].isfinite().all()
    assert all(torch.equal(ends[0][n], end[n]) for end in ends for n in end)


def test_weights_that_overflowed_are_finite_again_in_the_next_block(training):
    training.set_up([])
    for _ in range(200):
        training.step()
    weights = training.workload.model[2].weight
    assert not weights.isfinite().all()
    training.group = 1
    training.block("latency", 1)
    assert weights.isfinite().all()
