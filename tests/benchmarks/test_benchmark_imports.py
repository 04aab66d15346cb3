"""Every name that a benchmark takes from steadytorch exists, also where a function imports it."""

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.rglob("*.py"))


def taken(script: Path) -> list[tuple[str, str]]:
    """Modules and names that a script imports from steadytorch, at any depth."""
    nodes = [
        node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)
    ]
    return [
        (node.module, alias.name)
        for node in nodes
        if node.module and node.module.split(".")[0] == "steadytorch"
        for alias in node.names
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_what_a_benchmark_imports_exists(script: Path) -> None:
    for module, name in taken(script):
        if module.startswith("steadytorch.kernels"):
            pytest.importorskip("triton", reason="kernels need Triton")
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.import_module(f"{module}.{name}"), (module, name)


def test_missing_names_are_found(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text("def f():\n    from steadytorch.tune.candidates import describe\n")
    ((module, name),) = taken(script)
    assert not hasattr(importlib.import_module(module), name)
