from __future__ import annotations

import subprocess
import sys
import types

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import nn

import steadytorch
from steadytorch.errors import UsageError
from steadytorch.plan.fingerprint import (
    ENVIRONMENT,
    trained_fingerprint,
    workload_fingerprint,
)
from steadytorch.plan.store import Found, Store
from steadytorch.results.candidate import TransformSpec
from steadytorch.serve import plan as module_under_test
from steadytorch.serve.plan import Plan, load_plan
from steadytorch.transforms.prefetch import Delivered, Prefetched
from steadytorch.workload.workload import Workload

from .plans import make_model, make_plan, reason_untouched, sealed, write

# -- round trip ---------------------------------------------------------------------------------


def test_a_plan_comes_back_from_the_store_as_it_was(plan, tmp_path):
    assert Store(tmp_path).put(plan.key, plan)
    found = Store(tmp_path).get(plan.key, Plan)
    assert isinstance(found, Found)
    assert found.payload == plan


def test_load_plan_reads_a_file_and_says_where_it_was(plan, tmp_path):
    path = Store(tmp_path).put(plan.key, plan)
    assert load_plan(path) == replace(plan, path=str(path))
    assert load_plan(str(path)).path == str(path)


def test_the_path_in_a_file_is_not_believed(plan, tmp_path):
    path = write(tmp_path, replace(plan, path="/etc/passwd"))
    assert load_plan(path).path == str(path)


def test_the_id_is_the_start_of_the_digest(plan):
    assert plan.key.digest.startswith(plan.id)
    assert len(plan.id) == 12


def test_a_plan_prints_in_three_lines(plan, tmp_path):
    assert str(plan).splitlines() == [
        f"net, {plan.signature}: channels_last + inference_mode",
        "1.50x as fast as untouched (99 % interval 1.40 to 1.60)",
        f"plan {plan.id}, in memory only",
    ]
    path = write(tmp_path, plan)
    assert str(load_plan(path)).endswith(f"\nplan {plan.id}, {path}")


def test_an_empty_plan_prints_no_gain(plan):
    empty = replace(plan, candidate=(), trains="0" * 64, name="net\x1b[2J")
    assert str(empty).splitlines() == [
        f"net?[2J (training), {plan.signature}: untouched",
        f"plan {plan.id}, in memory only",
    ]


def test_a_plan_is_found_again_in_a_new_process(plan, tmp_path):
    path = write(tmp_path, plan)
    code = (
        "import sys, torch, steadytorch\nfrom torch import nn\n"
        "model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        "tuned = steadytorch.load_plan(sys.argv[1]).apply(model)\n"
        "tuned(torch.ones(1, 3, 8, 8)); print(tuned.report().calls)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "{'tuned': 1}", found.stderr


# -- applying -----------------------------------------------------------------------------------


def test_applied_to_its_model_it_serves(plan, model, x):
    tuned = plan.apply(model)
    torch.testing.assert_close(tuned(x), model(x).detach())
    assert tuned.report().calls == {"tuned": 1}


def test_other_weights_of_the_same_model_are_served(plan, x):
    torch.manual_seed(5)
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    tuned = plan.apply(other)
    torch.testing.assert_close(tuned(x), other(x).detach())
    assert tuned.report().calls == {"tuned": 1}


@pytest.mark.parametrize(
    "other",
    [
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU()).eval(),
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU()).eval(),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval().double(),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).train(),
    ],
    ids=["layer", "width", "dtype", "mode"],
)
def test_another_model_runs_untouched_and_is_named_as_the_reason(plan, x, other):
    model = other()
    x = x.to(next(model.parameters()).dtype)
    reason = reason_untouched(plan.apply(model), model, x)
    assert f"plan {plan.id} does not fit here: workload was" in reason


def test_another_shape_runs_untouched(plan, model, x):
    assert (
        reason_untouched(plan.apply(model), model, x.repeat(2, 1, 1, 1))
        == "no plan for these inputs"
    )


def _other(value):
    if isinstance(value, int):
        return value + 1
    return f"{value} of another kind"


