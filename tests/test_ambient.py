from __future__ import annotations

import pytest
import torch

from steadytorch.ambient import UNREADABLE, ambient, set_ambient
from steadytorch.errors import UsageError


@pytest.fixture(autouse=True)
def restored():
    found = ambient()
    yield
    set_ambient(found)
    assert ambient() == found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("float32_matmul_precision", "high"),
        ("fp32_precision", "ieee"),
        ("cuda.matmul.fp32_precision", "ieee"),
        ("cudnn.conv.fp32_precision", "ieee"),
        ("cudnn.rnn.fp32_precision", "ieee"),
        ("cudnn.enabled", "False"),
        ("cudnn.benchmark", "True"),
        ("cudnn.deterministic", "True"),
        ("deterministic_algorithms", "1"),
        ("deterministic_algorithms", "2"),
        ("sdp.flash", "False"),
        ("sdp.math", "False"),
        ("num_threads", "1"),
        ("default_dtype", "torch.bfloat16"),
    ],
)
def test_what_is_set_is_read(name, value):
    set_ambient({name: value})
    assert ambient()[name] == value


def test_a_snapshot_makes_another_state_equal_to_it():
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    snapshot = ambient()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    set_ambient(snapshot)
    assert ambient() == snapshot


def test_settings_that_pytorch_refuses_to_read_are_marked():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert ambient()["float32_matmul_precision"] == UNREADABLE


def test_unreadable_settings_are_left_alone():
    before = ambient()
    set_ambient({"float32_matmul_precision": UNREADABLE})
    assert ambient() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gravity", "9.81"),
        ("cudnn.benchmark", "yes"),
        ("num_threads", "many"),
        ("deterministic_algorithms", "3"),
        ("default_dtype", "torch.nn"),
        ("cuda.matmul.fp32_precision", "fp4"),
    ],
)
def test_unknown_names_and_values_are_refused(name, value):
    with pytest.raises(UsageError, match=name):
        set_ambient({name: value})
