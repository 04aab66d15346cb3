"""The worked example of the documentation, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steadytorch.plugins import violations

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"


@pytest.fixture
def example() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


def test_it_is_short(example):
    assert len(example.splitlines()) < 60


def test_it_keeps_the_contract(example):
    space: dict = {}
    exec(example, space)
    assert violations(space["FlushDenormal"]) == []


def test_its_name_is_the_entry_points(example):
    (found,) = re.findall(r"^(\w+) = \"steadytorch_flush:", PAGE.read_text(), re.MULTILINE)
    assert f'name = "{found}"' in example
