from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.runtime import entries
from steadytorch.runtime.entries import ServingOptions
from steadytorch.runtime.module import TunedModule

from .conftest import CANDIDATES, NO_PLAN, answer, entries_of, replace_executor


@pytest.mark.parametrize("name", CANDIDATES)
def test_outputs_are_those_of_the_model(model, x, serving, name):
    tuned = TunedModule(model, serving(CANDIDATES[name], x))
    loose = {"rtol": 0.05, "atol": 0.05} if name == "cast_weights" else {}
    torch.testing.assert_close(tuned(x), answer(model, x), **loose)
    assert tuned.report().calls == {"tuned": 1}


def test_the_executor_answers(model, x, tuned):
    expected = tuned(x)
    entry = entries_of(tuned)[0]
    replace_executor(tuned, lambda x, call=entry.call: call(x) * 2)
    assert torch.equal(tuned(x), expected * 2)


def test_another_shape_runs_untouched_and_is_counted_with_the_reason(model, x, tuned):
    other = x[:1]
    assert torch.equal(tuned(other), model(other))
    assert tuned.report().calls == {NO_PLAN: 1}
    tuned(x)
    assert tuned.report().calls == {NO_PLAN: 1, "tuned": 1}


def test_another_layout_of_the_same_shape_runs_untouched(model, x, tuned):
    other = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(tuned(other), model(other))
    assert tuned.report().calls == {NO_PLAN: 1}


def test_another_dtype_raises_what_the_model_raises(model, x, tuned):
    with pytest.raises(RuntimeError) as expected:
        model(x.double())
    with pytest.raises(RuntimeError) as found:
        tuned(x.double())
    assert str(found.value) == str(expected.value)


def test_a_signature_is_looked_up_once(model, x, serving):
    resolver = serving(CANDIDATES["channels_last"], x)
    tuned = TunedModule(model, resolver)
    for _ in range(3):
        tuned(x)
        tuned(x[:1])
    assert resolver.asked == 2


def test_the_empty_candidate_is_the_untouched_model(model, x, serving):
    tuned = TunedModule(model, serving((), x))
    assert torch.equal(tuned(x), model(x))
    assert tuned(x).requires_grad
    assert tuned.report().calls == {"untouched: nothing was faster than the untouched model": 2}


def test_tuned_outputs_have_no_gradient_history(model, x, serving):
    tuned = TunedModule(model, serving(CANDIDATES["channels_last"], x))
    output = tuned(x)
    assert tuned.report().calls == {"tuned": 1}
    assert not output.requires_grad
    assert torch.is_grad_enabled()


def test_set_off_from_the_start_it_says_why(model, x, serving, caplog):
    tuned = TunedModule(model, serving(CANDIDATES["all"], x), lambda model: "it does not fit here")
    assert torch.equal(tuned(x), model(x))
    assert tuned.report().calls == {"untouched: it does not fit here": 1}
    assert "running untouched: it does not fit here" in caplog.text


# -- arguments and outputs of all kinds -----------------------------------------------------------


@pytest.mark.parametrize("canary", [False, True])
@pytest.mark.parametrize("name", CANDIDATES)
def test_outputs_can_be_written_to_and_trained_on(model, x, serving, name, canary):
    tuned = TunedModule(model, serving(CANDIDATES[name], x), options=ServingOptions(canary=canary))
    head, loose = nn.Linear(2, 1), {"rtol": 0.05, "atol": 0.05}
    for _ in range(8):
        with torch.no_grad():
            y, expected = tuned(x).mul_(2).relu_(), model(x).mul_(2).relu_()
            y[0] = expected[0] = 0
        torch.testing.assert_close(y, expected, **(loose if name == "cast_weights" else {}))
        head(tuned(x)).sum().backward()
        assert head.weight.grad is not None
    assert tuned.report().hits > 8


def test_callers_in_inference_mode_get_inference_tensors_as_of_the_model(model, x, serving):
    tuned = TunedModule(model, serving(CANDIDATES["inference_mode"], x))
    with torch.inference_mode():
        assert tuned(x).is_inference() is tuned(x).is_inference() is True
    assert not tuned(x).is_inference()


@pytest.mark.parametrize("name", ["channels_last", "inference_mode"])
def test_nested_inputs_kwargs_and_constants_are_served(flexible, x, serving, name):
    kwargs = {"mask": torch.ones(6, 6), "times": 2, "mode": "mean", "also": [x, None]}
    tuned = TunedModule(flexible, serving(CANDIDATES[name], {"left": x}, **kwargs))
    found, expected = tuned({"left": x}, **kwargs), answer(flexible, {"left": x}, **kwargs)
    torch.testing.assert_close(found["pair"], expected["pair"])
    assert [found[k] for k in ("mode", "none", "also")] == ["mean", None, 2]
    assert tuned.report().calls == {"tuned": 1}


def test_the_order_of_keywords_does_not_matter(flexible, x, serving):
    tuned = TunedModule(
        flexible, serving(CANDIDATES["channels_last"], {"left": x}, times=2, mode="a")
    )
    tuned({"left": x}, mode="a", times=2)
    assert tuned.report().calls == {"tuned": 1}


