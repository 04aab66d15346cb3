"""The notebooks: their stored outputs fit the site, and their code runs."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "notebooks.py"


def script():
    spec = importlib.util.spec_from_file_location("notebooks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOTEBOOKS = script()
PATHS = NOTEBOOKS.PATHS


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_outputs_are_stored_as_text_without_paths_of_a_machine(path):
    text = path.read_text("utf-8")
    assert len(text) < 30_000
    cells = [each for each in json.loads(text)["cells"] if each["cell_type"] == "code"]
    assert [each["execution_count"] for each in cells] == list(range(1, len(cells) + 1))
    page = NOTEBOOKS.markdown(path)
    assert page.startswith("# ")
    assert page.count("```text") >= 3
    assert not re.search(r"(?<![~\w])/(tmp|root|home|work|usr)/", page)


def test_an_output_that_is_not_text_is_refused(tmp_path):
    output = {"output_type": "display_data", "data": {"image/png": ""}}
    cell = {"cell_type": "code", "source": ["1"], "outputs": [output]}
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    with pytest.raises(ValueError, match="cannot show"):
        NOTEBOOKS.markdown(path)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_code_runs(path):
    pytest.importorskip("nbclient", reason="notebooks run with nbclient")
    pytest.importorskip("ipykernel", reason="notebooks run in a kernel of ipykernel")
    subprocess.run([sys.executable, SCRIPT, "--check", path.stem], check=True)
