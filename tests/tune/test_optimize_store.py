"""Benchmark mode and its store: plans not to serve, failed writes, and new plans."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest
import torch
from stored import CANDIDATE, make_plan, store_plan
from torch import nn

from steadytorch.errors import PlanError
from steadytorch.plan.store import Found, Store
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune.optimize import optimize
from steadytorch.tune.search import EXHAUSTED
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.workload.workload import Workload

LOWER = (TransformSpec("cast_weights", (("dtype", "bf16"),)),)
NO_SUCH = (TransformSpec("os.system", (("command", "false"),)),)


@pytest.mark.parametrize("canary", [True, False])
@pytest.mark.parametrize(
    ("candidate", "why"), [(LOWER, "its transforms need bf16"), (NO_SUCH, "unknown transform")]
)
def test_a_plan_that_does_what_its_key_forbids_is_not_served(
    model, x, tmp_path, caplog, candidate, why, canary
):
    tuned = optimize(
        model, store=store_plan(tmp_path, make_plan(model, x, candidate)), canary=canary
    )
    for _ in range(3):
        torch.testing.assert_close(tuned(x), model(x), rtol=0, atol=0)
    assert tuned.report().hits == 0
    assert caplog.text.count(why) == 1


def test_a_search_puts_its_own_in_the_place_of_such_a_plan(model, x, tmp_path, searches):
    store_plan(tmp_path, make_plan(model, x, LOWER))
    tuned = optimize(model, "tune", store=tmp_path, canary=False)
    tuned(x)
    assert tuned.report().hits == 1
    assert Store(tmp_path).get(
        make_plan(model, x).key, type(make_plan(model, x))
    ).payload.candidate == (CANDIDATE)


def test_what_cannot_be_written_is_kept_for_all_signatures_and_said_once(
    model, tmp_path, searches, caplog
):
    (tmp_path / "file").write_text("")
    tuned = optimize(model, "tune", store=tmp_path / "file" / "plans", canary=False)
    inputs = [torch.randn(n, 8) for n in range(1, 5)]
    for x in inputs:
        tuned(x)
    tuned.refresh()
    for x in inputs:
        tuned(x)
    assert caplog.text.count("plans are kept in memory only") == 1
    assert len(searches.keys) == 4
    assert tuned.report().hits == 8


@pytest.mark.parametrize("size", [3, 8])
def test_strict_raises_for_a_bucket_too(model, tmp_path, size):
    tuned = optimize(model, "strict", store=tmp_path, buckets={"batch": [8]}, canary=False)
    for _ in range(2):
        with pytest.raises(PlanError, match="no stored plan"):
            tuned(torch.randn(size, 8))
    assert [*tuned.report().calls] == ["raised: no plan for these inputs"]


def test_strict_raises_above_the_largest_bucket(model, tmp_path):
    store_plan(tmp_path, make_plan(model, torch.randn(8, 8)))
    tuned = optimize(model, "strict", store=tmp_path, buckets={"batch": [8]}, canary=False)
    with pytest.raises(PlanError, match=r"no stored plan for Sequential \(.*\): batch exceeds"):
        tuned(torch.randn(9, 8))
    tuned(torch.randn(5, 8))
    assert tuned.report().hits == 1


def test_strict_raises_for_a_model_in_training_mode(model, x, tmp_path):
    store_plan(tmp_path, make_plan(model, x))
    tuned = optimize(model.train(), "strict", store=tmp_path, canary=False)
    for _ in range(2):
        with pytest.raises(PlanError, match=r"Sequential .*: the model is in training mode"):
            tuned(x)
    tuned.eval()
    tuned.refresh()
    tuned(x)
    tuned.train()
    with pytest.raises(PlanError, match="Sequential: the model was switched between"):
        tuned(x)
    assert tuned.report().hits == 1


def test_strict_raises_for_inputs_without_a_signature(model, tmp_path, caplog):
    tuned = optimize(model, "strict", store=tmp_path, canary=False)
    with pytest.raises(PlanError, match=r"these inputs have no signature: .*input \[0\] is a set"):
        tuned({1})
    assert tuned.report().calls == {"raised: these inputs have no signature": 1}
    assert "running untouched" not in caplog.text


def test_strict_leaves_calls_untouched_that_ask_for_more_than_a_plan_gives(model, x, tmp_path):
    store_plan(tmp_path, make_plan(model, x))
    tuned = optimize(model, "strict", store=tmp_path, canary=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tuned(x)
    assert torch.func.vmap(tuned)(x[None]).shape == (1, 2, 4)
    assert tuned(x.clone().requires_grad_()).requires_grad
    assert tuned.report().hits == 0
    assert len(tuned.report().fallbacks) == 3


def test_strict_raises_where_there_can_be_no_plan(tmp_path):
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).eval()
    model[1].train()
    tuned = optimize(model, "strict", store=tmp_path, canary=False)
    with pytest.raises(PlanError, match="updates the statistics"):
        tuned(torch.randn(2, 8))


# -- concurrent searches ------------------------------------------------------------------------


def test_what_another_process_stored_meanwhile_stays_and_is_served(
    model, x, tmp_path, searches, monkeypatch
):
    other, search = (TransformSpec("channels_last"),), Session.search

    def slow(self, watcher=None):
        store_plan(tmp_path, make_plan(model, x, other))
        return search(self, watcher)

    monkeypatch.setattr(Session, "search", slow)
    tuned = optimize(model, "tune", store=tmp_path, canary=False)
    tuned(x)
    (served,) = tuned.report().signatures
    assert served.executor == "channels_last"
    found = Store(tmp_path).get(make_plan(model, x).key, type(make_plan(model, x)))
    assert isinstance(found, Found)
    assert found.payload.candidate == other


@pytest.mark.parametrize("anew", [True, False])
def test_a_search_made_anew_takes_the_place_of_what_is_there(model, x, tmp_path, searches, anew):
    other = (TransformSpec("channels_last"),)
    store_plan(tmp_path, make_plan(model, x, other))
    session = Session(Workload(model, (x,)), SearchOptions(), "cpu", tmp_path)
    kept = session.keep(session.search(), anew)
    assert kept.candidate == (CANDIDATE if anew else other)
    assert session.look_up()[0] == kept


def test_a_search_that_ran_out_of_time_replaces_no_plan_with_a_gain(model, x, tmp_path):
    held = make_plan(model, x, (TransformSpec("channels_last"),))
    store_plan(tmp_path, held)
    session = Session(Workload(model, (x,)), SearchOptions(), "cpu", tmp_path)
    evidence = msgspec.structs.replace(held.evidence, not_tried={"compile(default)": EXHAUSTED})
    nothing = msgspec.structs.replace(held, candidate=(), evidence=evidence)
    assert session._stored(nothing, anew=True).candidate == held.candidate
    assert session.look_up()[0].candidate == held.candidate
    complete = msgspec.structs.replace(held, candidate=())
    assert session._stored(complete, anew=True).candidate == ()


TOGETHER = """
import json, multiprocessing, sys, torch
from types import SimpleNamespace
from torch import nn

