from __future__ import annotations

import importlib
import sys

import pytest

from steadytorch.errors import UnsupportedError
from steadytorch.integrations import versions

MODULES = {"lightning": "lightning", "transformers": "hugging_face"}


def test_every_checked_package_has_an_integration():
    assert set(versions.SUPPORTED) == set(MODULES)


@pytest.mark.parametrize("package", MODULES)
@pytest.mark.parametrize("found", ["0.9.1", "99.0", "unknown"])
def test_an_import_in_an_unsupported_version_is_one_clear_line(
    package, found, tmp_path, monkeypatch
):
    folder = tmp_path / f"{package}-{found}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {found}\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = f"steadytorch.integrations.{MODULES[package]}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UnsupportedError) as raised:
        importlib.import_module(name)
    least, below = versions.SUPPORTED[package]
    assert str(raised.value) == (
        f"{package} {found} is not supported, needs {least[0]}.{least[1]} or later, below {below}: "
        f"pip install '{package}>={least[0]}.{least[1]},<{below}'"
    )


@pytest.mark.parametrize(
    ("found", "is_supported"),
    [("2.2", True), ("2.10.1rc1", True), ("2.2.0.post1", True), ("2.1.9", False), ("3.0", False)],
)
def test_versions_are_compared_as_numbers(monkeypatch, found, is_supported):
    monkeypatch.setitem(versions.SUPPORTED, "lightning", ((2, 2), 3))
    monkeypatch.setattr(versions, "version", lambda package: found)
    if is_supported:
        versions.check("lightning")
    else:
        with pytest.raises(UnsupportedError, match=f"lightning {found} is not supported"):
            versions.check("lightning")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    def version(package):
        raise versions.PackageNotFoundError(package)

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(UnsupportedError, match="transformers is not installed: pip install"):
        versions.check("transformers")
