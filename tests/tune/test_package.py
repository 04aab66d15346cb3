from __future__ import annotations

import os
import shutil
import weakref

import msgspec
import pytest
import torch
from torch import nn

from steadytorch.bench.bench_worker import save_payload
from steadytorch.compiled import bundle, package
from steadytorch.compiled.aot_inductor import Package
from steadytorch.compiled.prebuilt import Task
from steadytorch.runtime.state import DRAWS, KEEPS_STATE
from steadytorch.transforms import ambient
from steadytorch.tune import package as made_here
from steadytorch.tune.package import NEVER_ASKED, Packager, PackagingHandler, PackagingResult
from steadytorch.workload.workload import Workload

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def ready(kept, monkeypatch):
    """Copies the package of `kept` instead of compiling ahead."""
    monkeypatch.setattr(made_here, "make", lambda *given: shutil.copy(kept.file, given[-1]))


@pytest.fixture
def packages(monkeypatch):
    """Weak references to the loaded packages."""
    loaded = []

    def load(*given, kind=Package):
        found = kind(*given)
        loaded.append(weakref.ref(found))
        return found

    monkeypatch.setattr(made_here, "Package", load)
    return loaded


def _packaged(model, x, tmp_path, compiled=None):
    """A packager's outcome for a model, and its own output."""
    packager = Packager(tmp_path / "p.pt2", "same", None)
    task = Task(Workload(model, (x,)), dict, lambda: compiled or model)
    call = packager(task)
    return call(x), packager.outcome, call


def _made(kept):
    """What the bundle says of where its package was made."""
    return package.decoded(bundle.read(kept.plan).package).made


def test_what_agrees_is_kept_and_answers(kept, ready, tmp_path):
    answer, outcome, call = _packaged(kept.model, kept.x, tmp_path)
    assert outcome.reason == ""
    assert outcome.made is not None
    assert outcome.made.taken == Workload(kept.model, (kept.x,)).signature()
    torch.testing.assert_close(answer, kept.model(kept.x))
    with pytest.raises(Exception, match="cannot be run here"):
        call(torch.ones(2, 3, 8, 8))
    assert msgspec.convert(msgspec.to_builtins(outcome), PackagingResult) == outcome


def test_it_names_the_sources_of_this_package(kept):
    made = _made(kept)
    assert "steadytorch.transforms.channels_last" in made.sources
    assert not any("tune" in name or "torch.nn" in name for name in made.sources)


def test_what_does_not_agree_is_refused_and_what_compiles_answers(kept, ready, tmp_path):
    kept.model[0].weight.mul_(1.01)
    answer, outcome, _ = _packaged(kept.model, kept.x, tmp_path)
    assert outcome.made is None
    assert "its outputs differ from torch.compile's: output 0 is off by" in outcome.reason
    assert torch.equal(answer, kept.model(kept.x))


def test_a_wider_class_allows_what_the_same_class_does_not(kept, ready, tmp_path):
    kept.model[0].weight.mul_(1.001)
    packager = Packager(tmp_path / "p.pt2", "fp16", None)
    packager(Task(Workload(kept.model, (kept.x,)), dict, lambda: kept.model))(kept.x)
    assert packager.outcome.made is not None


def test_it_is_compared_with_what_compile_gives_not_with_the_model(kept, ready, tmp_path):
    _, outcome, _ = _packaged(kept.model, kept.x, tmp_path, lambda x: 2 * kept.model(x))
    assert "its outputs differ from torch.compile's" in outcome.reason


@pytest.fixture
def handler(kept, tmp_path):
    save_payload(Workload(kept.model, (kept.x,)), tmp_path)
    handler = PackagingHandler(tmp_path)
    handler.load("cpu", ambient())
    return handler


def test_a_worker_makes_a_package_and_lets_go_of_it(kept, ready, tmp_path, handler, packages):
    candidate, file = msgspec.to_builtins(kept.plan.candidate), tmp_path / "p.pt2"
    found = handler.set_up_packaged(candidate, os.fspath(file), None)
    assert msgspec.convert(found, PackagingResult).made is not None
    assert [package() for package in packages] == [None]


def test_another_worker_finds_it_in_order_and_lets_go_of_it(kept, handler, packages):
    candidate = msgspec.to_builtins(kept.plan.candidate)
    made = msgspec.to_builtins(_made(kept))
    assert handler.check_package(candidate, os.fspath(kept.file), made, None) == ""
    assert [package() for package in packages] == [None]


def test_another_worker_sees_what_it_answers_wrongly(kept, tmp_path, handler):
    candidate = msgspec.to_builtins(kept.plan.candidate)
    made = msgspec.to_builtins(_made(kept))
    handler.workload.model[0].weight.mul_(1.01)
    answer = handler.check_package(candidate, os.fspath(kept.file), made, None)
    assert "output 0 is off by" in answer


class Counts(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Draws(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Depends(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Counts(), KEEPS_STATE), (Draws(), DRAWS), (Depends(), "the model cannot be exported")],
)
def test_what_cannot_be_packaged_is_a_reason(model, reason, tmp_path):
    _, outcome, _ = _packaged(model, torch.ones(3), tmp_path)
    assert outcome.made is None
    assert outcome.reason.startswith(reason)


def test_weights_that_are_too_large_are_a_reason_before_anything_is_compiled(
    kept, tmp_path, monkeypatch
):
    monkeypatch.setattr(made_here, "MOST_BYTES", 100)
    monkeypatch.setattr(made_here, "make", lambda *given: pytest.fail("compiled"))
    _, outcome, _ = _packaged(kept.model, kept.x, tmp_path)
    assert outcome.reason.endswith("bytes, over the limit of 100")


def test_outputs_in_memory_of_others_are_refused(kept, tmp_path, monkeypatch):
    shared = torch.ones(3)
    monkeypatch.setattr(made_here, "make", lambda *given: None)
    monkeypatch.setattr(made_here, "Package", lambda *given: lambda x: shared)
    _, outcome, _ = _packaged(nn.Identity(), torch.ones(3), tmp_path)
    assert outcome.reason == "its outputs share memory with inputs or earlier outputs"


def test_any_error_is_a_reason(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(made_here, "make", lambda *given: 1 / 0)
    _, outcome, _ = _packaged(kept.model, kept.x, tmp_path)
    assert outcome == PackagingResult(None, "ZeroDivisionError: division by zero")


def test_a_mode_that_never_asks_is_a_reason(tmp_path):
    assert Packager(tmp_path / "p.pt2", "same", None).outcome == PackagingResult(None, NEVER_ASKED)


def test_the_compiler_s_files_are_kept_apart(kept, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    monkeypatch.setattr(
        made_here, "make", lambda *given: seen.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    )
    _packaged(kept.model, kept.x, tmp_path)
    assert seen == [f"{tmp_path / 'p.pt2'}.cache"]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
