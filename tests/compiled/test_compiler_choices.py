"""What the compiler chose by timing: repeated by replays, shared by the processes of a search."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.compiled import compiler_choices
from steadytorch.compiled.compiler_choices import NONE, Choices, padding, put, supplied, within
from steadytorch.plan.record import CompilerChoices
from steadytorch.results.candidate import TransformSpec

NAME = "ab/0123456789abcdef.best_config"
MADE = CompilerChoices(
    {NAME: {"XBLOCK": 64, "num_warps": 4, "found": False, "hash": None}}, {"a product": True}
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "name", ["", "../x.best_config", "ab/../../x.best_config", f"/{NAME}", "ab/0123456789.py"]
)
def test_only_names_of_the_compilers_cache_are_accepted(name):
    with pytest.raises(ValueError, match="no name in the compiler's cache"):
        CompilerChoices({name: {}})


@given(st.text())
def test_no_name_leads_out_of_the_cache(name):
    try:
        CompilerChoices({name: {}})
    except ValueError:
        return
    assert name.count("/") == 1
    assert ".." not in name
    assert name.endswith(".best_config")


def test_configurations_take_the_place_of_others_in_the_cache(cache):
    (cache / NAME).parent.mkdir(parents=True)
    (cache / NAME).write_text('{"XBLOCK": 8}')
    Choices(MADE).place()
    assert json.loads((cache / NAME).read_text()) == MADE.kernels[NAME]
    assert [path.name for path in cache.rglob("*") if path.is_file()] == [(cache / NAME).name]


def test_a_cache_that_cannot_be_written_is_told(cache, caplog):
    cache.write_text("a file")
    Choices(MADE).place()
    assert "kernels are tuned anew" in caplog.text


def test_nothing_is_written_without_choices(cache):
    NONE.place()
    assert not cache.exists()


def test_processes_of_one_folder_agree_on_the_first_decision(tmp_path):
    one, other = within(tmp_path), within(tmp_path)
    assert one.padded("m x n") is None
    assert one.decide("m x n", True)
    assert other.padded("m x n") is True
    assert other.decide("m x n", False) is True  # it began before the first was noted
    assert other.of_process() == CompilerChoices({}, {"m x n": True})


def test_workers_repeat_the_choices_of_a_plan(tmp_path):
    put(tmp_path, MADE)
    found = within(tmp_path)
    assert found.made == MADE
    assert found.padded("a product") is True


def _decisions(monkeypatch, *found):
    """Inductor's module with a decision that answers `found` one after the other."""
    pad_mm = pytest.importorskip("torch._inductor.fx_passes.pad_mm")
    answers = iter(found)
    monkeypatch.setattr(pad_mm, "_should_pad", lambda *given: next(answers))
    monkeypatch.setattr(pad_mm, "should_pad_bench_key", lambda match, *given: f"{match}")
    return pad_mm


def test_a_decision_is_made_once(tmp_path, monkeypatch):
    pad_mm, made = _decisions(monkeypatch, True, False), Choices(MADE, tmp_path / "padding")
    before = pad_mm._should_pad
    with padding(made):
        found = [pad_mm._should_pad(each, 1, 2, 3) for each in ("a product", "b", "c", "b", "c")]
    assert found == [True, True, False, True, False]
    assert pad_mm._should_pad is before


def test_the_decision_is_the_compilers_own_again_after_an_error(monkeypatch):
    pad_mm = _decisions(monkeypatch)
    before = pad_mm._should_pad
    with pytest.raises(ZeroDivisionError), padding(Choices(MADE)):
        raise ZeroDivisionError
    assert pad_mm._should_pad is before


def test_tuned_kernels_are_found_with_their_configurations(cache, monkeypatch):
    class Tuned:
        def __init__(self, hook):
            self.save_cache_hook = hook

    class Saves:
        local_cache = ("a cache", str(cache / NAME))

        def save(self):
            pass

    monkeypatch.setitem(
        sys.modules,
        "torch._inductor.runtime.triton_heuristics",
        SimpleNamespace(CachingAutotuner=Tuned),
    )
    kernels = [Tuned(Saves().save), Tuned(None)]
    assert NONE.of_process() == CompilerChoices()  # not tuned yet
    Choices(MADE).place()
    assert NONE.of_process().kernels == MADE.kernels
    del kernels


def test_a_plan_places_its_choices_before_it_compiles(plan, model, x, cache, monkeypatch):
    def compile_model(function, **options):
        assert json.loads((cache / NAME).read_text()) == MADE.kernels[NAME]
        asked.append(options)
        return function

    asked = []
    monkeypatch.setattr(torch, "compile", compile_model)
    compiled = (TransformSpec("compile", (("mode", "default"), ("freezing", True))),)
    kept = msgspec.structs.replace(plan, candidate=compiled, compiler=MADE)
    assert msgspec.json.decode(msgspec.json.encode(kept.compiler), type=CompilerChoices) == MADE
    with torch.no_grad():
        kept.apply(model)(x)
    assert asked
    assert compiler_choices.current() is NONE


def test_what_is_supplied_is_withdrawn():
    choices = Choices(MADE)
    with supplied(choices):
        assert compiler_choices.current() is choices
    assert compiler_choices.current() is NONE


def test_the_device_sleeps_before_kernels_are_timed(monkeypatch):
    from torch._inductor.runtime.benchmarking import benchmarker

    slept = []
    monkeypatch.setitem(vars(benchmarker), "get_event_pairs", None)
    del vars(benchmarker)["get_event_pairs"]
    monkeypatch.setattr(type(benchmarker), "get_event_pairs", lambda self, n, **kwargs: [n, kwargs])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    for _ in range(2):  # once is enough
        compiler_choices.fill_queue_before_timing()
    assert benchmarker.get_event_pairs(5, device_type="cuda") == [5, {"device_type": "cuda"}]
    assert benchmarker.get_event_pairs(100) == [100, {}]
    assert slept[1] == 20 * slept[0] > 0


def test_the_caller_hears_whether_a_product_was_padded(tmp_path):
    made = within(tmp_path)
    assert not made.pads
    made.decide("m x n", False)
    assert not made.pads
    made.decide("n x m", True)
    assert within(tmp_path).pads
