import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from steadytorch import transforms
from steadytorch.device.facts import DeviceFacts
from steadytorch.explain.finding import Finding
from steadytorch.transforms.base import TransformSpec
from steadytorch.transforms.precision import ALLOWED, PRECISIONS, precision_of
from steadytorch.tune.moves import Moves, describe, suggested_by
from steadytorch.workload.workload import Workload

GPU = DeviceFacts(device="cuda", compute_capability="9.0", cudnn="9.19.0", triton="3.6.0")
CPU = DeviceFacts(device="cpu", cores_physical=8, cores_logical=16)
ALL = list(dict.fromkeys(t.spec for facts in (GPU, CPU) for t in transforms.all_variants(facts)))
WORKLOAD = Workload(nn.Linear(2, 2), torch.zeros(1, 2))
REGIMES = ("launch-bound", "memory-bound", "compute-bound")

subsets = st.lists(st.sampled_from(ALL), unique=True)
precisions = st.sampled_from(PRECISIONS)


def _single(name, **parameters):
    (found,) = [s for s in ALL if s.name == name and dict(s.parameters) == parameters]
    return found


GRAPH, LAYOUT = _single("cuda_graph"), _single("channels_last")
BF16, FP16 = (_single("cast_weights", dtype=dtype) for dtype in ("bf16", "fp16"))


def _assert_sound(candidates, available):
    assert len(set(candidates)) == len(candidates)
    for candidate in candidates:
        assert candidate
        assert set(candidate) <= set(available)
        assert candidate == transforms.order(candidate)
        assert transforms.conflict(candidate, WORKLOAD) is None


@settings(deadline=None)
@given(available=subsets, precision=precisions, regime=st.sampled_from(REGIMES))
def test_seeds_are_sound_and_within_the_allowed_precision(available, precision, regime):
    seeds = Moves(available, WORKLOAD, precision, regime).seeds()
    _assert_sound(seeds, available)
    assert all(precision_of(candidate) in ALLOWED[precision] for candidate in seeds)


@settings(deadline=None)
@given(available=subsets, precision=precisions, data=st.data())
def test_neighbours_are_sound_allowed_and_one_step_away(available, precision, data):
    moves = Moves(available, WORKLOAD, precision, "memory-bound")
    start = data.draw(st.sampled_from([(), *moves.seeds()]))
    neighbours = moves.neighbours(start)
    _assert_sound(neighbours, available)
    for candidate in neighbours:
        assert candidate != start
        assert precision_of(candidate) in ALLOWED[precision]
        assert len({s.name for s in set(candidate) ^ set(start)}) == 1


@settings(deadline=None)
@given(available=subsets, precision=precisions, data=st.data())
def test_beyond_holds_only_what_is_not_allowed(available, precision, data):
    moves = Moves(available, WORKLOAD, precision, "memory-bound")
    leader = data.draw(st.sampled_from([(), *moves.seeds()]))
    beyond = moves.beyond(leader)
    _assert_sound(beyond, available)
    assert not any(precision_of(candidate) in ALLOWED[precision] for candidate in beyond)


def test_every_option_alone_is_a_neighbour_of_the_untouched_workload():
    allowed = [s for s in ALL if precision_of((s,)) == "same" and s.name != "attention_backend"]
    neighbours = Moves(ALL, WORKLOAD, "same", "memory-bound").neighbours(())
    assert {(spec,) for spec in allowed} <= set(neighbours)


def test_a_transform_is_left_out_in_one_neighbour_each():
    candidate = transforms.order([BF16, LAYOUT, GRAPH])
    neighbours = Moves([BF16, LAYOUT, GRAPH], WORKLOAD, "bf16", "memory-bound").neighbours(
        candidate
    )
    assert set(neighbours) == {(BF16, LAYOUT), (BF16, GRAPH), (LAYOUT, GRAPH)}


def test_another_setting_takes_the_place_of_the_old_one():
    assert (BF16,) not in Moves([BF16, FP16], WORKLOAD, "fp16", "memory-bound").neighbours((FP16,))
    modes = [s for s in ALL if s.name == "compile"]
    found = Moves(modes, WORKLOAD, "same", "memory-bound").neighbours((modes[0],))
    assert found == [(mode,) for mode in modes[1:]]


def test_the_regime_decides_what_comes_first():
    def first(regime):
        return [s.name for s in Moves(ALL, WORKLOAD, "same", regime).seeds()[0]]

    assert "compile" not in first("launch-bound")
    assert "cuda_graph" in first("launch-bound")
    assert "compile" in first("memory-bound")


def test_seeds_use_the_precision_that_is_asked_for():
    seeds = Moves(ALL, WORKLOAD, "bf16", "compute-bound").seeds()
    assert BF16 in seeds[0]
    assert not any(FP16 in candidate for candidate in seeds)


def test_engines_are_tried_alone_where_nothing_that_goes_with_them_applies():
    engines, autocast = _single("cudnn_engines", choices=""), _single("autocast", dtype="bf16")
    model = WORKLOAD.model
    training = Workload.training(model, WORKLOAD.inputs, torch.sum, torch.optim.SGD)
    seeds = Moves([engines, autocast], training, "same", "compute-bound").seeds()
    assert seeds == [(engines,)]


def test_beyond_drops_the_leaders_own_lower_precision():
    tf32 = _single("tf32")
    moves = Moves([tf32, BF16, LAYOUT], WORKLOAD, "tf32", "memory-bound")
    assert moves.beyond((LAYOUT, tf32)) == [(BF16, LAYOUT)]


def test_nothing_applies_and_nothing_is_proposed():
    moves = Moves([], WORKLOAD, "bf16", "launch-bound")
    assert (moves.seeds(), moves.neighbours(()), moves.beyond(())) == ([], [], [])


def test_a_candidate_in_one_line():
    compiled = TransformSpec("compile", (("mode", "default"), ("freezing", True)))
    assert describe((compiled, GRAPH)) == "compile(default, freezing) + cuda_graph"
    assert describe(()) == "untouched"


def _finding(name, recoverable_ns, *names):
    return Finding(
        id=name,
        source="compiler",
        title="",
        evidence=(),
        recoverable_ns=(0, recoverable_ns),
        fix="",
        transforms=names,
        check="",
        false_alarm="",
    )


LAUNCHES = _finding("launch-bound", 900, "cuda_graph", "compile")
LAYOUTS = _finding("layout-conversion", 5000, "channels_last")


def test_a_candidate_names_the_findings_that_speak_for_it():
    assert suggested_by((LAYOUT, GRAPH), [LAUNCHES, LAYOUTS]) == (
        *("launch-bound", "layout-conversion"),
    )
    assert suggested_by((BF16,), [LAUNCHES, LAYOUTS]) == ()
    assert suggested_by((), [LAUNCHES, LAYOUTS]) == ()


@pytest.mark.parametrize("regime", REGIMES)
def test_what_would_recover_more_is_tried_first(regime):
    found = Moves(ALL, WORKLOAD, "same", regime, [LAUNCHES, LAYOUTS]).seeds()
    mended = [bool({"channels_last"} & {s.name for s in candidate}) for candidate in found]
    assert mended == sorted(mended, reverse=True)
    assert 0 < sum(mended) < len(mended)


def test_without_findings_the_regime_alone_orders():
    plain = Moves(ALL, WORKLOAD, "same", "launch-bound").seeds()
    assert Moves(ALL, WORKLOAD, "same", "launch-bound", [_finding("x", 9)]).seeds() == plain
