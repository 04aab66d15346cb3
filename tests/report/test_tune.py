from __future__ import annotations

import msgspec
import pytest

from steadytorch.plan.record import as_result
from steadytorch.report.tune import (
    name_of,
    render_interrupted,
    render_left_out,
    render_missing,
    render_plan,
    render_summary,
    render_trials,
)
from steadytorch.results.candidate import NOT_INSTALLED

from .conftest import (
    HOSTILE,
    LONG,
    TRIALS,
    WINNER,
    Screen,
    evidence,
    key,
    plan,
    result,
    spec,
    trial,
)
from .recorded import PLAN, TRAINED, found


def searched(trials=TRIALS, chosen=WINNER, **fields):
    """The result of a search with these trials; without a plan if nothing was chosen."""
    found = result(candidates=tuple(trials), chosen=chosen or (), **fields)
    kept = None if chosen is None else plan(candidate=chosen, evidence=evidence(trials=trials))
    return found.as_result(kept, inputs="8x3x224x224:float32", trains=False)


def show_trials(console, trials, chosen):
    render_trials(console, searched(trials, chosen))


def show_plan(console, made, heading):
    render_plan(console, as_result(made), heading)


def show_left_out(console, kept):
    render_left_out(console, as_result(plan(evidence=kept)))


# -- the table of candidates --------------------------------------------------------------------


def test_candidates_stand_fastest_first(screen):
    show_trials(screen.console, TRIALS, WINNER)
    places = [screen.text.index(name) for name in ("autocast", "channels_last", "untouched")]
    assert places == sorted(places)


def test_a_candidate_shows_its_figures(screen):
    show_trials(screen.console, TRIALS, WINNER)
    row = next(line for line in screen.text.splitlines() if "channels_last" in line)
    for figure in ("14.20", "2.02x", "1e-07", "1.15 GiB", "24 s"):
        assert figure in row


def test_the_winner_is_marked(screen):
    show_trials(screen.console, TRIALS, WINNER)
    assert screen.text.count("<- the plan") == 1


def test_without_a_choice_nothing_is_marked(screen):
    show_trials(screen.console, TRIALS, None)
    assert "<- the plan" not in screen.text
    assert "untouched" in screen.text


def test_untimed_candidates_give_their_reasons(screen):
    show_trials(screen.console, TRIALS, WINNER)
    assert "cudnn_deterministic: failed: set-up: RuntimeError: no" in screen.flat
    assert "allow with X" in screen.flat


def test_no_candidates_print_nothing(screen):
    show_trials(screen.console, (), None)
    assert screen.text == ""


def test_a_search_that_timed_nothing_shows_the_reasons_only(screen):
    show_trials(screen.console, [TRIALS[-1]], None)
    assert screen.flat.strip() == "cudnn_deterministic: failed: set-up: RuntimeError: no"


def test_long_names_wrap_and_stay_whole(screen):
    show_trials(screen.console, TRIALS, LONG)
    shown = "".join(line[:25].strip() for line in screen.text.splitlines())
    assert "max-autotune, freezing" in shown or "max-autotune,freezing" in shown
    for word in ("fold_batch_norm", "attention_backend", "mem_efficient", "threads"):
        assert word in shown.replace(" ", "")


def test_figures_are_whole_however_large(screen):
    extreme = {
        "peak_memory_bytes": 139 << 30,
        "setup_s": 3599.0,
        "error": 1.234e-16,
        "p90_ns": None,
        "p99_ns": 9e15,
    }
    trials = [trial(), trial(LONG, median_ns=2.5e12, median_ci_ns=(1e12, 9e12), **extreme)]
    show_trials(screen.console, [trial(median_ns=1e3), *trials[1:]], None)
    for figure in ("139 GiB", "59 min 59 s", "1e-16", "2500000000.00"):
        assert figure in screen.text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wider_than_the_console(width):
    screen = Screen(width)
    show_trials(screen.console, TRIALS, WINNER)
    show_plan(screen.console, plan(), "Plan")
    show_left_out(screen.console, evidence())
    screen.check_width()


# -- the plan -----------------------------------------------------------------------------------


def test_a_plan_says_what_it_gains_and_costs(screen):
    show_plan(screen.console, plan(), "Plan")
    for fact in (
        "channels_last + inference_mode",
        "2.02x",
        "1.90 to 2.10",
        "20 fresh pairs",
        "14.20 ms",
        "28.70 ms",
        "1.2e-07 against float64",
        "set-up 24 s",
        "1,234 calls",
        "1.15 GiB",
        plan().id,
        "/home/user/.cache/steadytorch/plans",
    ):
        assert fact in screen.flat


def test_a_plan_for_training_speaks_of_steps(screen):
    show_plan(screen.console, plan(trains="0" * 64), "Plan")
    for fact in (
        "2.02x as fast as an untouched step (99 % interval",
        "latency of a step 14.20 ms",
        "relative error of outputs, loss, gradients and buffers at the most 1.2e-07",
        "set-up 24 s at the first step, paid back after 1,234 steps",
    ):
        assert fact in screen.flat
    assert "workload" not in screen.flat


