"""What several rooms' tests share because it takes long to make: one bundle with its package."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

from steadytorch.device.host import usable_logical_cores
from steadytorch.native import host
from steadytorch.runtime import module as tuned_module
from steadytorch.runtime import weights
from steadytorch.serve.plan import Plan, load_plan

if TYPE_CHECKING:
    from steadytorch.results.candidate import Candidate
    from steadytorch.tune.session import Session


# How long an example takes says nothing here: other tests share the cores.
settings.register_profile("thorough", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("thorough"), max_examples=20)
settings.load_profile("fast")


class Kept(NamedTuple):
    """A stored plan with its bundle and package, and what they were made for."""

    plan: Plan
    model: nn.Module
    x: torch.Tensor

    @property
    def file(self) -> Path:
        """The package."""
        return Path(self.plan.path or "").with_suffix(".pt2")

    @property
    def store(self) -> Path:
        """The folder of the store."""
        return Path(self.plan.path or "").parents[1]


# Tests are no package: what several of their files share is loaded by its place.
_CONTRACT = "steadytorch_transforms_contract"
if _CONTRACT not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        _CONTRACT, Path(__file__).parent / "transforms" / "contract.py"
    )
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_CONTRACT] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_CONTRACT])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector passes over what is there before the tests; all of it stays in use."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Every second worker collects from the end: what one has rewritten, the other reads."""
    report = yield
    if isinstance(collector, pytest.Dir) and _collects_from_the_end():
        report.result.reverse()
    return report


def _collects_from_the_end() -> bool:
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2 == 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(every=n)`, all cases but every n-th are marked slow."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path)  # all workers must agree on the order
    cases: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            function = item.nodeid.partition("[")[0]
            if cases[function] % mark.kwargs["every"]:
                item.add_marker(pytest.mark.slow)
            cases[function] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: a container may have a few of the machine's cores."""
    return min(8, usable_logical_cores())


def _model() -> nn.Module:
    # Tensors of a few elements would be written into the code of kernels.
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()


@pytest.fixture(scope="session")
def keep_unmeasured() -> Callable[[Session, Candidate], Plan]:
    """Stores a candidate as the plan of a session, as if a search had chosen it."""
    from steadytorch.measure.measurement import summarize
    from steadytorch.plan.record import Speedup
    from steadytorch.tune.result import TuneResult

    def keep(session: Session, candidate: Candidate) -> Plan:
        timing = summarize([1000] * 20, "latency")
        found = TuneResult(
            baseline=timing,
            winner=timing,
            chosen=candidate,
            regime="memory-bound",
            candidates=(),
            not_applicable={},
            not_tried={},
            speedup=Speedup(1.0, None, None, "process", "tie", 0),
            break_even_calls=None,
            reference="float64",
            seconds=1.0,
        )
        return session.keep(found)

    return keep


def _made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first process of these tests to ask for it fills; the others wait."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            make(folder)
            (folder / "whole").touch()
    return folder


@pytest.fixture(scope="session")
def _kept_once(tmp_path_factory: pytest.TempPathFactory, keep_unmeasured: Any) -> Path:
    """The file of the plan; its bundle and its package lie beside it."""

    def keep(folder: Path) -> None:
        path = _kept_in(folder / "plans", keep_unmeasured)
        (folder / "path").write_text(os.fspath(path))

    return Path((_made_once(tmp_path_factory, "kept", keep) / "path").read_text())


def _kept_in(store: Path, keep_unmeasured: Any) -> Path:
    from steadytorch import transforms
    from steadytorch.device.facts import load_facts
    from steadytorch.tune.select import SearchOptions
    from steadytorch.tune.session import Session
    from steadytorch.workload.workload import Workload

    text = "fold_batch_norm + channels_last + compile(default, freezing)"
    chosen = transforms.parse(text, load_facts("cpu"))
    session = Session(Workload(_model(), (torch.ones(1, 3, 8, 8),)), SearchOptions(), "cpu", store)
    plan = keep_unmeasured(session, chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert session.keep_bundle(plan) is None
    assert plan.path is not None
    assert Path(plan.path).with_suffix(".pt2").exists()
    return Path(plan.path)


@pytest.fixture
def kept(_kept_once: Path, tmp_path: Path) -> Kept:
    """A copy of the bundle and its package, for one test to spoil."""
    store = tmp_path / "kept"
    shutil.copytree(_kept_once.parents[1], store)
    path = store / _kept_once.relative_to(_kept_once.parents[1])
    torch.manual_seed(1)
    return Kept(load_plan(path), _model(), torch.randn(1, 3, 8, 8))


@pytest.fixture(scope="session")
def native_caches(tmp_path_factory) -> Path:
    """A folder of caches with the compiled code of the host; making it takes some ten seconds."""
    if host.compiler_command() is None:
        pytest.skip("there is no C++ compiler to make the host's code with")

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(folder))
            assert host.Making().finish(200)

    return _made_once(tmp_path_factory, "native", make)


@pytest.fixture(scope="session")
def compiled_host(native_caches) -> Any:
    """The compiled code of the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(native_caches))
        patch.setattr(host, "_loaded", None)
        module, reason = host.load()
    assert module is not None, reason
    return module


@pytest.fixture(params=["interpreted", "compiled"])
def host_way(request, monkeypatch) -> str:
    """What a served call does on the host is interpreted, and then compiled."""
    found = (None, "for a test")
    if request.param == "compiled":
        found = (request.getfixturevalue("compiled_host"), "")
    for user in (tuned_module, weights):
        monkeypatch.setattr(user, "load", lambda: found)
    return request.param


class Repository:
    """A git repository in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *words: str) -> str:
        """Runs git, without the configuration of the user."""
        who = {f"GIT_{part}_{key}": "x@y" for part in ("AUTHOR", "COMMITTER") for key in KEYS}
        quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        done = subprocess.run(
            ["git", *words],
            cwd=self.root,
            env={**os.environ, **who, **quiet},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def write(self, **files: str) -> None:
        """Writes files; two underscores in a name stand for a slash, a single one for a dot."""
        for name, text in files.items():
            path = self.root / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def commit(self, **files: str) -> str:
        """Writes files and commits everything; returns the hash."""
        self.write(**files)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "change")
        return self.git("rev-parse", "HEAD").strip()

    def worktrees(self) -> int:
        """The number of its worktrees, with its own."""
        return self.git("worktree", "list").count("\n")


KEYS = ("NAME", "EMAIL")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """An empty git repository, with temporary folders of its own."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    return Repository(tmp_path / "repository")
