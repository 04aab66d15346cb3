"""A small run of the simulations in benchmarks/statistics, with limits as wide as its size asks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

STUDIES = Path(__file__).parents[2] / "benchmarks" / "statistics"
ROWS = 200


@pytest.fixture(scope="module")
def suite():
    """Modules of the simulation, which are scripts outside the package."""
    sys.path.insert(0, str(STUDIES))
    try:
        import gates
        import noise
        import unseen
        import validate

        yield {"gates": gates, "noise": noise, "validate": validate, "unseen": unseen}
    finally:
        sys.path.remove(str(STUDIES))
        for name in ("gates", "noise", "validate", "unseen"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def found(suite):
    return suite["validate"].study(suite["noise"].KINDS, ROWS, lengths=(2000,), seed=7)


def _at_most(rate, rows):
    """The count that chance exceeds once in ten thousand runs at this rate."""
    return binom.ppf(0.9999, rows, rate) / rows


@pytest.mark.slow
def test_intervals_of_the_median_hold_where_they_are_claimed(found):
    claims = held = 0.0
    for cell in found["coverage"]:
        if cell["coverage"] is not None:
            claims += cell["claimed"] * ROWS
            held += cell["claimed"] * ROWS * cell["coverage"]
    assert claims > 5 * ROWS
    assert 1 - held / claims <= _at_most(0.06, round(claims))


@pytest.mark.slow
def test_the_naive_interval_does_not_hold_under_correlation(found):
    cell = next(c for c in found["coverage"] if c["kind"] == "AR(0.9)")
    assert cell["naive_coverage"] < 0.65
    assert cell["coverage"] > 0.88


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AR(0.99)", "drift", "two clock states"])
def test_no_interval_is_claimed_where_none_would_hold(found, kind):
    cell = next(c for c in found["coverage"] if c["kind"] == kind)
    assert cell["claimed"] < 0.05


@pytest.mark.slow
def test_equal_arms_are_hardly_ever_told_apart(found):
    false = [c["faster"] + c["slower"] for c in found["verdicts"] if c["effect"] == 0]
    assert np.mean(false) <= _at_most(0.01, ROWS * len(false))


@pytest.mark.slow
def test_no_verdict_points_the_wrong_way(found):
    wrong = [c["wrong_direction"] for c in found["verdicts"]]
    assert np.mean(wrong) <= _at_most(0.001, ROWS * len(wrong))


@pytest.mark.slow
def test_one_percent_is_found_within_27_pairs(found):
    for cell in found["verdicts"]:
        if abs(cell["effect"]) == 0.01:
            assert 1 - cell["found_by_27"] <= _at_most(0.05, ROWS), cell["kind"]


@pytest.mark.slow
def test_one_arm_after_the_other_and_a_t_test_is_wrong_under_correlation(found):
    assert found["naive_false"]["AR(0.99)"] > 0.5
    assert found["naive_false"]["drift"] > 0.9


@pytest.mark.slow
def test_races_keep_the_best_and_save_blocks(found):
    races = sum(cell["races"] for cell in found["races"])
    lost = sum(cell["best_dropped"] * cell["races"] for cell in found["races"])
    assert lost / races <= _at_most(0.01, races)
    assert max(cell["median_cost"] for cell in found["races"]) < 0.8


@pytest.mark.slow
def test_the_table_names_every_kind_and_gate(suite, found):
    gates = suite["gates"].judge_all(found)
    page = suite["gates"].as_markdown(
        {
            "created": "2026-01-01",
            "seconds": 1,
            "versions": {"numpy": np.__version__},
            "configuration": {"replications": ROWS, "seed": 7, "processes": 1},
            "gates": gates,
            "gates_seen": gates,
            "gates_unseen": gates,
            "tuned": found,
            "seen": found,
            "unseen": found,
        }
    )
    for word in (*suite["noise"].KINDS, *(gate["gate"] for gate in gates)):
        assert word in page


@pytest.mark.slow
def test_a_gate_that_is_missed_is_said_to_be(suite, found):
    cells = [{**cell, "faster": 0.02} for cell in found["verdicts"]]
    gates = suite["gates"].judge_all({**found, "verdicts": cells})
    missed = {gate["gate"] for gate in gates if not gate["met"]}
    assert "false verdict on equal arms" in missed


def test_kinds_that_were_not_tuned_on_give_lines_of_the_shape_asked(suite):
    for noise in {**suite["unseen"].SEEN, **suite["unseen"].UNSEEN}.values():
        line = noise(np.random.default_rng(0), 3, 500)
        assert line.shape == (3, 500)
        assert 0.003 < line.std() < 0.03


def test_a_stationary_kind_has_the_spread_and_correlation_that_its_name_says(suite):
    line = suite["noise"].KINDS["AR(0.9)"](np.random.default_rng(0), 200, 500)
    assert line.std() == pytest.approx(0.01, rel=0.05)
    assert line[:, 0].std() == pytest.approx(0.01, rel=0.2)
    assert np.corrcoef(line[:, 1:].ravel(), line[:, :-1].ravel())[0, 1] == pytest.approx(
        0.9, abs=0.02
    )
