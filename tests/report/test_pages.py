"""What the pages tell: the sentences of the terminal, and every figure of a picture in a table."""

from __future__ import annotations

import json

import pytest

from steadytorch.report import compare, explain, measure
from steadytorch.report.conv import headline as conv_headline
from steadytorch.report.conv import rows
from steadytorch.report.text import duration

from .conftest import evidence, plan, result
from .documents import ALONE, CAUSES, DOCUMENTS, SLOW
from .explained import FULL
from .measured import MS, compared, measured, process, series
from .test_conv import layer, trained
from .test_conv import report as conv_report
from .test_html import read


def flat(name):
    return read(DOCUMENTS[name]).flat


def traces(name, picture=0):
    return read(DOCUMENTS[name]).figures[picture]["data"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("measure", measure.headline(measured())),
        (
            "measure, outliers",
            measure.headline(measured(process(series(slow=SLOW, causes=CAUSES)))),
        ),
        ("measure", " ".join(measure.details(measured()))),
        ("explain", "launch-bound, the GPU waits for the host to launch work"),
        ("explain", " ".join(explain.times(FULL))),
        ("explain", " ".join(explain.variation(FULL))),
        *[("explain", explain.recoverable(each, FULL)) for each in FULL.findings],
        ("tune", "2.02x as fast as the untouched workload (99 % interval 1.90 to 2.10, 20 fresh"),
        ("tune", "set-up 24 s at the first call, paid back after 1,234 calls"),
        ("tune, replayed", f"relative error 1.2e-07 against {evidence().reference}"),
        ("tune, a training step", "2.02x as fast as an untouched step (99 % interval 1.90 to 2.10"),
        ("tune, a training step", "set-up 24 s at the first step, paid back after 1,234 steps"),
        ("tune, a training step", "a training step on 1x3x224x224:float32"),
        ("tune, untouched", "no candidate was shown to be faster than the untouched workload"),
        ("tune, cut short", "the search was interrupted: no claim"),
        ("tune, no number", "the speedup is not a number"),
        ("compare", compare.sentence(compared())),
        ("compare", compare.basis(compared())),
        ("compare, by themselves", compare.alone(compared(dwells=ALONE))),
        ("compare, a gate", "The gate failed."),
        ("conv", conv_headline(conv_report(layer()))),
        ("conv, a training step", conv_headline(trained())),
    ],
)
def test_a_page_says_what_the_terminal_says(name, told):
    assert " ".join(told.split()) in flat(name)


def test_a_measurement_shows_all_samples_with_outliers_by_cause():
    by_name = {each["name"]: each for each in traces("measure, outliers")}
    assert by_name.keys() == {"samples", "outlier: garbage collection", "outlier: unattributed"}
    assert by_name["outlier: garbage collection"]["x"] == sorted(CAUSES)
    assert sum(len(each["x"]) for each in by_name.values()) == 1000
    assert "garbage collection 5" in flat("measure, outliers")


def test_processes_follow_one_another():
    first, second, third = traces("measure, three processes")
    assert [each["name"] for each in (first, second, third)] == [f"process {i}" for i in (1, 2, 3)]
    assert (first["x"][-1] + 1, second["x"][-1] + 1) == (second["x"][0], third["x"][0])
    assert "1 12.00 ms" in flat("measure, three processes")
    assert "Distribution in process 2, the representative one" in flat("measure, three processes")


def test_many_processes_and_many_causes_are_few_traces():
    document = json.loads(DOCUMENTS["measure, outliers"])
    one = document["processes"][0]
    for place, outlier in enumerate(one["period"]["outliers"]):
        outlier["cause"] = f"cause {place}"
    document["processes"] = [one] * 30
    (timeline, *_) = read(json.dumps(document).encode()).figures
    names = {each["name"] for each in timeline["data"]}
    assert {"odd processes", "even processes", "outliers of other causes"} <= names
    assert len(names) <= 10


def test_too_few_samples_for_a_figure_are_told():
    shown = flat("measure, few samples")
    assert "p99 too few samples: p99 needs 1,000 independent ones" in shown
    assert "none: too few samples (12 effective of 50 needed)" in shown


