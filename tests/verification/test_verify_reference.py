from collections import namedtuple

import pytest
import torch
from torch import nn

from steadytorch.verification.verdict import decide
from steadytorch.verification.verify import fresh_inputs, make_reference, verify
from steadytorch.workload.signature import tensors_of
from steadytorch.workload.workload import Workload


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        yield


@pytest.fixture
def linear():
    return Workload(nn.Linear(16, 16).eval(), torch.randn(16, 16))


def _verdict(workload, model=None, precision="same", tolerance=None, seed=0):
    """Verdict on a candidate that runs `model` instead of the workload's own."""
    data, reference = make_reference(workload, seed)
    found = verify(workload.model if model is None else model, workload, data)
    return decide(found, reference, precision, tolerance)


def _static(model):
    buffers = {}

    def mutant(*inputs):
        with torch.no_grad():
            out = model(*inputs)
            return buffers.setdefault(out.shape, torch.empty_like(out)).copy_(out)

    return mutant


# -- the reference ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_random_workload_is_not_repeatable_and_every_candidate_is_rejected(seed, rate):
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(rate)).train()
    torch.manual_seed(seed)
    assert _verdict(Workload(model, torch.randn(8, 16)), seed=seed) == (
        "cannot be verified: the untouched workload's own output changes between calls"
    )


def test_a_workload_with_a_state_of_its_own_is_not_repeatable():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return x + self.calls

    _, reference = make_reference(Workload(Counts(), torch.randn(4)), 0)
    assert not reference.repeatable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_repeatable_workload_is_seen_as_one_in_every_precision(dtype):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(dtype)
    _, reference = make_reference(Workload(model, torch.randn(8, 64, dtype=dtype)), 0)
    assert reference.repeatable
    assert reference.precision == "float64"
    assert reference.error.relative_l2 <= 8 * torch.finfo(dtype).eps


def test_the_reference_leaves_the_workload_as_it_was(linear):
    before = {name: value.clone() for name, value in linear.model.state_dict().items()}
    given = linear.inputs[0].clone()
    make_reference(linear, 0)
    assert linear.model.weight.dtype == torch.float32
    assert all(torch.equal(before[n], value) for n, value in linear.model.state_dict().items())
    assert torch.equal(linear.inputs[0], given)


def test_where_float64_cannot_run_the_reference_is_float32_and_says_so():
    def untouched(x):
        if x.dtype == torch.float64:
            raise RuntimeError("no float64 kernel\nfor this")
        return x * 2

    workload = Workload(untouched, torch.randn(4, dtype=torch.bfloat16))
    data, reference = make_reference(workload, 0)
    assert reference.precision == "float32"
    assert reference.note == "float64 cannot run (no float64 kernel)"
    assert reference.repeatable
    assert data["reference"][0][0].dtype == torch.float32
    assert "relative error" in _verdict(workload, lambda x: x * 2.1)


