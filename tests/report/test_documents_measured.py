"""Measurements and comparisons as documents, and measurements read back."""

from __future__ import annotations

import json
import os

import msgspec
import pytest

import steadytorch
from steadytorch.bench.saved import read_measure
from steadytorch.errors import UsageError
from steadytorch.results.compare import SustainedRun
from steadytorch.results.saved import SCHEMA, to_json

from .conftest import FACTS, HEAD, HOSTILE, read_document
from .measured import DEVICE, MS, compared, measured, process, series

MEASURE = {
    *("median_ns", "median_ci_ns", "why_no_ci", "p90_ns", "p99_ns", "mean_ns", "cv"),
    *("p99_over_median", "samples_ns", "warmup_dropped", "steady", "outliers", "host", "device"),
}
COMPARE = {"effect", "verdict", "claim", "pairs", "mde"}


def _measured(*processes, **fields):
    return read_document(to_json(measured(*processes, **fields), "resnet50", FACTS))


def test_a_measurement_has_the_promised_keys():
    document = _measured()
    assert document.keys() >= HEAD | MEASURE
    assert (document["schema"], document["kind"]) == (SCHEMA, "measure")
    assert (document["claim"], document["failed"]) == ("process", None)
    assert document["median_ci_ns"][0] <= document["median_ns"] <= document["median_ci_ns"][1]
    assert document["why_no_ci"] is None
    assert document["steady"] is True
    assert document["device"] is None
    assert document["host"]["gc_collections"] == 3


def test_a_measurement_on_a_gpu_has_its_block():
    document = _measured(process(device=DEVICE, latency=series(13e6)))
    assert document["device"]["clock_held_by"] == ["power_cap"]
    (only,) = document["processes"]
    assert only["latency"]["samples_ns"] == list(series(13e6).samples_ns)


def test_all_samples_of_all_processes_are_there_warm_up_and_outliers_included():
    warming = series(slow={i: 6 * MS for i in range(60)})
    slow = series(level_ns=12_500_000, slow={7: 30 * MS})
    document = _measured(process(warming), process(slow), process(series()))
    assert warming.warmup_dropped >= 60
    every = [*warming.samples_ns, *slow.samples_ns, *series().samples_ns]
    assert document["samples_ns"] == every
    assert [p["period"]["samples_ns"] for p in document["processes"]] == [
        list(s.samples_ns) for s in (warming, slow, series())
    ]


def test_outliers_point_at_the_samples_of_all_processes():
    slow = series(slow={7: 30 * MS}, causes={7: "garbage collection"})
    document = _measured(process(slow), process(slow), process(series()))
    assert [(o["index"], o["cause"]) for o in document["outliers"]] == [
        (7, "garbage collection"),
        (1007, "garbage collection"),
    ]
    for outlier in document["outliers"]:
        assert document["samples_ns"][outlier["index"]] == outlier["sample_ns"]


def test_few_samples_are_null_with_the_reason():
    document = _measured(process(series(count=30)))
    assert (document["median_ci_ns"], document["p99_ns"]) == (None, None)
    assert "too few samples" in document["why_no_ci"]
    assert document["p99_over_median"] is None


def test_two_processes_say_why_there_is_no_interval():
    document = _measured(process(), process(), median_ci_ns=None)
    assert document["why_no_ci"] == "an interval over processes needs three of them"


def test_three_processes_have_their_interval_whatever_a_single_one_lacks():
    short = process(series(count=30))
    document = _measured(short, short, short, median_ci_ns=(1e6, 2e6))
    assert (document["median_ci_ns"], document["why_no_ci"]) == ([1e6, 2e6], None)


def test_a_measurement_that_failed_or_was_interrupted_says_so():
    document = _measured(failed="ValueError: no", interrupted=True)
    assert (document["failed"], document["interrupted"]) == ("ValueError: no", True)


def test_measured_numbers_that_are_none_are_null():
    assert _measured(spread=float("nan"), median_ns=float("inf"))["spread"] is None


# -- comparisons --------------------------------------------------------------------------------


def _saved(found):
    return to_json(found, found.workload, FACTS)


def test_a_comparison_has_the_promised_keys():
    document = read_document(_saved(compared()))
    assert document.keys() >= HEAD | COMPARE
    assert document["effect"] == {"estimate": -0.1234, "low": -0.13, "high": -0.117}
    assert (document["kind"], document["verdict"]) == ("compare", "faster")
    assert (document["claim"], document["pairs"], document["mde"]) == ("process", 27, 0.006)
    assert document["samples_ns"] == [[[12.4e6, 10.9e6], [12.5e6, 10.8e6]]]
    assert document["workload"] == "resnet50 / resnet50@channels_last"
    assert (document["gate_failed"], document["failed"]) == (False, None)


def test_what_each_side_does_by_itself_is_told():
    alone = (SustainedRun("a", 10.01, 12.0e6, 1755.0), SustainedRun("b", 10.02, 12.6e6, None))
    document = read_document(_saved(compared(dwells=alone)))
    assert [each["side"] for each in document["dwells"]] == ["a", "b"]
    assert document["dwells"][1] == {
        "side": "b", "seconds": 10.02, "median_ns": 12.6e6, "sm_clock_mhz": None
    }  # fmt: skip
    assert read_document(_saved(compared()))["dwells"] == []


