"""No fault of a package raises in the caller, runs invalid code or changes a number."""

from __future__ import annotations

import os
import stat
import zipfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from torch import nn

from steadytorch.compiled import bundle, model_digest, package
from steadytorch.compiled.package import Made, Packaged, packaged
from steadytorch.compiled.prebuilt import Task
from steadytorch.plan.files import BrokenError
from steadytorch.plan.store import Store
from steadytorch.results.candidate import TransformSpec
from steadytorch.serve.plan import Plan
from steadytorch.workload.workload import Workload

from ..serve.plans import make_plan

COMPILE = (TransformSpec("compile", (("mode", "default"), ("freezing", True))),)


class NotCompiled(NamedTuple):
    """A stored plan with a bundle and a package that are in order in all but their code."""

    plan: Plan
    model: nn.Module
    x: torch.Tensor

    @property
    def file(self) -> Path:
        return Path(self.plan.path).with_suffix(".pt2")

    @property
    def store(self) -> Path:
        return Path(self.plan.path).parents[1]


@pytest.fixture
def kept(request, tmp_path):
    """A bundle with a package; it holds real code for the slow tests, which compile it."""
    if request.node.get_closest_marker("slow"):
        return request.getfixturevalue("kept")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()
    x, store = torch.ones(1, 3, 8, 8), Store(tmp_path / "plans", second="")
    plan = make_plan(model, x, COMPILE)
    plan = msgspec.structs.replace(plan, path=str(store.put(plan.key, plan)))
    code = tmp_path / "code.pt2"
    code.write_bytes(bytes(range(256)) * 64)
    made = Made(Workload(model, x).signature(), model_digest.sources_of(lambda: _model_code(x)))
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "kernel.so").write_bytes(b"code")
    described = packaged(code, model_digest.digest(model), made)
    bundle.write(plan, tmp_path / "compiled", (code, described))
    return NotCompiled(plan, model, x)


def _model_code(x):
    return x + 1


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Where the compiler of this process keeps its files."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path / "inductor"


@pytest.fixture
def task(kept):
    workload = Workload(kept.model, (kept.x,))
    return Task(workload, dict, lambda: lambda *args: "compiled")


@pytest.fixture
def refused(kept, task, here, caplog):
    """Returns why the package is not used; checks that the bundle is unpacked instead."""

    def refused() -> str:
        assert bundle.source(kept.plan)(task) is None
        assert list(here.rglob("*.so"))
        (record,) = caplog.records
        line = record.getMessage()
        assert line.startswith(f"plan {kept.plan.id} is compiled again: ")
        return line.partition(": ")[2]

    return refused


def described(kept) -> Packaged:
    """What the bundle says of its package."""
    data = bundle.read(kept.plan).package
    assert data is not None
    return package.decoded(data)


