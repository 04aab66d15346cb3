"""Notebooks of `examples/notebooks`: runs them, and converts them to Markdown for the site.

    python docs/notebooks.py               # runs all and stores their outputs
    python docs/notebooks.py serve         # runs one
    python docs/notebooks.py --check serve # runs it, and stores nothing

Runs need `nbclient` and `ipykernel`; the conversion needs neither.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
TIMEOUT_S = 300
STORE = re.compile(r"/[\w./-]+(?=/steadytorch/plans)")
"""Folder of the cache in an output."""


def markdown(path: Path) -> str:
    """A notebook as Markdown: its text, its code, and its outputs as plain text.

    Raises:
        ValueError: an output has another form, such as a picture.
    """
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        if output := "".join(map(_shown, cell["outputs"])).rstrip():
            parts.append(f"```text\n{output}\n```")
    parts.append(f"[Download this notebook]({path.name})")
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return "".join(output["text"])
    data = output.get("data", {})
    if not {"text/plain"} <= set(data) <= {"text/plain", "text/html"}:
        raise ValueError(f"cannot show a notebook's output of type {output['output_type']}")
    return "".join(data["text/plain"]) + "\n"


def executed(path: Path) -> Any:
    """Run a notebook on the CPU in a fresh kernel with an empty cache, on one core.

    Returns:
        The notebook with its outputs on stdout; progress on stderr is dropped.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        own = {"XDG_CACHE_HOME": folder, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
        os.environ |= {**own, "CUDA_VISIBLE_DEVICES": ""}
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=TIMEOUT_S, resources=resources).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [_plain(each) for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


def _plain(output: Any) -> Any:
    """The output without the cache's folder; the plain text of a result is that of its HTML."""
    if output.output_type == "stream":
        output.text = STORE.sub("~/.cache", output.text)
    elif "text/html" in output.get("data", ()):
        shown = STORE.sub("~/.cache", output.data["text/html"])
        text = html.unescape(re.sub(r"<[^>]+>", "", shown))
        lines = [line.rstrip() for line in text.strip("\n").split("\n")]
        output.data = {"text/html": shown, "text/plain": "\n".join(lines)}
    return output


def main() -> None:
    """Runs the named notebooks, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[path.stem for path in PATHS])
    parser.add_argument("--check", action="store_true", help="store nothing")
    args = parser.parse_args()
    for name in args.names:
        path = FOLDER / f"{name}.ipynb"
        notebook = executed(path)
        if not args.check:
            import nbformat

            nbformat.write(notebook, path)
        print(path.name, flush=True)


if __name__ == "__main__":
    main()
