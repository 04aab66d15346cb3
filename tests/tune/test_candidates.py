import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadytorch import transforms
from steadytorch.findings.finding import Finding
from steadytorch.results.candidate import TransformSpec, describe
from steadytorch.transforms.precision import ALLOWED, precision_of
from steadytorch.tune.candidates import (
    CandidateSource,
    suggested_by,
    unpadded,
)
from steadytorch.workload.workload import Workload

from .candidate_checks import (
    ALL,
    BF16,
    FP16,
    GRAPH,
    LAYOUT,
    ON_CPU,
    REGIMES,
    WORKLOAD,
    assert_sound,
    precisions,
    single,
    subsets,
)


@given(available=subsets, precision=precisions, regime=st.sampled_from(REGIMES))
def test_seeds_are_sound_and_within_the_allowed_precision(available, precision, regime):
    source = CandidateSource(available, WORKLOAD, precision, regime)
    seeds = [*source.seeds(), *source.late()]
    assert_sound(seeds, available)
    assert all(precision_of(candidate) in ALLOWED[precision] for candidate in seeds)


@given(available=subsets, precision=precisions, data=st.data())
def test_neighbours_are_sound_allowed_and_one_step_away(available, precision, data):
    source = CandidateSource(available, WORKLOAD, precision, "memory-bound")
    start = data.draw(st.sampled_from([(), *source.seeds()]))
    neighbours = source.neighbours(start)
    assert_sound(neighbours, available)
    for candidate in neighbours:
        assert candidate != start
        assert precision_of(candidate) in ALLOWED[precision]
        assert len({s.name for s in set(candidate) ^ set(start)}) == 1


@given(available=subsets, precision=precisions, data=st.data())
def test_beyond_holds_only_what_is_not_allowed(available, precision, data):
    source = CandidateSource(available, WORKLOAD, precision, "memory-bound")
    leader = data.draw(st.sampled_from([(), *source.seeds()]))
    beyond = source.beyond(leader)
    assert_sound(beyond, available)
    assert not any(precision_of(candidate) in ALLOWED[precision] for candidate in beyond)


def test_every_option_alone_is_a_neighbour_of_the_untouched_workload():
    same = [s for s in ALL if precision_of((s,)) == "same" and s.name != "attention_backend"]
    allowed = [s for s in same if not transforms.create(s).takes_half_only]
    neighbours = CandidateSource(ALL, WORKLOAD, "same", "memory-bound").neighbours(())
    assert {(spec,) for spec in allowed} <= set(neighbours)


def test_a_transform_is_left_out_in_one_neighbour_each():
    candidate = transforms.order([BF16, LAYOUT, GRAPH])
    neighbours = CandidateSource(
        [BF16, LAYOUT, GRAPH], WORKLOAD, "bf16", "memory-bound"
    ).neighbours(candidate)
    assert set(neighbours) == {(BF16, LAYOUT), (BF16, GRAPH), (LAYOUT, GRAPH)}


def test_another_setting_takes_the_place_of_the_old_one():
    assert (BF16,) not in CandidateSource(
        [BF16, FP16], WORKLOAD, "fp16", "memory-bound"
    ).neighbours((FP16,))
    modes = [s for s in ALL if s.name == "compile"]
    found = CandidateSource(modes, WORKLOAD, "same", "memory-bound").neighbours((modes[0],))
    assert found == [(mode,) for mode in modes[1:]]


def test_the_regime_decides_what_comes_first():
    without = [spec for spec in ALL if spec.name not in ("fused_kernels", "linear_patches")]

    def first(regime):
        return [s.name for s in CandidateSource(without, WORKLOAD, "same", regime).seeds()[0]]

    assert "compile" not in first("launch-bound")
    assert "cuda_graph" in first("launch-bound")
    assert "compile" in first("memory-bound")


def test_seeds_use_the_precision_that_is_asked_for():
    seeds = CandidateSource(ALL, WORKLOAD, "bf16", "compute-bound").seeds()
    assert BF16 in seeds[0]
    assert not any(FP16 in candidate for candidate in seeds)


