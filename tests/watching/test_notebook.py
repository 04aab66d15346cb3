"""A notebook, run by a real kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat")
nbclient = pytest.importorskip("nbclient", reason="running a notebook needs nbclient")
pytest.importorskip("ipykernel", reason="running a notebook needs ipykernel")

SOURCE = Path(__file__).parents[2] / "src"
CELLS = {
    "model": """
        import os, signal, torch
        from torch import nn
        import steadytorch as steady

        class Mine(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(64, 64)

            def forward(self, x):
                return torch.relu(self.layer(x))

        model, x = Mine().eval(), torch.randn(8, 64)
    """,
    "measure": "steady.measure((model, (x,)), budget='2s')",
    "explain": "steady.explain((model, (x,)), budget='2s')",
    "summarize": "steady.summarize([1_000_000 + 7 * i for i in range(60)])",
    "tune": "steady.tune((model, (x,)), budget='10s', store=os.environ['STORE'])",
    "watch": """
        chosen = torch.optim.SGD(model.parameters(), 0.1)
        seen = steady.watch([x] * 60)
        for batch in seen:
            model(batch).sum().backward()
            chosen.step()
        seen
    """,
    "interrupted loop": """
        seen = steady.watch(range(1000), keep_slow=2, traces=os.environ['STORE'] + '/t')
        for step in seen:
            model(x)
            if step == 50:
                os.kill(os.getpid(), signal.SIGINT)  # as the notebook's button does
    """,
    "kept": "seen.result",
    "interrupted block": """
        with steady.watch() as seen:
            for step in range(1000):
                model(x)
                if step == 50:
                    os.kill(os.getpid(), signal.SIGINT)
    """,
    "told": "seen.result",
    "again": "with steady.watch() as seen:\n    [model(x) for _ in range(5)]\nseen",
    "doctor": "steady.doctor()",
}


@pytest.mark.slow
def test_results_show_themselves_and_the_kernel_survives_an_interrupt(tmp_path, monkeypatch):
    monkeypatch.setenv("STORE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), *sys.path]))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    line = [sys.executable, "-m", "ipykernel", "install", "--prefix", str(tmp_path), "--name", "x"]
    subprocess.run(line, check=True, capture_output=True)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    texts = [nbformat.v4.new_code_cell(textwrap.dedent(text).strip()) for text in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=texts)
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="x", allow_errors=True, resources={"metadata": {}}
    )
    client.execute()
    outputs = dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))
    for name, told in outputs.items():
        errors = [each for each in told if each.output_type == "error"]
        assert [each.ename for each in errors] == ["KeyboardInterrupt"] * name.startswith(
            "interrupted"
        )
    html = {name: _html(outputs[name]) for name in outputs}
    assert {name for name, text in html.items() if not text} == {
        "model",
        "interrupted loop",
        "interrupted block",
    }
    assert "95 % within" in html["measure"] or "no interval" in html["measure"]
    assert "Where a step goes" in html["explain"]
    assert "Plan: " in html["tune"]
    assert "60 iterations" in html["watch"]
    assert "51 iterations" in html["kept"] or "50 iterations" in html["kept"]
    assert "interrupted; the steps so far" in html["told"]
    assert "4 model calls" in html["again"]
    assert all(text.startswith("<pre") for text in html.values() if text)


def _html(outputs):
    found = [each.data.get("text/html", "") for each in outputs if "data" in each]
    return found[-1] if found else ""
