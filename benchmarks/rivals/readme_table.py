"""Writes the README's comparison from the committed results, so that the two cannot drift apart.

python benchmarks/rivals/readme_table.py           # rewrites the block between the marks
python benchmarks/rivals/readme_table.py --check   # fails where the block says anything else
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rival_results import read
from rival_tables import readme

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- rivals: begin -->", "<!-- rivals: end -->"


def newest(results: Path) -> list[Path]:
    """The latest results of each device, GPUs first."""
    latest: dict[str, Path] = {}
    for path in sorted(results.glob("rivals_*_*.json")):
        latest[path.stem.rpartition("_")[0]] = path  # dates sort as they should
    return sorted(latest.values(), key=lambda path: read(path)["environment"]["device"] == "cpu")


def block(results: Path) -> str:
    """What stands between the marks; nothing without results."""
    return "\n".join(readme(read(path)) for path in newest(results))


def rewritten(text: str, inner: str) -> str:
    """The README with another block.

    Raises:
        SystemExit: it lacks a mark.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"README.md lacks {BEGIN} or {END}")
    return f"{head}{BEGIN}\n{inner}{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    path = ROOT / "README.md"
    before = path.read_text()
    after = rewritten(before, block(ROOT / "benchmarks" / "results"))
    if not args.check:
        path.write_text(after)
    elif before != after:
        sys.exit("README.md is out of date: run python benchmarks/rivals/readme_table.py")


if __name__ == "__main__":
    main()
