"""The README says what the committed results say."""

from __future__ import annotations

import json

import pytest
import readme_table

from .rivalry import ENVIRONMENT, document, one_workload


def test_the_readme_shows_the_committed_results():
    text = readme_table.README.read_text()
    inner = readme_table.block(readme_table.RESULTS)
    assert readme_table.rewritten(text, inner) == text, (
        "run python benchmarks/rivals/readme_table.py"
    )


def test_only_what_stands_between_the_marks_is_rewritten():
    text = "before\n<!-- rivals: begin -->\nold\n<!-- rivals: end -->\nafter\n"
    found = readme_table.rewritten(text, "new\n")
    assert found == text.replace("old", "new")
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


def test_without_results_there_is_nothing_between_the_marks(tmp_path):
    assert readme_table.block(tmp_path) == ""
