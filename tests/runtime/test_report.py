from __future__ import annotations

import msgspec
import pytest

from steadytorch.runtime.report import Report, Serving


def serving(**changes):
    fields = {
        "signature": "2x3:float32",
        "executor": "compile(default) + cuda_graph",
        "reason": None,
        "detail": "",
        "hits": 10,
        "others": 0,
        "plan": "0123456789ab",
        "saved_per_call_ns": 2e6,
        "break_even_calls": 100,
        "finding": "",
    }
    return Serving(**{**fields, **changes})


MISSED = serving(
    executor=None,
    reason="no plan",
    detail="torch was 1, is 2",
    hits=0,
    others=4,
    plan=None,
    saved_per_call_ns=0.0,
)


def test_hits_misses_and_fallbacks_add_up_to_the_calls():
    report = Report(
        {"tuned": 10, "untouched: no plan": 4, "untouched: called under autocast": 1},
        (serving(), MISSED),
    )
    assert (report.hits, report.misses) == (10, 4)
    assert report.fallbacks == {"no plan": 4, "called under autocast": 1}
    assert report.hits + sum(report.fallbacks.values()) == sum(report.calls.values())


def test_the_gain_is_calls_times_what_the_plan_measured():
    report = Report({"tuned": 10}, (serving(), MISSED, serving(hits=5)))
    assert report.saved_s == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "0.02 s saved by plan 0123456789ab, set-up paid back at 100 calls"),
        ({"hits": 100}, "0.2 s saved by plan 0123456789ab, set-up paid back"),
        ({"break_even_calls": None}, "10 calls, 0.02 s saved by plan 0123456789ab"),
        ({"finding": "faster in 12 pairs"}, "10 calls, faster in 12 pairs, 0.02 s saved"),
        ({"hits": 0}, "2x3:float32: compile(default) + cuda_graph, 0 calls"),
    ],
)
def test_a_line_says_what_serves_and_what_it_saved(changes, text):
    assert text in str(serving(**changes))


def test_a_line_says_why_the_model_runs_untouched():
    assert str(MISSED) == "2x3:float32: untouched, 4 calls, no plan; torch was 1, is 2"


def test_the_text_has_the_total_first_and_what_switched_it_off():
    lines = str(Report({"tuned": 1, "untouched: closed": 3}, (serving(hits=1),), "closed"))
    first, off, why, served = lines.splitlines()
    assert first.startswith("1 of 4 calls tuned")
    assert off == "off: closed"
    assert why == "  3 untouched: closed"
    assert "2x3:float32" in served


def test_a_report_without_calls_is_readable():
    assert str(Report({})) == "0 of 0 calls tuned, 0 s saved"


def test_a_report_is_data():
    report = Report({"tuned": 10}, (serving(), MISSED))
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
