"""Rows, the merging of documents, and what follows from them."""

from __future__ import annotations

import numpy as np
import pytest
import rival_results
from rival_arms import Arm
from rival_worker import SetUp

from .rivalry import document, judgement, one_workload, row


def arm(option, ms, blocks=12, count=10):
    """An arm that was timed: blocks of a normal scatter of 0.1 % about `ms`."""
    rng = np.random.default_rng(len(option))
    drawn = {
        metric: rng.normal(factor * ms * 1e6, ms * 1e3, (blocks, count)).astype(int).tolist()
        for metric, factor in (("period", 1.0), ("latency", 1.1))
    }
    set_up = SetUp(setup_s=2.0, peak_memory_bytes=5_000_000, error=1e-3, fault=None)
    return Arm(option, None, stage="ready", set_up=set_up, blocks=drawn)  # type: ignore[arg-type]


def test_a_row_holds_the_figures_and_the_verdict_on_ours():
    found = rival_results.row_of("w:1", arm("eager", 2.0), arm("steadytorch", 1.0))
    assert found["period_ms"] == pytest.approx(2.0, rel=1e-3)
    assert found["latency_ms"] == pytest.approx(2.2, rel=1e-3)
    assert found["cv"] == pytest.approx(1e-3, rel=0.3)
    assert found["peak_mb"] == 5.0
    low, high = found["period_ci_ms"]
    assert low <= found["period_ms"] <= high
    verdict = found["ours_against_it"]["period"]
    assert verdict["verdict"] == "faster"
    assert verdict["estimate"] == pytest.approx(-0.5, abs=0.002)


def test_only_our_own_row_keeps_every_sample():
    ours = arm("steadytorch", 1.0)
    found = rival_results.row_of("w:1", ours, ours)
    assert found["samples_ns"]["period"] == ours.samples("period")
    assert "ours_against_it" not in found
    assert "samples_ns" not in rival_results.row_of("w:1", arm("eager", 2.0), ours)


def test_p99_needs_a_thousand_independent_samples():
    few = rival_results.row_of("w:1", arm("eager", 2.0), None)
    many = rival_results.row_of("w:1", arm("eager", 2.0, blocks=150), None)
    assert few["p99_over_median"] is None
    assert many["p99_over_median"] == pytest.approx(1.0023, abs=5e-4)


def test_on_the_cpu_the_period_is_the_latency():
    alone = arm("eager", 2.0)
    del alone.blocks["latency"]
    found = rival_results.row_of("w:1", alone, None)
    assert found["latency_ms"] == found["period_ms"]
    assert rival_results.against({"ours_against_it": {"period": 1}}, "latency") == 1


def test_what_was_not_timed_is_a_row_with_its_reason():
    dead = Arm("eager", None, failed="out of memory", detail="the end")  # type: ignore[arg-type]
    found = rival_results.row_of("w:1", dead, None)
    assert (found["failed"], found["detail"], found["period_ms"]) == (
        "out of memory",
        "the end",
        None,
    )
    untimed = Arm("eager", None)  # type: ignore[arg-type]
    assert rival_results.row_of("w:1", untimed, None)["failed"] == "was not timed"


def test_merging_replaces_a_workload_and_keeps_the_others_in_order():
    before = document(*one_workload("b:1", -0.1), *one_workload("a:1", -0.1))
    fresh = document(row("b:1", "steadytorch", 0.2), precision="bf16")
    merged = rival_results.merge(before, fresh, ["a:1", "b:1"])
    assert list(merged["workloads"]) == ["a:1", "b:1"]
    assert merged["workloads"]["b:1"]["precision"] == "bf16"
    assert [r["workload"] for r in merged["rows"]] == ["a:1"] * 4 + ["b:1"]
    assert merged["rows"][-1]["period_ms"] == 0.2


