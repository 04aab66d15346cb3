from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from steadytorch.report.explain import render_brief, render_explain, untold
from steadytorch.results.explain import Abstention, Explanation, SlowStep, StepTime

from .conftest import FACTS, HOSTILE, Screen
from .explained import MS, ROOFLINE, explained, finding, line
from .measured import series


def _printed(name="resnet50", everything=False, width=80, **fields):
    screen = Screen(width)
    render_explain(screen.console, name, explained(**fields), everything)
    screen.check_width()
    assert [row for row in screen.text.splitlines() if row != row.rstrip()] == []
    return screen


# -- the headline -------------------------------------------------------------------------------


def test_the_headline_names_the_regime_and_what_it_means():
    flat = _printed().flat
    assert "resnet50: launch-bound, the GPU waits for the host to launch work" in flat
    assert "95.00 ms a step without the profiler, no drift, p99 +0.2 %" in flat
    assert "100.0 ms a step, mean of 2 profiled; GPU busy 65.0 % between its first and" in flat


SLEEPY = {"slow": {at: 1900 * MS for at in range(0, 1000, 10)}, "causes": {0: "context switch"}}


def test_slow_steps_outside_of_the_profile_are_told():
    flat = _printed(measured=series(95 * MS, **SLEEPY)).flat
    assert "resnet50: launch-bound in usual steps, the GPU waits for" in flat
    assert "285.0 ms a step on average, 3.0x the median: the profile covers only usual" in flat
    assert "causes of the outliers: 99 unattributed, 1 context switch" in flat
    brief = Screen()
    render_brief(brief.console, "resnet50", explained(measured=series(95 * MS, **SLEEPY)))
    assert "launch-bound in usual steps" in brief.flat


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"measured": None},
        {"measured": series(95 * MS, slow={0: 9000 * MS})},
        {
            "measured": series(95 * MS, **SLEEPY),
            "steps": (*explained().steps, StepTime(4, 2000 * MS, {"unknown": 2000 * MS})),
        },
    ],
    ids=["even steps", "a trace file", "one slow step", "slow steps were profiled"],
)
def test_a_profile_of_all_kinds_of_steps_is_not_limited_to_usual_ones(fields):
    flat = _printed(**fields).flat
    assert "usual steps" not in flat
    assert "causes of the outliers" not in flat


def test_a_trace_file_shows_no_measurement():
    flat = _printed(measured=None, distortion=None).flat
    assert "without the profiler" not in flat
    assert "100.0 ms a step, mean of 2 profiled; GPU busy" in flat


def test_one_step_and_a_trace_without_marks_say_so():
    one = explained().steps[:1]
    assert "100.0 ms in the one profiled step" in _printed(steps=one, distortion=None).flat
    unmarked = _printed(steps=one, marked=False, distortion=None).flat
    assert "100.0 ms in total; the trace marks no steps" in unmarked


def test_an_unsteady_measurement_says_why():
    few = series(count=20)
    assert f"drift not excluded: {few.why_unsteady}, p90" in _printed(measured=few).flat


def test_what_was_not_profiled_is_left_out():
    bare = {"steps": (), "gpu": None, "roofline": None, "regime": "unclassified"}
    flat = _printed(**bare, distortion=None, variance_shares=None, slowest=()).flat
    assert "unclassified, the limit could not be identified" in flat
    assert "Where a step goes" not in flat
    assert "Top" not in flat


# -- findings -----------------------------------------------------------------------------------


def test_a_finding_shows_its_first_evidence_its_gain_and_its_fix():
    flat = _printed().flat
    assert "1. the GPU waits for launches 30 ms of a step launch-bound 60 kernels a step" in flat
    assert "recoverable: up to 30.00 ms a step (30.0 %); confidence: high" in flat
    assert "fix: Launch many kernels at once. Transforms: cuda_graph, compile." in flat
    assert "5 us each" not in flat
    assert "the profiler slowed the host" not in flat


