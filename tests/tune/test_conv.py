from __future__ import annotations

import pytest
import torch
from msgspec import convert
from stored import make_plan, store_plan
from torch import nn

from steadytorch import transforms
from steadytorch.conv import choose_all, frontend
from steadytorch.conv.choices import ATEN, Choice, read_choice, read_choices
from steadytorch.conv.choose import ChoiceOptions, ConvOutcome
from steadytorch.conv.problem import parse
from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError
from steadytorch.plan.engines import known_engines
from steadytorch.plan.store import Store
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune import conv
from steadytorch.tune.conv import (
    ConvReport,
    Layer,
    choose_and_keep,
    choose_engines,
    incumbents,
    keys_beyond_fp16,
    problems_in,
    problems_in_training,
)
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.workload.workload import Workload

from .choosing import chooser, workload


@pytest.fixture
def handler(monkeypatch, tmp_path):
    return chooser(monkeypatch, tmp_path)


def test_equal_convolutions_are_one_problem_with_the_names_of_all():
    found = {
        problem.epilogue: names for problem, names in problems_in(workload(), ()).problems.items()
    }
    assert found == {"bias_relu": ["0"], "bias": ["2", "3"]}


@pytest.mark.parametrize(
    ("prefix", "number", "layout"),
    [
        ((), "tf32", "first"),
        ((TransformSpec("autocast", (("dtype", "bf16"),)),), "bf16", "first"),
        ((TransformSpec("channels_last"),), "tf32", "last"),
    ],
    ids=["alone", "autocast", "channels_last"],
)
def test_a_training_step_poses_gradients_in_the_precision_and_layout_in_force(
    prefix, number, layout
):
    given = workload()
    model = given.model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Workload.training(model, given.inputs, torch.Tensor.sum, optimizer)
    before = [p.clone() for p in model.parameters()]
    found = problems_in_training(training, prefix).problems
    assert [(p.operation, p.epilogue, names) for p, names in found.items()] == [
        ("fprop", "bias", ["0"]),
        ("wgrad", "none", ["0"]),
        ("fprop", "bias", ["2", "3"]),
        ("dgrad", "none", ["2", "3"]),
        ("wgrad", "none", ["2", "3"]),
    ]
    assert {(p.number, p.layout) for p in found} == {(number, layout)}
    assert [type(layer) for layer in model] == [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.Conv2d]
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_machine_without_a_gpu_is_a_fault_with_its_reason():
    with pytest.raises(WorkerFault) as found:
        choose_engines(workload(), device="cuda", deadline_s=5)
    assert found.value.reason


HALF = parse("fprop/bias/bf16/last/i2x3x8x8/w8x3x3x3/s1x1/p0x0/d1x1/g1")


@pytest.mark.parametrize(
    ("choice", "other_half", "usable"),
    [
        ("eng1", False, True),
        ("aten", False, True),
        ("c4:eng1", False, True),
        ("c16:eng1", False, False),
        ("fp16:eng1", False, False),
        ("c8:fp16:eng1", True, True),
    ],
)
def test_an_earlier_choice_counts_where_it_may_be_made_now(choice, other_half, usable):
    options = {HALF: ChoiceOptions(other_half=other_half)}
    found = incumbents(options, {HALF.key: choice, "of another network": "eng1"})
    assert found == ({HALF.key: read_choice(choice)} if usable else {})


@pytest.mark.parametrize(("factor", "layers"), [(1.0, 0), (1e6, 3)])
def test_where_values_are_large_fp16_is_no_choice(factor, layers):
    given = workload()
    large = Workload(given.model, factor * given.inputs[0])
    prefix = (TransformSpec("cast_weights", (("dtype", "bf16"),)), TransformSpec("channels_last"))
    barred = keys_beyond_fp16(large, prefix)
    found = {
        problem.key: len(names) for problem, names in problems_in(large, prefix).problems.items()
    }
    assert sum(found[key] for key in barred) == layers


FAULT = "OutOfMemoryError: CUDA out of memory."


@pytest.mark.parametrize("known", [False, True])
def test_a_convolution_that_fails_keeps_pytorchs_own_and_the_others_their_engines(handler, known):
    failed, well = (problem.key for problem in problems_in(workload(), ()).problems)
    before = {failed: "eng3"} if known else {}
    report = convert(handler.choose([], 60.0, {}, before), ConvReport)
    assert [layer.reason for layer in report.layers] == [FAULT, None]
    assert [layer.outcome is None for layer in report.layers] == [True, False]
    assert read_choices(report.choices) == {well: Choice("eng1")}


def test_where_all_fail_every_one_is_pytorchs_own(handler, monkeypatch):
    def failing(*_):
        raise RuntimeError("boom")

    monkeypatch.setattr(choose_all, "choose", failing)
    report = convert(handler.choose([], 60.0, {}, {}), ConvReport)
    assert {layer.reason for layer in report.layers} == {"RuntimeError: boom"}
    keys = [problem.key for problem in problems_in(workload(), ()).problems]
    assert read_choices(report.choices) == dict.fromkeys(keys, Choice(ATEN))


