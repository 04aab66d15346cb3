from __future__ import annotations

import hashlib
import json
import sys

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from steadytorch.errors import PlanError
from steadytorch.plan.files import canonical_json
from steadytorch.plan.plan import load_plan
from steadytorch.transforms.base import TransformSpec

from .plans import make_model, make_plan, reason_untouched, write

# -- files that lie -----------------------------------------------------------------------------

UNKNOWN = [
    ({"name": "run_a_command", "parameters": []}, "unknown transform"),
    ({"name": "__import__", "parameters": [["name", "os"]]}, "unknown transform"),
    ({"name": "channels_last", "parameters": [["command", "rm"]]}, "command"),
    ({"name": "compile", "parameters": [["mode", "worst"]]}, "worst"),
    ({"name": "compile", "parameters": [["backend", "os:system"]]}, "backend"),
    ({"name": "cast_weights", "parameters": [["dtype", 16]]}, "dtype"),
    ({"name": "threads", "parameters": [["count", 10**9]]}, "count"),
    ({"name": "threads", "parameters": [["count", True]]}, "count"),
]


@pytest.mark.parametrize("spec", [s for s, _ in UNKNOWN], ids=lambda s: str(s)[:60])
def test_a_transform_from_nowhere_loads_as_data_and_leaves_the_model_untouched(
    plan, model, x, spec, tmp_path, caplog
):
    liar = replace(plan, candidate=(msgspec.convert(spec, TransformSpec),))
    tuned = load_plan(write(tmp_path, liar)).apply(model)
    assert reason_untouched(tuned, model, x) == "the plan could not be applied"
    hint = dict((str(s), h) for s, h in UNKNOWN)[str(spec)]
    assert hint in caplog.text


def _sealed(payload: object, key: object) -> bytes:
    body = canonical_json({"key": key, "payload": payload, "schema": 1})
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + f',"sha256":"{digest}"}}'.encode()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("candidate", "channels_last"),
        ("candidate", [{"name": 3}]),
        ("candidate", [{"name": "threads", "parameters": [["count", 1.5]]}]),
        ("candidate", [{"name": "threads", "parameters": [["count", [1]]]}]),
        ("candidate", [{"name": "threads", "parameters": {"count": 1}}]),
        ("candidate", None),
        ("signature", None),
        ("signature", {"leaves": [{"path": 0}], "structure": ""}),
        ("evidence", {}),
        ("key", {}),
        ("name", None),
    ],
    ids=str,
)
def test_a_field_of_a_wrong_type_is_refused(plan, tmp_path, field, value):
    payload = {**msgspec.to_builtins(plan), field: value}
    path = tmp_path / "plan.json"
    path.write_bytes(_sealed(payload, plan.key))
    with pytest.raises(PlanError, match="does not fit the schema"):
        load_plan(path)


def test_a_file_whose_key_is_not_that_of_its_plan_is_refused(plan, tmp_path):
    path = write(tmp_path, plan, replace(plan.key, torch="9.9"))
    with pytest.raises(PlanError, match="another key"):
        load_plan(path)


@pytest.mark.parametrize(
    "path", ["no/such/plan.json", "", ".", "/dev/null", "a\0b", "x" * 5000], ids=repr
)
def test_a_path_that_is_no_plan_is_a_plan_error(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError):
        load_plan(path)


GONE = object()


@pytest.fixture(scope="module")
def payload():
    model = make_model()
    return json.loads(msgspec.json.encode(make_plan(model, torch.ones(1, 3, 8, 8))))


def _places(tree, path=()):
    yield path
    if not isinstance(tree, (dict, list)):
        return
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


_HOSTILE = [
    *("__import__('os').system('false')", "!!python/object:os.system", "\x1b[2J", "\ud800", ""),
    *(None, True, -1, 2**70, 1e308, 0.5, [], {}, [[[]]], GONE),
]
_VALUES = st.one_of(
    st.sampled_from(_HOSTILE),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
        max_leaves=5,
    ),
)


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
        self.listening = True
        return self.heard

    def __exit__(self, *raised):
        self.listening = False


@pytest.fixture(scope="module")
def listener(payload, tmp_path_factory):
    file = tmp_path_factory.mktemp("first") / "plan.json"
    file.write_bytes(_sealed(payload, payload["key"]))
    load_plan(file)  # what is imported at the first time is not the plan's doing
    return _Listener()


def test_the_listener_hears_code(listener):
    with listener as heard:
        eval("1 + 1")
    assert [event for event, _ in heard] == ["compile", "exec"]
    heard.clear()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_mutated_plan_loads_as_data_or_is_refused_and_harms_nobody(
    payload, listener, tmp_path, data
):
    path = data.draw(st.sampled_from(list(_places(payload))), "place")
    value = data.draw(_VALUES, "value")
    mutated = _changed(payload, path, value)
    try:
        content = json.dumps(mutated, allow_nan=True, sort_keys=True, separators=(",", ":"))
        inner = json.loads(content)
        key = inner.get("key", {}) if isinstance(inner, dict) else {}
        file = tmp_path / "plan.json"
        file.write_bytes(_sealed(inner, key))
    except (TypeError, msgspec.MsgspecError, UnicodeEncodeError):
        return  # no file can hold it
    plan = None
    with listener as heard:
        try:
            plan = load_plan(file)
        except PlanError as error:
            refused = str(error)
    assert heard == []
    if plan is None:
        assert "\n" not in refused
        return
    model, x = make_model(), torch.ones(1, 3, 8, 8)
    tuned = plan.apply(model)
    torch.testing.assert_close(tuned(x).detach(), model(x).detach())
    assert sum(tuned.report().values()) == 1


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_plan_error(tmp_path, content):
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(PlanError):
        load_plan(file)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_plan_with_damaged_bytes_is_a_plan_error(payload, tmp_path, data):
    whole = _sealed(payload, payload["key"])
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != whole[at]))
    file = tmp_path / "plan.json"
    file.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
    with pytest.raises(PlanError):
        load_plan(file)
