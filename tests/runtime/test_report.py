from __future__ import annotations

import msgspec
import pytest

from steadytorch.conv import executables
from steadytorch.runtime.report import Report, Serving, Tally, missed_convolutions


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
        ({}, "0.02 s saved by plan 0123456789ab, set-up to be paid back after 100 calls"),
        ({"break_even_calls": 27157}, "set-up to be paid back after 27,157 calls"),
        ({"hits": 1}, "cuda_graph, 1 call, "),
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


def test_a_report_without_calls_says_so():
    assert str(Report({})) == "never called: call this module in place of the model"


def test_a_report_without_calls_names_the_methods_that_were_called():
    first, called = str(Report({}, methods={"generate": 2, "encode": 1})).splitlines()
    assert first.startswith("never called")
    assert called == "  other methods of the model run untouched: generate (2), encode (1)"


def test_a_report_is_data():
    report = Report({"tuned": 10}, (serving(), MISSED))
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


ENGINED = serving(executor="fold_batch_norm + cudnn_engines(choices={...}) + cuda_graph")


@pytest.fixture
def misses(monkeypatch):
    found = {"fprop/none": "this cuDNN has no plan eng7"}
    monkeypatch.setattr(executables, "MISSES", found)
    return found


@pytest.mark.parametrize(
    ("signatures", "told"),
    [
        ((ENGINED,), True),
        ((MISSED, serving(), ENGINED), True),
        ((serving(), MISSED), False),
        ((), False),
    ],
    ids=["engines", "engines among others", "no engines", "nothing"],
)
def test_missed_convolutions_are_reported_for_plans_with_engines(misses, signatures, told):
    found = missed_convolutions(signatures)
    assert found == (misses if told else {})
    misses["later"] = "another"
    assert "later" not in found


def test_the_text_ends_with_the_convolutions_that_pytorch_ran():
    text = str(Report({"tuned": 1}, (ENGINED,), None, {"fprop/a": "gone", "fprop/b": "refused"}))
    assert text.splitlines()[-3:] == [
        "  convolutions that ran without their stored engine: 2",
        "    fprop/a: gone",
        "    fprop/b: refused",
    ]


def test_the_text_shows_a_few_of_many_convolutions():
    lines = str(Report({}, (), None, {str(n): "gone" for n in range(53)})).splitlines()
    assert len(lines) == 8
    assert lines[1].endswith(": 53")
    assert lines[-1].strip() == "and 48 more"


def test_misses_survive_being_written_down():
    report = Report({}, (ENGINED,), None, {"fprop/a": "gone"})
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_counts_of_freed_executors_are_kept():
    tally = Tally()
    tally.count("untouched: no plan")
    tally.keep([serving(), MISSED])
    tally.keep([serving(hits=3)])
    report = tally.report([serving(hits=1)], None)
    assert report.calls == {"tuned": 14, "untouched: no plan": 1}
    assert report.saved_s == pytest.approx(0.028)
    assert [each.hits for each in report.signatures] == [1]