def test_names_of_files_that_are_no_utf_8_are_written_all_the_same():
    name = os.fsdecode(b"bad\xff\xc3\xa9.json")
    document = read_document(_saved(compared(name, "good.json")))
    assert document["a"]["name"] == "bad\ufffd\u00e9.json"
    assert document["workload"] == "bad\ufffd\u00e9.json / good.json"
    half = read_document(_saved(compared("\ud800")))
    assert half["a"]["name"] == "\ufffd"


def test_a_comparison_without_an_interval_has_nulls():
    found = compared(
        low=None, high=None, mde=None, verdict="undecided", failed="no", gate_failed=True
    )
    document = read_document(_saved(found))
    assert document["effect"] == {"estimate": -0.1234, "low": None, "high": None}
    assert (document["gate_failed"], document["failed"]) == (True, "no")


# -- reading a measurement back -----------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """Writes a document, changed, to a file."""

    def write(content=None, **changes):
        path = tmp_path / "saved.json"
        if content is None:
            document = json.loads(to_json(measured(), "resnet50", FACTS))
            content = json.dumps({**document, **changes}).encode()
        path.write_bytes(content)
        return path

    return write


def test_what_was_written_is_read_back(tmp_path):
    made = measured(*[process(series(level)) for level in (12.1e6, 12.4e6, 12.6e6)])
    path = tmp_path / "a.json"
    path.write_bytes(to_json(made, HOSTILE, FACTS))
    found = read_measure(path)
    assert found.workload == HOSTILE
    assert found.environment == FACTS
    assert found.process_medians_ns == tuple(p.period.median_ns for p in made.processes)


def test_processes_that_ended_early_are_not_read_back_where_others_did_not(tmp_path):
    path, cut = tmp_path / "a.json", process(series(9e6, 30), complete=False)
    for made, medians in [((process(), cut), [process()]), ((cut,), [cut])]:
        path.write_bytes(to_json(measured(*made), "resnet50", FACTS))
        found = read_measure(path)
        assert found.process_medians_ns == tuple(p.period.median_ns for p in medians)


def _timed(median_ns):
    """A process as a file has it, with another median."""
    whole = msgspec.to_builtins(process())
    return {**whole, "period": {**whole["period"], "median_ns": median_ns}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": 2}, "has schema 2, this version reads 1"),
        ({"schema": 0, "environment": None}, "has schema 0, this version reads 1"),
        ({"kind": "tune"}, "holds a 'tune' result"),
        ({"kind": "doctor", "processes": None}, "holds a 'doctor' result"),
        ({"schema": "1"}, "is not a saved result"),
        ({"environment": {}}, "is not a saved result"),
        ({"processes": []}, "holds invalid medians"),
        ({"processes": [_timed(0)]}, "holds invalid medians"),
        ({"processes": [_timed(-1e6)]}, "holds invalid medians"),
        ({"processes": [_timed(None)]}, "is not a saved result"),
        ({"processes": [{}]}, "is not a saved result"),
        ({"processes": {"period": 1}}, "is not a saved result"),
    ],
    ids=range(12),
)
def test_a_file_of_another_shape_is_one_clear_line(saved, changes, said):
    with pytest.raises(UsageError) as caught:
        read_measure(saved(**changes))
    assert said in str(caught.value)
    assert "saved.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"schema": 1}', b"1e999"],
    ids=["empty", "cut", "list", "null", "bytes", "deep", "head", "huge"],
)
def test_what_is_no_result_is_one_clear_line(saved, content):
    with pytest.raises(UsageError, match="is not a saved result") as caught:
        read_measure(saved(content))
    assert "\n" not in str(caught.value)


def test_a_cut_file_is_one_clear_line(saved):
    whole = to_json(measured(), "resnet50", FACTS)
    for share in (0.1, 0.5, 0.99):
        with pytest.raises(UsageError, match="is not a saved result"):
            read_measure(saved(whole[: int(share * len(whole))]))


def test_what_cannot_be_read_says_why(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_measure(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_measure(tmp_path)


def test_saved_results_are_compared_by_path(tmp_path):
    for name, factor in (("a.json", 1.0), ("b.json", 0.8)):
        made = measured(*[process(series(factor * level)) for level in (12e6, 12.1e6, 12.2e6)])
        (tmp_path / name).write_bytes(to_json(made, "resnet50", FACTS))
    found = steadytorch.compare(tmp_path / "a.json", str(tmp_path / "b.json"))
    assert (found.effect.verdict, found.effect.claim) == ("faster", "machine")
    assert (found.a.name, found.metric) == (str(tmp_path / "a.json"), "period")
    with pytest.raises(UsageError, match="cannot be read"):
        steadytorch.compare(tmp_path / "a.json", tmp_path / "none.json")
    for asked in ({"metric": "period"}, {"processes": 3}, {"device": "cpu"}, {"seed": 1}):
        with pytest.raises(UsageError, match="apply only to live comparisons"):
            steadytorch.compare(tmp_path / "a.json", tmp_path / "b.json", **asked)
