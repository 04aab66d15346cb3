from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from steadytorch.conv.choose import Outcome
from steadytorch.conv.timing import Measured
from steadytorch.report.conv import render_conv, render_layer
from steadytorch.tune.conv import ConvReport, Layer

KEY = "fprop/bias_relu/fp16/last/i64x256x56x56/w64x256x1x1/s1x1/p0x0/d1x1/g1"
OUTCOME = Outcome(
    problem=KEY,
    choice="eng39_k25=0",
    default_ns=80_000.0,
    benchmark_ns=82_000.0,
    chosen_ns=40_000.0,
    engines=(
        Measured("eng39_k25=0", 40_000.0, 0.004, 28, 2**20, ("TENSOR_CORE",), 2e-4),
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


def layer(outcome: Outcome | None = OUTCOME, names: tuple[str, ...] = ("a", "b")) -> Layer:
    return Layer(names, KEY, outcome, 6_576_668_672, 128_000_000)


def test_a_row_shows_gain_share_and_how_near_the_limit_it_is():
    text = shown(render_conv, "net", report(layer()))
    for words in ("eng39_k25=0", "2.00x", "100.0 %", "40.0", "80.0", "82.0", "164", "80 %"):
        assert words in text
    assert "80 us by the chosen engines, 160 us by PyTorch's default" in text


def test_a_row_fits_into_80_columns():
    stream = StringIO()
    render_conv(Console(file=stream, width=80, highlight=False), "net", report(layer()))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(KEY in line for line in lines)
    assert any("eng39_k25=0" in line for line in lines)


def test_shares_are_of_the_time_of_all_convolutions():
    text = shown(render_conv, "net", report(layer(names=("a",)), layer(names=("b", "c", "d"))))
    assert "25.0 %" in text
    assert "75.0 %" in text


def test_what_was_not_measured_says_so():
    assert "not measured" in shown(render_conv, "net", report(layer(None)))
    assert "the time ran out" in shown(render_layer, layer(None))


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