@pytest.mark.parametrize("field", ENVIRONMENT)
def test_another_environment_runs_untouched_and_the_field_is_named(plan, model, x, field):
    old = _other(getattr(plan.key, field))
    stored = replace(plan, key=replace(plan.key, **{field: old}))
    reason = reason_untouched(stored.apply(model), model, x)
    assert f"does not fit here: {field} was {old}, is {getattr(plan.key, field)}" in reason


@pytest.mark.parametrize("field", ["workload", "signature"])
def test_another_workload_is_named(plan, model, x, field):
    stored = replace(plan, key=replace(plan.key, **{field: "other"}))
    assert f"{field} was other, is" in reason_untouched(stored.apply(model), model, x)


def test_another_process_setting_is_named(plan, model, x):
    settings = {**plan.key.ambient, "cudnn.benchmark": "perhaps", "no_such_setting": "1"}
    stored = replace(plan, key=replace(plan.key, ambient=settings))
    reason = reason_untouched(stored.apply(model), model, x)
    assert "ambient.cudnn.benchmark was perhaps, is" in reason
    assert "ambient.no_such_setting was 1, is None" in reason


def test_a_setting_that_differs_here_is_named(plan, model, x):
    found = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not found
    try:
        reason = reason_untouched(plan.apply(model), model, x)
    finally:
        torch.backends.cudnn.benchmark = found
    assert f"ambient.cudnn.benchmark was {found}, is {not found}" in reason


def test_many_differences_are_cut_short(plan, model, x):
    other = {name: _other(getattr(plan.key, name)) for name in ENVIRONMENT}
    reason = reason_untouched(replace(plan, key=replace(plan.key, **other)).apply(model), model, x)
    assert reason.count(" was ") == 4


def test_apply_takes_the_request_from_the_plan(model, x, plan):
    asked = {"objective": "p99", "precision": "bf16", "tolerance": 0.1, "max_memory_bytes": 7}
    tuned = replace(plan, key=replace(plan.key, **asked)).apply(model)
    tuned(x)
    assert tuned.report().calls == {"tuned": 1}


def test_a_plan_whose_inputs_contradict_its_key_serves_nothing(plan, model, x):
    other = Workload(model, x[:, :2]).signature()
    reason = reason_untouched(replace(plan, signature=other).apply(model), model, x)
    assert "does not fit here: signature was" in reason


def test_the_empty_plan_is_the_untouched_model(model, x):
    assert "nothing was faster" in reason_untouched(make_plan(model, x, ()).apply(model), model, x)


@pytest.mark.parametrize("thing", [None, 3])
def test_a_model_that_is_not_callable_is_a_usage_error(plan, thing):
    with pytest.raises(UsageError, match=f"{type(thing).__name__} is not a model"):
        plan.apply(thing)


def test_a_tuned_module_is_a_usage_error(plan, model):
    with pytest.raises(UsageError, match=r"got a tuned one: pass model\.__wrapped__"):
        plan.apply(plan.apply(model))


def test_a_function_runs_untouched_and_it_is_said_why(plan, model, x):
    assert "not an nn.Module" in reason_untouched(plan.apply(lambda x: model(x)), model, x)


def test_the_machine_that_cannot_be_read_is_a_reason(plan, model, x, monkeypatch):
    def broken(device):
        raise OSError("the driver\n\x1b[2Jis gone")

    monkeypatch.setattr(module_under_test, "load_facts", broken)
    reason = reason_untouched(plan.apply(model), model, x)
    assert "could not be checked against this environment: the driver??[2Jis gone" in reason


@pytest.mark.parametrize("tolerance", [float("nan"), float("inf"), -1.0])
def test_a_senseless_tolerance_in_a_plan_raises_nothing(plan, model, x, tolerance):
    stored = replace(plan, key=replace(plan.key, tolerance=tolerance))
    torch.testing.assert_close(stored.apply(model)(x).detach(), model(x).detach())


def test_terminal_escapes_of_a_plan_are_cleaned(plan, model, x, caplog):
    stored = replace(plan, key=replace(plan.key, torch="\x1b[31m\nfake: all is well\r"))
    stored.apply(model)
    assert "torch was ?[31m?fake: all is well?, is" in caplog.text