torch.set_num_threads(1)
from steadytorch.plan.record import CompilerChoices
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune.optimize import optimize
from steadytorch.tune.session import Session

sys.path.insert(0, sys.argv[2])
from stored import evidence, small_model

NAMES = ("inference_mode", "channels_last", "threads", "fold_batch_norm")

def child(number, barrier, answers):
    def search(self, watcher=None):
        barrier.wait(60)
        chosen = (TransformSpec(NAMES[number % 4]),)
        return SimpleNamespace(
            interrupted=False, chosen=chosen, evidence=evidence, compiler=CompilerChoices()
        )

    Session.search = search
    tuned = optimize(small_model(), "tune", store=sys.argv[1], canary=False)
    tuned(torch.ones(2, 8))
    answers.put(tuned.report().signatures[0].executor)

fork = multiprocessing.get_context("fork")
barrier, answers = fork.Barrier(16), fork.SimpleQueue()
children = [fork.Process(target=child, args=(n, barrier, answers)) for n in range(16)]
for each in children:
    each.start()
print(json.dumps([answers.get() for _ in children]))
for each in children:
    each.join()
"""


def test_sixteen_processes_that_tune_at_once_agree_on_one_plan(tmp_path, request):
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER, str(tmp_path), str(request.path.parent)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    served = json.loads(done.stdout)
    assert len(served) == 16
    (entry,) = Store(tmp_path).entries()
    assert entry.problem is None
    assert {*served} == {json.loads(bytes(entry.payload))["candidate"][0]["name"]}
