"""What is published: metadata, and a wheel that works outside of this folder."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import steadytorch

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_package_is_typed():
    assert (Path(steadytorch.__file__).parent / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_extras_name_extras_that_exist():
    extras = PROJECT["optional-dependencies"]
    named = {
        extra
        for wanted in extras.values()
        for each in wanted
        for group in re.findall(r"^steadytorch\[(.*)\]$", each)
        for extra in group.split(",")
    }
    assert named <= extras.keys()


def test_the_citation_has_the_version():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == steadytorch.__version__


@pytest.mark.parametrize(
    ("shell", "marks"), [("bash", "complete"), ("zsh", "compdef"), ("fish", "")]
)
def test_completion_works_in_a_shell(shell, marks):
    def asked(how, **words):
        done = subprocess.run(
            [sys.executable, "-m", "steadytorch"],
            env={**os.environ, "_STEADY_COMPLETE": how, **words},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert marks in asked(f"{shell}_source")
    place = "ga" if shell == "fish" else "1"
    assert "gate" in asked(f"{shell}_complete", COMP_WORDS="steady ga", COMP_CWORD=place)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from this tree."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: make .venv/installed-dev")
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (made,) = folder.glob("*.whl")
    assert list(folder.glob("*.tar.gz"))
    return made


def test_the_wheel_has_its_data_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"steadytorch", f"steadytorch-{steadytorch.__version__}.dist-info"}
    package = ROOT / "src" / "steadytorch"
    files = (file for file in package.rglob("*") if file.is_file() and file.suffix != ".pyc")
    assert {f"steadytorch/{file.relative_to(package)}" for file in files} <= set(names)
    assert "steadytorch/py.typed" in names


def test_the_wheel_works_in_a_clean_environment(wheel, tmp_path):
    venv, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120
    )
    own = sysconfig.get_path("purelib", "venv", vars={"base": str(venv), "platbase": str(venv)})
    # pip and the dependencies come from this environment; .pth files within it are not followed,
    # so that an editable install of this tree stays out.
    (Path(own) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}

    def run(*words):
        return subprocess.run(
            [str(venv / "bin" / words[0]), *words[1:]],
            cwd=elsewhere,
            env=clean,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout

    options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--force-reinstall")
    run("python", "-m", "pip", "install", *options, str(wheel))
    where = run("python", "-c", "import steadytorch; print(steadytorch.__file__)")
    assert where.startswith(str(venv))
    assert run("steady", "--version") == f"steady, version {steadytorch.__version__}\n"
    assert "bundled ResNet-50" in run("steady", "demo", "--help")
