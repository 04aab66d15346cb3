from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import sys
import threading
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from steadytorch import transforms
from steadytorch.errors import UsageError
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime import entries
from steadytorch.runtime.executors import build
from steadytorch.runtime.module import RAISED, TunedModule

from .conftest import (
    CANDIDATES,
    FAILED,
    NO_PLAN,
    NOT_APPLIED,
    Failing,
    Network,
    Resolver,
    always,
    answer,
    copy_into,
    entries_of,
    replace_executor,
)


def test_a_raising_executor_is_answered_for_and_not_called_again(model, x, tuned, caplog):
    tuned(x)
    executor = Failing(model)
    replace_executor(tuned, executor)
    for _ in range(3):
        assert torch.equal(tuned(x), model(x))
    assert executor.calls == 1
    assert tuned.report().calls == {"tuned": 1, FAILED: 3}
    assert caplog.text.count("the tuned executor failed: RuntimeError: the executor broke") == 1


def test_the_model_answers_if_the_first_tuned_call_fails(model, x, monkeypatch, serving):
    def broken(self, *args, **kwargs):
        raise ValueError("no")

    monkeypatch.setattr("steadytorch.rewrite.conversion.Converting.forward", broken)
    tuned = TunedModule(model, serving(CANDIDATES["channels_last"], x))
    assert torch.equal(tuned(x), model(x))
    assert tuned.report().calls == {FAILED: 1}


def test_inputs_that_the_model_refuses_do_not_disable_the_executor(serving):
    embedding = nn.Embedding(3, 2).eval()
    good, bad = torch.tensor([0, 2]), torch.tensor([0, 9])
    tuned = TunedModule(embedding, serving(CANDIDATES["inference_mode"], good))
    with pytest.raises(IndexError):
        tuned(bad)
    assert torch.equal(tuned(good), answer(embedding, good))
    assert tuned.report().calls == {RAISED: 1, "tuned": 1}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_the_wish_to_stop_is_no_fault(model, x, tuned, error):
    tuned(x)
    replace_executor(tuned, Failing(model, error=error))
    with pytest.raises(type(error)):
        tuned(x)


@pytest.mark.parametrize(
    "candidate",
    [
        (TransformSpec("no_such_transform"),),
        (TransformSpec("channels_last", (("speed", 11),)),),
        (TransformSpec("cast_weights", (("dtype", 16),)),),
        (TransformSpec("channels_last"),) * 2,
        (TransformSpec("channels_last"),) * 20_000,
        (TransformSpec("autocast", (("dtype", "bf16"),)), TransformSpec("cast_weights")),
        (TransformSpec("cuda_graph"),),
        (TransformSpec("inference_mode"), TransformSpec("fold_batch_norm")),
    ],
    ids=["name", "field", "type", "twice", "endless", "conflict", "device", "order"],
)
def test_a_candidate_that_cannot_be_applied_leaves_the_model_untouched(model, x, candidate, caplog):
    if torch.cuda.is_available() and candidate[0].name == "cuda_graph":
        pytest.skip("it can be applied where there is CUDA")
    tuned = TunedModule(model, always(candidate))
    for _ in range(2):
        assert torch.equal(tuned(x), model(x))
    assert tuned.report().calls == {NOT_APPLIED: 2}
    assert caplog.text.count("the plan could not be applied") == 1


def test_a_failing_resolver_leaves_the_model_untouched(model, x, caplog):
    def resolve(signature):
        raise OSError("\x1b[31mgone\x07")

    assert torch.equal(TunedModule(model, resolve)(x), model(x))
    assert "OSError: ?[31mgone?" in caplog.text


# -- life -----------------------------------------------------------------------------------------


def test_threads_build_an_executor_once_and_get_the_same_answers(model, x, monkeypatch, serving):
    built = []

    def counted(*arguments):
        built.append(threading.get_ident())
        return build(*arguments)

    monkeypatch.setattr(entries, "build", counted)
    resolver = serving(CANDIDATES["channels_last"] + CANDIDATES["inference_mode"], x)
    tuned, expected = TunedModule(model, resolver), answer(model, x)
    together, faults = threading.Barrier(4), []

    def work():
        together.wait()
        try:
            for _ in range(25):
                torch.testing.assert_close(tuned(x), expected)
                torch.testing.assert_close(answer(tuned, x[:1]), expected[:1])
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(built) == 1
    assert resolver.asked == 2
    calls = tuned.report().calls
    assert sum(calls.values()) == 200
    # While one of them looks, builds and checks, the others run untouched.
    assert calls["tuned"] > 0
    assert {*calls} <= {"tuned", NO_PLAN, *(f"untouched: {why}" for why in entries.PENDING)}


def test_building_an_executor_leaves_modules_of_other_threads_alone(x):
    model = nn.Sequential(*[Block() for _ in range(40)]).eval()
    bystander, faults, done = nn.Linear(8, 2), [], threading.Event()

    def work():
        while not done.is_set():
            try:
                bystander(x)
            except Exception as error:
                faults.append(error)

    thread, found = threading.Thread(target=work), sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(5):
            TunedModule(model, always(CANDIDATES["fold_batch_norm"]))(x)
    finally:
        sys.setswitchinterval(found)
        done.set()
        thread.join()
    assert faults == []


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))


