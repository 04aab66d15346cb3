"""Results are read and listed without PyTorch, whose import takes more than a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

LISTED = """
import sys
from steadytorch.cli import main
try:
    main(["plans", "list", "--store", sys.argv[1]])
except SystemExit as end:
    assert end.code in (0, None), end.code
"""
IMPORTED = """
import steadytorch.results.candidate, steadytorch.results.saved, steadytorch.results.signature
import steadytorch.report.html, steadytorch.report.pages
import steadytorch.plan.record, steadytorch.plan.store
"""


@pytest.mark.parametrize("code", [LISTED, IMPORTED], ids=["plans list", "imports"])
def test_pytorch_is_not_imported(code, tmp_path):
    check = "\nassert 'torch' not in sys.modules, 'PyTorch was imported'\n"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}{check}", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
