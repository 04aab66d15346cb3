"""The README and the benchmarks page say what the committed results say."""

from __future__ import annotations

import json

import pytest
import readme_table

from .rivalry import ENVIRONMENT, document, one_workload


def test_the_pages_show_the_committed_results():
    for path, inner in readme_table.blocks(readme_table.RESULTS).items():
        text = path.read_text()
        assert readme_table.rewritten(text, inner) == text, (
            "run python benchmarks/rivals/readme_table.py"
        )


def test_only_what_stands_between_the_marks_is_rewritten():
    text = f"before\n{readme_table.BEGIN}\nold\n{readme_table.END}\nafter\n"
    found = readme_table.rewritten(text, "new\n")
    assert found == f"before\n{readme_table.BEGIN}\nnew\n{readme_table.END}\nafter\n"
    assert readme_table.rewritten(found, "new\n") == found
    with pytest.raises(SystemExit, match="lacks"):
        readme_table.rewritten("no marks", "new\n")


def test_the_latest_results_of_each_device_count_gpus_first(tmp_path):
    for name, device in (
        ("amd-epyc_2026-11-23", "cpu"),
        ("h200_2026-11-21", "cuda"),
        ("h200_2026-11-22", "cuda"),
    ):
        found = document(*one_workload("a:1", -0.1), created=f"{name[-10:]}T00:00:00")
        found["environment"] = {**ENVIRONMENT, "device": device}
        (tmp_path / f"rivals_{name}.json").write_text(json.dumps(found))
    (tmp_path / "rivals-of-old_h200.json").write_text("{}")
    names = [path.stem for path in readme_table.newest(tmp_path)]
    assert names == ["rivals_h200_2026-11-22", "rivals_amd-epyc_2026-11-23"]
    _, text = readme_table.blocks(tmp_path).values()
    assert text.index("2026-11-22:") < text.index("2026-11-23:")
    assert "2026-11-21" not in text


def test_without_results_there_is_nothing_between_the_marks(tmp_path):
    assert set(readme_table.blocks(tmp_path).values()) == {""}
