"""The list of workloads, and those that the user names."""

from __future__ import annotations

import pytest
from rival_cases import CASES, Case, chosen

from steadytorch.errors import UsageError

CUDA = CASES["cuda"]


def test_without_a_choice_it_is_the_whole_list():
    assert chosen(CUDA, []) == list(CUDA)
    assert len({case.name for case in CUDA}) == len(CUDA) == 12


def test_a_beginning_chooses_all_that_fit_once():
    assert [case.name for case in chosen(CUDA, ["resnet50", "resnet50:1"])] == [
        "resnet50:1",
        "resnet50:64",
    ]
    assert chosen(CUDA, ["bert"])[0].spec == "transformers:bert"


def test_others_are_named_by_spec_and_size():
    (case,) = chosen(CUDA, ["some/file.py:factory:8"], "fp16")
    assert case == Case("some/file.py:factory", "8", "fp16")
    assert case.name == "factory:8"


@pytest.mark.parametrize("text", ["nothing", "resnet18:0", "resnet18:", ":4"])
def test_what_is_neither_is_refused(text):
    with pytest.raises(UsageError, match="write SPEC:BATCH or SPEC:SHAPE"):
        chosen(CUDA, [text])


def test_a_size_is_a_batch_or_the_shape_of_the_first_input():
    assert Case("gpt2", "2x16").load().inputs[0].shape == (2, 16)
    assert Case("resnet18", "3").load().inputs[0].shape == (3, 3, 224, 224)


def test_the_size_of_the_unet_is_one_that_its_poolings_admit():
    (case,) = chosen(CUDA, ["unet"])
    height = int(case.size.rpartition("x")[2])
    assert (height - 188) % 16 == 0


def test_precision_and_budget_are_those_of_the_list_unless_the_user_names_others():
    (listed,) = chosen(CUDA, ["densenet121"])
    assert (listed.precision, listed.budget_s) == ("fp16", 75.0)
    (named,) = chosen(CUDA, ["densenet121"], "bf16", 30.0)
    assert (named.precision, named.budget_s) == ("bf16", 30.0)
    assert chosen(CUDA, ["resnet50:1"])[0].budget_s is None


def test_more_than_half_of_the_list_is_searched_in_fp16():
    assert sum(case.precision == "fp16" for case in CUDA) > len(CUDA) / 2