def test_a_plan_is_data_only():
    def functions_in(value):
        if isinstance(value, msgspec.Struct):
            value = msgspec.structs.asdict(value)
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, (list, tuple)):
            return [f for item in value for f in functions_in(item)]
        return [value] if isinstance(value, (types.FunctionType, type, nn.Module)) else []

    assert functions_in(make_plan(make_model(), torch.ones(1, 3, 8, 8))) == []


def test_the_library_exports_these():
    assert steadytorch.load_plan is load_plan
    assert steadytorch.Plan is Plan


# -- the loader's part ----------------------------------------------------------------------------


def ahead(plan):
    return replace(plan, candidate=(*plan.candidate, TransformSpec("prefetch")))


def test_batches_come_as_the_plan_has_them(plan):
    loader = [torch.ones(1), torch.zeros(1)]
    plainly, early = plan.batches(loader, "cpu"), ahead(plan).batches(loader, "cpu")
    assert (type(plainly), type(early)) == (Delivered, Prefetched)
    for batches in (plainly, early):
        assert [b.item() for b in batches] == [b.item() for b in batches] == [1.0, 0.0]


def test_switched_off_batches_are_not_taken_ahead(plan, monkeypatch):
    monkeypatch.setenv("STEADYTORCH_MODE", "OFF ")
    assert type(ahead(plan).batches([])) is Delivered


def test_batches_go_to_a_device_that_is_there(plan):
    with pytest.raises(UsageError, match="'meta'"):
        plan.batches([], "meta")
    (found,) = plan.batches([torch.ones(1)])
    assert found.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_plan_for_steps_with_a_loader_serves_the_model_alone(plan, model, x):
    fed = ahead(replace(plan, key=replace(plan.key, loader=True)))
    assert fed.id != plan.id
    tuned = fed.apply(model)
    torch.testing.assert_close(tuned(x), model(x).detach())
    assert tuned.report().calls == {"tuned": 1}


# -- training -----------------------------------------------------------------------------------


def make_trained(model, x, loss=torch.sum):
    """A plan for training steps, as a session would keep it."""
    workload = Workload.training(model, x, loss, torch.optim.SGD)
    plan = make_plan(model, x, (TransformSpec("channels_last"),))
    key = replace(plan.key, workload=workload_fingerprint(workload))
    return replace(plan, key=key, trains=trained_fingerprint(model))


@pytest.fixture
def trained(x):
    return make_trained(make_model().train(), x)


def test_a_training_plan_serves_steps_of_its_model(trained, x):
    model = make_model().train()
    tuned = trained.apply(model)
    tuned(x).sum().backward()
    assert tuned.report().calls == {"tuned": 1}
    assert all(p.grad is not None for p in model.parameters())


def test_a_training_plan_comes_back_from_its_file(trained, tmp_path):
    found = load_plan(write(tmp_path, trained))
    assert found == replace(trained, path=found.path)
    assert found.trains == trained.trains


def test_a_plan_written_before_there_were_any_for_training_is_for_inference(plan, tmp_path):
    path = write(tmp_path, plan)
    held = msgspec.json.decode(path.read_bytes())
    del held["payload"]["trains"]
    path.write_bytes(sealed(held["payload"], held["key"]))
    assert load_plan(path).trains is None


@pytest.mark.parametrize(
    "other",
    [
        lambda: make_model().eval(),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU()).train(),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3).requires_grad_(False), nn.ReLU()).train(),
    ],
    ids=["in evaluation", "another", "partly frozen"],
)
def test_a_training_plan_leaves_other_models_untouched(trained, x, other):
    model = other()
    assert "does not fit here: workload was" in reason_untouched(trained.apply(model), model, x)


def test_a_training_plan_fits_whatever_the_loss_and_not_inference(trained, plan, x):
    model = make_model().train()
    other = make_trained(model, x, loss=lambda output: output.square().mean())
    assert other.key != trained.key
    assert other.trains == trained.trains
    assert "does not fit here" in reason_untouched(plan.apply(model), model, x)


def test_an_inference_plan_that_is_passed_off_for_training_serves_nothing(trained, x):
    model = make_model().train()
    forged = replace(trained, candidate=(TransformSpec("inference_mode"),))
    assert "gives 0.weight no gradient" in reason_untouched(forged.apply(model), model, x)
