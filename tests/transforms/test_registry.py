from __future__ import annotations

import dataclasses

import pytest

from steadytorch.errors import UsageError
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import (
    REGISTRY,
    all_variants,
    conflict,
    create,
    idle,
    names,
    order,
    parse,
)


def spec(name: str, **parameters) -> TransformSpec:
    return TransformSpec(name, tuple(parameters.items()))


def test_names_are_distinct_and_in_order_of_application():
    assert len(set(names())) == len(REGISTRY)
    assert names().index("openvino") < names().index("fold_batch_norm")
    assert names().index("cast_weights") < names().index("compile") < names().index("cuda_graph")


def test_order_puts_the_innermost_first():
    given = [spec("cuda_graph"), spec("compile"), spec("fold_batch_norm")]
    assert [s.name for s in order(given)] == ["fold_batch_norm", "compile", "cuda_graph"]


def test_order_refuses_an_unknown_name():
    with pytest.raises(UsageError, match="'sorcery'"):
        order([spec("sorcery")])


@pytest.mark.parametrize(
    "wrong",
    [
        spec("sorcery"),
        spec("compile", mode="fastest"),
        spec("compile", freezing="yes"),
        spec("compile", options="exec"),
        spec("threads", count=0),
        spec("threads", count=True),
        spec("threads", count="2"),
        spec("cudnn_benchmark", limit=3),
        spec("inference_mode", depth=1),
        spec("fused_kernels", residual=True, separable=True),
    ],
    ids=str,
)
def test_create_takes_nothing_outside_of_the_closed_list(wrong):
    with pytest.raises(UsageError):
        create(wrong)


def test_create_fills_in_defaults():
    off = dict.fromkeys(("freezing", "unpadded", "combo_kernels"), False)
    filled = spec("compile", mode="default", **off)
    assert create(spec("compile")).spec == filled


@pytest.mark.parametrize(
    ("one", "other", "claim"),
    [
        (spec("cast_weights"), spec("autocast"), "the dtype"),
        (spec("cuda_graph"), spec("compile", mode="reduce-overhead"), "CUDA graph capture"),
        (spec("tf32"), spec("compile", mode="max-autotune"), "float32 precision"),
        (spec("fused_kernels", residual=True), spec("cudnn_engines"), "sums"),
        (spec("fused_kernels", residual=True), spec("autocast"), "biases"),
        (spec("fused_kernels", separable=True), spec("autocast"), "biases"),
    ],
)
def test_transforms_with_the_same_claim_exclude_each_other(one, other, claim):
    assert claim in str(conflict((one, other)))
    assert claim in str(conflict((other, one)))


@pytest.mark.parametrize("asked", ["stem", "separable"])
def test_what_kernels_fuse_leaves_the_rest_to_engines(asked):
    kernels = spec("fused_kernels", **{asked: True})
    stack = [spec("fold_batch_norm"), kernels, spec("cudnn_engines")]
    assert conflict(order(stack)) is None
    names_in_order = [s.name for s in order(reversed(stack))]
    assert names_in_order == ["fold_batch_norm", "fused_kernels", "cudnn_engines"]


def test_patches_are_products_before_engines_look_for_convolutions():
    stack = [spec("cudnn_engines"), spec("linear_patches"), spec("channels_last"), spec("compile")]
    assert conflict(tuple(stack)) is None
    assert [s.name for s in order(stack)] == [
        *("channels_last", "linear_patches", "cudnn_engines", "compile"),
    ]


def test_two_settings_of_one_transform_exclude_each_other():
    both = (spec("threads", count=1), spec("threads", count=2))
    assert conflict(both) == "threads is listed twice"


def test_a_full_stack_has_no_conflict():
    stack = ("fold_batch_norm", "cast_weights", "channels_last", "compile", "inference_mode")
    assert conflict(tuple(map(spec, (*stack, "cudnn_benchmark", "cuda_graph")))) is None


def test_the_empty_candidate_has_no_conflict():
    assert conflict(()) is None


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_16_bit_attention_needs_16_bit_values_from_somewhere(backend, attention_workload):
    attention = spec("attention_backend", backend=backend)
    half = dataclasses.replace(attention_workload, model=attention_workload.model.bfloat16())
    assert conflict((attention,)) is None
    assert conflict((attention,), half) is None


