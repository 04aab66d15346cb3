"""The documentation: links lead somewhere, and outputs are those of today's commands."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import steadytorch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOKS = ROOT / "examples" / "notebooks"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INCLUDED = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)


def regenerate():
    spec = importlib.util.spec_from_file_location("regenerate", DOCS / "outputs" / "regenerate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(path):
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """The anchors of a page's headings, as both the site and code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings(page):
    for link in LINK.findall(text_of(page)):
        target, _, anchor = link.partition("#")
        if "://" in target or anchor.startswith("steadytorch."):  # of the reference
            continue
        found = page if not target else (page.parent / target).resolve()
        assert found.is_file(), link
        assert not anchor or anchor in anchors(found), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_and_tables_are_read_alike_by_the_site_and_by_code_hosts(page):
    nested = re.findall(r"^( +)(?:-|\d+\.) ", text_of(page), re.MULTILINE)
    nested += re.findall(r"^( +)\|", text_of(page), re.MULTILINE)
    assert all(len(indent) >= 4 for indent in nested)
    # Without a blank line, a list after a table becomes rows of it.
    assert not re.search(r"^ *\|.*\|\n *(?:-|\d+\.) ", text_of(page), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_included_outputs_exist(page):
    for name in INCLUDED.findall(page.read_text("utf-8")):
        assert any((folder / name).is_file() for folder in (DOCS, ROOT / "examples")), name


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page():
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    generated = {"index.md", "contributing.md", "changelog.md"}
    generated |= {f"notebooks/{path.stem}.md" for path in NOTEBOOKS.glob("*.ipynb")}
    assert set(listed) == pages | generated
    assert len(listed) == len(set(listed))


def test_helps_are_those_of_the_commands(tmp_path):
    module = regenerate()
    listed = subprocess.run(
        [sys.executable, "-m", "steadytorch", "--help"], capture_output=True, text=True, check=True
    )
    names = re.findall(r"^  (\w+)  +\w", listed.stdout.partition("Commands:")[2], re.MULTILINE)
    assert sorted(names) == sorted(module.COMMANDS)
    for name, text in module.helps(tmp_path).items():
        stored = (DOCS / "outputs" / f"{name}.txt").read_text()
        assert stored == text, f"{name} has changed: run docs/outputs/regenerate.py help"


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "reference" / "library.md").read_text()
    described = set(re.findall(r"heading: steady\.(\w+)", page))
    errors = set(re.findall(r"\w+Error", page))
    assert described | errors == set(steadytorch.__all__) - {"__version__"}


def test_the_reference_names_what_exists():
    for path in (DOCS / "reference").glob("*.md"):
        for name in re.findall(r"^::: ([\w.]+)$", path.read_text(), re.MULTILINE):
            module = name if name == "steadytorch.errors" else name.rpartition(".")[0]
            assert importlib.util.find_spec(module) is not None, name
