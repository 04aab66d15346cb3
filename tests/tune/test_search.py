import sys

import pytest
from scripted import (
    DETERMINISTIC,
    EAGER,
    FOLD,
    LAYOUT,
    MS,
    OWN_ERROR,
    TF32,
    Act,
    Notes,
    Stage,
    died,
    make_search,
)

from steadytorch.measure.race import LOOKS
from steadytorch.process.worker import Fault
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms.openvino import OpenVino
from steadytorch.tune.budget import SCREEN_BLOCKS
from steadytorch.tune.candidate_pool import FEWEST_BLOCKS
from steadytorch.tune.search import Search
from steadytorch.tune.select import SearchOptions, block_shape
from steadytorch.verification.verdict import OutputError, Reference

OUT_OF_MEMORY = (Fault.OUT_OF_MEMORY, "out of memory")


def _trial(result, *candidate):
    (found,) = [trial for trial in result.candidates if trial.transforms == candidate]
    return found


def _acts(**times_ms):
    """Acts of single transforms by name; combinations are as slow as the untouched workload."""
    specs = {spec.name: spec for spec in (EAGER, FOLD, DETERMINISTIC, LAYOUT, TF32)}
    return {(specs[name],): Act(time * MS) for name, time in times_ms.items()}


# -- the choice -------------------------------------------------------------------------------


def test_the_fastest_wins_and_its_speedup_is_the_ratio_of_times():
    acts = _acts(inference_mode=9, cudnn_deterministic=8, fold_batch_norm=9.5)
    acts |= {(EAGER, DETERMINISTIC): Act(8.5 * MS), (FOLD, EAGER): Act(9.2 * MS)}
    result = make_search(Stage(acts), [EAGER, DETERMINISTIC, FOLD]).run()
    assert result.chosen == (DETERMINISTIC,)
    assert result.speedup.estimate == pytest.approx(1.25, rel=0.01)
    assert result.speedup.low < result.speedup.estimate < result.speedup.high
    assert (result.speedup.claim, result.speedup.verdict) == ("process", "faster")


def test_the_best_combination_is_reached_from_its_parts():
    stage = Stage(
        _acts(inference_mode=9, cudnn_deterministic=9.5) | {(EAGER, DETERMINISTIC): Act(6 * MS)}
    )
    assert make_search(stage, [EAGER, DETERMINISTIC]).run().chosen == (EAGER, DETERMINISTIC)


@pytest.mark.parametrize(("device", "kept"), [("cuda", 1), ("cpu", 0)])
def test_what_the_compiler_chose_for_the_winner_is_kept_on_a_gpu(device, kept):
    compiled = TransformSpec("compile", (("mode", "default"), ("freezing", True)))
    result = make_search(Stage({(compiled,): Act(5 * MS)}), [compiled], device=device).run()
    assert result.chosen == (compiled,)
    assert [each["XBLOCK"] for each in result.compiler.kernels.values()] == [1] * kept


def test_a_winner_that_cannot_tell_what_the_compiler_chose_stays_the_winner():
    compiled = TransformSpec("compile", (("mode", "default"), ("freezing", True)))
    act = Act(5 * MS, faults={"compiler_choices": [died()]})
    notes = Notes()
    result = make_search(Stage({(compiled,): act}), [compiled], None, notes, device="cuda").run()
    assert (result.chosen, result.compiler.kernels) == ((compiled,), {})
    assert any("replays tune their kernels anew" in phase for phase in notes.phases)


def test_among_equally_fast_candidates_the_simplest_wins():
    stage = Stage(_acts(inference_mode=8) | {(EAGER, DETERMINISTIC): Act(8 * MS)})
    result = make_search(stage, [EAGER, DETERMINISTIC]).run()
    assert result.chosen == (EAGER,)
    assert _trial(result, EAGER, DETERMINISTIC).status == "ok"


def test_among_equally_fast_and_simple_candidates_the_one_with_least_memory_wins():
    acts = _acts(inference_mode=8, cudnn_deterministic=8)
    acts[(DETERMINISTIC,)].peak_bytes = 50 << 20
    acts[(EAGER, DETERMINISTIC)] = Act(12 * MS)
    assert make_search(Stage(acts), [EAGER, DETERMINISTIC]).run().chosen == (DETERMINISTIC,)


