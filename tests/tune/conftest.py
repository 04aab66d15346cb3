from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from steadytorch import transforms
from steadytorch.plan.record import CompilerChoices
from steadytorch.tune.session import Session

from ..verification.conftest import process_settings  # noqa: F401

HERE = Path(__file__).parent
TRAINING = HERE.parent / "training"


def _load(name: str, folder: Path = HERE) -> None:
    """Loads a module shared by several test files from its path, since tests are not a package."""
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


_load("trained", TRAINING)
_load("diffusing")
_load("faulty")
_load("scripted")
_load("simulated")
_load("stored")


@pytest.fixture(scope="module")
def faulty_transforms():
    """Registers the transforms of faulty.py here, and lets workers import that file."""
    with pytest.MonkeyPatch.context() as patch:
        registry, positions = sys.modules["faulty"].extended()
        patch.setattr(transforms, "REGISTRY", registry)
        patch.setattr(transforms, "POSITIONS", positions)
        patch.setattr(sys, "path", [*sys.path, str(HERE), str(TRAINING)])
        yield


@pytest.fixture
def no_process_left():
    """Fails the test if a process that it started is still alive at its end."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left


@pytest.fixture
def model():
    return sys.modules["stored"].small_model()


@pytest.fixture
def x():
    import torch

    return torch.randn(2, 8)


@pytest.fixture
def store(tmp_path, model, x):
    """One plan, for `x`."""
    stored = sys.modules["stored"]
    return stored.store_plan(tmp_path / "store", stored.make_plan(model, x))


@pytest.fixture
def searches(monkeypatch):
    """Counted searches that end at once, or when released."""
    stored = sys.modules["stored"]
    made = SimpleNamespace(keys=[], threads=[], may_end=threading.Event(), error=None)
    made.may_end.set()
    made.has_begun = threading.Event()

    def search(self, watcher=None):
        made.threads.append(threading.current_thread())
        made.keys.append(self.key.digest)
        made.has_begun.set()
        assert made.may_end.wait(60)
        if made.error is not None:
            raise made.error
        return SimpleNamespace(
            interrupted=False,
            chosen=stored.CANDIDATE,
            evidence=stored.evidence,
            compiler=CompilerChoices(),
        )

    monkeypatch.setattr(Session, "search", search)
    return made
