from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadytorch.conv import choose as choosing
from steadytorch.conv import timing
from steadytorch.conv.blocks import Flush
from steadytorch.conv.check import operands
from steadytorch.conv.choices import ATEN, read_choice
from steadytorch.conv.choose import ChoiceOptions, choose, first_sound, is_cold, variants
from steadytorch.conv.engines import OUTPUT, Engine
from steadytorch.conv.executables import DTYPES, empty
from steadytorch.conv.problem import parse
from steadytorch.errors import UnsupportedError

STEM = "fprop/bias_relu/fp16/last/i8x3x64x64/w64x3x7x7/s2x2/p3x3/d1x1/g1"
PLAIN = parse("fprop/bias/fp32/last/i1x8x4x4/w8x8x1x1/s1x1/p0x0/d1x1/g1")
CPU = torch.device("cpu")
WARM = ChoiceOptions(cold=False)
MEDIANS_NS = {"eng1": 950.0, "eng2": 1000.0, "eng3": 1010.0}
"""The first is the fastest, so it must not be chosen if it raises."""
BUILT, VERIFIED, RUN_ONCE, RECORDED, SCREENED, RACED = 0, 1, 3, 4, 6, 10
"""Number of calls of a plan before each stage: two to verify, one each to be timed once and to be
recorded, then the rounds."""