def test_slices_of_a_step_add_up_to_it_in_the_picture():
    found = traces("explain")
    for step in range(2):
        assert sum(each["y"][step] for each in found) == pytest.approx(100)
    shown = flat("explain")
    for label, time_ns in (("kernels", 60 * MS), ("idle: launching", 30 * MS)):
        assert f"{label} {duration(time_ns)}" in shown
    assert "together 100.0 ms 100.0 %" in shown
    assert "busy 130.0 ms 65.0 %" in shown


def test_many_steps_are_told():
    document = json.loads(DOCUMENTS["explain"])
    document["steps"] *= 200
    shown = read(json.dumps(document).encode())
    assert len(shown.figures[0]["data"][0]["x"]) == 200
    assert "Drawn: the first 200 of 400 steps; the table covers all." in shown.flat


def test_a_finding_has_its_evidence_and_its_fix():
    shown, finding = flat("explain"), FULL.findings[0]
    told = (finding.title, *finding.evidence, finding.fix, finding.check, finding.false_alarm)
    for text in (*told, "cuda_graph, compile"):
        assert text in shown
    assert "gc-pause, idle-ramp not recorded record it" in shown


def test_candidates_are_dots_with_intervals_and_rows_with_reasons():
    (dots,) = traces("tune")
    assert dots["text"][0] == "autocast"
    assert dots["x"] == [9.0, 14.2, 15.0, 28.7]
    assert dots["error_x"]["array"][-1] == pytest.approx(0.6)
    shown = flat("tune")
    for words in (
        "the plan 14.20 4.2% 2.02x",
        "set-up: RuntimeError: no",
        "allow with X",
        plan().id,
    ):
        assert words in shown


def test_a_search_shows_its_samples_and_a_replay_says_that_it_has_none():
    untouched, winner = traces("tune", 1)
    assert [len(each["x"]) for each in (untouched, winner)] == [12, 12]
    assert len(read(DOCUMENTS["tune, replayed"]).figures) == 1
    assert "A replayed plan: the store keeps the evidence of its search without samples." in flat(
        "tune, replayed"
    )
    base = evidence().baseline.median_ns
    assert f"untouched latency {duration(base)}" in flat("tune, replayed")
    assert f"untouched latency {duration(result().baseline.median_ns)}" in flat("tune")


@pytest.mark.parametrize("name", ["tune, cut short", "tune, nothing tried"])
def test_a_search_that_was_cut_short_claims_no_confirmation(name):
    assert "that confirmed the choice" not in flat(name)
    assert "timed again" not in flat(name)


def test_what_is_of_one_process_is_told_where_there_are_several():
    told = "Of the representative process, which has the middle median."
    assert told in flat("measure, three processes")
    assert told not in flat("measure")


def test_a_comparison_shows_its_pairs_and_its_interval():
    (pairs,) = traces("compare")
    assert pairs["y"] == [pytest.approx(100 * (10.9 / 12.4 - 1)), pytest.approx(-13.6)]
    shown = read(DOCUMENTS["compare"])
    band = shown.figures[0]["layout"]["shapes"][1]
    assert (band["y0"], band["y1"]) == (pytest.approx(-13.0), pytest.approx(-11.7))
    assert "1 2 12.50 ms 10.80 ms -13.60 %" in shown.flat
    assert "smallest detectable effect (MDE) 0.60 %" in shown.flat


def test_convolutions_have_the_rows_of_the_terminal_and_all_engines():
    shown = flat("conv, a training step")
    for row in rows(trained()):
        assert " ".join(" ".join(row).split()) in shown
    for words in ("eng39_k25=0 chosen 40.0 0.4 % 28 1.00 MiB 2e-04 tensor core", "over the cap"):
        assert words in shown
    assert "4 " in shown
    assert "not measured" in shown


def test_a_check_up_has_its_sections_and_what_is_hidden():
    shown = flat("doctor")
    for words in ("A/A noise floor 1.00% over 3 pairs (a product)", "It may differ.", "barred"):
        assert words in shown
    assert "counters barred ask root." in shown