def test_int8_is_tried_on_each_engine_and_beside_bf16():
    available = [*ON_CPU, BF16]
    seeds = CandidateSource(available, WORKLOAD, "int8", "compute-bound").seeds()
    tried = [(each[0].name, precision_of(each)) for each in seeds if transforms.engines(each)]
    assert tried == [
        ("openvino", "int8"),
        ("onnxruntime", "int8"),
        ("openvino", "bf16"),
        ("onnxruntime", "same"),
    ]
    assert CandidateSource(available, WORKLOAD, "int8", "compute-bound").lowered() == (BF16,)


@pytest.mark.parametrize("precision", ["same", "bf16"])
def test_int8_is_not_timed_where_it_is_not_allowed(precision):
    source = CandidateSource(ON_CPU, WORKLOAD, precision, "compute-bound")
    found = [*source.seeds(), *source.beyond(()), *source.neighbours(())]
    assert found
    assert all(precision_of(candidate) != "int8" for candidate in found)


def _fused(config="", **asked):
    plain = {"stem": False, "residual": False, "config": config, "separable": False}
    asked = {**plain, **asked}
    return TransformSpec("fused_kernels", tuple(asked.items()))


ENGINES = single("cudnn_engines", choices="")
FOLD = single("fold_batch_norm")
WITH_STEM = [_fused(), _fused(stem=True), _fused(stem=True, residual=True), _fused(residual=True)]


@pytest.mark.parametrize("regime", REGIMES)
def test_a_stem_is_fused_before_engines_take_the_rest(regime):
    available = [FOLD, *WITH_STEM, FP16, LAYOUT, ENGINES, GRAPH]
    seeds = CandidateSource(available, WORKLOAD, "fp16", regime).seeds()
    stem = (FOLD, _fused(stem=True), FP16, LAYOUT, ENGINES, GRAPH)
    assert stem in seeds[:3]
    assert (FOLD, FP16, LAYOUT, ENGINES, GRAPH) in seeds[:3]


FROZEN = single("compile", mode="default", freezing=True)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("stem", [(), (_fused(stem=True),)], ids=["engines", "a stem too"])
def test_engines_are_tried_without_a_graph_where_graphs_do_not_apply(regime, stem):
    around = [FOLD, *stem, FP16, LAYOUT, ENGINES, FROZEN]
    tried = {transforms.order(around), transforms.order(around[:-1])}
    without = CandidateSource(around, WORKLOAD, "fp16", regime).seeds()
    assert tried <= set(without[: 4 if stem else 2])
    with_graph = CandidateSource([*around, GRAPH], WORKLOAD, "fp16", regime).seeds()
    assert {transforms.order([*seed, GRAPH]) for seed in tried} <= set(with_graph)


EAGER, REDUCE = single("inference_mode"), single("compile", mode="reduce-overhead", freezing=True)
PLAIN = single("compile", mode="default", freezing=False)
TIMED = [regime for regime in REGIMES if regime != "memory-bound"]
"""Regimes with recorded searches on GPUs."""


@pytest.mark.parametrize("regime", REGIMES)
def test_where_graphs_apply_engines_are_tried_without_one_later(regime):
    available = [FOLD, FP16, LAYOUT, ENGINES, FROZEN, EAGER, GRAPH]
    source = CandidateSource(available, WORKLOAD, "fp16", regime)
    alone = (FOLD, FP16, LAYOUT, ENGINES, EAGER)
    both = [*source.seeds(), *source.late()]
    assert alone in both
    with_graph = [both.index(seed) for seed in both if {ENGINES, GRAPH} <= set(seed)]
    assert len(with_graph) == 2
    assert max(with_graph) < both.index(alone)


@pytest.mark.parametrize("regime", TIMED)
def test_what_never_came_near_the_best_is_late(regime):
    autocast = single("autocast", dtype="bf16")
    available = [BF16, LAYOUT, ENGINES, FROZEN, PLAIN, REDUCE, autocast, EAGER, GRAPH]
    source = CandidateSource(available, WORKLOAD, "bf16", regime)
    strong, weak = set(source.seeds()), set(source.late())
    assert not strong & weak
    assert {(BF16, LAYOUT, c, GRAPH) for c in (FROZEN, PLAIN)} <= strong
    assert {(BF16, LAYOUT, ENGINES, GRAPH), (BF16, LAYOUT, ENGINES, FROZEN, GRAPH)} <= strong
    assert {(BF16, FROZEN, GRAPH), (BF16, GRAPH), (BF16, LAYOUT, GRAPH)} <= strong
    assert weak == {
        *((BF16, LAYOUT, FROZEN), (BF16, LAYOUT, REDUCE), (FROZEN, GRAPH), (GRAPH,)),
        *((LAYOUT, autocast, GRAPH), (BF16, LAYOUT, EAGER), (LAYOUT, EAGER), (EAGER,)),
        (BF16, LAYOUT, ENGINES, EAGER),
    }