@pytest.mark.parametrize("provider", ["cast_weights", "autocast"])
def test_a_cast_provides_16_bit_values(provider, attention_workload):
    attention = spec("attention_backend", backend="flash")
    assert "16-bit" in str(conflict((attention,), attention_workload))
    assert conflict((spec(provider), attention), attention_workload) is None


def test_attention_backends_for_float32_need_no_cast(attention_workload):
    efficient = spec("attention_backend", backend="efficient")
    assert conflict((efficient,), attention_workload) is None


def test_variants_are_offered_for_the_device_at_hand(cpu, gpu):
    offered = {str(t.spec) for t in all_variants(gpu)} - {str(t.spec) for t in all_variants(cpu)}
    modes = ("coordinate-descent", "reduce-overhead")
    combined = {"compile(default, combo_kernels)", "compile(default, freezing, combo_kernels)"}
    assert offered == combined | {f"compile({mode}, freezing)" for mode in modes}


def test_the_registry_and_recorded_indices_leave_the_compiler_unloaded():
    import subprocess
    import sys

    code = (
        "import sys, torch\n"
        "names = ('torch._inductor', 'torch._dynamo', 'triton')\n"
        "print([m for m in names if m in sys.modules])\n"
        "import steadytorch.transforms\n"
        "from steadytorch.workload.indices import find_indices\n"
        "x, rows = torch.tensor([1]), torch.ones(3, 2)\n"
        "assert find_indices(lambda: torch.nn.functional.embedding(x + 1, rows), [x])\n"
        "print([m for m in names if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    bare, ours = done.stdout.splitlines()
    assert ours == bare


# -- transforms as text -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_variant_is_found_by_the_text_that_shows_it(kind, request):
    facts = request.getfixturevalue(kind)
    for transform in all_variants(facts):
        assert parse(str(transform.spec), facts) == (transform.spec,)


def test_a_name_alone_is_its_first_variant(cpu, gpu):
    for facts in (cpu, gpu):
        for kind in REGISTRY:
            variants = kind.variants(facts)
            if variants:
                assert parse(kind.name, facts) == (kind(variants[0]).spec,)


def test_words_may_stand_in_any_order_and_a_part_of_them_will_do(cpu, gpu):
    (found,) = parse("compile( freezing,default )", cpu)
    assert str(found) == "compile(default, freezing)"
    assert parse("compile(freezing)", cpu) == (found,)
    (recorded,) = parse("compile(reduce-overhead)", gpu)
    assert str(recorded) == "compile(reduce-overhead, freezing)"


def test_words_that_are_all_of_a_variant_mean_that_one(cpu):
    assert str(*parse("compile(max-autotune)", cpu)) == "compile(max-autotune)"


def test_several_are_put_in_the_order_of_application(cpu):
    found = parse("inference_mode+channels_last + fold_batch_norm", cpu)
    assert [s.name for s in found] == ["fold_batch_norm", "channels_last", "inference_mode"]


def test_a_transform_of_another_device_has_no_variant_here(cpu):
    with pytest.raises(UsageError, match="is not a variant of compile; available: "):
        parse("compile(reduce-overhead)", cpu)


@pytest.mark.parametrize("text", ["", " ", "+", "a b", "compile)", "compile(()", "compile(a)(b)"])
def test_text_that_names_no_transform_is_refused(cpu, text):
    with pytest.raises(UsageError, match="is not a transform: write a name"):
        parse(text, cpu)


def test_transforms_that_exclude_each_other_are_refused(cpu):
    with pytest.raises(UsageError, match=r"cannot combine .*: .* both control the dtype"):
        parse("cast_weights+autocast", cpu)


def test_a_transform_is_idle_beside_others_of_the_registry():
    for kind in REGISTRY:
        assert set(kind.idle_beside) <= set(names()) - {kind.name}
        for other in kind.idle_beside:
            assert idle((spec(kind.name), spec(other))) == kind.name
            assert idle((spec(kind.name),)) is None
