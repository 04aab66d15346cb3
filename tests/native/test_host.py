"""The host's compiled code: how it is made, and what it says of a model's weights."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from steadytorch.caches import make_private
from steadytorch.native import host
from steadytorch.runtime.weights import Weights

pytestmark = pytest.mark.skipif(
    host.compiler_command() is None, reason="no C++ compiler to make it with"
)


@pytest.fixture(autouse=True)
def unloaded(monkeypatch):
    monkeypatch.setattr(host, "_loaded", None)


@pytest.fixture
def compiled(native_caches, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_caches))


@pytest.fixture
def bare(tmp_path, monkeypatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "steadytorch" / "native"


@pytest.fixture
def compiler(bare, monkeypatch):
    """A scripted compiler."""

    def write(script: str) -> Path:
        path = bare.parent.parent / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        monkeypatch.setenv("CXX", str(path))
        return path

    return write


def left(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def remembered(model: nn.Module) -> Weights:
    weights = Weights(model)
    weights.remember()
    return weights


@pytest.mark.usefixtures("compiled")
def test_what_is_compiled_is_used():
    model = nn.Linear(2, 2)
    weights = remembered(model)
    assert weights.interpreted_for == ""
    assert not weights.changed()
    model.bias.data = torch.ones(2)
    assert weights.changed()


@pytest.mark.usefixtures("compiled")
def test_tensors_of_other_classes_are_looked_at_in_python():
    class Own(torch.Tensor):
        pass

    model = nn.Linear(2, 2)
    model.register_buffer("own", torch.ones(2).as_subclass(Own))
    weights = remembered(model)
    assert weights.interpreted_for == "some weights are not plain tensors"
    assert not weights.changed()
    model.own.add_(1)
    assert weights.changed()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "given",
    [
        (),
        ((), b"", (), (), (), (), ()) * 2,
        ((), b"0" * 16, (), (), (), (), ()),
        ((torch.ones(1),), b"", (), (), (), (), ()),
        ((), b"", (b"0" * 8,), (), (), (), ()),
        ((), b"", ("0",), (), (), (), ()),
        ((), b"", (), ({},), (), (), ()),
        ((), b"", (), (), (), ({},), ()),
        ([], b"", (), (), (), (), ()),
    ],
)
def test_what_does_not_belong_together_is_refused(given):
    module, _ = host.load()
    assert module is not None
    with pytest.raises(TypeError):
        module.changed(*given)


@pytest.mark.usefixtures("compiled")
def test_what_are_no_tensors_have_no_traits():
    module, _ = host.load()
    assert module is not None
    assert module.traits((torch.ones(2), 3)) is None
    assert module.traits((torch.ones(2).to_sparse(),)) is None
    with pytest.raises(TypeError, match="tuple"):
        module.traits([torch.ones(2)])


@pytest.mark.usefixtures("compiled")
def test_it_is_made_once():
    assert host.begin() is None


def test_without_it_python_looks_and_says_why(bare):
    model = nn.Linear(2, 2)
    weights = remembered(model)
    assert "not compiled for this PyTorch yet" in weights.interpreted_for
    model.bias.data = torch.ones(2)
    assert weights.changed()


def test_what_others_may_write_to_is_not_loaded(native_caches, bare):
    bare.parent.mkdir()
    shutil.copytree(native_caches / "steadytorch" / "native", bare)
    (path,) = bare.iterdir()
    path.chmod(0o666)
    assert host.load() == (None, f"others may write to {path}")
    path.chmod(0o600)
    for folder in (bare, bare.parent):
        folder.chmod(0o777)
        assert host.load() == (None, f"others may write to {folder}")
        folder.chmod(0o700)
    assert host.load()[0] is not None


@pytest.mark.parametrize("content", ["", "no library"])
def test_what_is_no_library_is_not_loaded_and_made_anew(bare, compiler, content):
    path = host.code_path()
    make_private(path.parent)
    path.write_text(content)
    path.chmod(0o600)
    module, reason = host.load()
    assert module is None
    assert "cannot be loaded" in reason
    compiler("exit 0")
    making = host.begin()
    assert making is not None
    making.stop()


@pytest.mark.usefixtures("compiled")
def test_a_module_of_the_same_name_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "host", "the user's own")
    assert host.load()[0] is not None
    assert sys.modules["host"] == "the user's own"


@pytest.mark.parametrize("looked_at", ["exists", "stat", "read_bytes"])
def test_a_cache_that_cannot_be_read_is_done_without(native_caches, monkeypatch, looked_at):
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_caches))

    def refuse(*given, **named):
        raise PermissionError(13, "no way in")

    monkeypatch.setattr(Path, looked_at, refuse)
    monkeypatch.setattr(host, "Making", refuse)
    module, reason = host.load()
    assert module is None
    assert "no way in" in reason
    assert host.begin() is None


def test_what_a_failing_compiler_said_is_kept(bare, compiler):
    compiler("echo a header is missing >&2; exit 1")
    making = host.begin()
    assert making is not None
    assert not making.finish(60)
    assert left(bare) == [".log"]
    (log,) = bare.iterdir()
    assert log.read_text() == "a header is missing\n"
    assert f"the C++ compiler failed, see {log}" in host.load()[1]
    making = host.begin()  # once more: what was missing may be there
    assert making is not None
    making.stop()


HANGS = """
touch "$TMPDIR/rest.s"
while [ $# -gt 1 ]; do [ $1 = -o ] && touch $2; shift; done
sleep 1000 &
echo $! > "$PIDS"
wait
"""


@pytest.fixture
def hanging(bare, compiler, monkeypatch):
    """A running compiler with a child process, and the pid of that child."""
    pids = bare.parent.parent / "pids"
    monkeypatch.setenv("PIDS", str(pids))
    compiler(HANGS)
    making = host.begin()
    assert making is not None
    while not (pids.exists() and pids.read_text().endswith("\n")):
        time.sleep(0.01)
    return making, int(pids.read_text())


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("end", [lambda making: making.finish(0.01), lambda making: making.stop()])
def test_a_compiler_that_takes_too_long_is_ended_and_leaves_nothing(bare, hanging, end):
    making, child = hanging
    assert is_running(child)
    compiler = psutil.Process(child).ppid()
    assert not end(making)
    assert left(bare) == []
    assert not psutil.pid_exists(compiler)  # nor a zombie
    gone = time.monotonic() + 30
    while is_running(child) and time.monotonic() < gone:
        time.sleep(0.01)
    assert not is_running(child)
    making.stop()  # once more does no harm


def test_it_is_told_whether_a_compiler_is_through(hanging, compiler):
    making, _ = hanging
    assert not making.is_through(0.01)
    making.stop()
    assert making.is_through(0)


def test_it_is_missing_where_it_is_not_and_can_be_made(bare, compiler, native_caches, monkeypatch):
    compiler("")
    assert host.is_missing()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not host.is_missing()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_caches))
    assert not host.is_missing()
    monkeypatch.setattr(host, "_loaded", None)
    monkeypatch.setattr(host, "cache_folder", lambda name: None)
    assert not host.is_missing()


def test_a_compiler_that_a_signal_ended_has_not_failed(bare, compiler):
    compiler("kill -TERM $$")
    making = host.begin()
    assert making is not None
    assert not making.finish(60)
    assert left(bare) == []


def test_what_cannot_be_started_leaves_nothing(bare, compiler):
    path = compiler("")
    path.write_bytes(b"no program")
    assert host.begin() is None
    assert left(bare) == []


def test_the_command_may_have_words_of_its_own(bare, compiler, monkeypatch):
    path = compiler('echo "$1" >&2; exit 1')
    monkeypatch.setenv("CXX", f"{path} -m64")
    making = host.begin()
    assert making is not None
    making.finish(60)
    (log,) = bare.iterdir()
    assert log.read_text() == "-m64\n"


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("named", ["no-such-compiler", "'g++", '""'])
def test_without_a_compiler_nothing_is_begun(monkeypatch, named):
    monkeypatch.setenv("CXX", named)
    assert host.begin() is None
    assert "no C++ compiler was found" in host.load()[1]


def test_without_the_interpreters_lock_it_is_not_used(native_caches, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_caches))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED")
    assert "it needs the GIL" in host.load()[1]
    assert host.begin() is None


def test_without_a_home_nothing_is_begun_or_loaded(monkeypatch):
    monkeypatch.setattr(host, "cache_folder", lambda name: None)
    assert host.begin() is None
    assert "there is no cache folder" in host.load()[1]


def test_a_folder_that_cannot_be_written_is_done_without(bare, monkeypatch):
    bare.parent.mkdir()
    bare.write_text("a file in its place")
    assert host.begin() is None
    assert os.path.isfile(bare)
