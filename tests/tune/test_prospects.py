from __future__ import annotations

import math

import pytest
from simulated import ATTENTION, BENCHMARK, BF16, COMPILED, EAGER, FOLD, GRAPH, LAYOUT

from steadytorch.transforms.compile import Compile
from steadytorch.transforms.onnxruntime import OnnxRuntime
from steadytorch.transforms.openvino import OpenVino
from steadytorch.tune.prospects import ENOUGH, Prospects

FROZEN, PLAIN, TREES = COMPILED


def timed(effects, *candidates):
    """Prospects after candidates were timed; a transform's effect is a factor of the time."""
    prospects = Prospects()
    for candidate in [(), *candidates]:
        prospects.note(candidate, 1e7 * math.prod(effects.get(spec, 1.0) for spec in candidate))
    return prospects


def test_before_anything_else_was_timed_a_compiler_promises_more_than_a_setting():
    prospects = timed({})
    compiled, setting = prospects.expected_gains([(FROZEN,), (FOLD,)])
    assert compiled > 2 * setting > 0


def test_nothing_left_promises_nothing():
    assert timed({}).expected_gain([]) == 0.0
    assert list(timed({}).expected_gains([])) == []


def openvino(precision):
    return OpenVino(OpenVino.Parameters(precision)).spec


@pytest.mark.parametrize("gained", [0.36, 0.07])
def test_an_engine_that_gained_leaves_the_other_one_promising(gained):
    runtime = OnnxRuntime().spec
    prospects = timed({runtime: gained}, (runtime,))
    assert prospects.expected_gain([(openvino("f32"),)]) > ENOUGH


def test_a_lower_precision_of_an_engine_is_more_than_a_setting():
    int8, pinned = openvino("int8"), OpenVino(OpenVino.Parameters("int8", "", True)).spec
    prospects = timed({int8: 0.15}, (int8,))
    assert prospects.expected_gain([(openvino("bf16"),)]) > ENOUGH
    assert prospects.expected_gain([(pinned,)]) > ENOUGH
    known = timed({openvino("bf16"): 0.3}, (openvino("bf16"),))
    assert known.expected_gain([(int8,)]) > 5 * ENOUGH


def test_more_candidates_promise_more():
    prospects = timed({})
    few, more = [(FOLD,)], [(FOLD,), (EAGER,), (BENCHMARK,)]
    assert prospects.expected_gain(more) > prospects.expected_gain(few)
    assert prospects.expected_gain(few) == pytest.approx(prospects.expected_gains(few)[0], rel=0.1)


def test_a_setting_that_gained_nothing_alone_promises_less_elsewhere():
    unseen = timed({FROZEN: 0.5}, (FROZEN,)).expected_gain([(FOLD, FROZEN)])
    seen = timed({FROZEN: 0.5}, (FROZEN,), (FOLD,)).expected_gain([(FOLD, FROZEN)])
    assert ENOUGH < seen < unseen


def test_what_gained_alone_is_expected_beside_the_leader():
    helps = timed({FROZEN: 0.5, LAYOUT: 0.8}, (FROZEN,), (LAYOUT,))
    harms = timed({FROZEN: 0.5, LAYOUT: 1.2}, (FROZEN,), (LAYOUT,))
    expected = helps.expected_gain([(LAYOUT, FROZEN)])
    assert expected > 5 * ENOUGH
    assert harms.expected_gain([(LAYOUT, FROZEN)]) < 0.6 * expected


def test_what_lacks_the_leaders_transforms_promises_nothing():
    effects = {FROZEN: 0.5, BF16: 0.6, GRAPH: 0.7}
    prospects = timed(effects, (BF16,), (BF16, GRAPH), (BF16, FROZEN, GRAPH), (GRAPH,))
    assert prospects.expected_gain([(FOLD, GRAPH), (LAYOUT, BF16)]) < ENOUGH


def test_another_mode_of_the_compiler_promises_less_than_the_first():
    before = timed({}).expected_gain([(FROZEN,)])
    after = timed({FROZEN: 0.5}, (FROZEN,)).expected_gain([(PLAIN,), (TREES,)])
    assert 0 < after < 0.6 * before


def test_tuning_the_kernels_of_the_leader_promises_little():
    prospects = timed({FROZEN: 0.5}, (FROZEN,))
    modes = [Compile.Parameters(mode, True) for mode in ("coordinate-descent", "max-autotune")]
    descent, autotune = (Compile(mode).spec for mode in modes)
    assert 0 < prospects.expected_gain([(descent,), (autotune,)]) < 2 * ENOUGH
    assert prospects.expected_gain([(PLAIN,)]) > 3 * ENOUGH
    assert prospects.expected_gain([(LAYOUT, descent)]) > 5 * ENOUGH


def test_predictions_that_came_true_shrink_what_is_expected():
    effects = {FROZEN: 0.5, GRAPH: 0.8, LAYOUT: 0.95}
    alone, pair, left = [(spec,) for spec in effects], (LAYOUT, GRAPH), [(BENCHMARK, FROZEN)]
    expected, surprising = timed(effects, *alone, pair), timed(effects, *alone)
    surprising.note(pair, 1e8)
    assert 0 < expected.expected_gain(left) < 0.8 * surprising.expected_gain(left)


def test_candidates_that_were_not_faster_shrink_what_is_expected():
    effects, left = {FROZEN: 0.5}, [(LAYOUT, GRAPH, FROZEN)]
    few = timed(effects, (FROZEN,), (EAGER, FROZEN))
    more = timed(effects, (FROZEN,), (EAGER, FROZEN), (BENCHMARK, FROZEN), (FOLD, FROZEN))
    assert 0 < more.expected_gain(left) < 0.9 * few.expected_gain(left)


def test_the_same_candidates_have_the_same_gain():
    def gain():
        return timed({FROZEN: 0.5}, (FROZEN,)).expected_gain([(each, FROZEN) for each in ATTENTION])

    assert gain() == gain()


def test_one_disappointment_alone_does_not_end_a_search():
    # Before anything else was timed, a lower precision alone is the largest one.
    prospects = timed({}, (BF16,))
    assert prospects.expected_gain([(BF16, FROZEN)]) > 2 * ENOUGH
