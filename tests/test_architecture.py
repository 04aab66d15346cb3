"""The house is built as the table of floors says; found in the source, not by running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "steadytorch"
MODULES = sorted(SOURCE.rglob("*.py"))

FLOORS = {
    "errors": -1,
    "caches": 0,
    "results": 0,
    "quantities": 1,
    "ambient": 1,
    "native": 1,
    "workload": 1,
    "device": 1,
    "process": 1,
    "traces": 1,
    "measure": 2,
    "ranks": 2,
    "revisions": 2,
    "ledger": 2,
    "conv": 3,
    "kernels": 3,
    "rates": 3,
    "plan": 4,
    "rewrite": 4,
    "sweeps": 5,
    "backends": 5,
    "graphs": 5,
    "compiled": 5,
    "transforms": 6,
    "plugins": 7,
    "runtime": 7,
    "bench": 7,
    "doctor": 8,
    "serve": 8,
    "verification": 8,
    "findings": 8,
    "training": 9,
    "rules": 9,
    "explain": 10,
    "tune": 11,
    "report": 12,
    "watching": 13,
    "cli": 14,
    "integrations": 14,
    "__init__": 14,
    "__main__": 14,
}
OTHERS = {"benchmarks", "gpu", "examples", "plugins", "torture"}
"""Folders of tests that mirror no room."""
# The version stands in the package itself, and importing it imports nothing else.
VERSION = ("steadytorch", "__version__")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), str(path))


def _name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {_name(path): path for path in MODULES}


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _imported(path: Path, nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Every module of the project that these nodes import; relative imports resolved."""
    package = _name(path).split(".") if path.name == "__init__.py" else _name(path).split(".")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                if (module, alias.name) != VERSION:
                    inner = f"{module}.{alias.name}"
                    yield inner if inner in NAMES else module


def _own(path: Path, nodes: Iterator[ast.AST]) -> set[str]:
    found = _imported(path, nodes)
    return {name for name in found if name.partition(".")[0] == "steadytorch"}


def _edges(name: str) -> set[str]:
    """The modules that a module imports, anywhere in its text."""
    found = _own(NAMES[name], ast.walk(_tree(NAMES[name])))
    return {target for target in found if target in NAMES and target != name}


def _cycle(edges: Mapping[str, set[str]]) -> list[str] | None:
    """One cycle of these imports; None if there is none."""
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> list[str] | None:
        if name in way:
            return [*way[way.index(name) :], name]
        if name not in done:
            for target in sorted(edges[name]):
                if (found := visit(target, (*way, name))) is not None:
                    return found
            done.add(name)
        return None

    return next((found for name in sorted(edges) if (found := visit(name, ()))), None)


def _objection(importer: str, imported: str) -> str | None:
    here, there = _room(importer), _room(imported)
    if here == there or FLOORS[there] < FLOORS[here]:
        return None
    if "__init__" in (here, there) and "__main__" in (here, there):
        return None
    # The package's own file stands beside the command line, on the roof.
    if here in ("__init__", "__main__") and there == "cli":
        return None
    where = "its own floor" if FLOORS[there] == FLOORS[here] else "above"
    return f"{importer} ({here}, {FLOORS[here]}) imports {imported} from {where}"


def test_the_source_is_there():
    assert len(MODULES) > 50


def test_every_room_has_a_floor():
    rooms = {_room(name) for name in NAMES}
    assert rooms <= FLOORS.keys(), f"rooms without a floor: {sorted(rooms - FLOORS.keys())}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_or_stay_in_the_room(path):
    imported = _own(path, ast.walk(_tree(path)))
    objections = [_objection(_name(path), name) for name in sorted(imported)]
    assert not [o for o in objections if o]


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("steadytorch.workload.workload", "steadytorch.device.facts"),
        ("steadytorch.device.facts", "steadytorch.measure.race"),
        ("steadytorch.runtime.module", "steadytorch.serve.plan"),
        ("steadytorch.serve.plan", "steadytorch"),
        ("steadytorch.traces.reader", "steadytorch.plan.store"),
    ],
)
def test_a_forbidden_import_is_seen(importer, imported):
    assert _objection(importer, imported)


def test_names_of_the_package_are_resolved_to_files():
    source = ast.parse("from steadytorch import transforms\nfrom . import race, __name__ as n\n")
    found = _own(SOURCE / "measure" / "noise.py", ast.walk(source))
    assert found == {"steadytorch.transforms", "steadytorch.measure.race", "steadytorch.measure"}


def test_imports_in_functions_and_for_types_count():
    source = ast.parse("if TYPE_CHECKING:\n    import b\ndef f():\n    import c\n")
    assert set(_imported(SOURCE / "errors.py", ast.walk(source))) == {"b", "c"}


def test_a_cycle_is_seen():
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}
    assert _cycle(edges) == ["b", "c", "b"]
    assert _cycle({**edges, "c": set()}) is None


def test_no_module_imports_itself_through_others():
    edges = {name: _edges(name) for name in NAMES}
    assert sum(map(len, edges.values())) > 100
    cycle = _cycle(edges)
    assert cycle is None, "cycle: " + " -> ".join(cycle)


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if _room(_name(path)) in ("report", "cli")],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_what_shows_results_needs_no_pytorch(path):
    roots = {name.partition(".")[0] for name in _imported(path, ast.walk(_tree(path)))}
    assert "torch" not in roots


def test_tests_mirror_the_rooms():
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    mirrors = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert mirrors <= rooms | OTHERS, f"no such room: {sorted(mirrors - rooms - OTHERS)}"
    assert rooms <= mirrors, f"rooms without tests: {sorted(rooms - mirrors)}"
