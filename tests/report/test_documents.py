from __future__ import annotations

import datetime

import msgspec
import pytest

from steadytorch.device.telemetry import Snapshot
from steadytorch.doctor import CheckUp
from steadytorch.measure.noise import NoiseFloor
from steadytorch.plan.record import as_result
from steadytorch.results.saved import SCHEMA, to_json
from steadytorch.runtime.switch import Switch

from .conftest import FACTS, HEAD, HOSTILE, TRIALS, evidence, plan, read_document, result, trial
from .explained import explained

TUNE = {
    *("baseline", "winner", "candidates", "speedup", "break_even_calls", "plan"),
}
CANDIDATE = {
    *("transforms", "status", "reason", "error", "peak_memory_bytes", "setup_s", "median_ns"),
}
OF = {"inputs": "1x3x224x224:float32", "trains": False}
SAMPLES = ("median_ns", "median_ci_ns", "p90_ns", "p99_ns", "mean_ns", "cv", "samples_ns")


def _tuned(found, kept=None, name="resnet50"):
    return to_json(found.as_result(kept, **OF), name, FACTS)


def _searched(**fields):
    return read_document(_tuned(result(**fields), plan()))


def _replayed(**fields):
    return read_document(to_json(as_result(plan(**fields)), "resnet50", FACTS))


@pytest.mark.parametrize("made", [_searched, _replayed])
def test_a_search_and_a_replay_have_the_promised_keys(made):
    document = made()
    assert document.keys() >= HEAD | TUNE
    assert (document["schema"], document["kind"], document["workload"]) == (
        SCHEMA,
        "tune",
        "resnet50",
    )
    assert document["environment"]["name"] == "AMD EPYC"
    assert datetime.datetime.fromisoformat(document["created"]).tzinfo is not None
    assert len(document["candidates"]) == len(TRIALS)
    for candidate in document["candidates"]:
        assert candidate.keys() >= CANDIDATE
        assert candidate["status"] in ("ok", "rejected", "failed", "skipped")
    assert document["speedup"].keys() >= {"estimate", "low", "high", "claim"}
    assert document["plan"]["id"] == plan().id
    assert document["plan"]["path"] == plan().path
    assert document["plan"]["objective"] == "latency"


def test_transforms_are_text():
    document = _searched()
    assert document["candidates"][1]["transforms"] == ["channels_last", "inference_mode"]
    assert (
        document["chosen"] == document["plan"]["transforms"] == ["channels_last", "inference_mode"]
    )


def test_a_search_keeps_every_sample():
    document = _searched()
    for side, found in (("baseline", result().baseline), ("winner", result().winner)):
        assert document[side]["samples_ns"] == list(found.samples_ns)
        assert document[side].keys() >= set(SAMPLES)


def test_a_replay_says_so_and_lacks_nothing_else():
    found, taken = _searched(), _replayed()
    assert (found.pop("replayed"), taken.pop("replayed")) == (False, True)
    assert taken.keys() == found.keys()
    kept = evidence()
    assert (taken["reference"], taken["seconds"]) == (kept.reference, kept.search_s)
    assert (taken["not_tried"], taken["not_applicable"]) == (kept.not_tried, kept.not_applicable)


def test_what_was_cut_short_is_a_document_too():
    short = result(
        baseline=None, winner=None, speedup=None, break_even_calls=None, interrupted=True
    )
    document = read_document(_tuned(short))
    assert document.keys() >= HEAD | TUNE
    assert document["interrupted"] is True
    assert [document[k] for k in ("baseline", "winner", "speedup", "plan")] == [None] * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_null(value):
    odd = msgspec.structs.replace(evidence().speedup, estimate=value)
    trials = (trial(error=value, median_ns=value),)
    document = _searched(speedup=odd, candidates=trials)
    assert document["speedup"]["estimate"] is None
    assert document["candidates"][0]["error"] is None
    assert _replayed(evidence=evidence(speedup=odd))["speedup"]["estimate"] is None


def test_hostile_names_are_escaped():
    document = _tuned(result(), None, HOSTILE)
    assert b"\x1b" not in document
    assert read_document(document)["workload"] == HOSTILE


def test_it_is_readable_line_by_line():
    assert _tuned(result(), plan()).count(b"\n") > 50


def test_the_check_up_has_its_blocks():
    state = Snapshot(device="cpu", load_average_1m=0.5)
    noise = NoiseFloor(0.01, 3, "a matrix product")
    switch = Switch(
        benchmark=True,
        benchmark_limit=10,
        deterministic=False,
        fp32_precision="tf32",
        environment={},
        no_effect="",
        traps=("It may differ.",),
    )
    found = CheckUp(
        environment=FACTS,
        state=state,
        observability=[],
        noise_floor=noise,
        benchmark_mode=switch,
    )
    document = read_document(to_json(found, "", FACTS))
    assert document.keys() >= HEAD | {"state", "observability", "noise_floor", "benchmark_mode"}
    assert document["benchmark_mode"]["benchmark"] is True
    assert document["benchmark_mode"]["traps"] == ["It may differ."]
    assert document["kind"] == "doctor"
    assert document["noise_floor"]["a_a_spread"] == 0.01


# -- explain ------------------------------------------------------------------------------------

EXPLAIN = {"steps", "gpu", "variance_shares", "findings", "abstained"}
FINDING = {
    *("id", "source", "evidence", "recoverable_ns", "variance_share", "confidence", "fix"),
    "transforms",
}


def test_an_explanation_has_the_promised_keys():
    document = read_document(to_json(explained(), "resnet50", FACTS))
    assert document.keys() >= HEAD | EXPLAIN
    assert (document["kind"], document["workload"]) == ("explain", "resnet50")
    assert document["environment"]["name"] == "H200"
    for step in document["steps"]:
        assert sum(step["slices_ns"].values()) == step["total_ns"]
    for finding in document["findings"]:
        assert finding.keys() >= FINDING
        assert len(finding["recoverable_ns"]) == 2
    for abstention in document["abstained"]:
        assert abstention.keys() == {"rule", "why", "recapture"}


def test_an_explanation_of_a_trace_without_gpu_has_nulls():
    document = read_document(to_json(explained(gpu=None, measured=None), "a.json", FACTS))
    assert (document["gpu"], document["measured"]) == (None, None)
