from __future__ import annotations

import pytest

from steadytorch.conv.choices import ATEN, read_choice
from steadytorch.conv.choose import Options, pick, variants
from steadytorch.conv.problem import parse
from steadytorch.conv.timing import BENCHMARK, Measured

STEM = "fprop/bias_relu/fp16/last/i8x3x64x64/w64x3x7x7/s2x2/p3x3/d1x1/g1"


def field(**times: float | tuple[float, int]) -> list[Measured]:
    made = []
    for name, value in times.items():
        median, workspace = value if isinstance(value, tuple) else (value, 0)
        shown = {"aten": ATEN, "benchmark": BENCHMARK}.get(name, name)
        made.append(Measured(shown, median, workspace_bytes=workspace))
    return sorted(made, key=lambda m: m.median_ns or 0.0)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"eng1": 100.0, "eng2": 102.0, "aten": 150.0}, "eng1"),
        ({"eng1": (100.0, 64), "eng2": (100.9, 0), "aten": 150.0}, "eng2"),
        ({"eng2": 100.0, "eng1": 100.5, "aten": 150.0}, "eng1"),
        ({"eng1": 100.5, "aten": 100.0}, "eng1"),
        ({"eng1": 110.0, "aten": 100.0}, "aten"),
        ({"eng1": 110.0, "aten": 120.0, "benchmark": 90.0}, "eng1"),
        ({"aten": 100.0}, "aten"),
    ],
)
def test_the_smallest_workspace_within_the_band_wins_then_the_name(times, expected):
    assert pick(field(**times)).choice == expected


@pytest.mark.parametrize(("median", "kept"), [(102.9, True), (103.1, False)])
def test_an_earlier_choice_stays_unless_another_is_clearly_faster(median, kept):
    times = {"eng1": 100.0, "eng2": median, "aten": 150.0}
    assert (pick(field(**times), read_choice("eng2")).choice == "eng2") == kept


def test_an_earlier_choice_that_is_gone_is_no_candidate():
    assert pick(field(eng1=100.0, aten=150.0), read_choice("eng9")).choice == "eng1"


def test_few_channels_are_padded():
    found = {str(choice): problem for problem, choice in variants(parse(STEM), Options())}
    assert set(found) == {"", "c4:", "c8:"}
    assert found["c4:"].input == (8, 4, 64, 64)
    assert found["c4:"].weight == (64, 4, 7, 7)
    assert found["c4:"].output == parse(STEM).output


@pytest.mark.parametrize(
    "key",
    [STEM.replace("x3x", "x64x"), STEM.replace("last", "first"), STEM.replace("fp16", "fp32")],
)
def test_others_are_not_padded(key):
    assert len(list(variants(parse(key), Options()))) == 1


def test_the_other_half_is_tried_where_that_is_allowed():
    problem = parse(STEM.replace("fp16", "bf16"))
    assert {p.number for p, _ in variants(problem, Options())} == {"bf16"}
    assert {p.number for p, _ in variants(problem, Options(other_half=True))} == {"bf16", "fp16"}
