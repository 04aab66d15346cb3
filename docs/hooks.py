"""Pages of the site that stand at the root of the repository, with their links rewritten."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
ASSETS = ("CITATION.cff",)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds the pages and assets of the root."""
    for source, target in PAGES.items():
        content = rewritten((ROOT / source).read_text("utf-8"))
        files.append(File.generated(config, target, content=content))
    for name in ASSETS:
        files.append(File.generated(config, name, content=(ROOT / name).read_bytes()))
    return files


def rewritten(text: str) -> str:
    """The text with links to `docs/` and to the root's pages as links of the site."""
    for source, target in PAGES.items():
        text = text.replace(f"]({source}", f"]({target}")
    return re.sub(r"\]\(docs/", "](", text)
