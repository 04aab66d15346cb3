"""What a search begins first, waits for, and leaves, on simulated machines."""

from __future__ import annotations

import math
import random
import statistics
import sys
from contextlib import suppress

import pytest
import torch
from scripted import NullListener
from simulated import (
    ATTENTION,
    AUTOCAST,
    AVAILABLE,
    BF16,
    LAYOUT,
    MS,
    RANGES,
    Machine,
    outcome,
    search,
)

from steadytorch.errors import UsageError
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune.prospects import Prospects
from steadytorch.tune.search import Search, compiling
from steadytorch.workload.workload import Workload


class Log(NullListener):
    """Notes when each candidate changed its state."""

    def __init__(self, machine):
        self.machine, self.states, self.phases = machine, [], []

    def trial(self, label, state, detail=""):
        self.states.append((self.machine.seconds, label, state))

    def timed(self, label, median_ns):
        self.states.append((self.machine.seconds, label, "timed"))

    def phase(self, message):
        self.phases.append(message)


def begun(log):
    return [(s, label) for s, label, state in log.states if state == "set-up"]


def test_a_compilation_begins_with_the_untouched_workload():
    machine = Machine(0, compile_s=20.0)
    log = Log(machine)
    search(machine, 60.0, watcher=log)
    first = begun(log)[:2]
    assert [second for second, _ in first] == [0.0, 0.0]
    assert first[0][1] == "untouched"
    assert "compile(default, freezing)" in first[1][1]


@pytest.mark.parametrize("seed", range(4))
def test_a_graph_of_uncompiled_code_is_ready_when_little_time_is_left(seed):
    machine = Machine(seed, compile_s=60.0)
    log = Log(machine)
    result = search(machine, 26.0, watcher=log)
    assert any(second == 0.0 and "cuda_graph" in label for second, label in begun(log))
    assert any(spec.name == "cuda_graph" for spec in result.chosen)


def test_what_is_ready_is_timed_while_compilers_go_on():
    machine = Machine(0, compile_s=40.0)
    log = Log(machine)
    search(machine, 90.0, watcher=log)
    timed_s = min(s for s, label, state in log.states if state == "timed" and label != "untouched")
    compiled_s = min(s for s, label, state in log.states if state == "verified" and "comp" in label)
    assert timed_s < 30.0 < compiled_s


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("seeds", [(0, 1), (2, 3), (4, 5), (6, 7)], ids=str)
def test_what_promises_little_is_not_begun_once_compiled_code_was_timed(monkeypatch, seeds):
    def run(seed):
        machine = Machine(seed)
        found = search(machine, 180.0)
        timed = [trial for trial in found.candidates if trial.samples]
        return machine.act(found.chosen).time_ns, len(timed)

    monkeypatch.setattr(sys.modules[Search.__module__], "ENOUGH", 0.0)  # no end before the budget's
    chosen_ns, timed = zip(*map(run, seeds), strict=True)
    monkeypatch.setattr(sys.modules[Search.__module__], "LEAST", 0.0)
    all_ns, all_timed = zip(*map(run, seeds), strict=True)
    assert max(ns / least for ns, least in zip(chosen_ns, all_ns, strict=True)) < 1.01
    assert sum(timed) < 0.9 * sum(all_timed)


@pytest.mark.parametrize("seed", range(4))
def test_expectations_follow_from_all_that_was_timed(seed, monkeypatch):
    noted, note = set(), Prospects.note

    def noting(self, candidate, iteration_ns):
        noted.add(candidate)
        note(self, candidate, iteration_ns)

    monkeypatch.setattr(Prospects, "note", noting)
    found = search(Machine(seed), 180.0)
    assert {trial.transforms for trial in found.candidates if trial.samples} == noted


ON_CPU = [s for s in AVAILABLE if s.name != "cuda_graph" and "reduce-overhead" not in str(s)]