@pytest.mark.parametrize("time_ms", [10, 12])
def test_the_untouched_workload_stays_where_nothing_is_faster(time_ms):
    stage = Stage(_acts(inference_mode=time_ms, cudnn_deterministic=time_ms))
    result = make_search(stage, [EAGER, DETERMINISTIC]).run()
    assert result.chosen == ()
    assert result.winner == result.baseline
    assert (result.speedup.estimate, result.speedup.low) == (1.0, None)
    assert result.break_even_calls is None
    assert not result.interrupted


def test_a_workload_to_which_nothing_applies_is_measured_and_stays():
    result = make_search(Stage(), []).run()
    assert result.chosen == ()
    assert result.baseline.median_ns == pytest.approx(10 * MS, rel=0.01)


def test_the_same_seed_gives_the_same_search():
    def run():
        result = make_search(
            Stage(_acts(inference_mode=9, cudnn_deterministic=8)), [EAGER, DETERMINISTIC, FOLD]
        ).run()
        return [trial.transforms for trial in result.candidates], result.winner, result.baseline

    assert run() == run()


@pytest.mark.parametrize("objective", ["p99", "throughput"])
def test_other_objectives_find_the_fastest_too(objective):
    stage = Stage(_acts(inference_mode=9, cudnn_deterministic=7))
    result = make_search(
        stage, [EAGER, DETERMINISTIC], SearchOptions(objective=objective, budget_s=600)
    ).run()
    assert result.chosen == (DETERMINISTIC,)
    assert result.winner.metric == ("period" if objective == "throughput" else "latency")


def test_p99_is_reported_where_it_is_the_objective():
    stage = Stage(_acts(inference_mode=7), spread=0.02)
    result = make_search(stage, [EAGER], SearchOptions(objective="p99", budget_s=600)).run()
    assert result.winner.p99_ns > result.winner.median_ns


class Shared(Stage):
    """A machine on which a neighbour slows candidates down, each by a factor of its own."""

    def __init__(self, acts, slowness):
        super().__init__(acts)
        self.slowed, self.busy, self.closed = slowness, False, False

    def sample_ns(self, act):
        (candidate,) = [each for each, known in self.acts.items() if known is act]
        return round(super().sample_ns(act) * (self.slowed[candidate] if self.busy else 1))

    def neighbour(self, wanted):
        stage = self

        class Neighbour:
            def __enter__(self):
                stage.busy = wanted

            def __exit__(self, *error):
                stage.busy = False

            def close(self):
                stage.closed = True

        return Neighbour()


@pytest.mark.parametrize(("objective", "chosen"), [("p99", EAGER), ("contended", DETERMINISTIC)])
def test_beside_a_neighbour_what_holds_up_is_chosen(monkeypatch, objective, chosen):
    slowed = {(): 3, (EAGER,): 3, (DETERMINISTIC,): 1.1, (EAGER, DETERMINISTIC): 3}
    stage = Shared(_acts(inference_mode=6, cudnn_deterministic=8), slowed)
    monkeypatch.setattr(sys.modules[Search.__module__], "Neighbour", stage.neighbour)
    options = SearchOptions(objective=objective, budget_s=600)
    result = make_search(stage, [EAGER, DETERMINISTIC], options).run()
    assert result.chosen == (chosen,)
    assert stage.closed


# -- constraints ------------------------------------------------------------------------------


def test_a_precision_that_is_not_allowed_is_measured_shown_and_never_chosen():
    stage = Stage(_acts(inference_mode=9) | {(EAGER, TF32): Act(1 * MS), (TF32,): Act(1 * MS)})
    stage.acts[(EAGER, TF32)].error = OutputError(1e-3, 1e-3)
    result = make_search(stage, [EAGER, TF32]).run()
    shown = _trial(result, EAGER, TF32)
    assert (shown.status, shown.allowed) == ("ok", False)
    assert shown.reason == "allow with --precision tf32"
    assert shown.median_ns == pytest.approx(1 * MS, rel=0.01)
    assert result.chosen == (EAGER,)


def test_the_same_precision_is_chosen_where_it_is_allowed():
    stage = Stage(_acts(inference_mode=9, tf32=2) | {(EAGER, TF32): Act(1 * MS)})
    stage.acts[(EAGER, TF32)].error = OutputError(1e-3, 1e-3)
    result = make_search(stage, [EAGER, TF32], SearchOptions(precision="tf32")).run()
    assert result.chosen == (EAGER, TF32)
    assert _trial(result, EAGER, TF32).allowed


