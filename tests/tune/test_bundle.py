from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from steadytorch.compiled import bundle, model_digest, package
from steadytorch.process.worker import Fault, WorkerFault
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.serve.plan import Plan
from steadytorch.tune import bundle as bundle_module
from steadytorch.tune.bundle import keep_bundle
from steadytorch.tune.package import PackagingResult
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.workload.workload import Workload

COMPILE = (TransformSpec("compile", (("mode", "default"), ("freezing", True))),)

USE = """
import logging, sys
from pathlib import Path
import torch
from torch import nn
import steadytorch as steady
from steadytorch.compiled import bundle
from steadytorch.serve.plan import load_plan

logging.basicConfig(level=logging.WARNING)
plan, cache = load_plan(sys.argv[1]), Path(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()
x = torch.randn(1, 3, 8, 8)
fast = steady.optimize(model, store=Path(sys.argv[1]).parents[1], canary=False, bundle=True)

def check(hits):
    torch.testing.assert_close(fast(x), model(x))
    assert fast.report().hits == hits, fast.report()

check(1)
check(2)
assert not {"torch._dynamo", "torch._inductor"} & set(sys.modules), "the compiler was loaded"
assert not cache.exists(), "something was unpacked"
with torch.no_grad():
    model[0].weight.mul_(2)
check(2)
model.load_state_dict({name: 4 * held for name, held in model.state_dict().items()})
check(2)
fast.refresh()
assert bundle.unpack(plan) is None
kept = set(cache.rglob("*.so"))
assert kept
check(3)
assert set(cache.rglob("*.so")) == kept, "compiled anew"
with torch.no_grad():
    for held in [*model.parameters(), *model.buffers()]:
        held.copy_(held / 4)
    model[0].weight.div_(2)
fast.refresh()
check(4)
"""


def _workload() -> Workload:
    torch.manual_seed(0)
    return Workload(nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), (torch.ones(2, 8),))


@pytest.fixture
def stored(keep_unmeasured) -> Callable[[Workload, Path, Candidate], Plan]:
    """A plan under the key of a search, as if the search had chosen the candidate."""
    return lambda workload, store, candidate: keep_unmeasured(
        Session(workload, SearchOptions(), "cpu", store), candidate
    )


def _works(monkeypatch, at_work):
    """Has this done in the place of a worker."""
    monkeypatch.setattr(bundle_module, "run_in_worker", at_work)


@pytest.mark.slow
def test_a_fresh_process_needs_no_compiler_and_with_other_weights_no_kernel_anew(kept, tmp_path):
    cache = tmp_path / "inductor"
    done = subprocess.run(
        [sys.executable, "-c", USE, str(kept.plan.path), str(cache)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "WARNING:steadytorch" in line]
    assert len(said) == 2, done.stderr
    assert "the model changed" in said[0]
    assert said[1].endswith("compiled again: its package was made for other weights or attributes")


def _fault(*given, **arguments):
    raise WorkerFault(Fault.SIGNAL, "segmentation fault (SIGSEGV)")


def test_workers_use_the_headers_that_the_compiler_has_ready(tmp_path, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    own, shared = tmp_path / "worker", tmp_path / "tmp"
    for folder in (own, shared):
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    bundle_module.share_headers(own)
    headers = Path(default_cache_dir()) / "precompiled_headers"
    assert headers.is_relative_to(shared)
    (headers / "made").touch()
    monkeypatch.setattr("tempfile.tempdir", str(own))
    assert (Path(default_cache_dir()) / "precompiled_headers" / "made").exists()


def test_headers_of_another_user_are_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(Path, "owner", lambda path: path.name)
    own = tmp_path / "worker"
    own.mkdir()
    bundle_module.share_headers(own)
    assert not list(own.iterdir())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: {"made": None, "reason": "it cannot be exported"}, "it cannot be exported"),
        (_fault, "its worker failed: segmentation fault (SIGSEGV)"),
    ],
)
def test_a_bundle_without_a_package_is_a_bundle_and_it_is_said(
    stored, tmp_path, caplog, monkeypatch, answer, reason
):
    plan, asked = stored(_workload(), tmp_path, COMPILE), []

    def at_work(plan, device, directory, cache, method, **arguments):
        asked.append(method)
        cache.mkdir(exist_ok=True)
        (cache / "kernel.so").write_bytes(b"code")
        return answer() if method == "set_up_packaged" else None

    _works(monkeypatch, at_work)
    assert keep_bundle(plan, _workload(), "cpu") is None
    assert asked == ["set_up_packaged"] + ["set_up"] * (answer is _fault)
    assert [r.getMessage() for r in caplog.records] == [
        f"the bundle of plan {plan.id} has no package: {reason}"
    ]
    assert bundle.fault(plan) is None
    assert keep_bundle(plan, _workload(), "cpu") is None
    assert len(caplog.records) == 1


def test_a_model_that_cannot_be_compared_has_no_package(stored, tmp_path, caplog, monkeypatch):
    workload, asked = _workload(), []
    workload.model[0].register_forward_hook(_fault)
    plan = stored(workload, tmp_path, COMPILE)

    def at_work(plan, device, directory, cache, method, **arguments):
        asked.append(method)
        cache.mkdir()
        (cache / "kernel.so").write_bytes(b"code")

    _works(monkeypatch, at_work)
    assert keep_bundle(plan, workload, "cpu") is None
    assert asked == ["set_up"]
    assert "has no package: a module has a hook" in caplog.text


