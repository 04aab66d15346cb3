"""Bundles hold code: one of another user, damaged or for elsewhere is never unpacked."""

from __future__ import annotations

import hashlib
import os
import resource
import stat
from pathlib import Path

import msgspec
import pytest

from steadytorch.compiled import bundle
from steadytorch.compiled.prebuilt import Task
from steadytorch.plan.fingerprint import canonical_json
from steadytorch.plan.store import Store
from steadytorch.results.candidate import TransformSpec
from steadytorch.serve.plan import Plan
from steadytorch.workload.workload import Workload

from ..serve.plans import make_model, make_plan

COMPILE = (TransformSpec("compile", (("mode", "default"), ("freezing", True))),)
FILES = {
    "ab/kernel.so": b"\x7fELF machine code",
    "fxgraph/cd/graph": b"pickled",
    "triton/0/H/__grp__kernel.json": b'{"child_paths": {"kernel.cubin": "%s/triton/0/H/k"}}',
}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A compiler cache, as a worker leaves it."""
    root = tmp_path / "worker" / "cache"
    for name, content in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.replace(b"%s", os.fsencode(root)))
    return root


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the compiler of this process keeps its files."""
    root = tmp_path / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(root))
    return root


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "plans", second="")


@pytest.fixture
def plan(store: Store) -> Plan:
    import torch

    made = make_plan(make_model(), torch.ones(1, 3, 8, 8), COMPILE)
    return msgspec.structs.replace(made, path=str(store.put(made.key, made)))


@pytest.fixture
def path(plan: Plan, cache: Path) -> Path:
    return bundle.write(plan, cache)


def _unpacked(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def _refused(plan: Plan, here: Path) -> str:
    """The reason for not using it; nothing may have been written."""
    reason = bundle.unpack(plan)
    assert reason is not None
    assert bundle.fault(plan) is not None
    assert not here.exists() or not _unpacked(here)
    return reason


def _forged(path: Path, files: object, **changes: object) -> None:
    """Writes a bundle with a valid digest for any content."""
    line, _, _ = path.read_bytes().partition(b"\n")
    body = msgspec.msgpack.encode({"files": files})
    head = msgspec.json.decode(line) | {"sha256": hashlib.sha256(body).hexdigest()} | changes
    path.write_bytes(canonical_json(head) + b"\n" + body)


def test_files_come_back_where_the_compiler_looks(plan, path, here):
    assert bundle.unpack(plan) is None
    found = _unpacked(here)
    assert found.keys() == FILES.keys()
    assert found["ab/kernel.so"] == FILES["ab/kernel.so"]


def test_paths_inside_of_triton_s_lists_follow_the_folder(plan, path, here, cache):
    bundle.unpack(plan)
    listed = (here / "triton/0/H/__grp__kernel.json").read_text()
    assert str(here / "triton/0/H/k") in listed
    assert str(cache) not in listed


def test_what_is_there_already_stays(plan, path, here):
    (here / "ab").mkdir(parents=True)
    (here / "ab/kernel.so").write_bytes(b"its own")
    assert bundle.unpack(plan) is None
    assert (here / "ab/kernel.so").read_bytes() == b"its own"


def test_locks_and_links_are_left_out(plan, cache, here):
    (cache / "locks").mkdir()
    (cache / "locks/x.lock").touch()
    (cache / "link").symlink_to("/etc/passwd")
    bundle.write(plan, cache)
    bundle.unpack(plan)
    assert _unpacked(here).keys() == FILES.keys()


def test_only_the_user_can_read_it(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_bundle_in_order_has_no_fault(plan, path):
    assert bundle.fault(plan) is None


def test_no_bundle_is_a_reason_and_one_log_line(plan, here, caplog):
    assert _refused(plan, here) == "it has no bundle"
    assert [r.getMessage() for r in caplog.records] == [
        f"plan {plan.id} is compiled again: it has no bundle"
    ]


def test_a_plan_in_memory_has_none(plan, here):
    assert "in memory only" in _refused(msgspec.structs.replace(plan, path=None), here)


def test_cut_or_altered_anywhere_it_is_refused(plan, path, here):
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at])
        _refused(plan, here)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        _refused(plan, here)


