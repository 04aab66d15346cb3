"""The document as Markdown."""

from __future__ import annotations

import rival_results
import rival_tables

from .rivalry import ENVIRONMENT, document, judgement, one_workload, row, series


def cells(text, first):
    """The cells of the lines of a table that begin with this cell."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0].strip() == first]


def test_every_row_is_shown_and_a_failure_says_why():
    text = rival_tables.markdown(document(*one_workload("a:1", -0.1)))
    rows = cells(text, "a:1")
    assert len(rows) == 5  # four options, and the summary
    assert rows[0][2] == "0.300 (0.300 to 0.301)"
    assert rows[2][-1].startswith("-10.0 % (-11.0 to -9.0), faster")
    assert rows[3][2].startswith("failed: > 90 s, not ready")


def test_all_rows_of_a_table_have_as_many_cells_as_its_head():
    text = rival_tables.markdown(document(*one_workload("a:1", -0.1)))
    counts = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert set(counts) == {len(rival_tables.ROWS) + 1, len(rival_tables.SUMMARY) + 1}


def test_the_summary_holds_ours_against_the_best():
    text = rival_tables.markdown(document(*one_workload("a:1", -0.1, tail=1.03)))
    summary = dict(zip(rival_tables.SUMMARY, cells(text, "a:1")[-1], strict=True))
    assert summary["best by hand"] == "fp16 compile freezing, CUDA graph"
    assert summary["our period against it (99 %)"] == "-10.0 % (-11.0 to -9.0), faster"
    assert summary["put down to"] == "not attributed"
    assert summary["latency/period"] == "1.050"
    assert summary["max-autotune s"] == "> 90 s, not ready"
    assert "geometric mean 0.900 of 1 workloads, worst 0.900 (a:1)" in text
    assert "0 of 1 ready in time" in text


def test_the_summary_holds_what_ours_and_the_best_take_alone():
    rows = one_workload("a:1", -0.1)
    collected = {
        "at_ns": (0, 20_000_000, 41_000_000),
        "gc_start_ns": (39_640_000,),
        "gc_duration_ns": (95_000,),
        "gc_generation": (2,),
    }
    for each, extra in zip(rows, (10_000, 20_000, 40_000), strict=False):
        found = {
            "period": series([400_000] * 99 + [500_000], **collected),
            "latency": series([400_000 + extra] * 5),
        }
        each["alone"] = rival_results.alone(found)
    text = rival_tables.markdown(document(*rows))
    summary = dict(zip(rival_tables.SUMMARY, cells(text, "a:1")[-1], strict=True))
    assert summary["CV, alone"] == "2.49%, 1 garbage collection"
    assert summary["latency/period, alone"] == "1.025"
    assert summary["the best's, alone"] == "1.100"


def test_what_was_not_timed_alone_has_no_figures_of_it():
    text = rival_tables.markdown(document(*one_workload("a:1", -0.1)))
    summary = dict(zip(rival_tables.SUMMARY, cells(text, "a:1")[-1], strict=True))
    assert not any(value for name, value in summary.items() if "alone" in name)


def test_a_workload_without_ours_is_in_the_summary_with_its_reason():
    rows = one_workload("a:1", -0.1)
    rows[0] = {**rows[3], "option": "steadytorch", "failed": "no budget"}
    text = rival_tables.markdown(document(*rows, plan=None))
    summary = dict(zip(rival_tables.SUMMARY, cells(text, "a:1")[-1], strict=True))
    assert {name: value for name, value in summary.items() if value} == {
        "workload": "a:1",
        "plan": "no budget",
        "search s": "55",
        "max-autotune s": "> 90 s, not ready",
    }
    assert "a:1" not in rival_tables.page(document(*rows))


PROTOCOL = {"dropped_ms": 8.0, "alone_s": 1.0, "explained_s": 3.0, "cv_limit": 0.005}


def test_how_long_was_timed_is_said_of_the_workloads_that_it_is_known_of():
    found = document(*one_workload("a:1", -0.1), *one_workload("b:1", -0.1))
    assert "of each turn" not in rival_tables.markdown(found)
    found["workloads"]["b:1"]["protocol"] = PROTOCOL
    assert (
        "\n\nb:1: The first 8 ms of each turn, and its first three calls, are no samples."
        in rival_tables.markdown(found)
    )
    found["workloads"]["a:1"]["protocol"] = {**PROTOCOL, "dropped_ms": 4.0}
    text = rival_tables.markdown(found)
    assert "\n\na:1: The first 4 ms" in text
    assert "\n\nb:1: The first 8 ms" in text
    found["workloads"]["a:1"]["protocol"] = PROTOCOL
    text = rival_tables.markdown(found)
    assert (
        text.count("The first 8 ms of each turn, and its first three calls, are no samples. Alone")
        == 1
    )
    assert "timed for 1 s, and for 3 s our period where its CV is over 0.5%.\n\n" in text


def test_the_heading_names_what_it_was_measured_on_once():
    found = document(*one_workload("a:1", -0.1), *one_workload("b:1", -0.1))
    assert rival_tables.heading(found) == (
        "NVIDIA H200, 16 cores, torch 2.11.0, cuDNN 9.19.0, driver 580.1, 2026-11-21"
    )
    found["workloads"]["b:1"]["environment"] = {**ENVIRONMENT, "driver": "580.2"}
    found["workloads"]["b:1"]["created"] = "2026-11-22T01:00:00+00:00"
    assert rival_tables.heading(found).endswith("driver 580.1 and 580.2, 2026-11-21 to 2026-11-22")


def test_a_verdict_without_an_interval_shows_none():
    early = {**judgement(-0.1, "undecided"), "low": None, "high": None}
    assert rival_tables.format_effect(early) == "-10.0 %, undecided"
    assert rival_tables.format_effect(None) == ""


def test_the_readme_has_a_line_a_workload():
    text = rival_tables.page(document(*one_workload("a:1", -0.1)))
    (row,) = cells(text, "a:1, fp16")
    assert row[1:5] == [
        "3.000 ms",
        "0.400 ms, fp16 compile freezing, CUDA graph",
        "0.300 ms",
        "-10.0 % (-11.0 to -9.0)",
    ]
    assert row[-1].strip() == "55 s"


def test_wrong_results_are_called_so():
    right, wrong = (row("a:1", "fp16 compile", 1.0, error=error) for error in (6.4e-4, 1.0))
    assert "6.4e-04" in rival_tables.row_cells(right)
    assert "1.0e+00, wrong" in rival_tables.row_cells(wrong)


def test_a_verdict_over_processes_says_how_many():
    claim = {**judgement(-0.02), "processes": 5, "claim": "machine"}
    assert rival_tables.effect(claim) == "-2.0 % (-3.0 to -1.0), 5 processes"


def test_engines_beyond_pytorch_are_told_apart():
    def made(*rows):
        return document(row("a:1", "steadytorch", 1.0), *rows)

    pytorch = row("a:1", "compile", 4.0, ours_against_it={"period": judgement(-0.75)})
    engine = row("a:1", "OpenVINO", 2.0, ours_against_it={"period": judgement(-0.5)})
    assert rival_tables.against_pytorch(made(pytorch)) is None
    assert rival_tables.against_pytorch(made(pytorch, engine)) == 0.25
    assert "best of PyTorch alone: geometric mean 0.250" in rival_tables.page(made(pytorch, engine))


def test_plans_of_smaller_budgets_have_a_table_of_their_own():
    def timed(option, period_ms, **others):
        medians = {"period": [1e6 * period_ms] * 20}
        return row("a:1", option, period_ms, block_medians_ns=medians, **others)

    rows = [
        timed("steadytorch", 0.3),
        timed("steadytorch within 60 s", 0.4),
        timed("eager", 0.8),
        timed("fp16 compile", 0.5, setup_s=70.0),
        timed("fp16 CUDA graph", 0.6),
        timed("fp16 max-autotune", 0.1, error=1.0),
    ]
    found = document(*rows)
    assert rival_tables.within_table(found) == []
    found["workloads"]["a:1"]["budgets"] = [{"budget_s": 60.0, "search_s": 55.0}]
    (shares,) = rival_results.within_budgets(found)[60.0].values()
    expected = {"best": 0.8, "ready": 0.667, "uncompiled": 0.667, "default": 1.333}
    assert {key: round(1 + shares[key], 3) for key in expected} == expected
    (line,) = cells(rival_tables.page(found), "60 s")
    assert line[1:3] == ["55 s", "0.800, 0.800 (a:1)"]
    assert rival_results.best_of(rows, "period_ms")["option"] == "fp16 compile"
