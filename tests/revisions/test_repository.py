"""Commits, the state of the working tree, and worktrees that leave nothing behind."""

from __future__ import annotations

import time
from threading import Barrier, Thread

import pytest

from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.revisions import repository as module
from steadytorch.revisions.repository import Repository, error_line


@pytest.fixture
def found(repository):
    """The repository with one commit, as the code under test sees it."""
    repository.commit(a_txt="one")
    return Repository.around(repository.root)


def left(tmp_path):
    return list((tmp_path / "scratch").iterdir())


def test_a_folder_within_the_tree_finds_its_root(repository, found):
    inner = repository.root / "inner"
    inner.mkdir()
    assert Repository.around(inner) == found


def test_a_folder_without_repository_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not in a git repository"):
        Repository.around(tmp_path)


def test_git_is_needed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="git is not installed"):
        Repository.around(tmp_path)


@pytest.mark.parametrize("name", ["main", "HEAD", "HEAD^0"])
def test_revisions_resolve_to_commits(repository, found, name):
    assert found.commit(name) == repository.git("rev-parse", "HEAD").strip()


@pytest.mark.parametrize("name", ["origin/main", "--all", "", "HEAD:a.txt", "a\nb"])
def test_an_unknown_revision_says_what_to_do(found, name):
    with pytest.raises(UsageError, match=r"does not exist in .*: fetch it"):
        found.commit(name)


def test_a_shallow_clone_is_named(repository, found, tmp_path):
    repository.commit(a_txt="two")
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.root}", str(shallow))
    with pytest.raises(UsageError, match="this clone is shallow, so fetch more history"):
        Repository.around(shallow).commit("HEAD~1")


def test_changed_files_are_listed_with_untracked_and_without_ignored(repository, found):
    assert found.changed() == ()
    repository.commit(_gitignore="*.log\n")
    repository.write(a_txt="two", new_txt="", x_log="")
    assert sorted(found.changed()) == ["a.txt", "new.txt"]


def test_a_worktree_holds_the_commit_and_is_removed(repository, found, tmp_path):
    first = found.commit("HEAD")
    repository.commit(a_txt="two")
    with found.worktree(first, "base") as tree:
        assert (tree / "a.txt").read_text() == "one"
        (tree / "written.txt").touch()
        assert repository.worktrees() == 2
    assert (repository.worktrees(), left(tmp_path)) == (1, [])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_worktree_is_removed_after_an_error(repository, found, tmp_path, error):
    with pytest.raises(error), found.worktree(found.commit("HEAD"), "base"):
        raise error
    assert (repository.worktrees(), left(tmp_path)) == (1, [])


def test_ctrl_c_while_a_worktree_is_made_leaves_nothing(repository, found, tmp_path, monkeypatch):
    commit, git = found.commit("HEAD"), module.run_git

    def interrupted(folder, *arguments):
        done = git(folder, *arguments)
        if "add" in arguments:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(module, "run_git", interrupted)
    with pytest.raises(KeyboardInterrupt), found.worktree(commit, "base"):
        pass
    assert (repository.worktrees(), left(tmp_path)) == (1, [])


def test_worktrees_can_be_made_at_the_same_time(repository, found):
    commit, together, texts = found.commit("HEAD"), Barrier(4, timeout=60), []

    def one():
        together.wait()
        with found.worktree(commit, "base") as tree:
            texts.append((tree / "a.txt").read_text())
            together.wait()

    threads = [Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (texts, repository.worktrees()) == (["one"] * 4, 1)


def test_one_worktree_is_made_or_removed_at_a_time(found, monkeypatch):
    commit, git, together = found.commit("HEAD"), module.run_git, Barrier(3, timeout=60)
    under_way, most = [], []

    def watched(folder, *arguments):
        if "worktree" not in arguments:
            return git(folder, *arguments)
        under_way.append(arguments)
        most.append(len(under_way))
        time.sleep(0.02)
        done = git(folder, *arguments)
        under_way.remove(arguments)
        return done

    def one():
        together.wait()
        with found.worktree(commit, "base"):
            pass

    monkeypatch.setattr(module, "run_git", watched)
    threads = [Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 9


def test_hooks_of_the_repository_do_not_run(repository, found):
    hook = repository.root / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {repository.root}/ran\n")
    hook.chmod(0o755)
    with found.worktree(found.commit("HEAD"), "base"):
        pass
    assert not (repository.root / "ran").exists()


def test_variables_of_a_hook_do_not_mislead(repository, found, monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert Repository.around(repository.root) == found


def test_a_copy_has_what_is_not_committed(repository, found):
    repository.commit(b_txt="b", gone_txt="")
    repository.write(a_txt="two", inner__new_txt="new")
    (repository.root / "gone.txt").unlink()
    with found.worktree(found.commit("HEAD"), "head") as tree:
        found.copy_onto(tree)
        texts = {path.name: path.read_text() for path in tree.rglob("*.txt")}
    assert texts == {"a.txt": "two", "b.txt": "b", "new.txt": "new"}


def test_submodules_are_noticed(repository, found):
    assert not found.has_submodules()
    repository.write(_gitmodules="")
    assert found.has_submodules()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("a\nb\n", "b"),
        ("x\nfatal: no\nhint: y", "fatal: no"),
        ("ERROR: a\nz", "ERROR: a"),
    ],
)
def test_the_line_that_reports_the_error_is_chosen(text, line):
    assert error_line(text) == line