def _on_openvino(**times_ms):
    """The result of a search in which OpenVINO takes these times per precision, off by 0.03."""
    specs = [OpenVino(OpenVino.Parameters(precision)).spec for precision in times_ms]
    error = OutputError(0.03, 0.03)
    acts = zip(specs, times_ms.values(), strict=True)
    stage = Stage({(spec,): Act(time * MS, error=error) for spec, time in acts})
    return make_search(stage, specs, SearchOptions(precision="int8")).run(), specs


def test_what_int8_has_to_beat_is_timed_even_where_it_promises_no_gain():
    result, (int8, bf16) = _on_openvino(int8=1, bf16=3)
    assert result.chosen == (int8,)
    assert _trial(result, bf16).median_ns == pytest.approx(3 * MS, rel=0.01)


def test_int8_that_is_slower_than_bf16_is_not_chosen():
    result, (int8, bf16) = _on_openvino(int8=1.2, bf16=1)
    assert result.chosen == (bf16,)
    assert _trial(result, int8).status == "ok"


def test_int8_beyond_its_bound_is_rejected_and_bf16_wins():
    specs = [OpenVino(OpenVino.Parameters(precision)).spec for precision in ("int8", "bf16")]
    acts = {(specs[0],): Act(1 * MS, error=OutputError(0.2, 0.2)), (specs[1],): Act(3 * MS)}
    result = make_search(Stage(acts), specs, SearchOptions(precision="int8")).run()
    assert result.chosen == (specs[1],)
    assert _trial(result, specs[0]).reason == "relative error 2.0e-01 exceeds 1.0e-01"


def test_a_candidate_over_the_memory_cap_is_rejected_and_the_next_best_wins():
    acts = _acts(inference_mode=5, cudnn_deterministic=8) | {(EAGER, DETERMINISTIC): Act(5 * MS)}
    acts[(EAGER,)].peak_bytes = acts[(EAGER, DETERMINISTIC)].peak_bytes = 2 << 30
    result = make_search(
        Stage(acts), [EAGER, DETERMINISTIC], SearchOptions(max_memory_bytes=1 << 30)
    ).run()
    rejected = _trial(result, EAGER)
    assert rejected.status == "rejected"
    assert rejected.reason == "peaks at 2.00 GiB, over the cap of 1.00 GiB"
    assert rejected.samples == 0
    assert result.chosen == (DETERMINISTIC,)


def test_an_untouched_workload_over_the_memory_cap_says_so_and_goes_on():
    acts = _acts(inference_mode=8) | {(): Act(10 * MS, peak_bytes=3 << 30)}
    watcher = Notes()
    options = SearchOptions(max_memory_bytes=1 << 30)
    result = make_search(Stage(acts), [EAGER], options, watcher=watcher).run()
    untouched = _trial(result)
    assert watcher.phases[1] == f"{untouched.reason}: looking for candidates below the cap"
    assert untouched.reason == (
        "the untouched workload itself peaks at 3.00 GiB, over the cap of 1.00 GiB"
    )
    assert (untouched.status, result.chosen) == ("ok", (EAGER,))


def test_within_the_cap_nothing_is_said_of_the_untouched_workload():
    result = make_search(Stage(), [EAGER], SearchOptions(max_memory_bytes=1 << 30)).run()
    assert _trial(result).reason is None


def test_a_wrong_candidate_is_rejected_with_its_error_and_never_timed():
    stage = Stage(
        _acts(inference_mode=5, cudnn_deterministic=8) | {(EAGER, DETERMINISTIC): Act(12 * MS)}
    )
    stage.acts[(EAGER,)].error = OutputError(1e-2, 1e-2)
    result = make_search(stage, [EAGER, DETERMINISTIC]).run()
    rejected = _trial(result, EAGER)
    assert (rejected.status, rejected.error, rejected.median_ns) == ("rejected", 1e-2, None)
    assert rejected.reason.startswith("relative error 1.0e-02 exceeds")
    assert result.chosen == (DETERMINISTIC,)


def test_a_workload_that_cannot_be_verified_stays_untouched():
    stage = Stage(
        _acts(inference_mode=5, cudnn_deterministic=5),
        reference=Reference(OWN_ERROR, "float64", False, True),
    )
    result = make_search(stage, [EAGER, DETERMINISTIC]).run()
    assert result.chosen == ()
    assert result.ended.endswith(": outputs change, so nothing can be verified")
    assert all(trial.median_ns is None for trial in result.candidates if trial.transforms)