def forge(kept, tmp_path, **changes) -> None:
    """Rewrites the bundle with valid digests for any content."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernel.so").write_bytes(b"code")
    content = kept.file.read_bytes()
    made = packaged(kept.file, model_digest.digest(kept.model), described(kept).made)
    kept.file.unlink()
    (tmp_path / "p").write_bytes(content)
    bundle.write(
        kept.plan, tmp_path / "cache", (tmp_path / "p", msgspec.structs.replace(made, **changes))
    )


@pytest.mark.slow
def test_a_package_in_order_is_used_and_nothing_is_unpacked(kept, task, here, caplog):
    call = bundle.source(kept.plan)(task)
    torch.testing.assert_close(call(kept.x), kept.model(kept.x))
    assert bundle.fault(kept.plan, model_digest.digest(kept.model)) is None
    assert not here.exists()
    assert not caplog.records


@pytest.mark.slow
def test_other_arguments_are_compiled_with_the_bundles_files(kept, task, here):
    call = bundle.source(kept.plan)(task)
    assert call(torch.ones(2, 3, 8, 8)) == "compiled"
    assert list(here.rglob("*.so"))


def test_only_the_user_can_read_it(kept):
    assert stat.S_IMODE(kept.file.stat().st_mode) == 0o600


def test_other_weights_are_not_served(kept, refused):
    with torch.no_grad():
        kept.model[1].running_mean[0] += 1e-3
    assert refused() == "its package was made for other weights or attributes"


def test_an_attribute_of_another_value_is_not_served(kept, refused):
    kept.model[1].eps = 1e-3
    assert refused() == "its package was made for other weights or attributes"


def test_a_model_that_cannot_be_compared_is_not_served(kept, refused):
    kept.model[0].register_forward_hook(lambda *arguments: None)
    assert refused() == "no package: a module has a hook, which compiled code would not call"


def test_other_sources_are_not_served(kept, tmp_path, refused):
    made = described(kept).made
    name = next(iter(made.sources))
    forge(kept, tmp_path, made=Made(made.taken, {**made.sources, name: "0" * 64}))
    assert refused() == f"its package was made from another version of {name}"


def test_a_package_that_is_gone_is_a_reason(kept, refused):
    kept.file.unlink()
    assert refused() == "it has no package"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_package_is_refused(kept, refused, share):
    whole = kept.file.read_bytes()
    kept.file.write_bytes(whole[: int(share * len(whole))])
    assert "bytes, expected" in refused()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_an_altered_package_is_refused(kept, refused, share):
    whole = bytearray(kept.file.read_bytes())
    whole[int(share * (len(whole) - 1))] ^= 1
    kept.file.write_bytes(whole)
    assert refused() == "its package was cut or altered: its digest does not match"


def _garbage(file):
    file.write_bytes(b"no archive at all")


def _cut(file):
    file.write_bytes(file.read_bytes()[:5000])


def _no_library(file):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("p/data/aotinductor/model/a.wrapper.so", b"\x7fELF")


@pytest.mark.parametrize("spoil", [_garbage, _cut, _no_library])
def test_a_package_that_pytorch_cannot_load_is_a_reason(kept, tmp_path, refused, spoil):
    spoil(kept.file)
    forge(kept, tmp_path)
    assert "its package " in refused()


@pytest.mark.slow
def test_a_package_for_other_nesting_is_a_reason(kept, tmp_path, refused):
    made = described(kept).made
    taken = msgspec.structs.replace(made.taken, structure="TreeSpec(list)")
    forge(kept, tmp_path, made=Made(taken, made.sources))
    assert "nested as" in refused()


def test_a_link_is_refused(kept, refused, tmp_path):
    kept.file.rename(tmp_path / "elsewhere")
    kept.file.symlink_to(tmp_path / "elsewhere")
    assert refused() == "its package was refused: it is a symbolic link"


def test_a_fifo_is_refused_at_once(kept, refused):
    kept.file.unlink()
    os.mkfifo(kept.file)
    assert refused() == "its package was refused: it is not a regular file"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_user_s_is_refused(kept, refused):
    os.chown(kept.file, 4321, -1)
    assert "belongs to user 4321" in refused()


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_to_is_refused(kept, refused, mode):
    kept.file.chmod(mode)
    assert refused() == "its package was refused: others may write to it"


@pytest.mark.slow
def test_a_file_swapped_in_during_loading_is_not_loaded(kept, task, monkeypatch):
    load = package.Package

    def replaced(file, *rest):
        kept.file.unlink()
        kept.file.write_bytes(b"something else")
        return load(file, *rest)

    monkeypatch.setattr(package, "Package", replaced)
    call = bundle.source(kept.plan)(task)
    torch.testing.assert_close(call(kept.x), kept.model(kept.x))


def test_a_bundle_that_is_broken_leaves_its_package_alone(kept, task, caplog):
    path = bundle.path_of(kept.plan)
    path.write_bytes(path.read_bytes()[:-1])
    assert bundle.source(kept.plan)(task) is None
    assert [r.getMessage() for r in caplog.records] == [
        f"plan {kept.plan.id} is compiled again: its bundle was cut or altered: its digest does "
        "not match"
    ]


@pytest.mark.parametrize("data", [b"", b"\x80", msgspec.msgpack.encode({"contents": 1})])
def test_a_description_of_another_shape_is_broken(data):
    with pytest.raises(BrokenError, match="schema"):
        package.decoded(data)


def test_other_weights_require_a_new_bundle(kept):
    assert bundle.fault(kept.plan) is None
    reason = bundle.fault(kept.plan, "0" * 64)
    assert reason == "its package was made for other weights or attributes"


def test_it_goes_with_its_plan(kept):
    assert Store(kept.store, second="").remove(kept.plan.path) is None
    assert not kept.file.exists()


def test_a_bundle_that_is_made_without_one_leaves_none_behind(kept, tmp_path):
    (tmp_path / "kernel.so").write_bytes(b"code")
    bundle.write(kept.plan, tmp_path)
    assert not kept.file.exists()
    assert bundle.fault(kept.plan, model_digest.digest(kept.model)) is None
