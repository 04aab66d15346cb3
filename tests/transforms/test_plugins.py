"""Plug-ins of fake distributions: found, loaded, checked and refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from steadytorch import transforms
from steadytorch.cli import steady
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import plugin_worker, plugins
from steadytorch.transforms.contract import _faults, check, violations
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.workload.workload import Workload

HEAD = """
from contextlib import contextmanager
import torch
from steadytorch.plugins import *
"""
GOOD = """
class Doubled(Transform):
    name = "good"
    risk = Risk.EXACT
    def applies_to(self, workload, facts):
        return Applicable()
    @contextmanager
    def applied(self, workload):
        model = workload.model
        yield workload.with_model(lambda *a, **k: model(*a, **k))
"""
OTHERS = {
    "crashes": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "exits": "raise SystemExit(3)",
    "absent": "import no_such_library",
    "no_class": "Doubled = 7",
    "unnamed": GOOD,
    "variants_fail": GOOD.replace('"good"', '"variants_fail"')
    + "    @classmethod\n    def variants(cls, facts):\n        raise KeyError('device')\n",
    "asks_wrongly": GOOD.replace('"good"', '"asks_wrongly"').replace(
        "return Applicable()", "raise ZeroDivisionError('no cores')"
    ),
    "compile": GOOD.replace('"good"', '"compile"'),
}
REASONS = {
    "crashes": "SIGSEGV",
    "exits": "SystemExit(3)",
    "absent": "No module named 'no_such_library'",
    "no_class": "7 is not a subclass",
    "unnamed": "its name is 'good', its entry point's is 'unnamed'",
    "variants_fail": "variants fail: KeyError",
    "compile": "steadytorch has a transform of this name",
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs plug-ins by name and source text."""

    def forget():
        plugins.found.cache_clear()
        plugins._loaded.cache_clear()
        plugins._refused.clear()
        plugin_worker._admitted.clear()

    def install(**sources: str) -> None:
        info = tmp_path / "steadytorch_fake-1.2.dist-info"
        info.mkdir()
        metadata = "Metadata-Version: 2.1\nName: steadytorch-fake\nVersion: 1.2\n"
        (info / "METADATA").write_text(metadata)
        lines = [f"{name} = fake_{name}:Doubled" for name in sources]
        (info / "entry_points.txt").write_text("\n".join([f"[{plugins.GROUP}]", *lines]))
        for name, text in sources.items():
            Path(tmp_path, f"fake_{name}.py").write_text(HEAD + text)
        forget()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    forget()
    for name in [name for name in sys.modules if name.startswith("fake_")]:
        del sys.modules[name]


def session(tmp_path) -> Session:
    workload = Workload(nn.Linear(4, 2).eval(), torch.randn(3, 4))
    return Session(workload, SearchOptions(), store=tmp_path / "store")


def test_a_plug_in_is_a_transform_like_any_other(install, cpu):
    install(good=GOOD)
    spec = TransformSpec("good")
    assert spec in [each.spec for each in transforms.all_variants(cpu)]
    assert transforms.create(spec).spec == spec
    assert transforms.parse("good+channels_last", cpu)[0].name == "channels_last"
    compiled = TransformSpec("compile", (("mode", "default"), ("freezing", True)))
    assert [s.name for s in transforms.order([compiled, spec])] == ["good", "compile"]


def test_none_is_loaded_unless_it_is_needed(install):
    install(crashes=OTHERS["crashes"])
    assert list(plugins.found()) == ["crashes"]
    transforms.create(TransformSpec("inference_mode"))
    assert not transforms.compiles((TransformSpec("inference_mode"),))


def test_an_unknown_name_lists_the_plug_ins_too(install):
    install(good=GOOD)
    with pytest.raises(UsageError, match=r"'sorcery'.*, good"):
        transforms.create(TransformSpec("sorcery"))


@pytest.mark.parametrize("name", [n for n in REASONS if n not in ("crashes", "compile")])
def test_a_broken_one_is_refused_with_its_reason(install, cpu, name):
    install(**{name: OTHERS[name]})
    assert not [t for t in transforms.all_variants(cpu) if t.name == name]
    assert REASONS[name] in plugins.refused()[name]
    if name != "variants_fail":
        with pytest.raises(UnsupportedError, match=f"plug-in {name} was refused"):
            transforms.create(TransformSpec(name))


@pytest.mark.slow
def test_broken_ones_cost_their_own_candidates_only(install, tmp_path):
    install(good=GOOD, **OTHERS)
    available, refused = session(tmp_path).options_that_apply()
    names = {spec.name for spec in available}
    assert {"good", "inference_mode"} <= names
    assert not names & (OTHERS.keys() - {"compile"})
    for name, reason in REASONS.items():
        assert reason in refused[name]
    assert "its own check failed: ZeroDivisionError" in refused["asks_wrongly"]


def test_one_that_crashes_is_refused_before_it_is_loaded_here(install):
    install(crashes=OTHERS["crashes"])
    plugin_worker.admit()
    assert "SIGSEGV" in plugins.refused()["crashes"]
    with pytest.raises(UnsupportedError, match="SIGSEGV"):
        transforms.create(TransformSpec("crashes"))


def test_the_doctor_lists_them_with_reasons(install):
    install(good=GOOD, absent=OTHERS["absent"])
    shown = CliRunner().invoke(steady, ["doctor", "--device", "cpu", "--plugins"])
    text = " ".join(shown.output.split())
    assert shown.exit_code == 0
    assert "good ok (steadytorch-fake 1.2)" in text
    assert "absent refused: cannot be imported: ModuleNotFoundError" in text


def made(body: str, more: str = "") -> type:
    space: dict = {}
    text = GOOD.replace("lambda *a, **k: model(*a, **k)", body) + more
    exec(HEAD + text, space)
    return space["Doubled"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("lambda *a, **k: torch.utils._pytree.tree_map(lambda t: t * 2, model(*a, **k))", "error"),
        ("(lambda first: lambda *a, **k: first)(model(*workload.inputs, **workload.kwargs))",
         "other values"),
        ("lambda *a, **k: [model(*a, **k), a[0].zero_()][0]", "writes to its inputs"),
        ("[p.mul_(2) for p in model.parameters()] and model", "changes the weights"),
        ("torch.set_num_threads(torch.get_num_threads() + 1) or model", "process-wide setting"),
    ],
)  # fmt: skip
def test_the_contract_finds(body, why):
    threads = torch.get_num_threads()
    try:
        assert any(why in each for each in violations(made(body)))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("values", [[0.0, 0.0], [], [1.0, 2.0]])
def test_the_contract_compares_any_results(values):
    assert _faults([torch.tensor(values)], [torch.tensor(values)], "same") == []
    more = torch.tensor([*values, 0.0])
    assert len(_faults([more + 1], [more], "same")) == 1


def test_the_contract_is_kept_by_a_good_one_and_says_what_was_not_run():
    assert violations(made("lambda *a, **k: model(*a, **k)")) == []
    refusing = made(
        "model", '    def applies_to(self, w, f):\n        return NotApplicable("no such card")\n'
    )
    assert check(refusing).violations == []
    assert check(refusing).not_run == "no such card"
