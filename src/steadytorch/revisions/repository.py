"""A git repository: commits, the state of the working tree, and temporary worktrees."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from steadytorch.errors import UnsupportedError, UsageError

_HOOK_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
"""Variables that git sets for hooks. If kept, they would make git work on another tree."""
_QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")
"""Hooks of the repository must not run when a worktree is made."""


class Repository(NamedTuple):
    """A git repository with a working tree.

    Attributes:
        root: absolute path of the working tree, links resolved.
    """

    root: Path

    @classmethod
    def around(cls, folder: Path) -> Repository:
        """Finds the repository that contains a folder.

        Raises:
            UsageError: the folder is in no working tree.
            UnsupportedError: git is not installed.
        """
        done = run_git(folder, "rev-parse", "--show-toplevel")
        if done.returncode or not done.stdout.strip():
            why = _reason(done) or "it has no working tree"
            raise UsageError(f"{folder} is not in a git repository ({why}): start in one")
        return cls(Path(done.stdout.rstrip("\n")).resolve())

    def commit(self, revision: str) -> str:
        """Resolves a revision, such as `main`, `HEAD~1` or `v1.2`, to the hash of its commit.

        Raises:
            UsageError: the revision does not exist here.
        """
        asked = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        done = run_git(self.root, *asked)
        if done.returncode:
            shallow = run_git(self.root, "rev-parse", "--is-shallow-repository").stdout.strip()
            fix = (
                "this clone is shallow, so fetch more history"
                if shallow == "true"
                else "fetch it, or name another revision"
            )
            raise UsageError(f"revision {revision!r} does not exist in {self.root}: {fix}")
        return done.stdout.strip()

    def changed(self) -> tuple[str, ...]:
        """Files that differ from HEAD, including untracked files but not ignored files."""
        listed = self._must(
            "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all"
        ).split("\0")
        return tuple(entry[3:] for entry in listed if entry)

    def has_submodules(self) -> bool:
        """Whether the repository has submodules, which temporary worktrees lack."""
        return (self.root / ".gitmodules").exists()

    @contextlib.contextmanager
    def worktree(self, commit: str, name: str) -> Iterator[Path]:
        """Checks a commit out into a temporary folder; removes it when the block ends.

        Several processes may check out commits at the same time.

        Args:
            commit: hash of the commit.
            name: name of the folder, within a temporary one.

        Raises:
            UsageError: git cannot check it out.
        """
        above = Path(tempfile.mkdtemp(prefix="steadytorch-"))
        tree = above / name
        try:
            add = ("worktree", "add", "--detach", "--quiet", str(tree), commit)
            with self._alone():
                done = run_git(self.root, *_QUIET, *add)
            if done.returncode:
                raise UsageError(f"{commit[:12]} cannot be checked out: {_reason(done)}")
            yield tree.resolve()
        finally:
            with self._alone():
                # Twice --force: git locks a worktree while it is made.
                run_git(self.root, "worktree", "remove", "--force", "--force", str(tree))
                shutil.rmtree(above, ignore_errors=True)
                run_git(self.root, "worktree", "prune")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other threads and processes from changing the repository's worktrees meanwhile.

        git 2.39 sometimes fails while another worktree is made, as it reads that one's files before
        they are written. Nothing is locked where the file system has no locks.
        """
        common = run_git(self.root, "rev-parse", "--git-common-dir").stdout.rstrip("\n")
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                descriptor = os.open(self.root / common, os.O_RDONLY)
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    def copy_onto(self, tree: Path) -> None:
        """Copies uncommitted changes, including untracked files, onto a worktree of HEAD."""
        for name in self.changed():
            ours, theirs = self.root / name, tree / name
            if name.endswith("/"):  # an untracked repository
                continue
            if not ours.exists():
                theirs.unlink(missing_ok=True)
                continue
            theirs.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ours, theirs, follow_symlinks=False)

    def _must(self, *arguments: str) -> str:
        done = run_git(self.root, *arguments)
        if done.returncode:
            raise UsageError(f"git {arguments[0]} fails in {self.root}: {_reason(done)}")
        return done.stdout


def run_git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs git in a folder; a failure shows in the return code.

    Raises:
        UnsupportedError: git is not installed.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _HOOK_VARIABLES}
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            start_new_session=True,  # Ctrl-C must not end the command that cleans up
        )
    except FileNotFoundError as error:
        raise UnsupportedError("git is not installed: steady gate needs it") from error


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    return error_line(done.stderr).removeprefix("fatal: ")


def error_line(text: str, marks: Sequence[str] = ("fatal:", "error:", "ERROR:")) -> str:
    """The first line of output that reports an error, else the last; cut to 300 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith(tuple(marks))]
    return (marked or lines[-1:] or [""])[0][:300]
