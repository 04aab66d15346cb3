from __future__ import annotations

from collections import namedtuple

import msgspec
import pytest
import torch
from torch import nn

from steadytorch.backends.call import EngineModel
from steadytorch.backends.exported import Form, Layout, export
from steadytorch.errors import UnsupportedError
from steadytorch.workload.workload import Workload

Pair = namedtuple("Pair", "left right")


class Nested(nn.Module):
    """Nested arguments with constants; results in containers, one with other strides."""

    def forward(self, pair, scale, *, flags):
        x, ids = pair
        y = x * scale + flags["bias"]
        return {"y": y.t(), "more": [ids + 1, None, "text", 3], "wide": x[:1].expand(4, -1)}


class Appends(nn.Module):
    def forward(self, kept):
        kept.append(kept[0] + 1)
        return kept[0] * 2


class Opaque(nn.Module):
    def forward(self, x):
        return x + 1, object()


class Passes(nn.Module):
    def forward(self, x):
        return x, x + 1


class Branches(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


class Asserts(nn.Module):
    def forward(self, x):
        torch._assert_async((x >= 0).all())
        return x + 1


def nested() -> Workload:
    inputs = ((torch.randn(3, 4), torch.tensor([1, 2])), 2.5)
    return Workload(Nested().eval(), inputs, {"flags": {"bias": torch.ones(4)}})


def test_an_export_leaves_the_modes_of_modules_as_they_are():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
    model[1] = nn.GELU()  # in training mode, as it is new
    export(Workload(model, torch.ones(1, 2)))
    assert [module.training for module in model.modules()] == [False, False, True]


def engine_of(workload: Workload) -> EngineModel:
    """The exported program as an engine that returns contiguous tensors."""
    made = export(workload)
    program = made.program.module()
    # As data and back, as artefacts keep it.
    form = msgspec.json.decode(msgspec.json.encode(made.form), type=Form)

    def run(tensors):
        with torch.no_grad():
            return [tensor.contiguous() for tensor in program(*tensors)]

    return EngineModel("fake", run, form, workload)


def test_containers_constants_and_strides_come_back():
    workload = nested()
    expected = workload.model(*workload.inputs, **workload.kwargs)
    found = engine_of(workload)(*workload.inputs, **workload.kwargs)
    assert found["more"][1:] == [None, "text", 3]
    assert torch.equal(found["more"][0], expected["more"][0])
    for name in ("y", "wide"):
        assert torch.equal(found[name], expected[name])
        assert found[name].stride() == expected[name].stride()


def test_inputs_may_have_any_strides_and_gradients():
    workload = Workload(nn.Linear(4, 2).eval(), torch.randn(3, 4))
    found = engine_of(workload)(torch.randn(4, 3).t().requires_grad_())
    assert found.shape == (3, 2)
    assert not found.requires_grad


def test_a_call_of_another_form_is_refused_with_both_forms():
    workload = nested()
    model = engine_of(workload)
    with pytest.raises(UnsupportedError, match=r"fake takes 3x4:float32.*got 5x4:float32"):
        model((torch.randn(5, 4), torch.tensor([1, 2])), 2.5, flags={"bias": torch.ones(4)})
    with pytest.raises(UnsupportedError, match=r"2\.5.*3\.5"):
        model((torch.randn(3, 4), torch.tensor([1, 2])), 3.5, flags={"bias": torch.ones(4)})


def test_an_exception_of_an_engine_becomes_a_runtime_error():
    class OwnError(Exception):
        pass

    def fails(tensors):
        raise OwnError("no memory for the arena")

    workload = Workload(nn.Linear(4, 2).eval(), torch.randn(3, 4))
    model = EngineModel("fake", fails, export(workload).form, workload)
    with pytest.raises(RuntimeError, match="fake failed: no memory"):
        model(torch.randn(3, 4))


@pytest.mark.parametrize(
    ("model", "inputs", "why"),
    [
        (Appends(), ([torch.ones(2)],), "writes to its inputs"),
        (Opaque(), (torch.ones(2),), "returns a object"),
        (Passes(), (torch.ones(2),), "returns one of its inputs"),
        (Branches(), (torch.ones(2),), "cannot be exported"),
        (Asserts(), (torch.ones(2),), "would not check what the model asserts"),
        (nn.Identity(), (torch.ones(2, dtype=torch.complex64),), "complex"),
        (nn.Identity(), (torch.ones(2, 2).to_sparse(),), "sparse"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_cannot_be_exported_says_why(model, inputs, why):
    with pytest.raises(UnsupportedError, match=why):
        export(Workload(model.eval(), inputs))


def test_the_form_names_flat_inputs_and_result_layouts(conv_workload):
    form = export(conv_workload).form
    assert len(form.inputs) == 1
    assert form.results == (Layout((2, 4), "float32", (4, 1)),)


def test_a_result_of_a_class_that_cannot_be_described_is_refused():
    class Pairs(nn.Module):
        def forward(self, x):
            return Pair(x + 1, x * 2)

    with pytest.raises(UnsupportedError, match="results cannot be described"):
        export(Workload(Pairs().eval(), torch.ones(2)))


class Described(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.info = nn.Linear(4, 2), [{"sizes": [4, 2]}]

    def forward(self, x):
        return self.layer(x)


def test_containers_in_attributes_stay_the_models_own():
    model = Described()
    info, sizes = model.info, model.info[0]["sizes"]
    export(Workload(model, (torch.ones(1, 4),)))
    assert model.info is info
    assert model.info[0]["sizes"] is sizes


@pytest.mark.parametrize("draws", [True, False])
def test_a_model_that_draws_is_refused(draws):
    class Attends(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 * draws)

    workload, before = Workload(Attends(), (torch.ones(1, 2, 4, 8),)), torch.get_rng_state()
    if draws:
        with pytest.raises(UnsupportedError, match="draws random numbers"):
            export(workload)
    else:
        export(workload)
    assert torch.equal(torch.get_rng_state(), before)