def test_with_all_a_finding_shows_everything():
    flat = _printed(everything=True).flat
    assert "60 kernels a step 5 us each" in flat
    assert "check: steady explain WORKLOAD" in flat
    assert "false alarm if: the profiler slowed the host" in flat


def test_at_most_five_findings_are_shown():
    seven = tuple(finding(f"rule-{i}") for i in range(7))
    flat = _printed(findings=seven).flat
    assert "rule-4" in flat
    assert "rule-5" not in flat
    assert "2 more findings: --all" in flat
    assert "rule-6" in _printed(findings=seven, everything=True).flat


def test_a_measured_gain_is_an_interval():
    shown = finding(recoverable_ns=(20 * MS, 30 * MS), variance_share=0.4)
    flat = _printed(findings=(shown,)).flat
    assert "recoverable: 20.00 ms to 30.00 ms a step (30.0 %); 40 % of the variance" in flat


def test_a_share_that_rounds_to_zero_has_no_sign():
    flat = _printed(findings=(finding(variance_share=-0.004),)).flat
    assert "; 0 % of the variance" in flat


def test_a_finding_that_informs_asks_for_nothing():
    shown = finding("queue-full", 0, information=True, transforms=())
    flat = _printed(findings=(shown,)).flat
    assert "for information" in flat
    assert "fix:" not in flat
    assert "recoverable" not in flat.partition("recovered")[2]


def test_time_beyond_the_profiled_step_is_no_share_of_it():
    assert "up to 300.0 ms a step; confidence" in _printed(findings=(finding(hi=300 * MS),)).flat


def test_no_findings_is_never_called_healthy():
    found = _printed(findings=()).flat
    assert "some rules lacked data" in found
    alone = _printed(findings=(), abstained=()).flat
    assert "every rule had its data" in alone
    assert "healthy" not in (found + alone).lower()


# -- kernels and variability --------------------------------------------------------------------


def test_kernels_stand_with_their_share_of_the_limit():
    flat = _printed().flat
    assert "50.0 % 60.00 ms 20x 62 % of memory elementwise<4>" in flat
    assert "50.0 % 30.00 ms 20x gemm" in flat
    assert (
        "92.3 % of this work takes 60.00 ms; at this device's limits it would take 37.00 ms" in flat
    )


def test_long_names_of_kernels_are_cut_to_one_line():
    lines = explained().roofline.lines
    long = (line("void " + "kernel_name_" * 30),)
    rows = _printed(roofline=replace(ROOFLINE, lines=long + lines)).text.splitlines()
    assert len([row for row in rows if "kernel_name_" in row]) == 1


def test_limits_that_were_passed_are_not_believed():
    passed = replace(ROOFLINE, least_ns=90 * MS, share_of_limit=1.5)
    flat = _printed(roofline=passed).flat
    assert "faster than the measured limits" in flat
    assert "would take" not in flat


def test_operators_without_data_or_arithmetic_are_not_compared_with_the_limits():
    flat = _printed(roofline=replace(ROOFLINE, least_ns=0, share_of_limit=1e-4)).flat
    assert "it would take" not in flat


def test_variability_names_slices_in_words():
    flat = _printed().flat
    assert "variance of the profiled steps: kernels 60 %, idle: launching 40 %" in flat
    assert "kernels: 50 % from slower kernels, 10 % from more kernels" in flat
    assert "ProfilerStep#3 took 3.00 ms more than the median: idle: launching 33 ms" in flat


def test_shares_that_do_not_exist_say_why():
    none = {"variance_shares": None, "kernel_variance": None}
    flat = _printed(**none, why_no_variance_shares="2 steps: a variance needs 3").flat
    assert "variance not split: 2 steps: a variance needs 3" in flat


# -- doubts -------------------------------------------------------------------------------------


def test_rules_that_could_not_tell_are_one_line_and_with_all_have_reasons():
    assert "Could not tell (3, --all says why): gc-pause, idle-ramp, copies" in _printed().flat
    flat = _printed(everything=True).flat
    assert "gc-pause, idle-ramp: not recorded record it" in flat
    assert "copies: no GPU take one" in flat


