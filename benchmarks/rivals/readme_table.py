"""Write the comparison tables of README and docs from the committed results.

The README gets a row per machine, docs/results.md a row per workload.

python benchmarks/rivals/readme_table.py           # rewrites the blocks between the marks
python benchmarks/rivals/readme_table.py --check   # fails if a block is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rival_results import read
from rival_tables import brief, page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- rivals: begin -->", "<!-- rivals: end -->"


def newest(results: Path) -> list[Path]:
    """The latest results of each device, GPUs first."""
    latest: dict[str, Path] = {}
    for path in sorted(results.glob("rivals_*_*.json")):
        latest[path.stem.rpartition("_")[0]] = path  # ISO dates sort by time
    return sorted(latest.values(), key=lambda path: read(path)["environment"]["device"] == "cpu")


def blocks(results: Path) -> dict[Path, str]:
    """Make the text between the marks of each file; empty without results."""
    documents = [read(path) for path in newest(results)]
    return {
        ROOT / "README.md": brief(documents) if documents else "",
        ROOT / "docs" / "results.md": "\n".join(map(page, documents)),
    }


def rewritten(text: str, inner: str) -> str:
    """Replace the block between the marks.

    Raises:
        SystemExit: a mark is missing.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the file lacks {BEGIN} or {END}")
    return f"{head}{BEGIN}\n{inner}{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for path, inner in blocks(RESULTS).items():
        before = path.read_text()
        after = rewritten(before, inner)
        if not args.check:
            path.write_text(after)
        elif before != after:
            sys.exit(f"{path.name} is out of date: run python benchmarks/rivals/readme_table.py")


if __name__ == "__main__":
    main()
