import sys

import msgspec
import pytest
from scripted import (
    DETERMINISTIC,
    EAGER,
    FOLD,
    LAYOUT,
    MS,
    TF32,
    Act,
    Notes,
    Stage,
    died,
    make_search,
)

from steadytorch.errors import UsageError
from steadytorch.process.worker import Fault
from steadytorch.tune.search import Search

OUT_OF_MEMORY = (Fault.OUT_OF_MEMORY, "out of memory")


def _trial(result, *candidate):
    (found,) = [trial for trial in result.candidates if trial.transforms == candidate]
    return found


def _acts(**times_ms):
    """Acts of single transforms by name; combinations are as slow as the untouched workload."""
    specs = {spec.name: spec for spec in (EAGER, FOLD, DETERMINISTIC, LAYOUT, TF32)}
    return {(specs[name],): Act(time * MS) for name, time in times_ms.items()}


# -- faults of workers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "stage_name"),
    [("load", "starting"), ("set_up", "set-up"), ("verify", "verification")],
)
def test_a_candidate_that_dies_on_the_way_is_rejected_and_the_search_goes_on(method, stage_name):
    acts = _acts(inference_mode=5, cudnn_deterministic=8) | {(EAGER, DETERMINISTIC): Act(12 * MS)}
    stage = Stage(acts)
    if (
        method == "load"
    ):  # a starting worker has no candidate yet: this is the first after the baseline's
        stage.act(()).faults["load"] = [None, None, died()]
    else:
        acts[(EAGER,)].faults[method] = [died()]
    result = make_search(stage, [EAGER, DETERMINISTIC]).run()
    rejected = _trial(result, EAGER)
    assert rejected.status == "rejected"
    assert rejected.reason == f"{stage_name}: segmentation fault (SIGSEGV)"
    assert result.chosen == (DETERMINISTIC,)


def test_an_exception_while_a_candidate_is_applied_is_a_failure():
    stage = Stage(_acts(cudnn_deterministic=8) | {(EAGER, DETERMINISTIC): Act(12 * MS)})
    stage.act((EAGER,)).faults["set_up"] = [died(Fault.RAISED, "RuntimeError: no kernel")]
    result = make_search(stage, [EAGER, DETERMINISTIC]).run()
    failed = _trial(result, EAGER)
    assert (failed.status, failed.reason) == ("failed", "set-up: RuntimeError: no kernel")
    assert result.chosen == (DETERMINISTIC,)


@pytest.mark.parametrize("blocks", [0, 3, 7, 14])
def test_a_candidate_that_dies_while_it_is_timed_is_rejected_with_its_reason(blocks):
    stage = Stage(
        _acts(inference_mode=5, cudnn_deterministic=5.2) | {(EAGER, DETERMINISTIC): Act(12 * MS)}
    )
    stage.acts[(EAGER,)].blocks_until_death = blocks
    result = make_search(stage, [EAGER, DETERMINISTIC]).run()
    rejected = _trial(result, EAGER)
    assert (rejected.status, rejected.reason) == ("rejected", "segmentation fault (SIGSEGV)")
    assert result.chosen == (DETERMINISTIC,)


@pytest.mark.parametrize("blocks", [0, 1, 11, 12, 13])
def test_a_winner_that_dies_while_it_is_confirmed_is_rejected_and_nothing_is_lost(blocks):
    stage = Stage(_acts(inference_mode=5))

    def die_soon(message):
        if message.startswith("confirming inference_mode"):
            (winner,) = [w for w in stage.workers if w.alive and w._candidate == (EAGER,)]
            stage.acts[(EAGER,)].blocks_until_death = winner._blocks + blocks

    result = make_search(stage, [EAGER], watcher=Notes(die_soon)).run()
    rejected = _trial(result, EAGER)
    assert (rejected.status, rejected.reason) == ("rejected", "segmentation fault (SIGSEGV)")
    assert result.chosen == ()
    assert result.winner.median_ns == pytest.approx(10 * MS, rel=0.01)


def _search_in_which_one_dies_between_blocks(candidate):
    stage = Stage(
        _acts(inference_mode=5, cudnn_deterministic=8) | {(EAGER, DETERMINISTIC): Act(12 * MS)}
    )

    def kill(message):
        if message.startswith("confirming inference_mode"):
            for worker in stage.workers:
                if worker._candidate == candidate:
                    worker.alive = False

    return stage, make_search(stage, [EAGER, DETERMINISTIC], watcher=Notes(kill))


def test_a_winner_that_is_gone_when_it_is_asked_gives_way_to_the_next():
    _, search = _search_in_which_one_dies_between_blocks((EAGER,))
    result = search.run()
    rejected = _trial(result, EAGER)
    assert (rejected.status, rejected.reason) == ("rejected", "process exited with status 1")
    assert result.chosen == ()


