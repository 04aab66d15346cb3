"""The switch on a GPU, in processes of its own: what has run before counts."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROGRAM = """
import warnings, torch
from steadytorch.runtime.benchmark_mode import benchmark_mode
layer = torch.nn.Conv2d(8, 8, 3).cuda().half()
x = torch.randn(2, 8, 16, 16, device="cuda", dtype=torch.half)
if {before}:
    layer(x)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with benchmark_mode(True) as mode:
        layer(x)
        layer(x)
print([str(w.message)[:25] for w in caught], mode.report().convolutions, mode.report().shapes)
"""


def printed(before: bool) -> str:
    program = PROGRAM.format(before=before)
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_fresh_process_is_not_warned():
    assert printed(before=False) == "[] 2 1"


def test_a_process_that_has_convolved_is_warned():
    assert printed(before=True) == "['benchmark mode comes late'] 2 1"
