from __future__ import annotations

import json

import pytest

from steadytorch.conv.choices import MOST_BYTES, Choice, read_choice, read_choices, write_choices
from steadytorch.errors import UsageError

KEY = "fprop/bias/fp16/last/i8x64x28x28/w64x64x1x1/s1x1/p0x0/d1x1/g1"


@pytest.mark.parametrize(
    "choice",
    [
        Choice("eng41_k2=4_k13=0"),
        Choice("eng48", channels=4),
        Choice("eng0", number="fp16"),
        Choice("eng1_k2=-1", channels=8, number="bf16"),
        Choice("aten"),
    ],
)
def test_a_choice_reads_back(choice):
    assert read_choice(str(choice)) == choice
    assert read_choices(write_choices({KEY: choice})) == {KEY: choice}


@pytest.mark.parametrize(
    "text", ["", "eng", "eng1;rm", "c0:eng1", "fp64:eng1", "c4:c4:eng1", "eng1_k2", "__import__"]
)
def test_what_is_no_choice_is_refused(text):
    with pytest.raises(UsageError, match="is not an engine choice"):
        read_choice(text)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        json.dumps({KEY: 1}),
        json.dumps({"key": "eng1"}),
        json.dumps({KEY: "x"}),
        '"' + "x" * MOST_BYTES + '"',
    ],
)
def test_what_are_no_choices_is_refused(text):
    with pytest.raises(UsageError):
        read_choices(text)


def test_no_choices_are_no_text():
    assert write_choices({}) == ""
    assert read_choices("") == {}


def test_the_same_choices_are_the_same_text():
    other = KEY.replace("i8", "i4")
    one, two = (
        {KEY: Choice("eng1"), other: Choice("eng2")},
        {
            other: Choice("eng2"),
            KEY: Choice("eng1"),
        },
    )
    assert write_choices(one) == write_choices(two)
