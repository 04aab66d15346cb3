"""The interpreter and the import path of each revision."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from steadytorch.errors import UsageError
from steadytorch.revisions.environment import (
    given_environment,
    installed_environment,
    shared_environment,
)

# Builds a wheel with nothing but the standard library, since tests have no network.
BACKEND = """
import zipfile

def build_wheel(directory, config_settings=None, metadata_directory=None):
    about = "demo-1.0.dist-info/"
    with zipfile.ZipFile(f"{directory}/demo-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write("src/demo.py", "demo.py")
        wheel.writestr(about + "METADATA", "Metadata-Version: 2.1\\nName: demo\\nVersion: 1.0\\n")
        wheel.writestr(about + "WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr(about + "RECORD", "")
    return "demo-1.0-py3-none-any.whl"
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "demo"
version = "1.0"
"""


def printed(interpreter, code):
    done = subprocess.run(
        [interpreter.python, "-P", "-c", code],
        cwd=interpreter.folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(interpreter.paths)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def trees(tmp_path):
    """A working tree and a base tree, each with a package in `src` and a module at the root."""
    made = []
    for name in ("root", "tree"):
        tree = tmp_path / name
        (tree / "src" / "pack").mkdir(parents=True)
        (tree / "src" / "pack" / "__init__.py").write_text(f"name = {name!r}")
        (tree / "flat.py").write_text(f"name = {name!r}")
        made.append(tree)
    return made


def test_each_side_imports_its_own_tree(trees, monkeypatch):
    root, tree = trees
    monkeypatch.setattr(sys, "path", [str(root), *sys.path, str(root / "src")])
    code = "import pack, flat; print(pack.name, flat.name)"
    assert printed(shared_environment(root, tree, tree), code) == "tree tree"
    assert printed(shared_environment(root, root, root), code) == "root root"


def test_paths_of_the_working_tree_are_moved_and_installed_packages_are_not(trees, monkeypatch):
    root, tree = trees
    installed = str(root / ".venv" / "lib" / "site-packages")
    monkeypatch.setattr(sys, "path", [str(root / "extra"), installed, "/elsewhere"])
    paths = shared_environment(root, tree, tree).paths
    own = (str(tree / "src"), str(tree), str(tree / "extra"))
    assert paths == (*own, installed, "/elsewhere")


def test_a_given_interpreter_must_be_executable(trees, tmp_path):
    for wrong in (tmp_path, trees[0] / "flat.py", tmp_path / "nothing"):
        with pytest.raises(UsageError, match="is not a Python executable"):
            given_environment(str(wrong), trees[1], trees[1], tmp_path)


def test_a_given_interpreter_finds_this_package_and_the_tree(trees, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    made = given_environment(sys.executable, trees[1], trees[1], scratch)
    assert printed(made, "import pack, steadytorch; print(pack.name)") == "tree"
    assert [path.name for path in (scratch / "measuring").iterdir()] == ["steadytorch"]


@pytest.fixture
def project(tmp_path, repository):
    repository.write(pyproject_toml=PROJECT, backend_py=BACKEND, src__demo_py="name = 'installed'")
    return repository.root


def scratch_of(tmp_path):
    scratch = tmp_path / "side"
    scratch.mkdir()
    return scratch


@pytest.mark.slow
def test_a_revision_is_installed_over_the_packages_of_this_environment(project, tmp_path):
    made = installed_environment(project, project, scratch_of(tmp_path), "base main")
    code = "import demo, msgspec, steadytorch; print(demo.name, demo.__file__)"
    name, file = printed(made, code).split()
    assert name == "installed"
    assert file.startswith(str(tmp_path / "side" / "venv"))


@pytest.mark.slow
def test_a_revision_that_does_not_install_is_told_in_one_line(project, tmp_path):
    (project / "backend.py").write_text("raise OSError('no compiler')")
    with pytest.raises(UsageError, match=r"^base main does not install: OSError: no compiler$"):
        installed_environment(project, project, scratch_of(tmp_path), "base main")