def test_closed_it_serves_untouched(model, x, tuned):
    tuned(x)
    tuned.close()
    tuned.close()
    assert torch.equal(tuned(x), model(x))
    assert tuned.report().calls == {"tuned": 1, "untouched: closed": 1}


def test_close_frees_the_executor(model, x, tuned):
    tuned(x)
    (entry,) = entries_of(tuned)
    gone = weakref.ref(entry.call.model)
    del entry
    tuned.close()
    gc.collect()
    assert gone() is None


def test_a_fault_while_closing_does_not_reach_the_caller(model, x, tuned, caplog):
    tuned(x)
    (entry,) = entries_of(tuned)
    entry.executor = replace(entry.executor, close=lambda: 1 / 0)
    tuned.close()
    assert "not undone cleanly: ZeroDivisionError" in caplog.text
    assert torch.equal(tuned(x), model(x))


FLAG_SETTERS = (
    TransformSpec("tf32"),
    TransformSpec("cudnn_benchmark"),
    TransformSpec("cudnn_deterministic"),
    TransformSpec("threads", (("count", 1),)),
)


def test_no_global_setting_is_changed(model, x, serving, request):
    seen = []

    class Spy(Network):
        def forward(self, x):
            seen.append(transforms.ambient())
            return super().forward(x)

    spy = Spy().eval()
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)
    before = transforms.ambient()
    tuned = TunedModule(spy, serving(FLAG_SETTERS, x))
    tuned(x)
    assert tuned.report().calls == {"tuned": 1}
    assert seen[0] != before
    assert transforms.ambient() == before
    replace_executor(tuned, Failing(spy))
    tuned(x)
    tuned.close()
    assert transforms.ambient() == before


def test_settings_are_put_back_when_the_executor_raises(x, serving):
    class Raising(nn.Linear):
        def forward(self, x):
            raise ValueError("always")

    before = transforms.ambient()
    tuned = TunedModule(Raising(8, 1).eval(), serving(FLAG_SETTERS, x))
    with pytest.raises(ValueError, match="always"):
        tuned(x)
    assert transforms.ambient() == before


def test_a_deep_copy_serves_with_its_own_weights(model, x, tuned):
    tuned(x)
    other = copy.deepcopy(tuned)
    copy_into(model, x)
    with torch.no_grad():
        assert not torch.allclose(other(x), model(x))
    assert other.report().calls == {"tuned": 1}
    assert not {id(p) for p in other.parameters()} & {id(p) for p in tuned.parameters()}
    assert torch.equal(answer(tuned, x), answer(model, x))


def test_a_deep_copy_of_something_switched_off_is_off(x, tuned):
    tuned.close()
    other = copy.deepcopy(tuned)
    other(x)
    assert other.report().calls == {"untouched: closed": 1}


@pytest.mark.parametrize("through", ["pickle", "torch.save", "copy"])
def test_a_pickled_one_serves_untouched_and_says_so(x, serving, through):
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    tuned = TunedModule(model, serving(CANDIDATES["channels_last"], x))
    expected = tuned(x)
    if through == "pickle":
        other = pickle.loads(pickle.dumps(tuned))
    elif through == "copy":
        other = copy.copy(tuned)
    else:
        file = io.BytesIO()
        torch.save(tuned, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    torch.testing.assert_close(answer(other, x), expected)
    assert other.report().calls == {"untouched: it was copied; apply the plan to the copy": 1}


def _pickled(module):
    return pickle.loads(pickle.dumps(module))


def _plus_one(module, inputs, output):
    return output + 1


@pytest.mark.parametrize(
    "through", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_keep_the_hooks_of_the_wrapper(x, serving, through):
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    tuned = TunedModule(model, serving(CANDIDATES["channels_last"], x))
    tuned.register_forward_hook(_plus_one)
    torch.testing.assert_close(through(tuned)(x), model(x) + 1)


def test_whether_the_plan_fits_is_asked_before_the_first_executor_is_built(x, serving):
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()

    def fits(model):
        return None if model[0].stride == (1, 1) else "another stride"

    tuned = TunedModule(model, serving(CANDIDATES["channels_last"], x), fits)
    model[0].stride = (2, 2)
    assert torch.equal(tuned(x), model(x))
    assert tuned.report().calls == {"untouched: another stride": 1}


def test_half_made_it_raises_attribute_errors():
    bare = TunedModule.__new__(TunedModule)
    with pytest.raises(AttributeError, match="anything"):
        bare.anything  # noqa: B018


def test_warnings_go_to_the_logger_of_the_package(model, caplog):
    with caplog.at_level(logging.WARNING, "steadytorch"):
        TunedModule(model, always(None), lambda model: "a reason")
    assert [r.name for r in caplog.records] == ["steadytorch"]


def test_the_resolver_of_these_tests_refuses_unknown_transforms(x):
    with pytest.raises(UsageError):
        Resolver((TransformSpec("no_such_transform"),), x)
