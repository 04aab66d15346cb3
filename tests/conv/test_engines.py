from __future__ import annotations

import pytest
import torch
from described import target
from msgspec import structs

from steadytorch.conv.denylist import DENYLIST, denied, engine_number
from steadytorch.conv.engines import Engine, Filters, Graph, excluded, list_engines
from steadytorch.conv.problem import parse
from steadytorch.errors import UnsupportedError

WINDOW = "s1x1/p1x1/d1x1"
HALF = parse(f"fprop/bias_relu/fp16/last/i8x64x28x28/w64x64x3x3/{WINDOW}/g1")


@pytest.mark.parametrize(
    "key",
    [
        f"fprop/none/fp16/last/i8x64x28x28/w64x64x3x3/{WINDOW}/g1",
        f"fprop/bias/bf16/first/i8x64x28x28/w64x64x3x3/{WINDOW}/g1",
        f"fprop/bias_relu/tf32/last/i8x64x28x28/w64x64x3x3/{WINDOW}/g1",
        f"fprop/add_bias/fp16/last/i8x64x28x28/w64x64x3x3/{WINDOW}/g1",
        f"fprop/add_bias_relu/fp16/last/i8x64x28x28/w64x64x3x3/{WINDOW}/g1",
        f"fprop/none/fp32/last/i8x64x28x28/w64x16x3x3/{WINDOW}/g4",
        "fprop/none/fp16/last/i8x64x28x28/w64x64x3x3/s1x1/p2x2/d2x2/g1",
        "fprop/bias/fp16/first/i8x16x100/w32x16x5/s1/p2/d1/g1",
        "fprop/bias_relu/fp16/last/i2x16x8x8x8/w32x16x3x3x3/s1x1x1/p1x1x1/d1x1x1/g1",
        *(
            f"{backward}/none/{rest}"
            for backward in ("dgrad", "wgrad")
            for rest in (
                f"fp16/last/i8x64x28x28/w64x64x3x3/{WINDOW}/g1",
                f"bf16/first/i8x64x28x28/w64x64x3x3/{WINDOW}/g1",
                f"fp32/first/i8x64x28x28/w64x64x3x3/{WINDOW}/g1",
                f"tf32/last/i8x64x28x28/w64x64x3x3/{WINDOW}/g1",
                f"fp16/last/i8x64x28x28/w64x16x3x3/{WINDOW}/g4",
                "fp16/last/i8x64x28x28/w64x64x3x3/s1x1/p2x2/d2x2/g1",
                "fp16/first/i8x16x100/w32x16x5/s1/p2/d1/g1",
                "fp16/last/i2x16x8x8x8/w32x16x3x3x3/s1x1x1/p1x1x1/d1x1x1/g1",
            )
        ),
    ],
)
def test_plans_are_listed_without_a_gpu_and_one_builds(key):
    where = target()
    problem = parse(key)
    offered = list_engines(problem, where)
    usable = [engine for engine in offered if engine.excluded is None]
    assert len(usable) >= 2
    assert len({engine.name for engine in offered}) == len(offered)
    assert all(engine.workspace_bytes is not None for engine in offered)
    assert Graph(problem, where).build(usable[0].index) == usable[0].workspace_bytes


def test_the_list_is_the_same_every_time():
    where = target()
    assert list_engines(HALF, where) == list_engines(HALF, where)


def test_float32_leaves_out_engines_that_round_to_tf32():
    where = target()
    key = f"fprop/none/fp32/last/i8x64x28x28/w64x64x3x3/{WINDOW}/g1"
    kept = [e for e in list_engines(parse(key), where) if e.excluded is None]
    assert kept
    assert not any("TENSOR_CORE" in engine.notes for engine in kept)
    rounded = [e for e in list_engines(parse(key.replace("fp32", "tf32")), where) if not e.excluded]
    assert len(rounded) > len(kept)


def test_a_workspace_over_the_cap_is_named():
    where = target()
    key = f"fprop/none/fp32/last/i64x256x14x14/w1024x256x1x1/{WINDOW.replace('p1x1', 'p0x0')}/g1"
    reasons = [e.excluded for e in list_engines(parse(key), where, Filters(2**20))]
    assert any("over the cap of 1 MiB" in reason for reason in reasons if reason)


def test_engines_that_differ_from_run_to_run_are_left_out_where_that_matters():
    where = target()
    problem = parse(f"wgrad/none/bf16/last/i64x256x14x14/w256x256x3x3/{WINDOW}/g1")
    asked = list_engines(problem, where, Filters(deterministic=True))
    refused = [e for e in asked if "NONDETERMINISTIC" in e.notes]
    assert refused
    assert all(engine.excluded for engine in refused)


@pytest.mark.parametrize("adds", [False, True])
def test_one_plan_is_made_by_itself_as_the_list_has_it(adds):
    where = target()
    problem = parse(HALF.key.replace("bias_relu", "add_bias_relu")) if adds else HALF
    offered = [e for e in list_engines(problem, where) if e.excluded is None]
    made = [Graph(problem, where, engine.name) for engine in offered]
    alone = [graph for graph in made if len(graph.names) == 1]
    assert len(alone) > 0.8 * len(offered)
    for engine, graph in zip(offered, made, strict=True):
        assert graph.build(graph.names.index(engine.name)) == engine.workspace_bytes


@pytest.mark.parametrize(
    "name", ["eng9999", "eng41_k3=1", "eng41_k99=1", "eng41_k2=9999999999_k13=-1", "aten", "eng"]
)
def test_where_a_plan_cannot_be_made_by_itself_all_are_listed(name):
    where = target()
    assert Graph(HALF, where, name).names == Graph(HALF, where).names