def test_merging_into_nothing_gives_the_whole_form(tmp_path):
    fresh = document(*one_workload("own:1", -0.1))
    fresh.pop("schema")
    merged = rival_results.merge(rival_results.read(tmp_path / "none.json"), fresh, ["a:1"])
    assert merged["schema"] == rival_results.SCHEMA
    assert merged["kind"] == "rivals"
    assert merged["rows"] == fresh["rows"]


def test_the_best_is_the_fastest_that_could_be_timed_and_is_not_ours():
    rows = one_workload("a:1", -0.1)
    assert rival_results.best_of(rows, "period_ms")["period_ms"] == 0.4
    assert rival_results.best_of(rows[:1], "period_ms") is None
    assert rival_results.ours_of(rows)["option"] == "steadytorch"


@pytest.mark.parametrize("error", [1.0, 0.051, float("nan"), None])
def test_what_gives_wrong_results_is_nobodys_rival(error):
    wrong = row("a:1", "fp16 compile", 0.1, error=error)
    rows = [*one_workload("a:1", -0.1), wrong]
    assert rival_results.best_of(rows, "period_ms")["period_ms"] == 0.4
    assert rival_results.is_wrong(wrong)
    assert not rival_results.is_wrong({**wrong, "error": rival_results.WRONG})


def test_totals_are_over_workloads_with_both_sides():
    alone = row("c:1", "eager TF32", 1.0)
    found = rival_results.totals(
        document(*one_workload("a:1", -0.19), *one_workload("b:1", 0.0), alone)
    )
    assert found["period"]["workloads"] == 2
    assert found["period"]["geometric_mean"] == pytest.approx(0.9)
    assert (found["period"]["worst"], found["period"]["worst_workload"]) == (1.0, "b:1")
    assert found["search_s"] == 55.0
    assert (found["autotuned"], found["autotuned_ready"]) == (2, 0)


def test_an_effect_without_pairs_is_no_ratio():
    assert rival_results.ratio({**judgement(0.0), "estimate": None}) is None
    assert rival_results.ratio(judgement(-0.25)) == 0.75


@pytest.mark.parametrize(
    ("ours", "power", "expected"),
    [
        (
            {"cv": 0.002, "p99_over_median": 1.01},
            {"finding": "the power limit holds the clock"},
            "",
        ),
        ({"cv": 0.002, "p99_over_median": None}, {}, ""),
        ({"cv": 0.02, "p99_over_median": None}, {"held": 0.1, "finding": None}, "not attributed"),
        ({"cv": 0.002, "p99_over_median": 1.05}, {}, "not attributed"),
        (
            {"cv": 0.02, "p99_over_median": 1.05},
            {
                "finding": "heat",
                "variance_share": 0.7,
                "sm_clock_mhz": 1755.0,
                "power_watts": 698.2,
            },
            "heat (1755 MHz, 698 W)",
        ),
        (
            {"cv": 0.02, "p99_over_median": 1.05},
            {"finding": "heat", "variance_share": None, "sm_clock_mhz": 1755.0},
            "not attributed; heat (1755 MHz)",
        ),
        (
            {
                "cv": 0.02,
                "p99_over_median": None,
                "alone": {"finding": "the limit holds the clock", "variance_share": 0.96},
            },
            {"finding": "heat", "variance_share": None},
            "not attributed in turns; alone: the limit holds the clock",
        ),
        (
            {
                "cv": 0.02,
                "p99_over_median": None,
                "alone": {"finding": "heat", "variance_share": None},
            },
            {"finding": None},
            "not attributed",
        ),
        (
            {"cv": 0.02, "p99_over_median": None, "alone": {"finding": "heat holds it"}},
            {"finding": None, "clock_share": 0.914},
            "the clock makes 91% of the variance; alone: heat holds it",
        ),
        (
            {"cv": 0.02, "p99_over_median": None},
            {"finding": None, "clock_share": 0.914},
            "the clock makes 91% of the variance",
        ),
    ],
)
def test_variability_is_put_down_to_what_explain_says_of_the_clock(ours, power, expected):
    assert rival_results.cause(ours, power) == expected