class Embedded(nn.Module):
    """Converts an input to float32 for sines, and creates a table in the default dtype."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, times):
        waves = times.float()[:, None] * torch.arange(1, 5, dtype=torch.float32)
        return self.layer(torch.cat([waves.sin(), waves.cos()], 1) @ torch.eye(8))


class ReadsBits(Embedded):
    def forward(self, times):
        return super().forward(times) + self.layer.weight[0, 0].float().view(torch.int32)


def test_what_a_model_converts_to_float32_is_float64_in_the_reference():
    torch.manual_seed(0)
    workload = Workload(Embedded().eval(), torch.randint(1000, (4,)))
    data, reference = make_reference(workload, 0)
    assert (reference.precision, reference.note) == ("float64", "")
    assert 1e-9 < reference.error.relative_l2 < 1e-4
    assert data["own"][0][0].dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_a_model_that_reads_the_bits_of_numbers_has_its_reference_in_float32():
    workload = Workload(ReadsBits().eval(), torch.randint(1000, (4,)))
    _, reference = make_reference(workload, 0)
    assert reference.precision == "float32"
    assert "float64 cannot run" in reference.note
    assert torch.get_default_dtype() == torch.float32


# -- inputs -----------------------------------------------------------------------------------


def test_fresh_inputs_keep_shape_stride_dtype_and_nesting():
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    workload = Workload(
        lambda *a, **k: None, ([image, {"ids": torch.arange(5)}], 3), {"mask": image > 0, "n": None}
    )
    inputs, kwargs = fresh_inputs(workload, 0)
    assert (inputs[1], kwargs["n"]) == (3, None)
    for drawn, given in zip(
        tensors_of((inputs, kwargs)), tensors_of((workload.inputs, workload.kwargs)), strict=True
    ):
        assert (drawn.shape, drawn.stride(), drawn.dtype) == (
            given.shape,
            given.stride(),
            given.dtype,
        )
        assert drawn.data_ptr() != given.data_ptr()


def test_fresh_inputs_take_only_values_that_were_given():
    ids = torch.tensor([[7, 101, 9], [7, 7, 55]])
    (drawn,), _ = fresh_inputs(Workload(nn.Embedding(200, 4), ids), 3)
    assert set(drawn.flatten().tolist()) <= set(ids.flatten().tolist())


def test_fresh_inputs_of_zeros_are_random_numbers():
    (drawn,), _ = fresh_inputs(Workload(nn.Identity(), torch.zeros(64)), 0)
    assert drawn.unique().numel() == 64


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize("value", [0.7, -3.0, 999.0, 2 + 1j])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_lone_number_varies_and_comes_nearer_to_zero(shape, value, dtype):
    dtype = dtype if isinstance(value, float) else torch.complex64
    given = torch.full(shape, value, dtype=dtype)
    drawn = [fresh_inputs(Workload(nn.Identity(), given), seed)[0][0] for seed in range(3)]
    assert {(each.shape, each.dtype) for each in drawn} == {(given.shape, dtype)}
    shares = [(each / given).to(torch.complex64).item() for each in drawn]
    assert all(0.49 < share.real < 0.91 for share in shares)
    assert all(abs(share.imag) < 1e-6 for share in shares)
    assert len(set(shares)) == 3


@pytest.mark.parametrize("value", [7, True])
def test_a_lone_integer_stays_as_it_may_be_an_index_or_a_switch(value):
    given = torch.tensor([value])
    (drawn,), _ = fresh_inputs(Workload(nn.Identity(), given), 0)
    assert torch.equal(drawn, given)
    assert drawn.dtype == given.dtype


def test_a_candidate_that_froze_a_lone_number_is_found_out():
    scale = torch.tensor(1.5)
    made = Workload(lambda x, scale: x * scale, (torch.randn(8), scale))
    assert _verdict(made) is None
    assert "relative error" in _verdict(made, lambda x, _: x * scale)


def test_fresh_inputs_depend_on_the_seed_alone():
    workload = Workload(nn.Identity(), torch.randn(64))
    first, again, other = (fresh_inputs(workload, seed)[0][0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_fresh_inputs_leave_the_random_state_alone():
    before = torch.get_rng_state()
    fresh_inputs(Workload(nn.Identity(), torch.zeros(64)), 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_indices_into_an_embedding_stay_valid():
    workload = Workload(nn.Embedding(10, 4), torch.tensor([[9, 0, 3]]))
    _, reference = make_reference(workload, 0)
    assert reference.fresh
    assert _verdict(workload) is None


@pytest.fixture
def bags():
    """A workload whose second input, offsets, must not be random."""
    return Workload(
        nn.EmbeddingBag(10, 4), (torch.arange(12) % 10, torch.tensor([0, 4, 8], dtype=torch.int64))
    )


def test_inputs_that_cannot_be_drawn_are_used_as_given_and_the_note_says_so(bags):
    data, reference = make_reference(bags, 0)
    assert not reference.fresh
    assert reference.note.startswith("random inputs do not fit (offsets[0] has to be 0")
    assert len(data["sets"]) == 1
    assert decide(verify(bags.model, bags, data), reference, "same", None) is None


def test_faults_are_found_on_given_inputs_too(bags):
    assert "relative error" in _verdict(bags, lambda *a: bags.model(*a) * 1.001)
    assert "return the same memory" in _verdict(bags, _static(bags.model))


def test_a_workload_that_fails_on_its_own_inputs_raises_its_own_error():
    def broken(x):
        raise ValueError("no such mask")

    with pytest.raises(ValueError, match="no such mask"):
        make_reference(Workload(broken, torch.randn(4)), 0)


Pair = namedtuple("Pair", "left right")


def test_containers_of_the_callers_own_reach_every_candidate(tmp_path):
    workload = Workload(lambda p: p.left - p.right, (Pair(torch.randn(4), torch.randn(4)),))
    data, reference = make_reference(workload, 0)
    torch.save(data, tmp_path / "reference.pt")
    data = torch.load(tmp_path / "reference.pt", weights_only=True)
    assert decide(verify(workload.model, workload, data), reference, "same", None) is None
