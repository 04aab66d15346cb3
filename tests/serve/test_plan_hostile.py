"""Plan files that lie, by the thousand: no exception, no code run, no other output, no hang.

They are tried by `hostile.Victim` in processes of their own: what hangs or crashes one, or makes it
grow, is a failure of that test and leaves the others alone.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from steadytorch.process.worker import Worker, WorkerFault

from .plans import digested, sealed

BATCH = 20
"""Files of one example. `make test-slow` tries more than 20,000 files in all."""
BATCHES = pytest.mark.parametrize("batch", [BATCH, pytest.param(100, marks=pytest.mark.slow)])
DEADLINE_S = 60.0
"""Timeout of a batch, which takes 0.1 s."""
MEMORY = 4 << 30
GONE = object()
_HOSTILE = [
    *("__import__('os').system('false')", "!!python/object:os.system", "\x1b[2J", "\ud800", ""),
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
_FEW = st.lists(_VALUES, min_size=8, max_size=8)
_SEEDS = st.integers(0, 2**64 - 1)
"""Draws for a whole batch; drawing each file by Hypothesis takes longer than trying it."""


class Victims:
    """Two processes that try half of a batch each; a dead one is restarted."""

    def __init__(self, directory):
        self._directory, self._workers = directory, {}

    def call(self, method, **arguments):
        """What one of them answers."""
        return self._worker(0).call(method, DEADLINE_S, **arguments)

    def tried(self, files):
        """Of each file, whether it was taken for a plan."""
        halves = [files[::2], files[1::2]]
        for number, half in enumerate(halves):
            self._worker(number).send("tries", files=half)
        taken = [False] * len(files)
        try:
            for number in range(2):
                taken[number::2] = self._workers[number].receive(DEADLINE_S)
        except WorkerFault as fault:
            self.kill()
            pytest.fail(f"{fault.reason}\n{fault.detail}")
        return taken

    def _worker(self, number):
        if number not in self._workers or not self._workers[number].alive:
            folder = self._directory / str(number)
            folder.mkdir(exist_ok=True)
            self._workers[number] = Worker("hostile:Victim", folder, "victim", {}, MEMORY)
        return self._workers[number]

    def kill(self):
        """Ends both."""
        while self._workers:
            self._workers.popitem()[1].kill()


@pytest.fixture(scope="module")
def victims():
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("sys.path", [*sys.path, str(Path(__file__).parent)])
        # Thousands of files are written and moved: in memory, if there is a folder for that.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        made = Victims(Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory))))
        stack.callback(made.kill)
        yield made


@pytest.fixture(scope="module")
def whole(victims):
    """The file of a plan that is one."""
    return victims.call("untouched")


def test_the_listener_hears_code(victims):
    assert victims.call("hears", text="1 + 1") == ["compile", "exec"]


def test_a_whole_file_is_a_plan_and_half_of_it_is_none(victims, whole):
    assert victims.tried([whole, whole[:500], whole]) == [True, False, True]


def test_a_candidate_of_lower_precision_than_the_plan_is_not_served(victims, whole):
    lower = [{"name": "cast_weights", "parameters": [["dtype", "bf16"]]}]
    payload = {**json.loads(whole)["payload"], "candidate": lower}
    assert victims.tried([sealed(payload, payload["key"])]) == [True]


@pytest.mark.parametrize("name", ["mode", "freezing", "command"])
def test_the_compiler_is_asked_for_nothing_that_is_not_in_its_closed_list(victims, whole, name):
    """What is in it has the compiler run much code of its own, for seconds: so the files below
    never name it, and the ones here are those that must not reach it."""
    payload, files = json.loads(whole)["payload"], []
    for value in _HOSTILE:
        if value is not GONE and not (name == "freezing" and value is True):
            specification = {"name": "compile", "parameters": [[name, value]]}
            files.append(_content({**payload, "candidate": [specification]}, payload["key"]))
    victims.tried(files)


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


def _content(payload, key):
    try:
        return sealed(json.loads(json.dumps(payload)), key)
    except (TypeError, ValueError, msgspec.MsgspecError):  # no file can hold it
        return repr(payload).encode("utf-8", "replace")


# No shrinking: it takes longer than all batches, and a failure shows its file.
_hostile = settings(
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@BATCHES
@settings(_hostile)
@given(values=_FEW, seed=_SEEDS)
def test_mutated_plans_are_data_or_refused_and_harm_nobody(victims, whole, values, seed, batch):
    contents, chance = [], Random(seed)
    for _ in range(batch):
        payload = json.loads(whole)["payload"]
        for value in chance.sample(values, chance.randint(1, 2)):
            payload = _changed(payload, chance.choice(list(_places(payload))), value)
        key = payload.get("key", {}) if isinstance(payload, dict) else {}
        contents.append(_content(payload, key))
    victims.tried(contents)


@BATCHES
@settings(_hostile)
@given(seed=_SEEDS)
def test_damaged_bytes_are_refused_or_harmless_though_the_digest_may_hold(
    victims, whole, seed, batch
):
    contents, chance = [], Random(seed)
    forgeries = [chance.random() < 0.5 for _ in range(batch)]
    for forged in forgeries:
        body = whole[: whole.rindex(b',"sha256"')] + b"}" if forged else whole
        for _ in range(chance.randint(1, 8)):
            at, length = chance.randint(0, len(body)), chance.randint(0, 6)
            body = body[:at] + chance.randbytes(chance.randint(0, 6)) + body[at + length :]
        contents.append(digested(body) if forged else body)
    for content, taken, forged in zip(contents, victims.tried(contents), forgeries, strict=True):
        assert forged or taken is (content == whole)


@settings(_hostile)
@given(files=st.lists(st.binary(max_size=200), min_size=BATCH, max_size=BATCH))
def test_any_bytes_are_a_plan_error(victims, files):
    assert not any(victims.tried(files))
