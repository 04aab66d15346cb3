import msgspec
import pytest

from steadytorch.measure.measurement import summarize
from steadytorch.measure.race import Judgement
from steadytorch.plan.record import Evidence, Speedup, Trial
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune.result import (
    TuneResult,
    break_even_calls,
    reference_text,
    speedup_of,
)
from steadytorch.verification.verdict import OutputError, Reference

CHOSEN = (TransformSpec("inference_mode"),)


@pytest.fixture
def result():
    return TuneResult(
        baseline=summarize(range(200, 300), "latency"),
        winner=summarize(range(100, 200), "latency"),
        chosen=CHOSEN,
        regime="memory-bound",
        candidates=(Trial(transforms=()), Trial(transforms=CHOSEN, median_ns=150.0, samples=100)),
        not_applicable={"cuda_graph": "no CUDA device"},
        not_tried={"cudnn_deterministic": "budget exhausted"},
        speedup=Speedup(1.7, 1.6, 1.8, "process", "faster", 12),
        break_even_calls=40,
        reference="float64",
        seconds=12.5,
    )


def test_evidence_keeps_the_summary_and_drops_the_samples(result):
    evidence = result.evidence()
    assert evidence.winner.median_ns == result.winner.median_ns
    assert evidence.winner.median_ci_ns == result.winner.median_ci_ns
    assert evidence.baseline.p90_ns == result.baseline.p90_ns
    assert (evidence.winner.samples, evidence.winner.metric) == (100, "latency")
    assert b"samples_ns" not in msgspec.json.encode(evidence)


def test_evidence_says_why_what_and_what_not(result):
    evidence = result.evidence()
    assert evidence.trials == result.candidates
    assert evidence.not_applicable == result.not_applicable
    assert evidence.not_tried == result.not_tried
    assert (evidence.speedup, evidence.break_even_calls) == (result.speedup, 40)
    assert (evidence.regime, evidence.reference, evidence.search_s) == (
        "memory-bound",
        "float64",
        12.5,
    )


def test_evidence_survives_a_journey_through_json(result):
    evidence = result.evidence()
    assert msgspec.json.decode(msgspec.json.encode(evidence), type=Evidence) == evidence


@pytest.mark.parametrize("missing", ["baseline", "winner", "speedup"])
def test_a_search_that_was_cut_short_is_no_evidence(result, missing):
    with pytest.raises(ValueError, match="interrupted"):
        msgspec.structs.replace(result, **{missing: None}).evidence()


def test_an_effect_on_time_becomes_a_ratio_whose_ends_change_places():
    speedup = speedup_of(Judgement(-0.2, -0.36, 0.25, "undecided", 12, 0.1))
    assert speedup == Speedup(1.25, 0.8, 1 / 0.64, "process", "undecided", 12)


def test_an_effect_without_an_interval_is_a_speedup_without_one():
    speedup = speedup_of(Judgement(-0.5, None, None, "undecided", 3, None))
    assert (speedup.estimate, speedup.low, speedup.high) == (2.0, None, None)


@pytest.mark.parametrize(
    ("gain_ns", "setup_s", "baseline_s", "calls"),
    [
        (1e6, 3.0, 1.0, 2000),
        (1e6, 1.0, 3.0, 0),
        (0.0, 3.0, 1.0, None),
        (-1e6, 3.0, 1.0, None),
        (1e6, None, 1.0, None),
        (1e6, 3.0, None, None),
    ],
)
def test_break_even_is_the_extra_set_up_over_the_gain(gain_ns, setup_s, baseline_s, calls):
    assert break_even_calls(gain_ns, setup_s, baseline_s) == calls


@pytest.mark.parametrize(("note", "text"), [("", "float64"), ("why", "float64; why")])
def test_the_reference_is_named_with_its_note(note, text):
    reference = Reference(OutputError(0.0, 0.0), "float64", True, True, note)
    assert reference_text(reference) == text
    assert reference_text(None) == "none"
