"""The page of results: its tables are those of the committed results, and its plots are drawn."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import results_page
from rival_results import read

from .rivalry import document, one_workload


def test_the_page_shows_the_committed_results():
    text = results_page.PAGE.read_text("utf-8")
    assert results_page.with_tables(text, results_page.RESULTS) == text, (
        "run python benchmarks/rivals/results_page.py"
    )


def test_each_plot_is_on_the_page_and_is_drawn_from_the_committed_results():
    text = results_page.PAGE.read_text("utf-8")
    assert set(results_page.MARK.findall(text)) == set(results_page.PLOTS)
    drawn = results_page.with_plots(text, results_page.RESULTS)
    assert not results_page.MARK.search(drawn)
    plots = re.findall(r"<svg.*?</svg>", drawn)
    for each in plots:
        ElementTree.fromstring(each)
    workloads = sum(len(read(p)["workloads"]) for p in results_page.newest(results_page.RESULTS))
    assert len(plots) > workloads  # a panel of the search for each, and others


def test_a_search_is_the_best_candidate_until_then():
    def trial(name, median_ns):
        transforms = [{"name": name, "parameters": []}] if name else []
        return {"transforms": transforms, "median_ns": median_ns}

    entry = {
        "trials": [trial("", 9e6), trial("a", 4e6), trial("b", 5e6), trial("c", None)],
        "timeline": [
            [1.0, "verified: untouched"],
            [1.5, "set-up: b"],
            [2.0, "verified: b"],
            [3.0, "verified: a"],
            [4.0, "verified: c"],
        ],
    }
    assert results_page.search_steps(entry) == [(1.0, 9.0), (2.0, 5.0), (3.0, 4.0)]


def test_a_workload_without_a_rival_or_a_p99_is_left_out_of_the_plots():
    rows = [*one_workload("a:1", -0.1), *one_workload("b:1", -0.2)[:1]]
    found = document(*rows, trials=[])
    assert "b:1" not in results_page.by_workload([found])
    assert "<svg" not in results_page.tails([found])


def test_missing_results_are_named(tmp_path):
    with pytest.raises(ValueError, match="no results of NVIDIA H200"):
        results_page.blocks(tmp_path)