@pytest.mark.parametrize(("step_ms", "budget_s"), [(300, 120.0), (1000, 90.0), (2000, 120.0)])
@pytest.mark.parametrize("seed", range(4))
def test_on_a_cpu_a_compilation_keeps_the_time_that_it_needs(seed, step_ms, budget_s):
    machine = Machine(seed, compile_s=25.0)
    machine.untouched_ns = step_ms * MS
    found = search(machine, budget_s, slots=2, available=ON_CPU, device="cpu")
    assert any(spec.name == "compile" for spec in found.chosen)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("budget_s", [30.0, 60.0, 120.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_search_takes_no_longer_than_a_fifth_beyond_its_budget(seed, budget_s):
    found = outcome(seed, budget_s, compile_s=0.7 * budget_s)
    assert found.seconds <= 1.2 * budget_s + 5.0
    assert ("beyond the budget" in found.ended) == (found.seconds > budget_s + 0.5)


LOSS, WHOLE = TransformSpec("compile_loss"), TransformSpec("step_graph", (("scope", "step"),))
FUSED = TransformSpec("optimizer", (("implementation", "fused"), ("merge", False)))
PLAIN = TransformSpec("compile", (("mode", "default"), ("freezing", False)))
OF_TRAINING = [LAYOUT, AUTOCAST, *ATTENTION, PLAIN, LOSS, FUSED, WHOLE]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_compiled_step_is_found_without_the_part_that_is_at_fault(seed):
    model = torch.nn.Linear(4, 4)
    given = Workload.training(model, torch.ones(2, 4), torch.sum, torch.optim.SGD)
    machine = Machine(seed, inexact=[LOSS])
    found = search(machine, 180.0, available=OF_TRAINING, given=given)
    assert PLAIN in found.chosen
    assert LOSS not in found.chosen


def test_a_compilation_that_is_about_to_be_ready_is_waited_for_and_it_is_said():
    machine = Machine(1, compile_s=22.0)
    log = Log(machine)
    result = search(machine, 30.0, watcher=log)
    assert any("compile" in str(spec) for spec in result.chosen)
    assert 30.0 < result.seconds <= 36.5
    assert "beyond the budget" in result.ended
    assert any("is about to be ready" in phase for phase in log.phases)


def test_a_compilation_that_never_ends_leaves_the_best_of_the_others():
    machine = Machine(1, compile_s=1e6)
    result = search(machine, 60.0)
    assert result.chosen
    assert not any("compile" in str(spec) for spec in result.chosen)
    assert result.seconds <= 73.0
    assert not any(worker.alive for worker in machine.workers)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("untouched_ms", [10, 30, 100, 600])
@pytest.mark.parametrize("budget_s", [45.0, 90.0, 120.0])
def test_nothing_is_begun_once_no_time_is_left_to_explore(monkeypatch, budget_s, untouched_ms):
    machine, asked = Machine(0, compile_s=45.0), []
    machine.untouched_ns = untouched_ms * MS
    affordable = Search._affordable

    def noted(self, batch):
        asked.append(machine.seconds)
        assert asked[-200:-100] != asked[-100:]  # it would ask for ever
        return affordable(self, batch)

    monkeypatch.setattr(Search, "_affordable", noted)
    available = [spec for spec in AVAILABLE if spec.name != "cuda_graph"]
    assert search(machine, budget_s, slots=2, available=available, device="cpu").winner


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("untouched_ms", "budget_s"), [(100, 90.0), (300, 90.0), (1000, 120.0)])
def test_compiled_code_is_waited_for_in_place_of_a_final_race(seed, untouched_ms, budget_s):
    machine = Machine(seed, compile_s=25.0)
    machine.untouched_ns = untouched_ms * MS
    available = [spec for spec in AVAILABLE if spec.name != "cuda_graph"]
    found = search(machine, budget_s, slots=2, available=available, device="cpu")
    assert any(spec.name == "compile" for spec in found.chosen)
    assert found.seconds <= 1.2 * budget_s


def test_a_second_compilation_begins_early_only_if_twice_its_guess_fits():
    def compilers(budget_s):
        machine = Machine(0, compile_s=50.0)
        log = Log(machine)
        search(machine, budget_s, slots=8, watcher=log)
        return sum("compile" in label for second, label in begun(log) if second < 40.0)

    assert compilers(36.0) < compilers(180.0)


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_begins_beside_a_compilation_that_outlasts_the_budget(seed, monkeypatch):
    engine = TransformSpec("openvino", (("precision", "f32"), ("threads", ""), ("pinned", False)))
    monkeypatch.setitem(RANGES, "openvino", (0.3, 0.4))
    machine = Machine(seed, compile_s=200.0)
    machine.untouched_ns = 40 * MS
    found = search(machine, 30.0, slots=2, available=[engine, *ON_CPU], device="cpu")
    assert found.chosen == (engine,)


def test_the_leader_is_tried_without_padding_if_the_compiler_padded():
    def tried(pads):
        machine = Machine(0, compile_s=10.0)
        found = search(machine, 180.0, pads=lambda: pads)
        return [c.transforms for c in found.candidates if "unpadded" in str(c.transforms)], machine

    assert tried(False)[0] == []
    (candidate, *_), machine = tried(True)
    plain = tuple(
        TransformSpec(s.name, tuple(p for p in s.parameters if p[0] != "unpadded"))
        for s in candidate
    )
    assert plain in machine.acts


def test_a_search_stops_when_no_gain_is_expected_and_says_so():
    machine = Machine(2, compile_s=10.0)
    result = search(machine, 3600.0)
    assert result.seconds < 600.0
    assert result.ended.startswith(f"stopped after {result.seconds:.0f} s"[:14])
    assert "were expected to gain 0." in result.ended
    given_up = [*result.not_tried.values(), *(each.reason or "" for each in result.candidates)]
    assert any("no gain expected" in reason for reason in given_up)


@pytest.mark.parametrize(
    ("slots", "on_gpu", "on_cpu"), [(1, 1, 1), (2, 1, 1), (4, 3, 2), (8, 6, 4)]
)
def test_compilers_share_the_cores(slots, on_gpu, on_cpu):
    assert compiling(slots, on_cpu=False) == on_gpu
    assert compiling(slots, on_cpu=True) == on_cpu


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("seed", range(8))
def test_more_time_makes_no_worse_plan(seed):
    times = [outcome(seed, budget_s).chosen_ns for budget_s in (30.0, 60.0, 180.0)]
    assert times[1] <= 1.03 * times[0]
    assert times[2] <= 1.03 * times[1]


def test_where_the_time_allows_it_the_plan_is_compiled():
    found = [outcome(seed, 60.0, compile_s=20.0) for seed in range(6)]
    assert all(each.compiled for each in found)
    assert statistics.median(each.seconds for each in found) <= 60.0


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("inexact", [(BF16,), (BF16, AUTOCAST)])
def test_a_precision_too_low_for_the_model_is_left_after_one_try(seed, inexact):
    machine, exact = Machine(seed, inexact=inexact), Machine(seed)
    log = Log(machine)
    available = [*AVAILABLE, AUTOCAST]
    result = search(machine, 180.0, watcher=log, available=available)
    tried = [t.transforms for t in result.candidates if (t.error or 0) > 0.5]
    assert [each for each in tried if len(each) == 1] == [(spec,) for spec in inexact]
    assert len(tried) <= len(inexact) + 1  # with the graph that begins beside it
    assert not set(result.chosen) & set(inexact)
    assert sum("leaving" in phase for phase in log.phases) == len(inexact)
    without = [spec for spec in available if spec not in inexact]
    best = search(exact, 180.0, available=without)
    assert machine.act(result.chosen).time_ns <= 1.15 * exact.act(best.chosen).time_ns


def test_a_search_that_expects_nothing_still_waits_for_its_first_compiled_candidate(monkeypatch):
    monkeypatch.setattr(Prospects, "expected_gain", lambda *_: 0.0)
    machine = Machine(0, compile_s=40.0)
    log = Log(machine)
    search(machine, 180.0, watcher=log)
    compiled_s = [s for s, label, state in log.states if state == "timed" and "compile" in label]
    assert compiled_s
    assert any(phase.startswith("stopped after") for phase in log.phases)
    assert machine.seconds < 100.0


@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, marks=pytest.mark.slow) if seed >= 8 else seed for seed in range(20)),
        *(85, 161, 183, 253),
    ],
)
def test_no_search_takes_a_fifth_more_than_its_budget(seed):
    draw = random.Random(seed)
    machine = Machine(seed, compile_s=math.exp(draw.uniform(math.log(10), math.log(200))))
    machine.untouched_ns = MS * math.exp(draw.uniform(math.log(5), math.log(400)))
    budget_s, device = draw.choice([30, 60, 100, 180]), draw.choice(["cpu", "cuda:0"])
    slots = 2 if device == "cpu" else 8
    with suppress(UsageError):  # too small for the untouched workload
        found = search(machine, budget_s, slots, device=device)
        assert found.seconds < 1.22 * budget_s  # blocks vary a little