# -- the reported figure ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time_ms", "objective", "blocks"),
    [
        (12, "latency", FEWEST_BLOCKS),
        (10.5, "latency", SCREEN_BLOCKS),
        (5, "latency", SCREEN_BLOCKS),
        (12, "p99", SCREEN_BLOCKS),
    ],
)
def test_a_candidate_that_is_clearly_behind_takes_half_a_screening(
    time_ms, objective, blocks, monkeypatch
):
    monkeypatch.setattr(Search, "_decide", lambda self: None)
    options = SearchOptions(objective=objective, budget_s=600)
    stage = Stage(_acts(inference_mode=time_ms), spread=0.02)
    result = make_search(stage, [EAGER], options).run()
    assert _trial(result, EAGER).samples == blocks * block_shape(options, 10 * MS).count


@pytest.mark.parametrize(("fastest_ms", "beside"), [(9.5, True), (8, False)])
def test_the_untouched_workload_races_only_where_it_is_near(fastest_ms, beside):
    stage, notes = Stage(_acts(inference_mode=fastest_ms, cudnn_deterministic=fastest_ms)), Notes()
    make_search(stage, [EAGER, DETERMINISTIC], watcher=notes).run()
    (phase,) = [phase for phase in notes.phases if phase.startswith("final race")]
    assert phase.endswith("and the untouched workload") == beside


def test_the_reported_figures_come_from_blocks_taken_after_the_choice():
    stage = Stage(_acts(inference_mode=5))

    def slow_down(message):
        if message.startswith("confirming inference_mode"):
            stage.factor = 3.0

    result = make_search(stage, [EAGER], watcher=Notes(slow_down)).run()
    assert result.chosen == (EAGER,)
    assert min(result.winner.samples_ns) > 14 * MS
    assert min(result.baseline.samples_ns) > 28 * MS
    assert result.speedup.estimate == pytest.approx(2.0, rel=0.02)


def test_a_confirmation_that_noise_leaves_undecided_goes_on_beyond_the_budget_and_says_so():
    stage = Stage(_acts(inference_mode=9))
    budget_s = 60.0

    def be_noisy(message):
        if message.startswith("confirming inference_mode"):
            stage.spread = 0.5
            stage.seconds = max(stage.seconds, budget_s - 1.0)

    notes = Notes(be_noisy)
    result = make_search(stage, [EAGER], SearchOptions(budget_s=budget_s), notes).run()
    assert result.chosen == (EAGER,)
    assert result.speedup.pairs > LOOKS[0]
    assert budget_s < result.seconds <= 1.2 * budget_s + 1.0
    assert any(phase.endswith("whether it is faster is not decided yet") for phase in notes.phases)
    assert result.ended.endswith("beyond the budget, confirming the plan")


def test_a_choice_that_is_not_confirmed_gives_way_to_the_untouched_workload():
    stage = Stage(_acts(inference_mode=9))

    def lose_the_gain(message):
        if message.startswith("confirming inference_mode"):
            stage.acts[(EAGER,)].time_ns = 10.5 * MS

    result = make_search(stage, [EAGER], watcher=Notes(lose_the_gain)).run()
    assert result.chosen == ()
    assert result.winner.median_ns == result.baseline.median_ns
    assert _trial(result, EAGER).status == "ok"
    assert "not shown to be faster" in _trial(result, EAGER).reason


def test_break_even_is_the_extra_set_up_over_the_gain_per_call():
    stage = Stage({(): Act(10 * MS, setup_s=1.0), (EAGER,): Act(5 * MS, setup_s=11.0)}, spread=0.0)
    assert make_search(stage, [EAGER]).run().break_even_calls == 2000


def test_the_result_names_regime_reference_and_what_does_not_apply():
    reference = Reference(OWN_ERROR, "float32", True, False, "float64 cannot run (no kernel)")
    stage = Stage(reference=reference, regime="launch-bound")
    result = make_search(stage, [EAGER]).run()
    assert result.regime == "launch-bound"
    assert result.reference == "float32; float64 cannot run (no kernel)"
    assert result.not_applicable == {"cuda_graph": "no CUDA device"}
