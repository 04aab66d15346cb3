from __future__ import annotations

import json
import os
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
CALLS = "open close write read fsync rename mkdir stat fstat unlink listdir".split()

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
        Store(folder).put(key, Payload(2))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found = store.get(key, Payload)
    shown = found.payload.number if isinstance(found, Found) else found.reason
    bad = [entry.problem for entry in store.entries() if entry.problem]
    again = store.put(key, Payload(3)) is not None and store.get(key, Payload).payload.number == 3
    whole = again and not bad and not (folder / QUARANTINE).exists()
    return {"killed": os.WIFSIGNALED(status), "shown": shown, "whole": whole}

after, old = sys.argv[3] == "after", sys.argv[4] == "old"
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
@pytest.mark.parametrize("existing", ["old", "none"])
def test_a_writer_killed_at_any_call_leaves_the_old_or_the_new(
    tmp_path: Path, key: Key, moment: str, existing: str
) -> None:
    encoded_key = msgspec.json.encode(key).decode()
    outcomes = driven(KILLED, str(tmp_path), encoded_key, moment, existing)
    *killed, last = outcomes
    before = 1 if existing == "old" else "no plan is stored for this workload"
    shown = [outcome["shown"] for outcome in outcomes]
    assert len(killed) >= 6
    assert all(outcome["killed"] for outcome in killed)
    assert not last["killed"]
    assert all(outcome["whole"] for outcome in outcomes)
    # Once the new one shows it stays: the moment of the rename divides the two.
    at = shown.index(2)
    assert shown == [before] * at + [2] * (len(shown) - at)
    assert at > 0


RACE = (
    DRIVER
    + """
def child(number, gate):
    os.close(gate[1])
    os.read(gate[0], 1)
    store = Store(root)
    for turn in range(20):
        if store.put(key, Payload(number)) is None:
            return 2
        found = store.get(key, Payload)
        if not isinstance(found, Found) or found.path is None or found.payload.number >= 16:
            return 3
    return 0

gate = os.pipe()
children = []
for number in range(16):
    if (pid := os.fork()) == 0:
        os._exit(child(number, gate))
    children.append(pid)
os.close(gate[1])
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
seen = [Store(root).get(key, Payload).payload.number for _ in range(3)]
left = sorted(str(each.relative_to(root)) for each in root.rglob("*") if each.is_file())
print(json.dumps({"codes": codes, "seen": seen, "left": left}))
"""
)


def test_sixteen_processes_write_and_read_one_key(tmp_path: Path, key: Key) -> None:
    done = driven(RACE, str(tmp_path / "plans"), msgspec.json.encode(key).decode())
    assert done["codes"] == [0] * 16
    assert len(set(done["seen"])) == 1
    assert done["left"] == [f"{key.environment_digest}/{key.digest}.json"]


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
    assert "replaced meanwhile" in miss(store, key).reason
    assert store.get(key, Payload) == Found(Payload(2), path)
