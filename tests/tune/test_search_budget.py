"""How a search spends its time: what it starts, in which order, and what it gives up."""

import msgspec
import pytest
from scripted import (
    DETERMINISTIC,
    EAGER,
    FOLD,
    LAYOUT,
    MS,
    Act,
    Notes,
    ScriptedWorker,
    Stage,
    died,
    make_search,
)

from steadytorch.errors import UsageError
from steadytorch.process.worker import Fault
from steadytorch.results.candidate import TransformSpec, describe
from steadytorch.transforms.openvino import OpenVino
from steadytorch.tune import setup_scheduler
from steadytorch.tune.select import SearchOptions


def test_a_budget_that_cannot_hold_the_untouched_workload_is_refused_with_numbers():
    stage = Stage({(): Act(2e9)})
    with pytest.raises(UsageError) as caught:
        make_search(stage, [EAGER], SearchOptions(budget_s=30)).run()
    message = str(caught.value)
    assert "a budget of 30 s is too small" in message
    least = int(message.rpartition("give at least ")[2].removesuffix(" s"))
    assert least > 30
    assert not any(worker.alive for worker in stage.workers)


def test_the_budget_that_the_refusal_names_is_enough():
    def run(budget_s):
        return make_search(Stage({(): Act(2e9)}), [EAGER], SearchOptions(budget_s=budget_s)).run()

    with pytest.raises(UsageError) as caught:
        run(30)
    least = int(str(caught.value).rpartition("give at least ")[2].removesuffix(" s"))
    assert run(least).winner is not None


def test_the_default_budget_holds_tails_of_steps_that_a_neighbour_slows_down():
    slow = {candidate: Act(2600 * MS) for candidate in ((), (FOLD,), (FOLD, EAGER))}
    stage = Stage({**slow, (EAGER,): Act(70 * MS)})
    result = make_search(stage, [EAGER, FOLD], SearchOptions(objective="p99")).run()
    assert result.chosen == (EAGER,)
    assert result.seconds <= 180.0


def test_a_deadline_before_the_untouched_workload_was_measured_is_a_small_budget():
    slow = died(Fault.DEADLINE, "no answer within 20 s, killed")
    with pytest.raises(UsageError, match="a budget of 20 s is too small: it ended before"):
        make_search(
            Stage({(): Act(faults={"set_up": [slow]})}), [], SearchOptions(budget_s=20)
        ).run()


def test_what_no_longer_fits_the_budget_is_named():
    stage = Stage({(EAGER,): Act(8 * MS, setup_s=40.0)})
    result = make_search(
        stage, [EAGER, DETERMINISTIC, FOLD], SearchOptions(budget_s=60), slots=1
    ).run()
    assert result.chosen == (EAGER,)
    assert result.not_tried
    assert set(result.not_tried.values()) == {"budget exhausted"}
    assert all(
        label in {"cudnn_deterministic", "fold_batch_norm"} or "+" in label
        for label in result.not_tried
    )


GRAPH = TransformSpec("cuda_graph")
BF16 = TransformSpec("cast_weights", (("dtype", "bf16"),))
ATTENTION = [
    TransformSpec("attention_backend", (("backend", name),)) for name in ("cudnn", "efficient")
]
FROZEN, PLAIN, REDUCE = (
    TransformSpec("compile", (("mode", mode), ("freezing", freezing)))
    for mode, freezing in (("default", True), ("default", False), ("reduce-overhead", True))
)
OF_TRANSFORMERS = [BF16, FROZEN, PLAIN, REDUCE, *ATTENTION, EAGER, GRAPH]


@pytest.mark.parametrize("budget_s", [120, 1000])
def test_variations_of_the_leader_come_before_weak_combinations(budget_s):
    stage = Stage({(): Act(7 * MS)}, regime="compute-bound")
    for compiled, time_ms in ((FROZEN, 1.0), (PLAIN, 1.1)):
        stage.acts[(BF16, compiled, GRAPH)] = Act(time_ms * MS, setup_s=15.0)
    best = (BF16, FROZEN, ATTENTION[0], GRAPH)
    stage.acts[best] = Act(0.8 * MS, setup_s=15.0)
    options = SearchOptions(budget_s=budget_s, precision="bf16")
    result = make_search(stage, OF_TRANSFORMERS, options, slots=8).run()
    tried = stage.tried()
    weak = [(BF16, FROZEN), (BF16, REDUCE), (FROZEN, GRAPH), (GRAPH,), (EAGER,), (BF16, EAGER)]
    assert result.chosen == best
    assert all(tried.index(best) < tried.index(each) for each in weak if each in tried)
    named = result.not_tried
    assert all(each in tried or describe(each) in named for each in weak)
    assert len(tried) == len(set(tried))


