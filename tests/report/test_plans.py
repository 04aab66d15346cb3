from __future__ import annotations

from pathlib import Path

from steadytorch.plan.store import Stored
from steadytorch.report.plans import render_list, render_show

from .conftest import HOSTILE, LONG, evidence, key, plan, spec, trial

ROOT = Path("/home/user/plans")


def _stored(made):
    return Stored(ROOT / "0" / "1.json", made.key, made)


def test_an_empty_store_says_where_it_looked_and_what_to_do(screen):
    render_list(screen.console, [], ROOT)
    assert "no plans in /home/user/plans" in screen.flat
    assert "steady tune" in screen.flat


def test_a_plan_is_listed_with_its_id_name_inputs_and_gain(screen):
    render_list(screen.console, [_stored(plan())], ROOT)
    for fact in (plan().id, "resnet50", "2.02x"):
        assert fact in screen.text
    assert "8x3x224x224:float32" in screen.text.replace("\n", "").replace(" ", "")


def test_the_empty_plan_has_no_gain(screen):
    render_list(screen.console, [_stored(plan(candidate=()))], ROOT)
    assert "untouched" in screen.text
    assert "2.02x" not in screen.text


def test_files_that_are_no_plans_are_named_with_the_problem(screen):
    bad = Stored(ROOT / "0" / "2.json", None, None, "was cut or altered")
    render_list(screen.console, [_stored(plan()), bad], ROOT)
    assert "/home/user/plans/0/2.json: was cut or altered" in screen.flat
    assert plan().id in screen.text


def test_only_bad_files_print_no_table(screen):
    render_list(screen.console, [Stored(ROOT, None, None, "cannot be listed")], ROOT)
    assert "workload" not in screen.text
    assert "cannot be listed" in screen.text


def test_long_names_wrap(screen):
    name = "some/very/long/path/" * 5 + "models.py:a_factory_with_a_long_name"
    render_list(screen.console, [_stored(plan(name=name, candidate=LONG))], ROOT)
    assert "2.02x" in screen.text
    assert plan().id in screen.text


def test_a_plan_is_shown_with_evidence_and_key(screen):
    render_show(screen.console, plan(), Path("/home/user/plans/0/1.json"))
    for fact in (
        "resnet50",
        "channels_last",
        "no CUDA device",
        "2026-01-01",
        "steadytorch 0.1.0",
        "latency, precision same",
        "AMD EPYC",
        "torch 2.13.0",
        "/home/user/plans/0/1.json",
    ):
        assert fact in screen.flat


def test_hostile_plans_are_shown_harmlessly(screen):
    hostile = plan(
        name=HOSTILE,
        candidate=spec(HOSTILE),
        created=HOSTILE,
        version=HOSTILE,
        evidence=evidence(trials=(trial(spec(HOSTILE), reason=HOSTILE),), reference=HOSTILE),
        key=key(signature=HOSTILE, device_name=HOSTILE, torch=HOSTILE, objective=HOSTILE),
    )
    bad = Stored(Path(f"/a/{HOSTILE}"), None, None, HOSTILE)
    render_list(screen.console, [_stored(hostile), bad], Path(HOSTILE))
    render_list(screen.console, [], Path(HOSTILE))
    render_show(screen.console, hostile, Path(HOSTILE))
    assert screen.text.count("[red]") >= 10
