from __future__ import annotations

import json
from io import StringIO

import pytest
from msgspec import structs
from rich.console import Console

from steadytorch.conv.choose import ConvOutcome
from steadytorch.conv.timing import Measured
from steadytorch.report.conv import render_conv, render_layer
from steadytorch.results.saved import to_json
from steadytorch.tune.conv import ConvReport, Layer, LeftOut

from .conftest import FACTS

KEY = "fprop/bias_relu/fp16/last/i64x256x56x56/w64x256x1x1/s1x1/p0x0/d1x1/g1"
OUTCOME = ConvOutcome(
    problem=KEY,
    choice="eng39_k25=0",
    default_ns=80_000.0,
    benchmark_ns=82_000.0,
    chosen_ns=40_000.0,
    engines=(
        Measured("eng39_k25=0", 40_000.0, 0.004, 28, 2**20, ("TENSOR_CORE",), 2e-4, None, True),
        Measured("aten", 80_000.0, 0.01, 4, error=2e-4),
        Measured("eng10", workspace_bytes=2**30, excluded="over the cap"),
    ),
    seconds=0.8,
)


def report(*layers: Layer) -> ConvReport:
    return ConvReport(layers, "", True, 8e14, 4e12, 91900, 20.0)


def shown(draw, *args) -> str:
    stream = StringIO()
    draw(Console(file=stream, width=200, highlight=False), *args)
    return stream.getvalue()


def layer(
    outcome: ConvOutcome | None = OUTCOME, names: tuple[str, ...] = ("a", "b"), problem: str = KEY
) -> Layer:
    return Layer.of(names, problem, outcome, 6_576_668_672, 128_000_000)


def test_a_row_shows_gain_share_and_how_near_the_limit_it_is():
    text = shown(render_conv, "net", report(layer()))
    for words in ("eng39_k25=0", "2.00x", "100.0 %", "40.0", "80.0", "82.0", "164", "80 %"):
        assert words in text
    assert "80 us with the chosen engines, 160 us with PyTorch's default" in text


def chosen_with(**known) -> ConvOutcome:
    """The outcome with other knowledge of the chosen engine."""
    first, *others = OUTCOME.engines
    return structs.replace(OUTCOME, engines=(structs.replace(first, **known), *others))


@pytest.mark.parametrize(
    ("known", "mark", "deterministic"),
    [
        ({}, "=", True),
        ({"notes": ("NONDETERMINISTIC",)}, "~", False),
        ({"repeats": False}, "~", False),
        ({"repeats": None}, "?", None),
    ],
    ids=["two equal runs", "cuDNN's note", "other bits", "not run twice"],
)
def test_a_row_says_whether_the_engine_is_deterministic(known, mark, deterministic):
    found = report(layer(chosen_with(**known)))
    row = next(line for line in shown(render_conv, "net", found).splitlines() if "2.00x" in line)
    assert row.rstrip().endswith(f"2e-04 {mark}")
    document = json.loads(to_json(found, "net", FACTS))
    assert document["layers"][0]["deterministic"] is deterministic


def test_what_was_not_measured_is_not_called_deterministic():
    document = json.loads(to_json(report(layer(None)), "net", FACTS))
    assert document["layers"][0]["deterministic"] is None