def test_a_known_combination_that_is_also_a_variation_is_tried_once():
    stage = Stage({(): Act(7 * MS), (BF16, GRAPH): Act(1 * MS)}, regime="launch-bound")
    # The second round has the remaining combinations and variations of the leader.
    options = SearchOptions(budget_s=1000, precision="bf16")
    make_search(stage, [BF16, LAYOUT, FROZEN, PLAIN, GRAPH], options, slots=4).run()
    assert len(stage.tried()) == len(set(stage.tried()))


def test_beside_the_last_known_combinations_there_is_room_for_variations():
    stage = Stage({(): Act(7 * MS)}, regime="compute-bound")
    stage.acts[(BF16, FROZEN, GRAPH)] = Act(1.0 * MS, setup_s=15.0)
    notes = Notes()
    options = SearchOptions(budget_s=1000, precision="bf16")
    make_search(stage, OF_TRANSFORMERS, options, notes, slots=4).run()
    before = [c for c in stage.tried() if c][:5]
    assert before[:2] == [(BF16, FROZEN, GRAPH), (BF16,)]
    assert before[2:4] == [(BF16, GRAPH), (BF16, PLAIN, GRAPH)]
    assert before[4] == (BF16, FROZEN, ATTENTION[0], GRAPH)


@pytest.mark.parametrize("budget_s", [20, 40, 120])
def test_the_search_does_not_outlast_its_budget(budget_s):
    stage = Stage(
        {(spec,): Act(9 * MS, setup_s=3.0) for spec in (EAGER, DETERMINISTIC, FOLD, LAYOUT)}
    )
    result = make_search(
        stage, [EAGER, DETERMINISTIC, FOLD, LAYOUT], SearchOptions(budget_s=budget_s)
    ).run()
    assert result.seconds <= budget_s


def test_the_first_engine_may_take_overtime():
    engine = OpenVino(OpenVino.Parameters("f32")).spec
    stage = Stage({(): Act(140 * MS), (engine,): Act(90 * MS)})
    result = make_search(stage, [engine], SearchOptions(budget_s=30)).run()
    assert result.chosen == (engine,)


def test_what_is_not_ready_leaves_the_others_time_to_be_screened(monkeypatch):
    stage = Stage({(spec,): Act(180 * MS) for spec in (EAGER, DETERMINISTIC, LAYOUT)})
    stage.acts[()] = Act(200 * MS)
    search = make_search(
        stage, [EAGER, DETERMINISTIC, FOLD, LAYOUT], SearchOptions(budget_s=120), slots=8
    )
    ready, left = ScriptedWorker.ready, []

    def never(worker):
        pending = worker._pending
        if pending and pending[0] == "set_up" and "fold_batch_norm" in str(pending[1]):
            stage.seconds += 0.5
            return False
        return ready(worker)

    def decide():
        left.append(search._budget.left_to_explore())
        raise KeyboardInterrupt

    monkeypatch.setattr(setup_scheduler, "wait_any", lambda workers, seconds: None)
    monkeypatch.setattr(ScriptedWorker, "ready", never)
    monkeypatch.setattr(search, "_decide", decide)
    monkeypatch.setattr(search, "_is_hopeless", lambda *_: False)
    result = search.run()
    late = [t for t in result.candidates if "budget exhausted" in (t.reason or "")]
    assert late
    assert all(FOLD in trial.transforms for trial in late)
    assert sum(trial.samples > 0 for trial in result.candidates) >= 4
    assert left[0] >= -1.0  # polled every half second


def test_a_warm_up_beside_compilers_is_no_measure_of_the_screening():
    stage = Stage({(EAGER,): Act(9 * MS), (): Act(10 * MS)})
    search = make_search(stage, [EAGER], SearchOptions(budget_s=60))
    search.run()
    (fast,) = [t for t in search._pool.trials if t.candidate]
    quick_s = search._pool.screening_s([fast])
    slow = msgspec.structs.replace(fast.set_up.warm_up, iteration_ns=int(900 * MS))
    fast.set_up = msgspec.structs.replace(fast.set_up, warm_up=slow)
    assert quick_s < search._pool.screening_s([fast]) < 1.2 * quick_s
    assert search._pool.screening_s([]) == 0.0
