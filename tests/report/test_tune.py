from __future__ import annotations

import pytest

from steadytorch.report.tune import name_of, render_left_out, render_plan, render_trials

from .conftest import HOSTILE, LONG, TRIALS, WINNER, Screen, evidence, key, plan, spec, trial

# -- the table of candidates --------------------------------------------------------------------


def test_candidates_stand_fastest_first(screen):
    render_trials(screen.console, TRIALS, WINNER)
    places = [screen.text.index(name) for name in ("autocast", "channels_last", "untouched")]
    assert places == sorted(places)


def test_a_candidate_shows_its_figures(screen):
    render_trials(screen.console, TRIALS, WINNER)
    row = next(line for line in screen.text.splitlines() if "channels_last" in line)
    for figure in ("14.20", "2.02x", "1e-07", "1.15 GiB", "24 s"):
        assert figure in row


def test_the_winner_is_marked(screen):
    render_trials(screen.console, TRIALS, WINNER)
    assert screen.text.count("<- the plan") == 1


def test_without_a_choice_nothing_is_marked(screen):
    render_trials(screen.console, TRIALS, None)
    assert "<- the plan" not in screen.text
    assert "untouched" in screen.text


def test_untimed_candidates_give_their_reasons(screen):
    render_trials(screen.console, TRIALS, WINNER)
    assert "cudnn_deterministic: failed: set-up: RuntimeError: no" in screen.flat
    assert "allow with X" in screen.flat


def test_no_candidates_print_nothing(screen):
    render_trials(screen.console, (), None)
    assert screen.text == ""


def test_a_search_that_timed_nothing_shows_the_reasons_only(screen):
    render_trials(screen.console, [TRIALS[-1]], None)
    assert screen.flat.strip() == "cudnn_deterministic: failed: set-up: RuntimeError: no"


def test_long_names_wrap_and_stay_whole(screen):
    render_trials(screen.console, TRIALS, LONG)
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
    render_trials(screen.console, [trial(median_ns=1e3), *trials[1:]], None)
    for figure in ("139 GiB", "59 min 59 s", "1e-16", "2500000000.00"):
        assert figure in screen.text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wider_than_the_console(width):
    screen = Screen(width)
    render_trials(screen.console, TRIALS, WINNER)
    render_plan(screen.console, plan(), "Plan")
    render_left_out(screen.console, evidence())
    screen.check_width()


# -- the plan -----------------------------------------------------------------------------------


def test_a_plan_says_what_it_gains_and_costs(screen):
    render_plan(screen.console, plan(), "Plan")
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
    render_plan(screen.console, plan(trains="0" * 64), "Plan")
    for fact in (
        "2.02x as fast as an untouched step (99 % interval",
        "latency of a step 14.20 ms",
        "relative error of outputs, loss, gradients and buffers at the most 1.2e-07",
        "set-up 24 s at the first step, paid back after 1,234 steps",
    ):
        assert fact in screen.flat
    assert "workload" not in screen.flat


def test_an_empty_plan_for_training_claims_nothing(screen):
    render_plan(screen.console, plan(trains="0" * 64, candidate=()), "Plan")
    assert "nothing was shown to be faster than an untouched step" in screen.flat


def test_a_plan_in_memory_says_so(screen):
    render_plan(screen.console, plan(path=None), "Plan")
    assert "in memory only" in screen.flat


def test_a_plan_that_never_pays_back_says_so(screen):
    render_plan(screen.console, plan(evidence=evidence(break_even_calls=None)), "Plan")
    assert "never paid back" in screen.flat


def test_the_empty_plan_claims_nothing(screen):
    render_plan(screen.console, plan(candidate=()), "Plan")
    assert "untouched" in screen.flat
    assert "nothing was shown to be faster" in screen.flat
    assert "x as fast" not in screen.flat


@pytest.mark.parametrize(
    ("objective", "claim"),
    [
        ("latency", "2.02x as fast as the untouched workload"),
        ("throughput", "2.02x as fast as the untouched workload"),
        ("p99", "2.02x as fast at p99 as the untouched workload"),
    ],
)
def test_a_gain_in_the_tail_is_called_one(screen, objective, claim):
    render_plan(screen.console, plan(key=key(objective=objective)), "Plan")
    assert claim in screen.flat


def test_an_untouched_workload_over_the_memory_cap_is_reported_once(screen):
    over = "the untouched workload itself peaks at 3.00 GiB, over the cap of 1.00 GiB"
    trials = (trial(reason=over), *TRIALS[1:])
    render_trials(screen.console, trials, WINNER)
    render_plan(screen.console, plan(evidence=evidence(trials=trials)), "Plan")
    assert [line.strip() for line in screen.text.splitlines() if "itself" in line] == [over]


def test_no_interval_no_claim(screen):
    from steadytorch.plan.record import Speedup

    unsure = Speedup(2.02, None, None, "process", "undecided", 5)
    render_plan(screen.console, plan(evidence=evidence(speedup=unsure)), "Plan")
    assert "2.02" not in screen.flat


# -- what was left out --------------------------------------------------------------------------


def test_what_was_not_tried_is_grouped_by_reason(screen):
    render_left_out(screen.console, evidence())
    assert "no CUDA device: cuda_graph, tf32" in screen.flat
    assert "budget exhausted: compile(max-autotune)" in screen.flat


def test_long_lists_are_cut_with_their_number(screen):
    many = {f"candidate{i}": "budget exhausted" for i in range(40)}
    render_left_out(screen.console, evidence(not_applicable={}, not_tried=many))
    assert "and 34 more" in screen.flat


def test_nothing_left_out_prints_nothing(screen):
    render_left_out(screen.console, evidence(not_applicable={}, not_tried={}))
    assert screen.text == ""


# -- hostile text -------------------------------------------------------------------------------


def test_names_and_reasons_cannot_act_on_the_terminal(screen):
    candidate = spec(HOSTILE)
    trials = [
        trial(candidate, reason=HOSTILE),
        trial(candidate, status="rejected", reason=HOSTILE),
        trial(candidate, median_ns=None, status="failed", reason=HOSTILE),
    ]
    render_trials(screen.console, trials, candidate)
    hostile = evidence(
        trials=(trial(), trial(candidate, error=0.1)),
        not_applicable={HOSTILE: HOSTILE},
        reference=HOSTILE,
    )
    render_left_out(screen.console, hostile)
    stored = plan(candidate=candidate, evidence=hostile, path=f"/a/{HOSTILE}/b/c.json")
    render_plan(screen.console, stored, "Plan")
    assert screen.text.count("boo") >= 7


def test_markup_is_shown_and_not_obeyed():
    screen = Screen(200)
    render_plan(screen.console, plan(candidate=spec("[bold]x[/bold]")), "Plan")
    assert "[bold]x[/bold]" in screen.text


def test_a_candidate_in_one_line():
    assert name_of(()) == "untouched"
    assert name_of(WINNER) == "channels_last + inference_mode"
    assert name_of(spec("a\nb")) == "a\\nb"