@pytest.mark.parametrize(
    "changed", [{"times": 3}, {"mode": "max"}, {"times": 2.0}, {"times": True}]
)
def test_another_constant_runs_untouched(flexible, x, serving, changed):
    tuned = TunedModule(flexible, serving(CANDIDATES["channels_last"], {"left": x}, times=2))
    found = tuned({"left": x}, **{"times": 2, **changed})
    expected = flexible({"left": x}, **{"times": 2, **changed})
    assert torch.equal(found["x"], expected["x"])
    assert found["mode"] == expected["mode"]
    assert tuned.report().calls == {NO_PLAN: 1}


def test_arguments_without_a_signature_run_untouched(x, serving, caplog):
    class Takes(nn.Linear):
        def forward(self, x, thing):
            return super().forward(x), thing

    model, thing = Takes(8, 1).eval(), object()
    tuned = TunedModule(model, serving(CANDIDATES["inference_mode"], x))
    for _ in range(2):
        assert tuned(x, thing)[1] is thing
    assert tuned.report().calls == {"untouched: these inputs have no signature": 2}
    assert caplog.text.count("input [1] is a object") == 1


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs_run_untouched(serving, layout):
    model, dense = nn.Linear(4, 2, bias=False), torch.eye(4)
    tuned = TunedModule(model.eval(), serving(CANDIDATES["inference_mode"], dense))
    sparse = dense.to_sparse(layout=layout)
    torch.testing.assert_close(tuned(sparse), model(dense))
    assert tuned.report().hits == 0


def test_a_call_without_arguments_is_served(serving):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.ones(2))

        def forward(self):
            return self.value * 2

    tuned = TunedModule(Constant().eval(), serving(CANDIDATES["inference_mode"]))
    assert tuned().tolist() == [2, 2]
    assert tuned.report().calls == {"tuned": 1}


def test_inputs_that_never_repeat_do_not_fill_the_memory(flexible, x, serving, monkeypatch):
    monkeypatch.setattr(entries, "MOST_REMEMBERED", 5)
    tuned = TunedModule(flexible, serving(CANDIDATES["channels_last"], {"left": x}, times=50))
    for times in range(20):
        tuned({"left": x}, times=times)
    assert len(entries_of(tuned)) == 5
    tuned({"left": x}, times=50)
    tuned({"left": x}, times=51)
    assert len(entries_of(tuned)) == 5 + 1
    assert tuned.report().calls == {NO_PLAN: 21, "tuned": 1}


# -- when a plan must not serve -------------------------------------------------------------------


def test_a_switch_to_train_runs_untouched_and_back_serves_again(model, x, tuned):
    tuned(x)
    tuned.train()
    assert model.training
    tuned(x)
    tuned.eval()
    assert not model.training
    torch.testing.assert_close(answer(tuned, x), answer(model, x))
    mode = "untouched: the model was switched between train and eval"
    assert tuned.report().calls[mode] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.use_deterministic_algorithms(True),
    ],
)
def test_process_wide_settings_of_the_call_are_heeded(x, tuned, change):
    tuned(x)
    change()
    try:
        tuned(x)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    tuned(x)
    said = "untouched: process-wide settings changed since the plan was set up"
    assert tuned.report().calls[said] == 1


def test_settings_from_before_the_first_call_are_those_of_the_plan(x, tuned):
    torch.set_default_dtype(torch.float64)
    try:
        tuned(x)
        tuned(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert not tuned.report().fallbacks


def test_a_mode_switch_behind_the_wrapper_is_seen(model, x, tuned):
    tuned(x)
    model.train()
    assert tuned.training
    torch.manual_seed(3)
    found = tuned(x)
    assert found.requires_grad
    assert tuned.report().calls["tuned"] == 1


def test_training_through_the_wrapper_trains_the_model(model, x, serving):
    tuned = TunedModule(model, serving(CANDIDATES["all"], x))
    before = model.head.weight.detach().clone()
    tuned.train()
    optimizer = torch.optim.SGD(tuned.parameters(), lr=0.1)
    tuned(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model.head.weight, before)


@pytest.mark.parametrize("first", [True, False])
def test_autocast_is_the_callers_choice(model, x, tuned, first):
    if not first:
        tuned(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = tuned(x), model(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert tuned.report().calls["untouched: called under autocast"] == 1
    assert answer(tuned, x).dtype == torch.float32


@pytest.mark.parametrize("keyword", [False, True])
def test_gradients_of_inputs_reach_them(model, x, serving, keyword):
    args, kwargs = ((), {"x": x}) if keyword else ((x,), {})
    tuned = TunedModule(model, serving(CANDIDATES["all"], *args, **kwargs))
    tuned(*args, **kwargs)
    x.requires_grad_()
    tuned(*args, **kwargs).sum().backward()
    assert x.grad is not None
    assert tuned.report().calls == {"tuned": 1, "untouched: an input requires gradients": 1}


def test_gradients_of_nested_inputs_reach_them(flexible, x, serving):
    tuned = TunedModule(flexible, serving(CANDIDATES["channels_last"], {"left": x}))
    x.requires_grad_()
    tuned({"left": x})["x"].sum().backward()
    assert x.grad is not None


def test_inputs_with_gradients_are_served_where_none_are_recorded(model, x, tuned):
    x.requires_grad_()
    answer(tuned, x)
    assert tuned.report().calls == {"tuned": 1}