@pytest.mark.parametrize("regime", TIMED)
def test_at_the_models_own_precision_what_has_a_graph_is_not_late(regime):
    source = CandidateSource([BF16, LAYOUT, FROZEN, EAGER, GRAPH], WORKLOAD, "same", regime)
    assert {(LAYOUT, FROZEN, GRAPH), (FROZEN, GRAPH), (GRAPH,)} <= set(source.seeds())
    assert set(source.late()) == {(LAYOUT, FROZEN), (LAYOUT,), (LAYOUT, EAGER), (EAGER,)}


PREFETCH = TransformSpec("prefetch")


def test_frozen_code_is_tried_with_combined_kernels_too():
    combined = single("compile", mode="default", freezing=True, combo_kernels=True)
    seeds = CandidateSource(
        [BF16, FROZEN, PLAIN, combined, GRAPH], WORKLOAD, "bf16", "memory-bound"
    ).seeds()
    compiled = [c for c in seeds if any(spec.name == "compile" for spec in c)]
    assert compiled[:2] == [(BF16, FROZEN, GRAPH), (BF16, combined, GRAPH)]


@pytest.mark.parametrize(
    ("regime", "available"),
    [
        *((regime, [spec for spec in ALL if spec not in (GRAPH, PREFETCH)]) for regime in REGIMES),
        ("memory-bound", [spec for spec in ALL if spec != PREFETCH]),
        ("launch-bound", [*ALL, PREFETCH]),
    ],
    ids=[*(f"{regime} without a graph" for regime in REGIMES), "memory-bound", "a loader"],
)
def test_where_there_are_no_such_records_nothing_is_late(regime, available):
    source = CandidateSource(available, WORKLOAD, "bf16", regime)
    assert source.late() == []
    assert (EAGER,) in {tuple(s for s in seed if s != PREFETCH) for seed in source.seeds()}


def _attention(backend):
    return single("attention_backend", backend=backend)


def test_attention_layout_and_compiler_are_varied_first():
    attention = [_attention(backend) for backend in ("flash", "cudnn")]
    others = [FOLD, single("cudnn_deterministic"), single("dense_mask")]
    available = [*others, BF16, LAYOUT, FROZEN, PLAIN, *attention, GRAPH]
    leader = (BF16, FROZEN, GRAPH)
    found = CandidateSource(available, WORKLOAD, "bf16", "compute-bound").neighbours(leader)
    assert found[:5] == [
        *((BF16, FROZEN, backend, GRAPH) for backend in attention),
        (BF16, LAYOUT, FROZEN, GRAPH),
        *((BF16, PLAIN, GRAPH), (BF16, GRAPH)),
    ]
    assert all(any(spec in candidate for spec in others) for candidate in found[5:8])


def test_the_configuration_that_was_chosen_for_a_stem_is_what_is_tried():
    chosen = _fused("64x32x7-w4s1", stem=True)
    seeds = CandidateSource(
        [FOLD, chosen, LAYOUT, ENGINES, GRAPH], WORKLOAD, "same", "memory-bound"
    ).seeds()
    assert (FOLD, chosen, LAYOUT, ENGINES, GRAPH) in seeds


@pytest.mark.parametrize(
    ("variants", "expected"),
    [
        (WITH_STEM, _fused(stem=True, residual=True)),
        ([_fused(), _fused(stem=True)], _fused(stem=True)),
        ([_fused(residual=True)], _fused(residual=True)),
    ],
    ids=["both", "a stem", "sums"],
)
def test_without_engines_kernels_take_what_they_can(variants, expected):
    available = [FOLD, *variants, FP16, LAYOUT, GRAPH]
    seeds = CandidateSource(available, WORKLOAD, "fp16", "memory-bound").seeds()
    assert seeds[0] == (FOLD, expected, FP16, LAYOUT, GRAPH)