@pytest.fixture
def settings():
    """Restores PyTorch's process-wide settings afterwards."""
    found = transforms.ambient()
    yield
    transforms.set_ambient(found)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    "asked", [{"cudnn.deterministic": "True"}, {"deterministic_algorithms": "2"}]
)
def test_the_worker_of_who_asks_for_the_same_bits_takes_such_engines_alone(
    handler, monkeypatch, asked
):
    choose, repeatable = choose_all.choose, []

    def noted(problem, device, options, incumbent):
        repeatable.append(options.filters.repeatable)
        return choose(problem, device, options, incumbent)

    monkeypatch.setattr(choose_all, "choose", noted)
    for settings in ({}, asked):
        handler.load("cpu", transforms.ambient() | settings)
        handler.choose([], 60.0, {}, {})
    assert repeatable == [False, False, True, True]


def test_a_search_starts_that_worker_with_the_settings_of_its_plans_key(monkeypatch, tmp_path):
    class StartedError(Exception):
        pass

    def start(directory, device, ambient, server):
        raise StartedError(ambient)

    monkeypatch.setattr(conv, "start_chooser", start)
    engines = [TransformSpec("cudnn_engines")]
    monkeypatch.setattr(Session, "options_that_apply", lambda self: (engines, {}))
    torch.use_deterministic_algorithms(True)
    try:
        session = Session(workload(), SearchOptions(), "cpu", tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(StartedError) as found:
        session.search()
    assert found.value.args == (session.key.ambient,)
    assert session.key.ambient["deterministic_algorithms"] == "2"


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("name", "asked", "difference"),
    [
        ("cudnn.deterministic", "True", "was False, is True"),
        ("deterministic_algorithms", "2", "was 0, is 2"),
    ],
)
def test_what_was_chosen_without_is_not_served_to_who_asks_for_the_same_bits(
    tmp_path, name, asked, difference
):
    given = workload()
    chosen = TransformSpec("cudnn_engines", (("choices", f'{{"{HALF.key}":"eng1"}}'),))
    store_plan(tmp_path, make_plan(given.model, *given.inputs, (chosen,)))
    assert Session(given, SearchOptions(), "cpu", tmp_path).look_up()[0] is not None
    transforms.set_ambient({name: asked})
    plan, reason = Session(given, SearchOptions(), "cpu", tmp_path).look_up()
    assert plan is None
    assert f"ambient.{name} {difference}" in reason


def test_where_cudnn_is_missing_there_is_no_report(handler, monkeypatch):
    def missing():
        raise UnsupportedError("choosing cuDNN engines needs it")

    monkeypatch.setattr(frontend, "version", missing)
    with pytest.raises(UnsupportedError, match="needs it"):
        handler.choose([], 60.0, {}, {})


def test_what_was_chosen_is_where_the_next_choice_starts(monkeypatch, tmp_path):
    facts, plans = DeviceFacts(device="cuda", name="GPU", cudnn="9.19.0"), Store(tmp_path)
    handed = []

    def chosen(workload, *, incumbent, **asked):
        handed.append(dict(incumbent))
        outcome = ConvOutcome(HALF.key, "eng1", 2.0, 2.0, 1.0, (), 0.1)
        reached = Layer(("0",), HALF.key, outcome, 1, 1)
        others = [HALF.key.replace("bias", epilogue) for epilogue in ("none", "bias_relu")]
        failed = Layer(("1",), others[0], None, 1, 1, "RuntimeError: boom")
        quick = ConvOutcome(others[1], "eng7", None, None, None, (), 0.1)
        untimed = Layer(("2",), others[1], quick, 1, 1, "the time ran out before")
        return ConvReport((reached, failed, untimed), "", True, 1.0, 1.0, 91900, 1.0)

    monkeypatch.setattr(conv, "choose_engines", chosen)
    for _ in range(2):
        choose_and_keep(workload(), facts, plans, deadline_s=1.0)
    assert handed == [{}, {HALF.key: Choice("eng1")}]
    assert known_engines(facts, plans) == handed[1]


@pytest.mark.parametrize(
    ("precision", "allowed"), [("same", False), ("fp16", False), ("bf16", True)]
)
def test_a_search_allows_fp16_layers_to_who_allows_bf16_alone(
    monkeypatch, tmp_path, precision, allowed
):
    asked = {}

    def chosen(workload, facts, plans, **given):
        asked.update(given, plans=plans.root)
        return ConvReport((), "{}", True, 1.0, 1.0, 91900, 1.0)

    monkeypatch.setattr(conv, "choose_and_keep", chosen)
    session = Session(workload(), SearchOptions(precision=precision), "cpu", tmp_path)
    assert session._engines(None, Worker.receive, (), 5.0) == "{}"
    assert (asked["other_half"], asked["plans"]) == (allowed, tmp_path)
