"""Compiles the C++ host code for calls of tuned models in the background, cached on disk."""

from __future__ import annotations

import atexit
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import torch

from steadytorch.caches import cache_folder, make_private, why_not_private

SOURCE = Path(__file__).with_suffix(".cpp")
_NAME = "host"
_OPTIONS = ("-O2", "-DNDEBUG", "-std=c++20", "-shared", "-fPIC")
_LEAST_URGENT = 19
_loaded: ModuleType | None = None


def load() -> tuple[ModuleType | None, str]:
    """Load the compiled functions that `host.cpp` defines.

    Returns:
        The module and "", or None and the reason.
    """
    global _loaded
    if _loaded is not None:
        return _loaded, ""
    try:
        path = code_path()
        if not path.exists():
            return None, _why_missing(path)
        for each in (path, *path.parents[:2]):
            if (reason := why_not_private(each.stat(), str(each))) is not None:
                return None, reason
        _loaded = _imported(path)
    except (ImportError, OSError) as error:
        return None, f"the compiled code cannot be loaded: {error}"
    return _loaded, ""


def _why_missing(path: Path) -> str:
    log = path.with_suffix(".log")
    if log.exists():
        return f"the C++ compiler failed, see {log}"
    if compiler_command() is None:
        return "not compiled for this PyTorch, and no C++ compiler was found: set CXX"
    return "not compiled for this PyTorch yet: the next search compiles it"


def _imported(path: Path) -> ModuleType:
    """Import a compiled extension module from a file, without adding it to `sys.modules`."""
    loader = ExtensionFileLoader(_NAME, str(path))
    spec = spec_from_loader(_NAME, loader)
    if spec is None:
        raise ImportError(f"{path} is not a module")
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


class Making:
    """A running compiler process at the lowest priority; end it with `finish` or `stop`.

    Raises:
        OSError: the compiler cannot be started, or there is no cache folder.
    """

    def __init__(self) -> None:
        path, compiler = code_path(), compiler_command()
        if compiler is None:
            raise OSError("no C++ compiler: set CXX")
        make_private(path.parent)
        # Other processes may compile the same file: build in a private folder, then replace.
        self._path, self._folder = path, Path(tempfile.mkdtemp(dir=path.parent, prefix="making-"))
        self._partial, self._log = self._folder / path.name, self._folder / "log"
        root = Path(torch.__file__).parent
        try:
            with self._log.open("wb") as log:
                # Its own group: Ctrl-C only reaches the search; `stop` also ends g++'s children.
                self._process = subprocess.Popen(
                    [
                        *(*compiler, *_OPTIONS, str(SOURCE), "-o", str(self._partial)),
                        *("-isystem", str(root / "include"), f"-I{sysconfig.get_path('include')}"),
                        *(f"-L{root / 'lib'}", "-lc10", "-ltorch_python"),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "TMPDIR": str(self._folder)},
                    start_new_session=True,
                    umask=0o077,
                )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        atexit.register(self.stop)
        with suppress(OSError):
            os.setpriority(os.PRIO_PGRP, self._process.pid, _LEAST_URGENT)

    def is_through(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether the compiler has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def finish(self, seconds: float) -> bool:
        """Wait up to `seconds` for the compiler, stop it on timeout, and store its result.

        Returns:
            Whether the compiled code is available now. The log of a failed compilation is stored
            beside the path of the compiled code.
        """
        try:
            code = self._process.wait(seconds)
            if code == 0:
                with self._partial.open("rb") as made:
                    os.fsync(made.fileno())
                os.replace(self._partial, self._path)
                self._path.with_suffix(".log").unlink(missing_ok=True)
            elif code > 0:  # negative: killed by a signal
                os.replace(self._log, self._path.with_suffix(".log"))
        except (subprocess.TimeoutExpired, OSError):
            return False
        finally:
            self.stop()
        return code == 0

    def stop(self) -> None:
        """Kill the compiler and remove its temporary files."""
        atexit.unregister(self.stop)
        if self._process.returncode is None:  # otherwise its pid may have been reused
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def is_missing() -> bool:
    """Whether the compiled code is missing or unusable, and a C++ compiler is available."""
    with suppress(OSError):
        return code_path() is not None and load()[0] is None and compiler_command() is not None
    return False


def begin() -> Making | None:
    """Start compiling missing or unusable code; return None if the compiler was not started."""
    try:
        if load()[0] is not None:
            return None
        return Making()
    except OSError:  # the code is optional; `load` gives the reason
        return None


def code_path() -> Path:
    """Return the cache path, keyed by C++ source, compiler options, PyTorch version and Python ABI.

    Raises:
        OSError: there is no cache folder, or this Python build has no GIL.
    """
    folder = cache_folder("native")
    if folder is None:
        raise OSError("there is no cache folder")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise OSError("it needs the GIL, which this Python build disables")
    made_for = (torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI"))
    said = "\0".join(map(str, (*made_for, *_OPTIONS)))
    digest = hashlib.sha256(SOURCE.read_bytes() + said.encode())
    return folder / f"{_NAME}-{digest.hexdigest()[:16]}.so"


def compiler_command() -> list[str] | None:
    """Return the C++ compiler command, with the arguments in CXX; None if no compiler is found."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # an unterminated quotation
        return None
    known = [chosen] if chosen else [["g++"], ["clang++"]]
    return next((command for command in known if shutil.which(command[0])), None)
