from __future__ import annotations

import os
import tempfile
import threading
import zipfile

import pytest
import torch

from steadytorch.compiled import shared_library as library_module
from steadytorch.compiled.shared_library import Library, free_container

pytestmark = pytest.mark.slow


def test_it_computes_what_the_model_does(kept):
    library = Library(os.fspath(kept.file))
    (found,) = library([kept.x])
    torch.testing.assert_close(found, kept.model(kept.x))
    assert not found.requires_grad
    assert len(library.call_spec) == 2


def test_calls_beside_each_other_do_not_disturb_each_other(kept):
    library, faults = Library(os.fspath(kept.file)), []
    inputs = [torch.randn(1, 3, 8, 8) for _ in range(4)]
    expected = [kept.model(x).detach() for x in inputs]

    def run(x, y):
        with torch.no_grad():
            faults.extend(n for n in range(200) if not torch.allclose(library([x])[0], y, 1e-4))

    threads = [threading.Thread(target=run, args=a) for a in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_it_leaves_no_file_behind(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    before = set(tmp_path.iterdir())
    library = Library(os.fspath(kept.file))
    assert set(tmp_path.iterdir()) == before
    torch.testing.assert_close(library([kept.x])[0], kept.model(kept.x))


def test_its_memory_is_freed_with_its_last_user(kept, monkeypatch):
    freed = []
    monkeypatch.setattr(
        library_module, "free_container", lambda *given: freed.append(free_container(*given))
    )
    library = Library(os.fspath(kept.file))
    (found,) = library([kept.x])
    del library
    assert len(freed) == 1
    torch.testing.assert_close(found, kept.model(kept.x))


def test_a_second_load_shares_the_code_and_nothing_else(kept, monkeypatch):
    first = Library(os.fspath(kept.file))
    monkeypatch.setattr(zipfile, "ZipFile", lambda *given: pytest.fail("unpacked again"))
    second = Library(os.fspath(kept.file))
    del first
    torch.testing.assert_close(second([kept.x])[0], kept.model(kept.x))


def test_another_file_of_the_same_name_is_another_library(kept):
    first = Library(os.fspath(kept.file))
    kept.file.write_bytes(b"something else")
    with pytest.raises(zipfile.BadZipFile):
        Library(os.fspath(kept.file))
    torch.testing.assert_close(first([kept.x])[0], kept.model(kept.x))


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\0" * 4096])
def test_a_library_that_is_none_raises(tmp_path, content):
    path = tmp_path / "package.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("p/data/aotinductor/model/a.wrapper.so", content)
    with pytest.raises(OSError, match=r"package\.so"):
        Library(os.fspath(path))


def test_a_package_without_a_library_raises(tmp_path):
    path = tmp_path / "package.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", "1")
    with pytest.raises(ValueError, match="unpack"):
        Library(os.fspath(path))