SEPARABLE = _fused(separable=True)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("stem", [[], WITH_STEM], ids=["nothing else", "a stem too"])
def test_separable_convolutions_are_tried_first(regime, stem):
    available = [FOLD, *stem, SEPARABLE, FP16, LAYOUT, FROZEN, GRAPH]
    first, *others = CandidateSource(available, WORKLOAD, "fp16", regime).seeds()
    assert first == (SEPARABLE, FP16, LAYOUT, FROZEN, GRAPH)
    without = [spec for spec in available if spec != SEPARABLE]
    assert others == CandidateSource(without, WORKLOAD, "fp16", regime).seeds()


@pytest.mark.parametrize("regime", REGIMES)
def test_engines_take_what_separable_convolutions_leave(regime):
    around = [FP16, LAYOUT, FROZEN, GRAPH, SEPARABLE, ENGINES]
    seeds = CandidateSource([FOLD, *around], WORKLOAD, "fp16", regime).seeds()
    assert transforms.order(around) in seeds[:5]


def test_separable_convolutions_are_no_seed_without_a_compiler_and_in_nothing_elses_place():
    source = CandidateSource(
        [SEPARABLE, FP16, LAYOUT, ENGINES, GRAPH], WORKLOAD, "fp16", "memory-bound"
    )
    assert not any(SEPARABLE in seed for seed in [*source.seeds(), *source.late()])
    assert (SEPARABLE, FP16, ENGINES) in source.neighbours((FP16, ENGINES))


def test_separable_convolutions_are_for_16_bits():
    source = CandidateSource([SEPARABLE, FP16, FROZEN, GRAPH], WORKLOAD, "same", "memory-bound")
    assert not any(SEPARABLE in seed for seed in [*source.seeds(), *source.late()])
    assert not any(SEPARABLE in candidate for candidate in source.neighbours((FROZEN,)))


def test_engines_and_fused_sums_are_never_tried_together():
    source = CandidateSource([*WITH_STEM, ENGINES, GRAPH], WORKLOAD, "same", "memory-bound")
    for start in ((ENGINES,), (_fused(residual=True),), (_fused(stem=True), ENGINES)):
        for candidate in source.neighbours(start):
            assert ENGINES not in candidate or not any(
                dict(spec.parameters).get("residual") for spec in candidate
            )
    assert (_fused(stem=True), ENGINES) in source.neighbours((ENGINES,))


def test_engines_are_tried_alone_where_nothing_that_goes_with_them_applies():
    engines, autocast = single("cudnn_engines", choices=""), single("autocast", dtype="bf16")
    model = WORKLOAD.model
    training = Workload.training(model, WORKLOAD.inputs, torch.sum, torch.optim.SGD)
    seeds = CandidateSource([engines, autocast], training, "same", "compute-bound").seeds()
    assert seeds == [(engines,)]


def test_beyond_drops_the_leaders_own_lower_precision():
    tf32 = single("tf32")
    source = CandidateSource([tf32, BF16, LAYOUT], WORKLOAD, "tf32", "memory-bound")
    assert source.beyond((LAYOUT, tf32)) == [(BF16, LAYOUT)]


@pytest.mark.parametrize(
    ("precision", "expected"), [("same", [(BF16,)]), ("bf16", []), ("fp16", []), ("int8", [])]
)
def test_beyond_holds_one_16_bit_type_unless_one_is_allowed(precision, expected):
    source = CandidateSource([BF16, FP16, LAYOUT], WORKLOAD, precision, "memory-bound")
    assert source.beyond(()) == expected


def test_beyond_compares_engines_in_16_bits_too():
    engines = [spec for spec in ON_CPU if precision_of((spec,)) == "bf16"]
    source = CandidateSource([BF16, *engines], WORKLOAD, "same", "memory-bound")
    named = [transforms.engines(candidate) for candidate in source.beyond(())]
    assert sorted(named) == sorted({(), *(transforms.engines((spec,)) for spec in engines)})


def test_only_the_compiled_part_of_a_candidate_becomes_unpadded():
    found = unpadded((LAYOUT, FROZEN, GRAPH))
    assert (found[0], found[2]) == (LAYOUT, GRAPH)
    assert dict(found[1].parameters) == {**dict(FROZEN.parameters), "unpadded": True}
    assert transforms.create(found[1]).spec == found[1]
    assert unpadded((LAYOUT, GRAPH)) == (LAYOUT, GRAPH)


