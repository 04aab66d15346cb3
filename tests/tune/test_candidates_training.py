import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadytorch import transforms
from steadytorch.transforms.precision import ALLOWED, precision_of
from steadytorch.tune.candidates import CandidateSource, engine_prefix
from steadytorch.workload.workload import Workload

from .candidate_checks import (
    ALL,
    BF16,
    LAYOUT,
    REGIMES,
    WORKLOAD,
    assert_sound,
    precisions,
    single,
    subsets,
)

TRAINING = Workload.training(WORKLOAD.model, WORKLOAD.inputs, torch.sum, torch.optim.SGD)
TRAINABLE = ("channels_last", "autocast", "tf32", "cudnn_engines", "threads")
COMPILED = single("compile", mode="default", freezing=False)
AUTOCAST = single("autocast", dtype="bf16")
OF_TRAINING = [*(s for s in ALL if s.name in TRAINABLE), COMPILED]


@given(available=subsets, precision=precisions, regime=st.sampled_from(REGIMES))
def test_seeds_of_training_are_sound_and_within_the_allowed_precision(available, precision, regime):
    seeds = CandidateSource(available, TRAINING, precision, regime).seeds()
    assert_sound(seeds, available)
    assert all(precision_of(candidate) in ALLOWED[precision] for candidate in seeds)


@pytest.mark.parametrize("regime", REGIMES)
def test_training_begins_with_layout_compiler_and_mixed_precision_together(regime):
    available = [s for s in OF_TRAINING if s.name != "cudnn_engines"]
    seeds = CandidateSource(available, TRAINING, "bf16", regime).seeds()
    assert seeds[0] == transforms.order([LAYOUT, COMPILED, AUTOCAST])
    singles = [c for c in seeds if len(c) == 1]
    assert singles == [(AUTOCAST,), (COMPILED,), (LAYOUT,)]


def test_steps_are_compiled_with_combined_kernels_and_without():
    combined = single("compile", mode="default", freezing=False, combo_kernels=True)
    graph = single("step_graph", scope="step")
    available = [*OF_TRAINING, combined, graph]
    seeds = CandidateSource(available, TRAINING, "bf16", "launch-bound").seeds()
    assert seeds[:2] == [
        transforms.order([LAYOUT, each, AUTOCAST, graph]) for each in (combined, COMPILED)
    ]


def test_the_loss_is_compiled_with_the_model():
    loss = single("compile_loss")
    for candidate in CandidateSource(
        [*OF_TRAINING, loss], TRAINING, "bf16", "memory-bound"
    ).seeds():
        assert (loss in candidate) is (COMPILED in candidate)


@pytest.mark.parametrize("regime", REGIMES)
def test_steps_on_a_gpu_that_never_came_near_the_best_are_late(regime):
    graph = single("step_graph", scope="step")
    fused = single("optimizer", implementation="fused", merge=False)
    available = [*(s for s in OF_TRAINING if s.name != "cudnn_engines"), fused, graph]
    source = CandidateSource(available, TRAINING, "bf16", regime)
    strong, late = set(source.seeds()), set(source.late())
    assert strong == {
        transforms.order([*model, AUTOCAST, fused, graph])
        for model in ([LAYOUT, COMPILED], [LAYOUT], [COMPILED], [])
    }
    without_graph = transforms.order([LAYOUT, COMPILED, AUTOCAST, fused])
    assert {(LAYOUT,), (COMPILED,), (AUTOCAST,), (fused,), without_graph} <= late


def test_training_at_its_own_precision_lowers_nothing():
    seeds = CandidateSource(OF_TRAINING, TRAINING, "same", "memory-bound").seeds()
    assert {spec.name for c in seeds for spec in c} <= {"channels_last", "cudnn_engines", "compile"}


def test_training_in_tf32_is_tried_where_that_is_allowed():
    seeds = CandidateSource(OF_TRAINING, TRAINING, "tf32", "compute-bound").seeds()
    assert any(spec.name == "tf32" for spec in seeds[0])


def test_engines_of_training_are_chosen_under_autocast():
    prefix = engine_prefix([LAYOUT, AUTOCAST, BF16, COMPILED], "bf16", training=True)
    assert prefix == transforms.order([LAYOUT, AUTOCAST])
    assert engine_prefix([LAYOUT, AUTOCAST, BF16], "bf16") == transforms.order([LAYOUT, BF16])
