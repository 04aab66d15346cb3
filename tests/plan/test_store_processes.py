from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steadytorch.plan.fingerprint import Key
from steadytorch.plan.store import Found, Miss, Store


class Payload(msgspec.Struct):
    number: int
    text: str = ""


def miss(store: Store, key: Key) -> Miss:
    found = store.get(key, Payload)
    assert isinstance(found, Miss)
    return found


NOT_STORED = "no plan is stored for this workload"
DRIVER = """
import json, os, signal, sys, msgspec
from pathlib import Path
from steadytorch.plan.fingerprint import Key
from steadytorch.plan.store import QUARANTINE, Found, Store

class Payload(msgspec.Struct):
    number: int

root, key = Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Key)
"""

KILLED = (
    DRIVER
    + """
CALLS = "open close write read fsync rename link mkdir stat fstat unlink listdir".split()

def arm(limit, after):
    made = 0
    def wrap(call):
        def wrapped(*args, **kwargs):
            nonlocal made
            made += 1
            if made == limit and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            if made == limit and call is write:
                call(args[0], args[1][:100])
                os.kill(os.getpid(), signal.SIGKILL)
            last = made == limit
            try:
                return call(*args, **kwargs)
            finally:
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)
        return wrapped
    write = os.write
    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))

def outcome(folder, limit, after, old):
    store = Store(folder)
    if old:
        store.put(key, Payload(1))
    if (child := os.fork()) == 0:
        arm(limit, after)
        getattr(Store(folder), verb)(key, Payload(2))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found = store.get(key, Payload)
    shown = found.payload.number if isinstance(found, Found) else found.reason
    bad = [entry.problem for entry in store.entries() if entry.problem]
    again = store.put(key, Payload(3)) is not None and store.get(key, Payload).payload.number == 3
    whole = again and not bad and not (folder / QUARANTINE).exists()
    return {"killed": os.WIFSIGNALED(status), "shown": shown, "whole": whole}

after, old, verb = sys.argv[3] == "after", sys.argv[4] == "old", sys.argv[5]
outcomes = []
for limit in range(1, 200):
    outcomes.append(outcome(root / str(limit), limit, after, old))
    if not outcomes[-1]["killed"]:
        break
print(json.dumps(outcomes))
"""
)


def driven(program: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("existing", "verb"), [("old", "put"), ("none", "put"), ("none", "add")])
def test_a_writer_killed_at_any_call_leaves_the_old_or_the_new(
    tmp_path: Path, key: Key, moment: str, existing: str, verb: str
) -> None:
    encoded_key = msgspec.json.encode(key).decode()
    outcomes = driven(KILLED, str(tmp_path), encoded_key, moment, existing, verb)
    *killed, last = outcomes
    before = 1 if existing == "old" else NOT_STORED
    shown = [outcome["shown"] for outcome in outcomes]
    assert len(killed) >= 6
    assert all(outcome["killed"] for outcome in killed)
    assert not last["killed"]
    assert all(outcome["whole"] for outcome in outcomes)
    # Once the new one shows it stays: the moment of the rename, or link, divides the two.
    at = shown.index(2)
    assert shown == [before] * at + [2] * (len(shown) - at)
    assert at > 0


RACE = (
    DRIVER
    + """
import multiprocessing
from msgspec.structs import replace

keys = [replace(key, signature=str(number)) for number in range(3)]

def found_by(store):
    found = [store.get(each, Payload) for each in keys]
    good = all(isinstance(each, Found) and each.path is not None for each in found)
    return [each.payload.number for each in found] if good else None

def child(number, barrier, answers):
    store = Store(root)
    barrier.wait()
    for turn in range(10):
        put = [store.put(each, Payload(number)) for each in keys]
        if None in put or found_by(store) is None:
            break
    barrier.wait()
    answers.put((turn, found_by(store)))

fork = multiprocessing.get_context("fork")
barrier, answers = fork.Barrier(16), fork.SimpleQueue()
children = [fork.Process(target=child, args=(n, barrier, answers)) for n in range(16)]
for each in children:
    each.start()
told = [answers.get() for _ in children]
for each in children:
    each.join()
left = sorted(str(each.relative_to(root)) for each in root.rglob("*") if each.is_file())
expected = sorted(f"{each.environment_digest}/{each.digest}.json" for each in keys)
print(json.dumps({"told": told, "left": left, "expected": expected}))
"""
)