def test_an_untouched_workload_that_is_gone_when_it_is_asked_is_an_error():
    stage, search = _search_in_which_one_dies_between_blocks(())
    with pytest.raises(UsageError, match="process exited with status 1"):
        search.run()
    assert not any(worker.alive for worker in stage.workers)


def test_after_a_winner_died_the_next_best_finalist_is_confirmed():
    stage = Stage(
        _acts(inference_mode=5, cudnn_deterministic=5.4) | {(EAGER, DETERMINISTIC): Act(12 * MS)}
    )

    def die_soon(message):
        if message.startswith("confirming inference_mode"):
            (winner,) = [w for w in stage.workers if w.alive and w._candidate == (EAGER,)]
            stage.acts[(EAGER,)].blocks_until_death = winner._blocks + 3

    result = make_search(stage, [EAGER, DETERMINISTIC], watcher=Notes(die_soon)).run()
    assert _trial(result, EAGER).status == "rejected"
    assert result.chosen == (DETERMINISTIC,)
    assert result.speedup.estimate == pytest.approx(10 / 5.4, rel=0.02)


def test_a_candidate_out_of_memory_beside_others_is_tried_once_more_on_its_own():
    stage = Stage(
        _acts(inference_mode=5, cudnn_deterministic=8) | {(EAGER, DETERMINISTIC): Act(12 * MS)}
    )
    stage.acts[(EAGER,)].faults["set_up"] = [died(*OUT_OF_MEMORY), None]
    result = make_search(stage, [EAGER, DETERMINISTIC]).run()
    assert stage.tried().count((EAGER,)) == 2
    assert result.chosen == (EAGER,)
    assert _trial(result, EAGER).status == "ok"


def test_a_candidate_that_is_out_of_memory_on_its_own_too_is_rejected():
    stage = Stage(
        _acts(inference_mode=5, cudnn_deterministic=8) | {(EAGER, DETERMINISTIC): Act(12 * MS)}
    )
    stage.acts[(EAGER,)].faults["set_up"] = [died(*OUT_OF_MEMORY)] * 5
    result = make_search(stage, [EAGER, DETERMINISTIC]).run()
    assert stage.tried().count((EAGER,)) == 2
    rejected = _trial(result, EAGER)
    assert (rejected.status, rejected.reason) == ("rejected", "set-up: out of memory")
    assert result.chosen == (DETERMINISTIC,)


@pytest.mark.parametrize("method", ["load", "set_up", "reference", "characterise", "block"])
def test_a_workload_that_fails_untouched_is_an_error_that_says_so(method):
    stage = Stage()
    stage.act(()).faults[method] = [died(Fault.RAISED, "ValueError: no such mask")]
    with pytest.raises(UsageError, match="the untouched workload fails: ValueError: no such"):
        make_search(stage, [EAGER]).run()
    assert not any(worker.alive for worker in stage.workers)


# -- the end ----------------------------------------------------------------------------------


def test_no_worker_outlives_the_search(monkeypatch):
    monkeypatch.setattr(sys.modules[Search.__module__], "ENOUGH", 0.0)  # all are tried
    stage = Stage(_acts(inference_mode=5, cudnn_deterministic=8))
    make_search(stage, [EAGER, DETERMINISTIC, FOLD]).run()
    assert len(stage.workers) > 5
    assert not any(worker.alive for worker in stage.workers)


def _interrupted_at(exchange):
    stage = Stage(_acts(inference_mode=5, cudnn_deterministic=8), interrupt_at=exchange)
    return stage, make_search(stage, [EAGER, DETERMINISTIC]).run()


@pytest.mark.parametrize("exchange", [*range(1, 14), *range(15, 60, 6), *range(60, 150, 18)])
def test_an_interrupted_search_keeps_its_trials_and_kills_its_workers(exchange):
    stage, result = _interrupted_at(exchange)
    assert result.interrupted
    assert (result.winner, result.speedup, result.chosen) == (None, None, ())
    assert not any(worker.alive for worker in stage.workers)
    timed = {candidate for method, candidate in stage.events[:-1] if method == "block"}
    kept = {trial.transforms for trial in result.candidates if trial.samples}
    assert timed - {()} <= kept


def test_an_interruption_after_the_baseline_still_reports_it():
    _, result = _interrupted_at(40)
    assert result.baseline.median_ns == pytest.approx(10 * MS, rel=0.01)


def test_an_interrupted_result_is_no_evidence():
    _, result = _interrupted_at(60)
    with pytest.raises(ValueError, match="interrupted"):
        result.evidence()


def test_a_result_survives_a_journey_through_json():
    result = make_search(Stage(_acts(inference_mode=5)), [EAGER]).run()
    assert msgspec.json.decode(msgspec.json.encode(result), type=type(result)) == result
