from __future__ import annotations

from pathlib import Path

from steadytorch.measure.race import MachineClaim
from steadytorch.plan.fingerprint import Difference
from steadytorch.plan.store import Stored
from steadytorch.report.plans import (
    render_exported,
    render_imported,
    render_list,
    render_passed_over,
    render_reverified,
    render_show,
)
from steadytorch.serve.exchange import Imported
from steadytorch.tune.reverify import Reverified

from .conftest import HOSTILE, LONG, evidence, key, plan, spec, trial

ROOT = Path("/home/user/plans")


def _stored(made):
    return Stored(ROOT / "0" / "1.json", made.key, made)


def test_plans_for_training_are_called_so(screen):
    render_list(screen.console, [_stored(plan(trains="0" * 64))], ROOT)
    assert "(training)" in screen.flat


def test_an_empty_store_says_where_it_looked_and_what_to_do(screen):
    render_list(screen.console, [], ROOT)
    assert "no plans in /home/user/plans" in screen.flat
    assert "steady tune" in screen.flat


def test_a_plan_is_listed_with_its_id_name_inputs_and_gain(screen):
    render_list(screen.console, [_stored(plan())], ROOT)
    for fact in (plan().id, "resnet50", "2.02x"):
        assert fact in screen.text
    assert "8x3x224x224:float32" in screen.text.replace("\n", "").replace(" ", "")


def test_names_and_shapes_are_whole_in_80_columns(screen):
    made = plan(name="serving.py:factory", candidate=LONG)
    render_list(screen.console, [_stored(made)], ROOT)
    for word in (made.id, "serving.py:factory", "8x3x224x224:float32", "attention_backend("):
        assert word in screen.text


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


def test_files_that_were_moved_aside_are_counted(screen):
    aside = [ROOT / "quarantine" / f"{name}.json" for name in ("a", "b")]
    render_list(screen.console, [], ROOT, aside)
    assert "no plans in /home/user/plans" in screen.flat
    assert "2 unusable files moved aside to /home/user/plans/quarantine" in screen.flat


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


def test_facts_that_do_not_apply_are_left_out(screen):
    bare = key(compute_capability=None, cuda=None, cudnn=None, driver=None, tolerance=None)
    render_show(screen.console, plan(key=bare), ROOT / "1.json")
    facts = screen.flat.partition(" asked ")[2]
    assert "AMD EPYC (cpu)" in facts
    assert not any(word in facts for word in ("None", "CUDA", "cuDNN", "driver", "tolerance"))
    full = key(compute_capability="9.0", cuda="13.0", cudnn="9.19.0", driver="580", tolerance=0.01)
    render_show(screen.console, plan(key=full), ROOT / "1.json")
    for fact in ("tolerance 0.01", "compute capability 9.0", "CUDA 13.0, cuDNN 9.19.0, driver 580"):
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


# -- exchange -----------------------------------------------------------------------------------


def test_an_export_says_how_many_and_what_was_left_out(screen):
    bad = Stored(ROOT / "0" / "2.json", None, None, "was cut or altered")
    render_exported(screen.console, [_stored(plan()), bad], Path("plans.steady"))
    assert "1 plan in plans.steady" in screen.flat
    assert "left out: /home/user/plans/0/2.json: was cut or altered" in screen.flat


def test_an_import_says_of_each_plan_whether_it_fits(screen):
    misfit = (Difference("driver", "570.1", "590.44"),)
    imported = [Imported(plan(), False, ()), Imported(plan(name="vit"), True, misfit)]
    render_imported(screen.console, imported)
    for fact in (
        "resnet50, 8x3x224x224:float32: channels_last + inference_mode",
        "stored",
        "fits this machine",
        "already stored, left unchanged",
        "does not fit here: driver was 570.1, is 590.44",
        "2 plans, 1 of them for this machine",
    ):
        assert fact in screen.flat


# -- verified anew ------------------------------------------------------------------------------

CLAIM = MachineClaim(-0.5, -0.52, -0.48, "faster", 5, "machine")


def _reverified(**fields):
    found = {"plan": plan(), "error": 1e-7, "claim": CLAIM, "baseline_ns": 20e6, "plan_ns": 10e6}
    return Reverified(**{**found, **fields})


def test_a_plan_that_holds_is_shown_beside_what_it_was(screen):
    render_reverified(screen.console, _reverified())
    for fact in (
        "relative error 1.0e-07",
        "2.00x as fast as the untouched workload (99 % interval 1.92 to 2.08)",
        "5 fresh processes a side; claim: machine; 2.02x when it was made",
        "10.00 ms, untouched 20.00 ms",
        "holds",
    ):
        assert fact in screen.flat


def test_a_plan_that_fails_says_why_and_what_to_do(screen):
    render_reverified(screen.console, _reverified(failed="output 0 holds NaN", claim=None))
    assert "failed: output 0 holds NaN; tune again, or remove it" in screen.flat
    assert "holds\n" not in screen.text


def test_too_few_processes_show_no_interval(screen):
    claim = MachineClaim(-0.5, None, None, "undecided", 1, "process")
    render_reverified(screen.console, _reverified(claim=claim))
    assert "2.00x as fast as the untouched workload, 1 fresh processes" in screen.flat
    assert "interval" not in screen.text


def test_the_empty_plan_has_nothing_to_verify(screen):
    render_reverified(screen.console, Reverified(plan=plan(candidate=())))
    assert "leaves the workload untouched: nothing to verify" in screen.flat


def test_hostile_plans_are_exchanged_and_verified_harmlessly(screen):
    hostile = plan(name=HOSTILE, candidate=spec(HOSTILE), key=key(signature=HOSTILE))
    misfit = (Difference(HOSTILE, HOSTILE, HOSTILE),)
    render_exported(screen.console, [Stored(Path(HOSTILE), None, None, HOSTILE)], Path(HOSTILE))
    render_imported(screen.console, [Imported(hostile, False, misfit)])
    render_passed_over(screen.console, hostile, HOSTILE)
    render_reverified(screen.console, _reverified(plan=hostile, failed=HOSTILE))
    assert screen.text.count("[red]") >= 10
