from __future__ import annotations

import pytest
import torch

from .conftest import only_line


def test_without_a_gpu_it_says_what_it_needs(steady):
    shown = steady("conv", "resnet18", "--device", "cpu")
    assert shown.code == 3
    assert "needs a CUDA device" in only_line(shown.err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_gpu_that_is_not_there_is_refused(steady):
    shown = steady("conv", "resnet18", "--device", "cuda")
    assert shown.code == 3
    assert "is not available" in only_line(shown.err)