def test_an_empty_plan_for_training_claims_nothing(screen):
    show_plan(screen.console, plan(trains="0" * 64, candidate=()), "Plan")
    assert "no candidate was shown to be faster than an untouched step" in screen.flat


def test_a_plan_in_memory_says_so(screen):
    show_plan(screen.console, plan(path=None), "Plan")
    assert "in memory only" in screen.flat


def test_a_plan_that_never_pays_back_says_so(screen):
    show_plan(screen.console, plan(evidence=evidence(break_even_calls=None)), "Plan")
    assert "never paid back" in screen.flat


def test_the_empty_plan_claims_nothing(screen):
    show_plan(screen.console, plan(candidate=()), "Plan")
    assert "untouched" in screen.flat
    assert "no candidate was shown to be faster" in screen.flat
    assert "x as fast" not in screen.flat


@pytest.mark.parametrize(
    ("objective", "claim"),
    [
        ("latency", "2.02x as fast as the untouched workload"),
        ("throughput", "2.02x as fast as the untouched workload"),
        ("p99", "2.02x as fast at p99 as the untouched workload"),
        ("contended", "2.02x as fast at p99 beside a busy process as the untouched workload"),
    ],
)
def test_a_gain_in_the_tail_is_called_one(screen, objective, claim):
    show_plan(screen.console, plan(key=key(objective=objective)), "Plan")
    assert claim in screen.flat


@pytest.mark.parametrize(
    ("half_width", "objective", "told"),
    [(0.05, "latency", False), (0.3, "latency", True), (0.3, "contended", False)],
)
def test_times_that_scatter_are_told(screen, half_width, objective, told):
    base = evidence().baseline
    ends = tuple(base.median_ns * (1 + side * half_width) for side in (-1, 1))
    base = msgspec.structs.replace(base, median_ci_ns=ends)
    found = plan(key=key(objective=objective), evidence=evidence(baseline=base))
    show_plan(screen.console, found, "Plan")
    assert ("times scatter" in screen.flat) == told


def test_an_untouched_workload_over_the_memory_cap_is_reported_once(screen):
    over = "the untouched workload itself peaks at 3.00 GiB, over the cap of 1.00 GiB"
    trials = (trial(reason=over), *TRIALS[1:])
    show_trials(screen.console, trials, WINNER)
    show_plan(screen.console, plan(evidence=evidence(trials=trials)), "Plan")
    assert [line.strip() for line in screen.text.splitlines() if "itself" in line] == [over]


def test_no_interval_no_claim(screen):
    from steadytorch.plan.record import Speedup

    unsure = Speedup(2.02, None, None, "process", "undecided", 5)
    show_plan(screen.console, plan(evidence=evidence(speedup=unsure)), "Plan")
    assert "2.02" not in screen.flat


# -- the summary --------------------------------------------------------------------------------


def summary(kept, width=80):
    screen = Screen(width)
    of = {"inputs": "8x3x224x224:float32", "trains": kept.trains is not None}
    render_summary(screen.console, found().as_result(kept, **of), as_result(kept))
    screen.check_width()
    return screen


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("kept", [PLAN, TRAINED, plan()], ids=["long", "training", "short"])
def test_the_result_of_a_search_takes_at_most_25_lines(kept, width):
    assert len(summary(kept, width).text.splitlines()) <= 25


def test_the_summary_has_the_plan_its_gain_its_costs_and_two_runners_up():
    shown = summary(PLAN, 100).flat
    for fact in (
        "Plan: fold_batch_norm + channels_last + cudnn_engines(#",
        "2.02x as fast as the untouched workload (99 % interval 1.90 to 2.10, 27 fresh pairs",
        "set-up 24 s at the first call, paid back after 1,234 calls",
        "peak memory 1.15 GiB, untouched 1.15 GiB",
        "1.90x 15.10 ms fold_batch_norm + channels_last + compile(",
        "1.88x 15.30 ms channels_last + compile(",
        "24 candidates timed, 1 rejected, 1 failed",
        "42 not tried: the budget ended (12); reason 0 of those that exist (6)",
        f"All candidates: steady plans show {PLAN.id}",
    ):
        assert fact in shown
    assert "transform_0" not in shown


def test_a_plan_in_memory_cannot_be_shown_later(screen):
    made = as_result(plan(path=None))
    render_summary(screen.console, made, made)
    assert "All candidates: run with --all" in screen.flat
    assert "plans show" not in screen.flat


def test_candidates_that_the_user_did_not_allow_are_no_runners_up(screen):
    made = searched()
    render_summary(screen.console, made, as_result(plan()))
    assert "autocast" not in screen.text
    assert "fold_batch_norm" in screen.text


def test_an_interrupted_search_shows_the_fastest_five(screen):
    cut = found(interrupted=True, chosen=(), speedup=None)
    render_interrupted(screen.console, cut.as_result(None, inputs="x", trains=False))
    lines = screen.text.splitlines()
    assert len(lines) <= 9
    assert "2.02x   14.20 ms  fold_batch_norm" in lines[1]
    assert "All candidates: run with --all" in screen.flat


