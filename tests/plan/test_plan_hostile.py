"""Plan files that lie, by the thousand: no exception, no code run, no other output."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from steadytorch import transforms
from steadytorch.errors import PlanError
from steadytorch.plan.plan import Plan, load_plan
from steadytorch.plan.store import Found, Store
from steadytorch.tune.optimize import optimize

from .plans import digested, make_plan, sealed

MUTATED, DAMAGED, BATCH = 12_000, 9_000, 20
"""Files of each kind, more than 20,000 in all, and how many of them one example has."""
GONE = object()
_HOSTILE = [
    *("__import__('os').system('false')", "!!python/object:os.system", "\x1b[2J", "\ud800", ""),
    # Not `compile`: a plan may ask for the compiler, which runs much of its own code.
    *("cpu", "cuda:99", "same", "channels_last", "threads", "../../etc/passwd"),
    *(None, True, -1, 0, 2**70, 1e308, 0.5, float("nan"), [], {}, [[[]]], GONE),
    {"name": "cast_weights", "parameters": [["dtype", "bf16"]]},
    [{"name": "os.system", "parameters": [["command", "false"]]}],
]
_VALUES = st.one_of(
    *3 * [st.sampled_from(_HOSTILE)],
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
        max_leaves=5,
    ),
)
_PLACES = st.integers(0, 1 << 20)
_RUNNING_CODE = ("exec", "compile", "import", "os.system", "subprocess.Popen", "pickle.find_class")


class _Listener:
    """Notes what code is run meanwhile; the interpreter never lets go of such a hook."""

    def __init__(self):
        self.heard, self.listening = [], False
        sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        if self.listening and event in _RUNNING_CODE:
            self.heard.append((event, str(arguments)[:200]))

    def __enter__(self):
        self.heard, self.listening = [], True
        return self.heard

    def __exit__(self, *raised):
        self.listening = False


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    """A small model, its plan in a store and in a file, and what listens beside."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), torch.ones(2, 3)
    plan = make_plan(model, x)
    folder = tmp_path_factory.mktemp("hostile")
    store = Store(folder / "plans", second="")
    made = SimpleNamespace(
        model=model,
        x=x,
        expected=model(x).detach(),
        key=plan.key,
        payload=json.loads(msgspec.json.encode(plan)),
        store=store,
        stored=store.put(plan.key, plan),
        file=folder / "plan.json",
        listener=_Listener(),
    )
    made.file.write_bytes(made.stored.read_bytes())
    # What is imported, and resolved of our own annotations, at the first time is not its doing.
    load_plan(made.file).apply(model)(x)
    served = optimized(made)
    served(x)
    assert served.report().hits == 1  # it looks where the files below are put
    for entry in transforms.REGISTRY:
        with suppress(msgspec.ValidationError):
            msgspec.convert({}, entry.transform.Parameters)
    logging.disable(logging.WARNING)
    yield made
    logging.disable(logging.NOTSET)


def test_the_listener_hears_code(victim):
    with victim.listener as heard:
        eval("1 + 1")
    assert [event for event, _ in heard] == ["compile", "exec"]


def optimized(victim):
    """Benchmark mode over the store, without the canary that would find what is wrong there."""
    return optimize(victim.model, store=victim.store.root, canary=False)


def _check_harmless(victim, content):
    """What the four ways in make of a file: a plan or a reason, and the model's own outputs."""
    for path in (victim.stored, victim.file):
        path.write_bytes(content)
    plan, refused = None, ""
    with victim.listener as heard:
        found = victim.store.get(victim.key, Plan)
        try:
            plan = load_plan(victim.file)
        except PlanError as error:
            refused = str(error)
    assert heard == []
    assert refused.isprintable()
    if isinstance(found, Found):
        assert msgspec.structs.replace(found.payload, path=str(victim.file)) == plan
    else:
        assert found.reason.isprintable()
        assert not victim.stored.exists()
    if plan is not None:
        with victim.listener as heard:
            out = plan.apply(victim.model)(victim.x)
        assert [event for event, _ in heard if event != "import"] == []
        torch.testing.assert_close(out.detach(), victim.expected)
        # It looks files up as the store above did, and may serve what that found.
        torch.testing.assert_close(optimized(victim)(victim.x).detach(), victim.expected)
    return plan


def test_a_candidate_of_lower_precision_than_the_plan_is_not_served(victim):
    lower = [{"name": "cast_weights", "parameters": [["dtype", "bf16"]]}]
    payload = {**victim.payload, "candidate": lower}
    plan = _check_harmless(victim, sealed(payload, payload["key"]))
    assert torch.equal(plan.apply(victim.model)(victim.x).detach(), victim.expected)


def _places(tree, path=()):
    yield path
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _places(value, (*path, key))


def _changed(tree, path, value):
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    if value is GONE and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = _changed(tree[path[0]], path[1:], value)
    return copy


# Shrinking a batch takes longer than all of them: what fails shows its one file.
_hostile = settings(
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _batches(files):
    return st.lists(files, min_size=BATCH, max_size=BATCH)


@settings(_hostile, max_examples=MUTATED // BATCH)
@given(files=_batches(st.lists(st.tuples(_PLACES, _VALUES), min_size=1, max_size=2)))
def test_mutated_plans_are_data_or_refused_and_harm_nobody(victim, files):
    for mutations in files:
        payload = victim.payload
        for place, value in mutations:
            places = list(_places(payload))
            payload = _changed(payload, places[place % len(places)], value)
        key = payload.get("key", {}) if isinstance(payload, dict) else {}
        try:
            content = sealed(json.loads(json.dumps(payload)), key)
        except (TypeError, ValueError, msgspec.MsgspecError):  # no file can hold it
            content = repr(payload).encode("utf-8", "replace")
        _check_harmless(victim, content)


_CUTS = st.lists(st.tuples(_PLACES, st.integers(0, 6), st.binary(max_size=6)), min_size=1)


@settings(_hostile, max_examples=DAMAGED // BATCH)
@given(files=_batches(st.tuples(_CUTS, st.booleans())))
def test_damaged_bytes_are_refused_or_harmless_though_the_digest_may_hold(victim, files):
    whole = sealed(victim.payload, victim.payload["key"])
    for cuts, forged in files:
        body = whole[: whole.rindex(b',"sha256"')] + b"}" if forged else whole
        for place, length, new in cuts:
            at = place % (len(body) + 1)
            body = body[:at] + new + body[at + length :]
        content = digested(body) if forged else body
        plan = _check_harmless(victim, content)
        assert forged or (plan is not None) is (content == whole)


@settings(_hostile, max_examples=300)
@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_plan_error(victim, content):
    assert _check_harmless(victim, content) is None
