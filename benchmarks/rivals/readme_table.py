"""Write the README's table, a row per machine, from the committed results.

python benchmarks/rivals/readme_table.py           # rewrites the block between the marks
python benchmarks/rivals/readme_table.py --check   # fails if the block is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rival_results import read
from rival_tables import brief

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def newest(results: Path) -> list[Path]:
    """The latest results of each device, GPUs first."""
    latest: dict[str, Path] = {}
    for path in sorted(results.glob("rivals_*_*.json")):
        latest[path.stem.rpartition("_")[0]] = path  # ISO dates sort by time
    return sorted(latest.values(), key=lambda path: read(path)["environment"]["device"] == "cpu")


def block(results: Path) -> str:
    """Make the text between the marks; empty without results."""
    documents = [read(path) for path in newest(results)]
    return brief(documents) if documents else ""


def rewritten(text: str, inner: str, name: str = "rivals") -> str:
    """Replace the block between the marks `<!-- NAME: begin -->` and `<!-- NAME: end -->`.

    Raises:
        SystemExit: a mark is missing.
    """
    marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, begin, rest = text.partition(marks[0])
    _, end, tail = rest.partition(marks[1])
    if not (begin and end):
        raise SystemExit(f"the file lacks {marks[0]} or {marks[1]}")
    return f"{head}{begin}\n{inner}{end}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    before = README.read_text()
    after = rewritten(before, block(RESULTS))
    if not args.check:
        README.write_text(after)
    elif before != after:
        sys.exit("README.md is out of date: run python benchmarks/rivals/readme_table.py")


if __name__ == "__main__":
    main()
