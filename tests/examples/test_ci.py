"""The snippets for CI use options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steadytorch.cli.gate import gate

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "ci").iterdir())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_options_are_those_of_the_command(path):
    text = path.read_text()
    known = {name for parameter in gate.params for name in parameter.opts}
    for call in re.findall(r"steady gate (--(?:.|\n[ ]+(?=--))+)", text):
        used = set(re.findall(r"(?<![\w-])--[\w-]+", call))
        assert "--base" in used
        assert used <= known


def test_a_snippet_runs_the_command():
    assert any("steady gate --base" in path.read_text() for path in EXAMPLES)