def test_a_model_that_changes_while_it_is_saved_has_no_bundle(
    stored, tmp_path, caplog, monkeypatch
):
    workload, save = _workload(), bundle_module.save_payload
    plan = stored(workload, tmp_path, COMPILE)

    def changed(workload, directory):
        with torch.no_grad():
            workload.model[0].weight.mul_(2)
        save(workload, directory)

    monkeypatch.setattr(bundle_module, "save_payload", changed)
    _works(monkeypatch, _fault)
    assert keep_bundle(plan, workload, "cpu") == "the model changed while it was being saved"
    assert f"no bundle for plan {plan.id}: the model changed" in caplog.text


@pytest.mark.slow
def test_a_package_that_is_too_large_is_left_out(kept, caplog, monkeypatch):
    most, made = kept.file.stat().st_size - 1, _described(kept).made

    def at_work(plan, device, directory, cache, method, file, **arguments):
        cache.mkdir()
        (cache / "kernel.so").write_bytes(b"code")
        Path(file).write_bytes(kept.file.read_bytes())
        return msgspec.to_builtins(PackagingResult(made))

    _works(monkeypatch, at_work)
    monkeypatch.setattr(bundle_module, "check_in_worker", lambda outcome, *rest: outcome)
    monkeypatch.setattr(bundle, "MOST_BYTES", most)
    with torch.no_grad():
        kept.model[0].weight.mul_(2)
    assert keep_bundle(kept.plan, Workload(kept.model, (kept.x,)), "cpu") is None
    assert f"it has {most + 1} bytes, over the limit of {most}" in caplog.text
    assert not kept.file.exists()


CRASH = """
#include <stdlib.h>
__attribute__((constructor)) static void crash(void) { abort(); }
"""


@pytest.mark.slow
def test_a_package_that_crashes_a_fresh_process_is_left_out(kept, caplog, monkeypatch, tmp_path):
    (tmp_path / "crash.c").write_text(CRASH)
    library = tmp_path / "crash.so"
    subprocess.run(["gcc", "-shared", "-o", library, tmp_path / "crash.c"], check=True)
    made, at_work = _described(kept).made, bundle_module.run_in_worker

    def spoiled(plan, device, directory, cache, method, **arguments):
        if method == "check_package":
            return at_work(plan, device, directory, cache, method, **arguments)
        cache.mkdir()
        (cache / "kernel.so").write_bytes(b"code")
        with zipfile.ZipFile(arguments["file"], "w") as archive:
            archive.write(library, "p/data/aotinductor/model/a.wrapper.so")
        return msgspec.to_builtins(PackagingResult(made))

    _works(monkeypatch, spoiled)
    with torch.no_grad():
        kept.model[0].weight.mul_(2)
    assert keep_bundle(kept.plan, Workload(kept.model, (kept.x,)), "cpu") is None
    assert "a fresh process cannot use it: " in caplog.text
    assert "SIGABRT" in caplog.text
    assert not kept.file.exists()


@pytest.mark.parametrize(
    ("answer", "fault"), [(lambda: "", ""), (lambda: "output 0 is off", "output 0 is off")]
)
@pytest.mark.slow
def test_a_fresh_process_has_the_last_word(kept, answer, fault):
    outcome = PackagingResult(_described(kept).made)
    found = bundle_module.check_in_worker(outcome, lambda method, **arguments: answer(), {})
    assert found == (PackagingResult(None, fault) if fault else outcome)


@pytest.mark.slow
def test_a_bundle_whose_package_is_for_other_weights_is_made_anew(kept, monkeypatch):
    workload, made = Workload(kept.model, (kept.x,)), []
    monkeypatch.setattr(bundle_module, "build", lambda *given: made.append(given[3]) or "")
    assert keep_bundle(kept.plan, workload, "cpu") is None
    assert not made
    with torch.no_grad():
        kept.model[0].weight.mul_(2)
    assert keep_bundle(kept.plan, workload, "cpu") is None
    assert made == [model_digest.digest(kept.model)]


def _described(kept):
    return package.decoded(bundle.read(kept.plan).package or b"")


def test_a_plan_that_compiles_nothing_has_no_bundle(stored, tmp_path):
    plan = stored(_workload(), tmp_path, (TransformSpec("inference_mode"),))
    assert keep_bundle(plan, _workload(), "cpu") == "the plan compiles nothing"
    assert not list(tmp_path.rglob("*.bundle"))


class _Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such thing")


@pytest.mark.slow
def test_a_worker_that_fails_is_a_reason(stored, tmp_path, caplog):
    plan = stored(_workload(), tmp_path, COMPILE)
    reason = keep_bundle(plan, Workload(_Fails().eval(), (torch.ones(2, 8),)), "cpu")
    assert "its worker failed" in (reason or "")
    assert [r.getMessage() for r in caplog.records] == [f"no bundle for plan {plan.id}: {reason}"]


def test_a_plan_without_its_bundle_is_served_all_the_same(stored, tmp_path, caplog):
    import steadytorch as steady

    workload = _workload()
    plan = stored(workload, tmp_path, (TransformSpec("inference_mode"),))
    fast = steady.optimize(workload.model, store=tmp_path, bundle=True, canary=False)
    torch.testing.assert_close(fast(*workload.inputs), workload.model(*workload.inputs))
    assert fast.report().hits == 1
    assert bundle.fault(plan) == "it has no bundle"
    assert not caplog.records


def test_what_compile_is_to_take_is_found_only_where_asked_for(stored, tmp_path):
    plan = stored(_workload(), tmp_path, COMPILE)
    assert plan.resolution().prebuilt is None
    assert plan.resolution(bundle=True).prebuilt is not None
    nothing = stored(_workload(), tmp_path / "other", (TransformSpec("inference_mode"),))
    assert nothing.resolution(bundle=True).prebuilt is None
