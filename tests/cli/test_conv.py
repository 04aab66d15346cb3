from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from steadytorch.cli.conv import conv
from steadytorch.errors import UnsupportedError


def test_without_a_gpu_it_says_what_it_needs():
    found = CliRunner().invoke(conv, ["resnet18", "--device", "cpu"])
    assert isinstance(found.exception, UnsupportedError)
    assert "needs a CUDA device" in str(found.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_gpu_that_is_not_there_is_refused():
    found = CliRunner().invoke(conv, ["resnet18", "--device", "cuda"])
    assert isinstance(found.exception, UnsupportedError)
    assert "is not available" in str(found.exception)