# -- int8 ---------------------------------------------------------------------------------------

OWN = trial(WINNER, median_ns=14e6, median_ci_ns=(13.8e6, 14.2e6), precision="bf16")


def of_int8(**fields):
    given = {"median_ns": 15e6, "median_ci_ns": (14.8e6, 15.2e6), "precision": "int8"}
    return trial(spec("openvino"), **{**given, **fields})


def shown_with(screen, *trials, chosen=WINNER):
    kept = evidence(trials=(trial(), *trials))
    show_plan(screen.console, plan(candidate=chosen, evidence=kept), "Plan")
    return screen.flat


def test_int8_without_a_gain_is_said_with_its_interval(screen):
    text = shown_with(screen, OWN, of_int8())
    line = "int8: no gain here, 0.93x (0.91 to 0.96) of channels_last + inference_mode, as screened"
    assert line in text


def test_int8_that_was_not_timed_gives_its_reason(screen):
    why = "relative error 2.0e-01 exceeds 1.0e-01"
    text = shown_with(screen, OWN, of_int8(median_ns=None, status="rejected", reason=why))
    assert f"int8: no gain shown, openvino rejected: {why}" in text


def test_nothing_is_said_of_int8_where_it_is_the_plan_or_was_not_allowed(screen):
    assert "int8" not in shown_with(screen, OWN)
    assert "int8" not in shown_with(screen, OWN, of_int8(allowed=False))
    assert "int8" not in shown_with(screen, OWN, of_int8(), chosen=spec("openvino"))


# -- what was left out --------------------------------------------------------------------------


def test_what_was_not_tried_is_grouped_by_reason(screen):
    show_left_out(screen.console, evidence())
    assert "no CUDA device: cuda_graph, tf32" in screen.flat
    assert "budget exhausted: compile(max-autotune)" in screen.flat


def test_long_lists_are_cut_with_their_number(screen):
    many = {f"candidate{i}": "budget exhausted" for i in range(40)}
    show_left_out(screen.console, evidence(not_applicable={}, not_tried=many))
    assert "and 34 more" in screen.flat


def test_nothing_left_out_prints_nothing(screen):
    show_left_out(screen.console, evidence(not_applicable={}, not_tried={}))
    assert screen.text == ""


# -- hostile text -------------------------------------------------------------------------------


def test_names_and_reasons_cannot_act_on_the_terminal(screen):
    candidate = spec(HOSTILE)
    trials = [
        trial(candidate, reason=HOSTILE),
        trial(candidate, status="rejected", reason=HOSTILE),
        trial(candidate, median_ns=None, status="failed", reason=HOSTILE),
    ]
    show_trials(screen.console, trials, candidate)
    hostile = evidence(
        trials=(trial(), trial(candidate, error=0.1)),
        not_applicable={HOSTILE: HOSTILE},
        reference=HOSTILE,
    )
    show_left_out(screen.console, hostile)
    stored = plan(candidate=candidate, evidence=hostile, path=f"/a/{HOSTILE}/b/c.json")
    show_plan(screen.console, stored, "Plan")
    assert screen.text.count("boo") >= 7


def test_markup_is_shown_and_not_obeyed():
    screen = Screen(200)
    show_plan(screen.console, plan(candidate=spec("[bold]x[/bold]")), "Plan")
    assert "[bold]x[/bold]" in screen.text


def test_a_candidate_in_one_line():
    assert name_of(()) == "untouched"
    assert name_of(WINNER) == "channels_last + inference_mode"
    assert name_of(spec("a\nb")) == "a\\nb"


def test_engines_that_an_extra_would_add_are_named_in_one_line(screen):
    missing = {
        f"{name}(f32)": f"needs {name}, {NOT_INSTALLED} 'steadytorch[{name}]'"
        for name in ("openvino", "onnxruntime")
    }
    kept = plan(evidence=msgspec.structs.replace(evidence(), not_applicable=missing))
    render_missing(screen.console, as_result(kept))
    line = "Not installed: openvino, onnxruntime; to try: pip install 'steadytorch[cpu]'"
    assert screen.text.strip() == line


def test_nothing_missing_prints_nothing(screen):
    render_missing(screen.console, searched())
    assert screen.text == ""


def test_gains_are_shown_within_one_device_only(screen):
    elsewhere = {name_of(WINNER): "cuda:1"}
    given = searched(devices=("cuda:0", "cuda:1"), timed_on=elsewhere)
    render_trials(screen.console, searched())
    shown = screen.text.count("x ")
    render_trials(screen.console, given)
    assert "on cuda:1" in screen.text
    assert screen.text.count("x ") == 2 * shown - 1


def test_the_summary_names_the_devices(screen):
    left_out = {"cuda:2": "busy: 1 other process"}
    given = searched(devices=("cuda:0", "cuda:1"), devices_left_out=left_out)
    render_summary(screen.console, given, given)
    said = " ".join(screen.text.split())
    assert "also timed on cuda:1; the winner's times are from cuda:0" in said
    assert "without cuda:2: busy: 1 other process" in said
