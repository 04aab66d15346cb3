"""Where a page is written, and what goes wrong with files."""

from __future__ import annotations

import errno
import os

import pytest

from steadytorch.errors import UsageError
from steadytorch.plan import files
from steadytorch.report.html import report
from steadytorch.results import saved

from .documents import DOCUMENTS


@pytest.fixture
def result(tmp_path):
    path = tmp_path / "result.json"
    path.write_bytes(DOCUMENTS["doctor"])
    return path


def test_a_page_stands_beside_its_result_or_where_it_is_asked_for(result):
    beside, folder = result.with_suffix(".html"), result.parent
    assert report(result) == beside
    assert report(str(result), str(folder / "a page")) == folder / "a page"
    assert (folder / "a page").read_bytes() == beside.read_bytes()
    assert {each.name for each in folder.iterdir()} == {"a page", "result.html", "result.json"}


def test_plotly_is_written_once_beside_pages_with_charts(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_bytes(DOCUMENTS["measure"])
    report(tmp_path / "a.json")
    (script,) = tmp_path.glob("plotly-*.min.js")
    before = script.stat()
    report(tmp_path / "b.json")
    after = script.stat()  # reading it changes the time of the last access
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    script.write_text("cut short")
    report(tmp_path / "b.json")
    assert script.stat().st_size == before.st_size
    report(tmp_path / "b.json", tmp_path / "alone.html", embed=True)
    assert {each.suffix for each in tmp_path.iterdir()} == {".json", ".html", ".js"}


def test_a_page_may_be_read_by_whom_the_umask_lets(result):
    before = os.umask(0o027)
    try:
        assert report(result).stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_a_page_that_was_private_stays_so(result):
    report(result).chmod(0o600)
    assert report(result).stat().st_mode & 0o777 == 0o600


def test_a_page_is_replaced_and_a_link_to_one_stays(result, tmp_path):
    kept, link = tmp_path / "kept.html", tmp_path / "link.html"
    kept.write_text("old")
    link.symlink_to(kept)
    report(result, link)
    assert link.is_symlink()
    assert kept.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("result.json", "is the result itself: name another file"),
        ("hard", "is the result itself"),
        ("", "is no regular file"),
        ("folder", "is no regular file"),
        ("pipe", "is no regular file"),
        ("no such/page.html", "there is no folder"),
        ("a\0b", r"cannot be written: (lstat: )?embedded null"),
        ("x" * 300, "cannot be written: File name too long"),
    ],
)
def test_a_page_is_written_nowhere_else(result, monkeypatch, output, said):
    monkeypatch.chdir(result.parent)
    os.link(result, "hard")
    os.mkdir("folder")
    os.mkfifo("pipe")
    with pytest.raises(UsageError, match=said):
        report("result.json", output)
    assert result.read_bytes() == DOCUMENTS["doctor"]


def test_devices_are_not_replaced(result):
    with pytest.raises(UsageError, match="/dev/null is no regular file"):
        report(result, "/dev/null")


def test_what_may_not_be_written_is_said_before_the_work(result, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match=r"result\.html cannot be written: no permission"):
        report(result)


@pytest.mark.parametrize("after", [0, 1000])
def test_a_full_disk_leaves_the_old_page(result, monkeypatch, after):
    written = files.os.write

    def write(descriptor, data):
        if not after or os.fstat(descriptor).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(descriptor, data[:after])

    page = result.with_suffix(".html")
    page.write_text("old")
    monkeypatch.setattr(files.os, "write", write)
    with pytest.raises(UsageError, match=r"result\.html cannot be written: No space left"):
        report(result)
    monkeypatch.undo()
    assert page.read_text() == "old"
    assert {each.name for each in page.parent.iterdir()} == {"result.html", "result.json"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.json", "none.json cannot be read: No such file or directory"),
        (".", "cannot be read: Is a directory"),
        ("pipe", "is not a regular file: pass one that --json wrote"),
        ("/dev/zero", "is not a regular file"),
        ("a\0b", r"cannot be read: (open: )?embedded null"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
    ],
)
def test_what_cannot_be_read_is_said_and_holds_nobody_up(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.symlink("loop", "loop")
    with pytest.raises(UsageError, match=said):
        report(name)
    assert not list(tmp_path.glob("*.html"))


def test_a_result_that_may_not_be_read_is_said(result, monkeypatch):
    def refuse(path, flags):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(saved.os, "open", refuse)
    with pytest.raises(UsageError, match=r"result\.json cannot be read: Permission denied"):
        report(result)


def test_a_file_that_is_too_large_is_refused(result, monkeypatch):
    monkeypatch.setattr(saved, "MOST_BYTES", 1 << 20)
    result.write_bytes(b" " * (1 << 20) + b"x")
    with pytest.raises(UsageError, match="exceeds 1 MiB: measure with a smaller --budget"):
        report(result)
