"""Saved results: written, and read back by the strict decoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steadytorch.errors import UsageError
from steadytorch.results.compare import CompareResult, Effect, Side, SustainedRun, effect_of
from steadytorch.results.conv import ConvOutcome, ConvReport, Layer, Measured
from steadytorch.results.machine import DeviceFacts
from steadytorch.results.saved import FORMS, decode, kind_of, to_json
from steadytorch.results.tune import Gain, Replayed, Searched, Timing

HERE = Path("result.json")
FACTS = DeviceFacts(device="cpu", name="AMD EPYC")
EFFECT = Effect(
    estimate=-0.12,
    low=-0.13,
    high=-0.11,
    verdict="faster",
    claim="process",
    pairs=27,
    processes=1,
    mde=0.006,
)
COMPARED = CompareResult.of(EFFECT, a=Side("a", 12e6), b=Side("b", 10e6), metric="latency")
KEY = "wgrad/none/fp16/last/i64x256x56x56/w64x256x1x1/s1x1/p0x0/d1x1/g1"
OUTCOME = ConvOutcome(KEY, "eng1", 2.0, 2.0, 1.0, (Measured("eng1", repeats=True),), 0.1)
CONV = ConvReport((Layer.of(("a",), KEY, OUTCOME, 1, 1),), "", True, 1.0, 1.0, 91900, 1.0)
TUNED = {
    "chosen": ("channels_last",),
    "regime": "memory-bound",
    "candidates": (),
    "not_applicable": {},
    "not_tried": {},
    "speedup": Gain(2.0, 1.9, 2.1, "process", "faster", 20),
    "break_even_calls": 7,
    "reference": "float64",
    "seconds": 60.0,
    "interrupted": False,
    "inputs": "8x3x224x224:float32",
    "trains": False,
    "plan": None,
}
TIMING = Timing("latency", 1e6, None, 1e6, None, 20)
SEARCHED = Searched(baseline=None, winner=None, replayed=False, **TUNED)
REPLAYED = Replayed(baseline=TIMING, winner=TIMING, replayed=True, **TUNED)


def read(content):
    return decode(HERE, content, kind_of(HERE, content))


@pytest.mark.parametrize(
    ("kind", "result"),
    [("compare", COMPARED), ("conv", CONV), ("tune", SEARCHED), ("tune", REPLAYED)],
)
def test_a_result_is_read_back_as_it_was(kind, result):
    found = read(to_json(result, "net", FACTS))
    assert (found.kind, found.head.workload, found.head.environment) == (kind, "net", FACTS)
    assert found.result == result


def test_every_kind_has_a_form_of_its_own():
    assert len(set(FORMS.values())) == len(FORMS) == 11


@pytest.mark.parametrize("field", ["workload", "environment", "created", "verdict", "a"])
def test_a_missing_field_is_named(field):
    document = json.loads(to_json(COMPARED, "net", FACTS))
    del document[field]
    with pytest.raises(UsageError, match=f"missing required field `{field}`"):
        read(json.dumps(document).encode())


def test_a_replay_needs_its_timings():
    document = json.loads(to_json(SEARCHED, "net", FACTS))
    with pytest.raises(UsageError, match="is not a saved result"):
        read(json.dumps({**document, "replayed": True}).encode())


def test_the_effect_is_split_in_json_and_whole_in_python():
    document = json.loads(to_json(COMPARED, "net", FACTS))
    assert document["effect"] == {"estimate": -0.12, "low": -0.13, "high": -0.11}
    assert document["verdict"] == "faster"
    assert COMPARED.effect == EFFECT


def test_a_layer_knows_its_pass_and_whether_its_engine_repeats():
    (layer,) = CONV.layers
    assert (layer.operation, layer.deterministic, CONV.passes) == ("wgrad", True, ("wgrad",))
    assert json.loads(to_json(CONV, "net", FACTS))["layers"][0]["pass"] == "wgrad"


def test_a_choice_that_is_no_engine_is_an_error():
    with pytest.raises(LookupError, match="not in the list of engines"):
        _ = ConvOutcome(KEY, "eng2", None, None, None, (), 0.1).chosen


def test_dwells_are_compared_by_their_log_ratios():
    rounds = [("a", 100.0), ("b", 110.0), ("b", 99.0), ("a", 100.0)]
    found = [SustainedRun(side, 10.0, median, None) for side, median in rounds]
    assert effect_of(found) == pytest.approx((1.1 * 0.99) ** 0.5 - 1)