def test_nothing_applies_and_nothing_is_proposed():
    source = CandidateSource([], WORKLOAD, "bf16", "launch-bound")
    assert (source.seeds(), source.late(), source.neighbours(()), source.beyond(())) == (
        [],
        [],
        [],
        [],
    )


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
    found = CandidateSource(ALL, WORKLOAD, "same", regime, [LAUNCHES, LAYOUTS]).seeds()
    mended = [bool({"channels_last"} & {s.name for s in candidate}) for candidate in found]
    assert mended == sorted(mended, reverse=True)
    assert 0 < sum(mended) < len(mended)


def test_without_findings_the_regime_alone_orders():
    plain = CandidateSource(ALL, WORKLOAD, "same", "launch-bound").seeds()
    assert (
        CandidateSource(ALL, WORKLOAD, "same", "launch-bound", [_finding("x", 9)]).seeds() == plain
    )


def test_where_a_loader_feeds_the_steps_every_seed_takes_batches_ahead():
    ahead, available = TransformSpec("prefetch"), [GRAPH, LAYOUT, TransformSpec("prefetch")]
    seeds = CandidateSource(available, WORKLOAD, "same", "memory-bound").seeds()
    assert (ahead,) in seeds
    assert all(ahead in candidate for candidate in seeds)
    assert {tuple(s for s in candidate if s != ahead) for candidate in seeds} - {()} == set(
        CandidateSource(available[:2], WORKLOAD, "same", "memory-bound").seeds()
    )


@pytest.mark.parametrize("regime", REGIMES)
def test_masks_are_written_out_where_code_is_compiled_and_recorded(regime):
    mask = single("dense_mask")
    available = [BF16, LAYOUT, mask, FROZEN, GRAPH]
    seeds = CandidateSource(available, WORKLOAD, "bf16", regime).seeds()
    assert transforms.order(available) in seeds[:3]
    assert all(mask in seed for seed in seeds if {FROZEN, GRAPH} & set(seed))
    uncompiled = next(seed for seed in seeds if FROZEN not in seed)
    assert uncompiled == transforms.order([BF16, LAYOUT, mask, GRAPH])


PATCHES = single("linear_patches")


@pytest.mark.parametrize("regime", REGIMES)
def test_patches_are_tried_as_products_before_they_are_as_convolutions(regime):
    available = [BF16, LAYOUT, PATCHES, FROZEN, GRAPH]
    seeds = CandidateSource(available, WORKLOAD, "bf16", regime).seeds()
    recorded, compiled = (BF16, LAYOUT, GRAPH), (BF16, LAYOUT, FROZEN, GRAPH)
    with_patches = [transforms.order([*seed, PATCHES]) for seed in (recorded, compiled)]
    assert seeds[0] == with_patches[1]
    for plain, with_them in zip((recorded, compiled), with_patches, strict=True):
        assert seeds.index(with_them) < seeds.index(plain)
    without = [spec for spec in available if spec != PATCHES]
    others = CandidateSource(without, WORKLOAD, "bf16", regime).seeds()
    assert [seed for seed in seeds if seed not in with_patches] == others


@pytest.mark.parametrize("regime", REGIMES)
def test_patches_go_along_with_masks(regime):
    mask = single("dense_mask")
    both = [BF16, LAYOUT, PATCHES, mask, FROZEN, GRAPH]
    seeds = CandidateSource(both, WORKLOAD, "bf16", regime).seeds()
    assert seeds[0] == transforms.order(both)
    assert transforms.order([spec for spec in both if spec != PATCHES]) in seeds[:4]


@pytest.mark.parametrize("regime", REGIMES)
def test_patches_go_along_with_separable_convolutions(regime):
    all_of_it = [SEPARABLE, FP16, LAYOUT, PATCHES, ENGINES, FROZEN, GRAPH]
    seeds = CandidateSource(all_of_it, WORKLOAD, "fp16", regime).seeds()
    without = [spec for spec in all_of_it if spec != ENGINES]
    assert seeds[0] == transforms.order(without)
    assert transforms.order(all_of_it) in seeds
    assert seeds[1] == transforms.order([spec for spec in without if spec != SEPARABLE])


def test_patches_are_products_without_a_graph_or_a_compiler_too():
    for way in ([GRAPH], [FROZEN]):
        seeds = CandidateSource([PATCHES, *way], WORKLOAD, "same", "memory-bound").seeds()
        assert seeds[:2] == [(PATCHES, *way), tuple(way)]