@pytest.mark.parametrize(
    "field", ["compiler", "cpu", "libc", "python", "steadytorch", "torch build"]
)
def test_another_environment_is_named(plan, path, here, field):
    environment = bundle.environment() | {field: "another"}
    _forged(path, FILES, environment=environment)
    assert _refused(plan, here) == f"its bundle was made for another {field}"


def test_another_candidate_or_key_is_named(plan, path, here):
    _forged(path, FILES, candidate="compile(default)", key="0" * 64, schema=1)
    assert _refused(plan, here) == "its bundle was made for another schema, key, candidate"


@pytest.mark.parametrize(
    "name",
    ["../outside", "/etc/outside", "a/../../outside", ".hidden", "a//b", "a\0b", "", "a/" * 20],
)
def test_a_name_that_leads_elsewhere_is_refused(plan, path, here, tmp_path, name):
    _forged(path, {name: b"x"})
    assert "holds a file name that is not allowed" in (bundle.unpack(plan) or "")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("files", [[1], {"a": "text"}, {"a": {"b": b""}}, None, {1: b""}])
def test_a_body_of_another_shape_is_refused(plan, path, here, files):
    _forged(path, files)
    assert "cannot be read" in _refused(plan, here)


@pytest.mark.parametrize("body", [[1], {}, None, {"files": {}, "package": 1}, {"more": 1}])
def test_an_undecodable_body_is_refused(plan, path, here, body):
    line, _, _ = path.read_bytes().partition(b"\n")
    data = msgspec.msgpack.encode(body)
    head = msgspec.json.decode(line) | {"sha256": hashlib.sha256(data).hexdigest()}
    path.write_bytes(canonical_json(head) + b"\n" + data)
    assert "cannot be read" in _refused(plan, here)


def test_compile_finds_no_package_where_there_is_none_and_the_files_are_unpacked(
    plan, path, here, caplog
):
    task = Task(Workload(make_model(), ()), dict, lambda: pytest.fail("compiled"))
    assert bundle.source(plan)(task) is None
    assert _unpacked(here).keys() == FILES.keys()
    assert not caplog.records


def test_a_link_is_refused(plan, path, here, tmp_path):
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in _refused(plan, here)


def test_a_fifo_is_refused_at_once(plan, path, here):
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in _refused(plan, here)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_user_s_is_refused(plan, path, here):
    os.chown(path, 4321, -1)
    assert "belongs to user 4321" in _refused(plan, here)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_to_is_refused(plan, path, here, mode):
    path.chmod(mode)
    assert "others may write to it" in _refused(plan, here)


def test_a_folder_that_others_may_write_to_is_refused(plan, path, here):
    path.parent.chmod(0o777)
    assert "others may write to its folder" in _refused(plan, here)


def test_a_compiler_cache_that_others_may_write_to_is_not_written_to(plan, path, here):
    here.mkdir()
    here.chmod(0o777)
    assert "others may write to the compiler's cache folder" in (bundle.unpack(plan) or "")
    assert not _unpacked(here)


def test_a_bundle_above_the_limit_is_neither_written_nor_read(plan, path, here, cache, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_BYTES", 200)
    assert "larger than 200 bytes" in _refused(plan, here)
    with pytest.raises(bundle.BrokenError, match="would take"):
        bundle.write(plan, cache)


def test_a_full_disk_is_a_reason(plan, path, here):
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, most[1]))
    try:
        reason = bundle.unpack(plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert "File too large" in (reason or "")
    assert not _unpacked(here)


def test_nothing_compiled_is_no_bundle(plan, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(bundle.BrokenError, match="nothing was compiled"):
        bundle.write(plan, tmp_path / "empty")


def test_it_goes_with_its_plan(plan, path, store):
    assert store.remove(plan.path) is None
    assert not path.exists()


def test_it_goes_when_its_plan_is_moved_aside(plan, path, store):
    Path(plan.path).write_bytes(b"garbled")
    store.get(plan.key, Plan)
    assert not path.exists()
    assert len(store.quarantined()) == 1


def test_lists_of_plans_do_not_show_it(plan, path, store):
    assert [entry.path for entry in store.entries()] == [Path(plan.path)]
