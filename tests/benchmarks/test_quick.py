"""The quick run: which published results it is compared with, and what it prints."""

from __future__ import annotations

import json
import signal

import pytest
import quick
from rival_cases import CASES
from rival_options import options_of

from .rivalry import ENVIRONMENT, document, judgement, one_workload, row

CPU = {**ENVIRONMENT, "device": "cpu", "name": "AMD EPYC", "isa": "AVX512", "cores_logical": 2}
NAMES = ("mobilenet_v3_large:1", "resnet50:1", "vit_b_16:1")


def measured(*names, environment=CPU, **entry):
    """Results of workloads whose plan takes 10 % less time than the best option by hand."""
    rows = []
    for name in names:
        against = {"period": judgement(-0.1)}
        rows += [
            row(name, "steadytorch", 9.0),
            row(name, "eager", 30.0, ours_against_it={"period": judgement(-0.7)}),
            row(name, "compile freezing", 10.0, ours_against_it=against),
        ]
    known = {"budget_s": 25.0, "timing_s": 6.0, "environment": environment, **entry}
    return document(*rows, **known)


def stored(folder, name, environment, date="2026-11-21"):
    found = document(*one_workload("resnet50:1", -0.1), environment=environment)
    found |= {"environment": environment, "created": date}
    (folder / f"rivals_{name}_{date}.json").write_text(json.dumps(found))


def test_published_results_are_those_of_the_closest_device(tmp_path):
    stored(tmp_path, "h200", ENVIRONMENT)
    assert quick.closest(CPU, tmp_path) is None
    stored(tmp_path, "xeon", {**CPU, "name": "Xeon"}, "2026-11-24")
    stored(tmp_path, "epyc", CPU)
    assert quick.closest(CPU, tmp_path)["environment"]["name"] == "AMD EPYC"
    other = {**CPU, "name": "Ampere", "isa": "NEON"}
    assert quick.closest(other, tmp_path)["environment"]["name"] == "Xeon"  # the newest
    assert quick.closest(ENVIRONMENT, tmp_path)["environment"]["name"] == "NVIDIA H200"


def test_options_by_hand_are_eager_and_the_best_of_the_published():
    for kind in ("cpu", "cuda"):
        for case in quick.cases(CASES[kind], kind, None):
            assert len(case.options) > 2
            assert not any("max-autotune" in option for option in case.options)
    found = quick.cases(CASES["cpu"], "cpu", measured("resnet50:1"))
    options = {case.name: case.options for case in found}
    assert options["resnet50:1"] == ("eager", "compile freezing")
    assert options["mobilenet_v3_large:1"] == tuple(
        options_of("cpu", "same")
    )  # not among the published


def test_the_table_has_both_sides_and_what_differs():
    theirs = {**CPU, "name": "Intel(R) Xeon(R) Processor of a long name in the cloud"}
    published = measured(*NAMES, environment=theirs, budget_s=90.0, processes=5)
    text = quick.report([measured("resnet50:1", threads=2)], NAMES, published, 290.0)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    at = lines.index("resnet50:1")
    assert lines[at + 1].split()[:4] == ["here", "30.0", "10.0", "9.00"]
    assert lines[at + 1].endswith("-10.0 % (-11.0 to -9.0)")
    assert lines[at + 2].split()[0] == "published"
    differing = {line[:17].strip(): line[17:].split() for line in lines[lines.index("") :]}
    assert differing["search budget"] == ["25", "s", "90", "s"]
    assert differing["processes"] == ["1", "5"]
    assert differing["threads"] == ["2", "not", "recorded"]
    assert "torch" not in differing  # equal


def test_a_workload_that_did_not_finish_says_so():
    failed = measured("resnet50:1")
    failed["rows"][0] |= {"failed": "> 40 s, not ready", "period_ms": None}
    text = quick.report([failed], NAMES, None, 290.0)
    assert "steadytorch did not finish: > 40 s, not ready" in text
    assert text.count("did not finish within the time") == 2
    beside = measured("resnet50:1")
    beside["rows"][2] |= {"failed": "> 60 s, not ready", "period_ms": None}
    shown = quick.report([beside], ["resnet50:1"], None, 290.0)
    assert "compile freezing did not finish: > 60 s, not ready" in shown
    text += shown
    assert max(map(len, text.splitlines())) <= 80


def test_a_gain_has_an_interval_or_says_that_it_has_none():
    found = measured("resnet50:1")
    found["rows"][2]["ours_against_it"]["period"] |= {"low": None, "high": None}
    found["rows"][0]["period_ci_ms"] = None
    text = quick.report([found], ["resnet50:1"], None, 290.0)
    assert "9.00 (no interval)" in text
    assert "no interval (few pairs)" in text
    assert "-10" not in text
    assert "faster" not in text.partition("gain:")[0]


def test_the_time_ends_a_block_and_no_later_one():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(quick.OutOfTime), quick.limit(0.01):
        signal.pause()
    with quick.limit(60.0):
        pass
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) is before
