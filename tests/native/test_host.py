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

pytestmark = pytest.mark.skipif(host._compiler() is None, reason="no C++ compiler to make it with")


@pytest.fixture(autouse=True)
def unloaded(monkeypatch):
    monkeypatch.setattr(host, "_loaded", None)


@pytest.fixture
def compiled(native_caches, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_caches))


@pytest.fixture
def bare(tmp_path, monkeypatch) -> Path:
    """A folder of caches that has nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "steadytorch" / "native"


@pytest.fixture
def compiler(bare, monkeypatch):
    """A compiler that does as the test says."""

    def write(script: str) -> Path:
        path = bare.parent.parent / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        monkeypatch.setenv("CXX", str(path))
        return path

    return write


def left(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def network() -> nn.Module:
    layers = [nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.ReLU(), nn.Conv2d(2, 2, 1))]
    return nn.Sequential(*layers).eval()


def remembered(model: nn.Module) -> Weights:
    weights = Weights(model)
    weights.remember()
    return weights


def replaced(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.ones(2, 2, 1, 1))


def swapped(model: nn.Module) -> None:
    torch.utils.swap_tensors(model[0].bias, nn.Parameter(torch.ones(2)))


def swapped_for_what_counts_nothing(model: nn.Module) -> None:
    with torch.inference_mode():
        other = nn.Parameter(torch.ones(2), requires_grad=False)
    model[0].bias.requires_grad_(False)
    torch.utils.swap_tensors(model[0].bias, other)


def written(model: nn.Module) -> None:
    with torch.no_grad():
        model[2][1].weight.add_(1)


def moved(model: nn.Module) -> None:
    model[1].running_mean.data = model[1].running_mean.clone()


def renamed(model: nn.Module) -> None:
    parts = model._modules
    parts["a"] = parts.pop("0")


CHANGES = [
    written,
    moved,
    replaced,
    swapped,
    swapped_for_what_counts_nothing,
    renamed,
    lambda model: model.double(),
    lambda model: model.load_state_dict(model.state_dict()),
    lambda model: setattr(model[0], "bias", None),
    lambda model: delattr(model[1], "running_mean"),
    lambda model: model[2].append(nn.ReLU()),
    lambda model: model[2].pop(0),
    lambda model: model[1].register_buffer("more", torch.ones(1)),
    lambda model: model[2][0].train(),
    lambda model: delattr(model[2][0], "training"),
    lambda model: model[2][0].register_forward_hook(lambda *given: None),
    lambda model: model[0].register_forward_pre_hook(lambda *given: None),
]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen_until_it_is_remembered(change):
    model = network()
    weights = remembered(model)
    assert weights.interpreted_for == ""
    assert not weights.changed()
    change(model)
    assert weights.changed()
    assert weights.changed()


@pytest.mark.usefixtures("compiled")
def test_calls_and_gradients_are_no_change():
    model = network()
    weights = remembered(model)
    model(torch.ones(1, 2, 3, 3)).sum().backward()
    model.zero_grad()
    model[0].weight.requires_grad_(False)
    assert not weights.changed()


@pytest.mark.usefixtures("compiled")
def test_hooks_that_stand_in_another_order_than_they_were_added_in_are_no_change():
    model = network()
    model[0].register_forward_hook(lambda *given: None)
    model[0].register_forward_hook(lambda *given: None, prepend=True)
    assert not remembered(model).changed()


@pytest.mark.usefixtures("compiled")
def test_a_hook_on_all_modules_is_a_change():
    weights = remembered(network())
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        assert weights.changed()
    finally:
        handle.remove()
    assert not weights.changed()


@pytest.mark.usefixtures("compiled")
def test_tensors_of_other_classes_are_looked_at_in_python():
    class Own(torch.Tensor):
        pass

    model = network()
    model[0].register_buffer("own", torch.ones(2).as_subclass(Own))
    weights = remembered(model)
    assert weights.interpreted_for == "weights that are no plain tensors"
    assert not weights.changed()
    model[0].own.add_(1)
    assert weights.changed()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "given",
    [
        (),
        ((), b"", (), (), (), ()) * 2,
        ((), b"0" * 16, (), (), (), ()),
        ((torch.ones(1),), b"", (), (), (), ()),
        ((), b"", ({},), (), (), ()),
        ((), b"", (), (), ({},), ()),
        ([], b"", (), (), (), ()),
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
    with torch.inference_mode():
        assert module.traits((torch.ones(2),)) is None
    with pytest.raises(TypeError, match="tuple"):
        module.traits([torch.ones(2)])


@pytest.mark.usefixtures("compiled")
def test_it_is_made_once():
    assert host.begin() is None


def test_without_it_python_looks_and_says_why(bare):
    model = network()
    weights = remembered(model)
    assert "not compiled for this PyTorch yet" in weights.interpreted_for
    written(model)
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
    path = host._path()
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
    assert f"its compiler failed, see {log}" in host.load()[1]
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
    """A compiler that has begun, with a process of its own that goes on; and that one's number."""
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
    assert not end(making)
    assert left(bare) == []
    assert making._process.returncode is not None
    gone = time.monotonic() + 30
    while is_running(child) and time.monotonic() < gone:
        time.sleep(0.01)
    assert not is_running(child)
    making.stop()  # once more does no harm


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
def test_without_a_compiler_nothing_is_begun(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert host.begin() is None
    assert "there is no C++ compiler" in host.load()[1]


def test_without_the_interpreters_lock_it_is_not_used(native_caches, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_caches))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED")
    assert "does without" in host.load()[1]
    assert host.begin() is None


def test_without_a_home_nothing_is_begun_or_loaded(monkeypatch):
    monkeypatch.setattr(host, "cache_folder", lambda name: None)
    assert host.begin() is None
    assert "there is no folder for caches" in host.load()[1]


def test_a_folder_that_cannot_be_written_is_done_without(bare, monkeypatch):
    bare.parent.mkdir()
    bare.write_text("a file in its place")
    assert host.begin() is None
    assert os.path.isfile(bare)