def test_a_profiler_that_distorts_is_told():
    assert "Profiling slowed" not in _printed(distortion=1.05).flat
    told = "Profiling slowed steps 1.60x"
    assert f"{told}; mostly host time" in _printed(distortion=1.6).flat
    assert f"{told}; short operators" in _printed(distortion=1.6, gpu=None).flat


def test_profiled_steps_that_are_not_those_of_the_run_are_told():
    assert "Profiled steps took" not in _printed(distortion=0.95).flat
    told = "Profiled steps took 0.03x the time of steps without the profiler"
    assert told in _printed(distortion=0.034).flat


def test_one_figure_says_what_the_profiler_costs():
    """The ratio of medians: outliers among a few profiled steps move their mean."""
    flat = _printed(distortion=1.3).flat
    assert "95.00 ms a step without the profiler" in flat
    assert "100.0 ms a step, mean of 2 profiled" in flat
    assert re.findall(r"\d\.\d\dx", flat) == ["1.30x"]


def test_problems_and_remarks_of_the_trace_are_told():
    flat = _printed(problems=("the capture was cut off",), remarks=("stacks were on",)).flat
    assert "the capture was cut off stacks were on" in flat


def test_a_measurement_that_ended_early_says_why():
    assert "ended early: ValueError: no" in _printed(failed="ValueError: no").flat


# -- the whole ----------------------------------------------------------------------------------


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("width", [40, 80, 100])
def test_names_of_others_are_neutralised(screen, width, everything):
    texts = {"title": HOSTILE, "evidence": (HOSTILE,), "fix": HOSTILE, "check": HOSTILE}
    hostile = explained(
        regime=HOSTILE,
        findings=(finding(HOSTILE, **texts, transforms=(HOSTILE,), false_alarm=HOSTILE),),
        abstained=(Abstention(HOSTILE, HOSTILE, HOSTILE),),
        roofline=type(ROOFLINE)(lines=(line(HOSTILE),), steps=1, busy_ns=1, known_ns=0, least_ns=0),
        slowest=(SlowStep(0, HOSTILE, 2, 1, (HOSTILE,)),),
        variance_shares={HOSTILE: 1.0},
        problems=(HOSTILE,),
        remarks=(HOSTILE,),
        failed=HOSTILE,
    )
    own = Screen(width)
    render_explain(own.console, HOSTILE, hostile, everything)
    own.check_width()
    assert "\x1b" not in own.text
    assert "\x07" not in own.text
    render_explain(screen.console, HOSTILE, hostile, everything)
    assert "[red]boo[/red]" in screen.text


def test_the_verdict_fits_a_screen_of_fifty_lines():
    five = tuple(finding(f"rule-{i}") for i in range(5))
    assert len(_printed(findings=five).text.splitlines()) <= 50


def test_a_bare_explanation_can_be_shown():
    screen = Screen()
    bare = Explanation(source="x", environment=FACTS, regime="unclassified")
    render_explain(screen.console, "x", bare)
    assert "unclassified" in screen.text


def test_a_quiet_console_shows_nothing():
    screen = Screen(quiet=True)
    render_explain(screen.console, "x", explained())
    assert screen.text == ""


def test_rules_about_a_gpu_are_one_doubt_where_there_was_none():
    recapture = "profile on the GPU"
    abstained = (
        Abstention("input-pipeline", "nothing is named as a data loader", "profile the loop"),
        Abstention("copies", "the trace has no GPU events, and this is about the GPU", recapture),
        Abstention("lazy-loading", "the trace has no GPU events: loading is unseen", recapture),
    )
    assert untold(abstained) == (
        "Could not tell (3, --all says why): input-pipeline, 2 about a GPU"
    )
    assert untold(abstained[:1]) == "Could not tell (1, --all says why): input-pipeline"