def test_sixteen_processes_write_and_read_the_same_keys(tmp_path: Path, key: Key) -> None:
    done = driven(RACE, str(tmp_path / "plans"), msgspec.json.encode(key).decode())
    turns, numbers = zip(*done["told"], strict=True)
    assert turns == (9,) * 16
    assert numbers[0] is not None
    assert [*numbers] == [numbers[0]] * 16
    assert done["left"] == done["expected"]


TRACED = (
    DRIVER
    + """
import shutil

existing, verb = sys.argv[3:]
# One child after another waits until it is traced, and then writes.
for line in sys.stdin:
    shutil.rmtree(root, ignore_errors=True)
    if existing == "old":
        Store(root).put(key, Payload(1))
    gate = os.pipe()
    if (child := os.fork()) == 0:
        os.read(gate[0], 1)
        getattr(Store(root), verb)(key, Payload(2))
        os._exit(0)
    print(child, flush=True)
    sys.stdin.readline()
    os.write(gate[1], b"1")
    status = os.waitpid(child, 0)[1]
    os.close(gate[0]), os.close(gate[1])
    found = Store(root).get(key, Payload)
    shown = found.payload.number if isinstance(found, Found) else found.reason
    bad = [entry.problem for entry in Store(root).entries() if entry.problem]
    again = Store(root).put(key, Payload(3)) is not None
    whole = again and not bad and not (root / QUARANTINE).exists()
    print(json.dumps([os.WIFSIGNALED(status), shown, whole]), flush=True)
"""
)


def written_under(program: subprocess.Popen[str], *strace: str) -> Any:
    """Lets one child of the program write while it is traced, and returns the findings."""
    assert program.stdin is not None
    assert program.stdout is not None
    print("next", file=program.stdin, flush=True)
    child = program.stdout.readline().strip()
    with subprocess.Popen(
        ["strace", *strace, "-p", child], stderr=subprocess.PIPE, text=True
    ) as tracer:
        assert tracer.stderr is not None
        attached = tracer.stderr.readline()
        print("traced", file=program.stdin, flush=True)
        answer = program.stdout.readline()
    if "attached" not in attached:
        pytest.skip(f"processes cannot be traced here: {attached.strip()}")
    return json.loads(answer)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("verb", ["put", "add"])
@pytest.mark.parametrize("existing", ["old", "none"])
def test_a_writer_killed_at_any_system_call_leaves_the_old_or_the_new(
    tmp_path: Path, key: Key, existing: str, verb: str
) -> None:
    before = 1 if existing == "old" else NOT_STORED
    after = 1 if (existing, verb) == ("old", "add") else 2  # what is there stays
    trace, encoded_key = tmp_path / "trace", msgspec.json.encode(key).decode()
    arguments = ["-c", TRACED, str(tmp_path / "plans"), encoded_key, existing, verb]
    with subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        on_files = ("-o", str(trace), "-e", "trace=%file,%desc")
        assert written_under(program, *on_files) == [False, after, True]
        # The first read is the one that it waits in, memory is not the store's, and the last line
        # says how it ended.
        names = [line.partition("(")[0] for line in trace.read_text().splitlines()[:-1]]
        calls = [name for name in names if name not in ("read", "restart_syscall", "mmap")]
        shown = []
        for index, name in enumerate(calls):
            when = calls[: index + 1].count(name)
            inject = f"inject={name}:signal=SIGKILL:when={when}"
            killed, number, whole = written_under(program, "-o", str(trace), "-e", inject)
            assert (killed, whole) == (True, True), (name, when)
            shown.append(number)
        program.communicate()
    assert len(calls) > 8
    assert ("mkdir" in " ".join(calls)) is (existing == "none")
    # A call is reached, and not made: the new one shows after the rename, or link.
    placing = {"put": "rename", "add": "link"}[verb]
    placed = 1 + next(i for i, name in enumerate(calls) if name.startswith(placing))
    assert shown == [before] * placed + [after] * (len(calls) - placed)


def test_a_left_temporary_file_is_harmless(store: Store, key: Key, path: Path) -> None:
    (path.parent / f".{path.stem}.0123456789abcdef.tmp").write_bytes(b"half")
    assert store.get(key, Payload) == Found(Payload(1), path)
    assert [entry.path for entry in store.entries()] == [path]


def test_a_file_replaced_while_it_was_read_is_not_moved_aside(
    store: Store, key: Key, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b"garbage")
    real = os.fstat

    def replaced_meanwhile(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        monkeypatch.setattr(os, "fstat", real)
        Store(store.root).put(key, Payload(2))
        return status

    monkeypatch.setattr(os, "fstat", replaced_meanwhile)
    assert "replaced since" in miss(store, key).reason
    assert store.get(key, Payload) == Found(Payload(2), path)
