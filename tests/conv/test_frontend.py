from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from steadytorch.conv import frontend
from steadytorch.device.probes import CUDNN_FRONTEND
from steadytorch.errors import UnsupportedError

INSTALL = re.escape("pip install 'steadytorch[cudnn]'")


@pytest.fixture
def cudnn(monkeypatch):
    """A fake frontend module of the supported version."""
    made: Any = ModuleType("cudnn")
    made.__version__ = f"{CUDNN_FRONTEND}.0"
    made.backend_version = lambda: 91900
    monkeypatch.setitem(sys.modules, "cudnn", made)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    frontend.frontend.cache_clear()
    yield made
    frontend.frontend.cache_clear()


def test_the_version_that_fits_is_given(cudnn):
    assert frontend.frontend() is cudnn
    assert frontend.version() == 91900


def test_a_pytorch_that_names_no_cudnn_leaves_it_to_the_frontend(cudnn, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert frontend.frontend() is cudnn


@pytest.mark.parametrize("version", ["1.27.0", "1.25.9", "1.260.0", "2.0", None])
def test_another_version_of_the_frontend_is_refused_with_what_to_install(cudnn, version):
    if version is None:
        del cudnn.__version__
    else:
        cudnn.__version__ = version
    named = f"needs nvidia-cudnn-frontend {CUDNN_FRONTEND}, found {version or 'unknown'}"
    with pytest.raises(UnsupportedError, match=INSTALL) as found:
        frontend.frontend()
    assert named in str(found.value)


@pytest.mark.usefixtures("cudnn")
def test_a_frontend_that_is_missing_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(UnsupportedError, match=INSTALL):
        frontend.frontend()


def test_another_cudnn_than_pytorchs_is_refused_with_both_versions(cudnn):
    cudnn.backend_version = lambda: 92300
    with pytest.raises(UnsupportedError, match="loads cuDNN 92300, but PyTorch uses 91900"):
        frontend.frontend()


def test_a_cudnn_that_does_not_load_is_refused_with_the_reason(cudnn):
    def missing():
        raise OSError("libcudnn.so.9: cannot open shared object file")

    cudnn.backend_version = missing
    with pytest.raises(UnsupportedError, match=r"cannot be loaded \(libcudnn"):
        frontend.frontend()


def test_what_was_refused_is_looked_at_anew(cudnn):
    cudnn.__version__ = "1.27.0"
    with pytest.raises(UnsupportedError):
        frontend.frontend()
    cudnn.__version__ = f"{CUDNN_FRONTEND}.1"
    assert frontend.frontend() is cudnn