class Lab:
    """Fake engines; some raise, the others compute PyTorch's result.

    Attributes:
        faults: by engine, at which of its calls it raises what; 0 is when it is built.
        refusals: by engine, from which of its calls on it does not run.
        factors: by engine, what its results are multiplied by.
        built: engines in the order they were built.
        flushes: what each block that is timed is given to flush the cache.
        clock_s: what the clock shows; a plan that is built takes `build_s`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.faults: dict[str, tuple[int, Exception]] = {}
        self.refusals: dict[str, int] = {}
        self.factors: dict[str, float] = {}
        self.built: list[str] = []
        self.flushes: list[Any] = []
        self.clock_s, self.build_s = 0.0, 0.0
        self.excluded: dict[str, str] = {}
        lab = self

        class EngineExecutable:
            workspace_bytes = 0

            def __init__(self, problem: Any, engine: str, device: torch.device) -> None:
                self.problem, self.engine, self.calls = problem, engine, 0
                lab.built.append(engine)
                lab.clock_s += lab.build_s
                self._count()

            def _count(self) -> None:
                at, fault = lab.faults.get(self.engine, (-1, None))
                if fault is not None and self.calls == at:
                    raise fault
                self.calls += 1

            def enqueue(self, pointers: dict[int, int], workspace: int) -> bool:
                self._count()
                if self.calls > lab.refusals.get(self.engine, self.calls):
                    return False
                result = operands(self.problem, CPU).by_pytorch()
                result *= lab.factors.get(self.engine, 1.0)
                dtype = DTYPES[self.problem.number]
                made = empty(tuple(result.shape), dtype, CPU, self.problem.layout).copy_(result)
                ctypes.memmove(pointers[OUTPUT], made.data_ptr(), made.nbytes)
                return True

        def block_ns(arm: Any, flush: object, lead: object, repeats: int) -> float:
            lab.flushes.append(flush)
            arm.run()
            return MEDIANS_NS.get(arm.found.choice, 2000.0)

        def offered(*_: object) -> list[Engine]:
            return [
                Engine(name, index, 0, (), lab.excluded.get(name))
                for index, name in enumerate(MEDIANS_NS)
            ]

        monkeypatch.setattr(choosing, "EngineExecutable", EngineExecutable)
        monkeypatch.setattr(choosing, "target", lambda device: None)
        monkeypatch.setattr(choosing, "list_engines", offered)
        monkeypatch.setattr(choosing, "time", SimpleNamespace(perf_counter=lambda: lab.clock_s))
        monkeypatch.setattr(timing.Arm, "_record", lambda arm, stream, pool: arm.run())
        monkeypatch.setattr(timing.Arm, "block_ns", block_ns)
        monkeypatch.setattr(torch.cuda, "Stream", object)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)


@pytest.fixture
def lab(monkeypatch):
    return Lab(monkeypatch)


def left_out(outcome):
    """Excluded engines with their reasons."""
    return {engine.choice: engine.excluded for engine in outcome.engines if engine.excluded}


def test_of_engines_that_do_what_they_should_the_fastest_is_chosen(lab):
    found = choose(PLAIN, CPU, WARM)
    assert (found.choice, found.chosen_ns, found.default_ns) == ("eng1", 950.0, 2000.0)
    assert left_out(found) == {}


@pytest.mark.parametrize(
    "at",
    [BUILT, VERIFIED, RUN_ONCE, RECORDED, SCREENED, RACED],
    ids=["built", "verified", "run once", "recorded", "screened", "raced"],
)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (UnsupportedError("does not build"), "does not build"),
        (RuntimeError("launch failed\nmore"), "RuntimeError: launch failed"),
        (torch.OutOfMemoryError("CUDA out of memory."), "OutOfMemoryError: CUDA out of memory."),
        (AssertionError(), "AssertionError: "),
    ],
    ids=["unsupported", "runtime", "memory", "silent"],
)
def test_an_engine_that_raises_is_left_out_with_the_reason(lab, at, fault, reason):
    lab.faults["eng1"] = (at, fault)
    found = choose(PLAIN, CPU, WARM)
    assert left_out(found) == {"eng1": reason}
    assert (found.choice, found.chosen_ns) == ("eng2", 1000.0)
    assert {engine.choice for engine in found.engines if engine.runs} >= {"eng2", "eng3", ATEN}


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (VERIFIED, "does not run"),
        (RUN_ONCE, "no longer runs"),
        (RECORDED, "no longer runs"),
        (SCREENED, "no longer runs"),
        (RACED, "no longer runs"),
    ],
)
def test_an_engine_that_runs_nothing_is_not_the_fastest(lab, at, reason):
    lab.refusals["eng1"] = at
    found = choose(PLAIN, CPU, WARM)
    assert (found.choice, left_out(found)) == ("eng2", {"eng1": reason})


def test_an_engine_that_computes_something_else_is_left_out_with_its_error(lab):
    lab.factors = {"eng1": 1 + 1e-3}
    found = choose(PLAIN, CPU, WARM)
    assert found.choice == "eng2"
    assert left_out(found)["eng1"].startswith("relative error 1.0e-03 exceeds ")


def test_several_engines_may_raise_in_one_race(lab):
    for name in ("eng1", "eng2"):
        lab.faults[name] = (RACED, RuntimeError(name))
    found = choose(PLAIN, CPU, WARM)
    assert left_out(found) == {"eng1": "RuntimeError: eng1", "eng2": "RuntimeError: eng2"}
    assert found.choice == "eng3"


def test_an_incumbent_that_raises_does_not_stay(lab):
    lab.faults["eng3"] = (RACED, RuntimeError("boom"))
    assert choose(PLAIN, CPU, WARM, read_choice("eng3")).choice == "eng1"


def test_where_pytorchs_own_cannot_be_recorded_an_engine_is_chosen_without_it(lab, monkeypatch):
    def record(arm, stream, pool):
        if arm.found.choice == ATEN:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(timing.Arm, "_record", record)
    found = choose(PLAIN, CPU, WARM)
    assert (found.choice, found.default_ns, found.benchmark_ns) == ("eng1", None, 2000.0)
    assert left_out(found) == {ATEN: "OutOfMemoryError: CUDA out of memory."}


def test_where_every_engine_raises_pytorchs_own_is_chosen(lab):
    lab.faults = {name: (VERIFIED, RuntimeError("boom")) for name in MEDIANS_NS}
    assert choose(PLAIN, CPU, WARM).choice == ATEN


@pytest.mark.parametrize("at", [BUILT, VERIFIED, RUN_ONCE, RECORDED, SCREENED, RACED])
def test_an_engine_that_takes_the_device_along_is_named(lab, monkeypatch, at):
    monkeypatch.setattr(timing, "device_answers", lambda: False)
    lab.faults["eng2"] = (at, RuntimeError("illegal memory access"))
    with pytest.raises(
        UnsupportedError, match=r"eng2 made the device unusable \(RuntimeError: illegal memory"
    ):
        choose(PLAIN, CPU, WARM)


def test_what_is_of_the_whole_problem_is_raised(lab, monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(choosing, "operands", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        choose(PLAIN, CPU, WARM)


def test_where_half_of_the_time_is_over_no_more_engines_are_built(lab):
    lab.build_s = 3.0
    found = choose(PLAIN, CPU, ChoiceOptions(cold=False, seconds=8.0))
    assert lab.built == ["eng1", "eng2"]
    assert list(left_out(found)) == ["any other"]


def test_the_incumbent_is_built_first_and_one_engine_in_any_case(lab):
    lab.build_s = 100.0
    assert choose(PLAIN, CPU, WARM, read_choice("eng3")).choice == "eng3"
    assert lab.built == ["eng3"]


def test_without_time_the_first_engine_that_is_sound_is_taken(lab):
    lab.excluded["eng1"] = "over the cap"
    lab.faults["eng2"] = (VERIFIED, RuntimeError("boom"))
    found = first_sound(PLAIN, CPU)
    assert (found.choice, found.chosen_ns, found.chosen.runs) == ("eng3", None, 0)
    assert found.chosen.error is not None
    assert left_out(found) == {"eng1": "over the cap", "eng2": "RuntimeError: boom"}


@pytest.mark.parametrize(("sound", "chosen"), [(True, "eng3"), (False, "eng1")])
def test_without_time_what_was_chosen_before_is_taken_if_it_is_sound(lab, sound, chosen):
    lab.factors = {} if sound else {"eng3": 2.0}
    found = first_sound(PLAIN, CPU, incumbent=read_choice("eng3"))
    assert (found.choice, found.chosen_ns) == (chosen, None)
    assert lab.built == (["eng3"] if sound else ["eng3", "eng1"])
    assert ("eng3" in left_out(found)) is not sound


def test_what_was_chosen_before_for_padded_channels_is_tried_so(lab):
    stem = parse("fprop/bias/tf32/last/i1x3x4x4/w8x3x1x1/s1x1/p0x0/d1x1/g1")
    found = first_sound(stem, CPU, incumbent=read_choice("c4:eng3"))
    # Plans of the lab use their own operands, so their results are right only without padding.
    assert next(iter(left_out(found))) == "c4:eng3"


def test_without_time_an_earlier_choice_that_may_not_be_used_is_not_taken(lab):
    lab.excluded["eng3"] = "results differ from run to run"
    assert first_sound(PLAIN, CPU, incumbent=read_choice("eng3")).choice == "eng1"
    assert "eng3" not in lab.built


def test_where_none_is_sound_there_is_none_to_take(lab):
    lab.faults = {name: (VERIFIED, RuntimeError("boom")) for name in MEDIANS_NS}
    with pytest.raises(UnsupportedError, match="every cuDNN engine failed verification"):
        first_sound(PLAIN, CPU)
    assert lab.built == list(MEDIANS_NS)


@pytest.mark.parametrize("cold", [False, True])
def test_the_cache_is_flushed_of_all_but_the_input_where_the_network_is_cold(
    lab, monkeypatch, cold
):
    properties = SimpleNamespace(L2_cache_size=2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    choose(PLAIN, CPU, ChoiceOptions(cold=cold))
    assert len(lab.flushes) > 4 * len(MEDIANS_NS)
    (flush,) = set(lab.flushes)
    if cold:
        assert isinstance(flush, Flush)
        assert torch.equal(flush._kept, operands(PLAIN, CPU).first)
    else:
        assert flush is None


@pytest.mark.parametrize(("count", "cold"), [(1, False), (2, False), (3, True)])
def test_a_network_is_cold_where_its_tensors_overflow_the_cache(monkeypatch, count, cold):
    l2 = SimpleNamespace(L2_cache_size=2 * PLAIN.traffic_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: l2)
    assert is_cold({PLAIN: count}, torch.device("cuda")) is cold


def test_few_channels_are_padded():
    found = {str(choice): problem for problem, choice in variants(parse(STEM), ChoiceOptions())}
    assert set(found) == {"", "c4:", "c8:"}
    assert found["c4:"].input == (8, 4, 64, 64)
    assert found["c4:"].weight == (64, 4, 7, 7)
    assert found["c4:"].output == parse(STEM).output


@pytest.mark.parametrize(
    "key",
    [STEM.replace("x3x", "x64x"), STEM.replace("last", "first"), STEM.replace("fp16", "fp32")],
)
def test_others_are_not_padded(key):
    assert len(list(variants(parse(key), ChoiceOptions()))) == 1


def test_weights_that_go_on_changing_are_not_padded():
    assert len(list(variants(parse(STEM), ChoiceOptions(padded=False)))) == 1


def test_the_other_half_is_tried_for_few_channels_where_that_is_allowed():
    problem = parse(STEM.replace("fp16", "bf16"))
    assert {p.number for p, _ in variants(problem, ChoiceOptions())} == {"bf16"}
    assert {p.number for p, _ in variants(problem, ChoiceOptions(other_half=True))} == {
        "bf16",
        "fp16",
    }
    wide = parse("fprop/bias/bf16/last/i8x64x56x56/w64x64x1x1/s1x1/p0x0/d1x1/g1")
    assert {p.number for p, _ in variants(wide, ChoiceOptions(other_half=True))} == {"bf16"}
