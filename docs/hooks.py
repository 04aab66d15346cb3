"""Pages of the site that are not files of `docs/`, and what is generated within pages.

- Pages at the root of the repository, with their links rewritten.
- Notebooks of `examples/notebooks`, as Markdown.
- Tables and plots of the results, from `benchmarks/results`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import notebooks
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
ASSETS = ("CITATION.cff",)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds the pages and assets of the root, and the notebooks, as pages and for download."""
    for source, target in PAGES.items():
        content = rewritten((ROOT / source).read_text("utf-8"))
        files.append(File.generated(config, target, content=content))
    for name in ASSETS:
        files.append(File.generated(config, name, content=(ROOT / name).read_bytes()))
    for path in notebooks.PATHS:
        content = notebooks.markdown(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))
        files.append(File.generated(config, f"notebooks/{path.name}", content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Generates the tables and plots of the results."""
    if page.file.src_uri != "results.md":
        return markdown
    folder = str(ROOT / "benchmarks" / "rivals")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import results_page

    tables = results_page.with_tables(markdown, results_page.RESULTS)
    return results_page.with_plots(tables, results_page.RESULTS)


def rewritten(text: str) -> str:
    """The text with links to `docs/` and to the root's pages as links of the site."""
    for source, target in PAGES.items():
        text = text.replace(f"]({source}", f"]({target}")
    return re.sub(r"\]\(docs/", "](", text)