@pytest.mark.parametrize("trains", [False, True])
def test_a_row_fits_into_80_columns(trains):
    stream = StringIO()
    widest = structs.replace(
        chosen_with(workspace_bytes=256 * 2**20),
        **{f"{which}_ns": 12_345_678.9 for which in ("default", "benchmark", "chosen")},
    )
    rows = [layer(widest)] * 10
    if trains:
        gradient = KEY.replace("fprop/bias_relu", "dgrad/none")
        rows.append(layer(widest, problem=gradient))
    render_conv(Console(file=stream, width=80, highlight=False), "net", report(*rows))
    lines = stream.getvalue().splitlines()
    assert any("12345.7 12345.7 12345.7" in line and "256 MiB" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert any(KEY in line for line in lines)
    assert any("eng39_k25=0" in line for line in lines)


def trained() -> ConvReport:
    """The three passes of a convolution, and the two of a first one; the last not measured."""
    gradients = [KEY.replace("fprop/bias_relu", f"{which}/none") for which in ("dgrad", "wgrad")]
    rows = [layer(), *(layer(problem=key) for key in gradients)]
    return report(*rows, layer(None, problem=gradients[1]))


def test_a_training_step_has_a_row_for_each_pass():
    lines = shown(render_conv, "net", trained()).splitlines()
    rows = [line.split()[:3] for line in lines if line.lstrip()[:1].isdigit() and "/" not in line]
    assert rows == [
        ["1", "fprop", "2"],
        ["2", "dgrad", "2"],
        ["3", "wgrad", "2"],
        ["4", "wgrad", "2"],
    ]
    assert "net: 4 passes of distinct convolutions in a training step" in lines


def test_the_time_of_a_training_step_is_told_by_passes():
    text = shown(render_conv, "net", trained())
    assert "Total: 240 us (fprop 80, dgrad 80, wgrad 80) with the chosen engines" in text
    assert "480 us (fprop 160, dgrad 160, wgrad 160) with PyTorch's default" in text
    assert "gradient by the input (dgrad)" in text


def test_inference_has_no_column_for_the_one_pass():
    text = shown(render_conv, "net", report(layer()))
    assert "pass" not in text
    assert "(fprop" not in text


def test_the_pass_is_in_the_document():
    document = json.loads(to_json(trained(), "net", FACTS))
    assert [row["pass"] for row in document["layers"]] == ["fprop", "dgrad", "wgrad", "wgrad"]


def test_shares_are_of_the_time_of_all_convolutions():
    text = shown(render_conv, "net", report(layer(names=("a",)), layer(names=("b", "c", "d"))))
    assert "25.0 %" in text
    assert "75.0 %" in text


LEFT_OUT = (
    LeftOut(tuple(f"features.{n}.a_rather_long_name.\x1b[31m" for n in range(5)), "a hook"),
    LeftOut(("up",), "a ConvTranspose2d: engines are for Conv1d, Conv2d and Conv3d"),
)


@pytest.mark.parametrize("rows", [0, 1])
def test_what_was_left_out_stands_below_the_table_with_the_reason(rows):
    found = structs.replace(report(*[layer()] * rows), left_out=LEFT_OUT)
    stream = StringIO()
    render_conv(Console(file=stream, width=80, highlight=False), "net", found)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"net: {rows} distinct convolutions"
    below = " ".join(" ".join(lines[1:]).split())
    assert "Left to PyTorch: up (1): a ConvTranspose2d: engines are for" in below
    assert ", ... (5): a hook" in below
    assert "\x1b[31m" not in stream.getvalue()
    assert any("TFLOP/s" in line for line in lines) is (rows == 1)
    assert ("n: occurrences" in below) is (rows == 1)


def test_what_was_left_out_is_in_the_document():
    found = structs.replace(report(), left_out=LEFT_OUT)
    document = json.loads(to_json(found, "net", FACTS))
    assert document["left_out"][1] == {"names": ["up"], "reason": LEFT_OUT[1].reason}


def test_what_was_not_measured_says_so():
    assert "not measured" in shown(render_conv, "net", report(layer(None)))
    assert "the time ran out" in shown(render_layer, layer(None))


@pytest.mark.parametrize("reason", ["OutOfMemoryError: CUDA out of memory.", None])
def test_why_nothing_was_measured_is_told(reason):
    failed = structs.replace(layer(None), reason=reason)
    text = shown(render_layer, failed)
    assert ("Not measured: OutOfMemoryError: CUDA out of memory." in text) is (reason is not None)
    assert ("the time ran out" in text) is (reason is None)
    document = json.loads(to_json(report(failed), "net", FACTS))
    assert document["layers"][0]["reason"] == reason


def test_an_engine_that_was_taken_untimed_is_shown_with_the_reason():
    first = structs.replace(OUTCOME.engines[0], median_ns=None, spread=None, runs=0)
    times = dict.fromkeys(("default_ns", "benchmark_ns", "chosen_ns"))
    quick = structs.replace(OUTCOME, engines=(first,), **times)
    untimed = structs.replace(layer(quick), reason="the time ran out before")
    text = shown(render_layer, untimed)
    assert "Not timed: the time ran out before." in text
    assert "eng39_k25=0 *" in text
    assert "eng39_k25=0" in shown(render_conv, "net", report(layer(), untimed))
    document = json.loads(to_json(report(untimed), "net", FACTS))
    assert document["layers"][0]["outcome"]["chosen_ns"] is None
    assert document["layers"][0]["deterministic"] is True


def test_all_engines_of_a_layer_with_the_reasons():
    text = shown(render_layer, layer())
    assert "eng39_k25=0 *" in text
    assert "over the cap" in text
    assert "tensor core" in text


@pytest.mark.parametrize("names", [("\x1b[31mx",), tuple("abcdef")])
def test_names_are_printed_plainly_and_briefly(names):
    text = shown(render_layer, layer(names=names))
    assert "\x1b[31m" not in text
    assert ("..." in text) == (len(names) > 3)