def test_a_plan_that_was_refused_says_so_when_built():
    where = target()
    graph = Graph(HALF, where)
    graph.refusals(None)
    with pytest.raises(UnsupportedError, match="does not build"):
        graph.build(0)


@pytest.mark.parametrize("key", [HALF.key, HALF.key.replace("fp16", "bf16")])
@pytest.mark.parametrize("activation", ["swish", "sigmoid", "relu"])
def test_of_silu_and_relu_cudnn_has_precompiled_engines_for_relu_alone(key, activation):
    where = target()

    class Activated(Graph):
        def _epilogue(self, y):
            y = super()._epilogue(y)
            activated = getattr(self._graph, activation)(input=y)
            product = activation == "sigmoid"  # SiLU in two steps
            return self._graph.mul(a=y, b=activated) if product else activated

    try:
        graph = Activated(parse(key.replace("bias_relu", "bias")), where)
    except UnsupportedError:  # a description alone has no engine that is compiled when built
        precompiled = 0
    else:
        precompiled = sum(not graph.runtime_compiled(i) for i in range(len(graph.names)))
    assert bool(precompiled) == (activation == "relu")


@pytest.mark.parametrize(
    ("notes", "filters", "words"),
    [
        (("DOWN_CONVERT_INPUTS",), Filters(), "rounds its inputs"),
        (("RUNTIME_COMPILATION",), Filters(), "run-time compilation"),
        (("NONDETERMINISTIC",), Filters(deterministic=True), "may differ from run to run"),
    ],
)
def test_notes_exclude_an_engine(notes, filters, words):
    found = excluded(Engine("eng1", 0, 0, notes), HALF, filters)
    assert found is not None
    assert words in found


@pytest.fixture
def settings():
    """Restores PyTorch's determinism settings after the test."""
    found = torch.backends.cudnn.deterministic, torch.get_deterministic_debug_mode()
    yield
    torch.backends.cudnn.deterministic = found[0]
    torch.set_deterministic_debug_mode(found[1])


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    "ask",
    [
        lambda: setattr(torch.backends.cudnn, "deterministic", True),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    ],
    ids=["cudnn", "algorithms", "warn_only"],
)
def test_whoever_asks_pytorch_for_the_same_bits_gets_no_engine_that_differs(ask):
    differs = Engine("eng1", 0, 0, ("NONDETERMINISTIC",))
    assert excluded(differs, HALF, Filters()) is None
    ask()
    assert "may differ from run to run" in (excluded(differs, HALF, Filters()) or "")
    assert excluded(Engine("eng2", 0, 0), HALF, Filters()) is None


def test_an_engine_without_objection_is_not_excluded():
    assert excluded(Engine("eng1", 0, None, ("TENSOR_CORE",)), HALF, Filters()) is None


FLAT = parse("fprop/bias/fp16/first/i8x16x100/w32x16x5/s1/p2/d1/g1")
SOLID = parse("fprop/none/fp16/last/i2x16x8x8x8/w32x16x3x3x3/s1x1x1/p1x1x1/d1x1x1/g1")
DGRAD, WGRAD = (structs.replace(HALF, operation=o, epilogue="none") for o in ("dgrad", "wgrad"))
SOLID_DGRAD = structs.replace(SOLID, operation="dgrad")


@pytest.mark.parametrize(
    ("problem", "name", "version", "capability", "refused"),
    [
        (HALF, "eng23_k2=1", 90799, "9.0", False),
        (HALF, "eng23_k2=1", 90800, "9.0", True),
        (HALF, "eng23", 91502, "8.6", True),
        (HALF, "eng23_k2=1", 91600, "9.0", False),
        (HALF, "eng230_k2=1", 90800, "9.0", False),
        (FLAT, "eng23", 91500, "9.0", True),
        (SOLID, "eng23", 80000, "9.0", True),
        (SOLID, "eng23", 99900, "8.6", True),
        (FLAT, "eng23", 99900, "9.0", False),
        (DGRAD, "eng23_k2=1", 80000, "9.0", True),
        (DGRAD, "eng23_k2=1", 99900, "8.6", True),
        (SOLID_DGRAD, "eng23", 99900, "9.0", True),
        (WGRAD, "eng23", 90800, "9.0", False),
        (HALF, "eng5_k2=1", 92300, "8.6", False),
        (HALF, "eng5_k2=1", 92301, "8.6", True),
        (SOLID, "eng5", 92402, "8.6", True),
        (HALF, "eng5_k2=1", 92500, "8.6", False),
        (HALF, "eng5_k2=1", 92301, "9.0", False),
        (DGRAD, "eng5_k2=1", 92301, "8.6", False),
        *(
            (problem, name, version, capability, refused)
            for name in ("eng58", "eng63_k2=1")
            for problem, version, capability, refused in (
                (HALF, 80000, "12.0", True),
                (SOLID, 99900, "12.0", True),
                (HALF, 92000, "9.0", False),
                (HALF, 92000, "12.1", False),
                (DGRAD, 92000, "12.0", False),
            )
        ),
    ],
)
def test_the_denylist_goes_by_problem_engine_version_and_device(
    problem, name, version, capability, refused
):
    assert (denied(problem, name, version, capability) is not None) == refused


def test_every_denied_engine_has_a_source():
    assert all(entry.source for entry in DENYLIST)


@pytest.mark.parametrize(
    ("name", "number"), [("eng41_k2=4", 41), ("eng0", 0), ("engine", None), ("x_eng1", None)]
)
def test_an_engines_number_is_read_from_the_name(name, number):
    assert engine_number(name) == number
