"""What a served call does on the host, compiled: made in the background, kept on disk."""

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
    """The compiled functions, which the source describes.

    Returns:
        The module, or None and why there is none.
    """
    global _loaded
    if _loaded is not None:
        return _loaded, ""
    try:
        path = _path()
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
        return f"its compiler failed, see {log}"
    if _compiler() is None:
        return "not compiled for this PyTorch, and there is no C++ compiler"
    return "not compiled for this PyTorch yet: a search does it"


def _imported(path: Path) -> ModuleType:
    """The module of a file, not known to `sys.modules`."""
    loader = ExtensionFileLoader(_NAME, str(path))
    spec = spec_from_loader(_NAME, loader)
    if spec is None:
        raise ImportError(f"{path} is no module")
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


class Making:
    """A compiler at work, at the lowest priority; call `finish` or `stop` in the end.

    Raises:
        OSError: it could not be started, or there is no folder for what it makes.
    """

    def __init__(self) -> None:
        path, compiler = _path(), _compiler()
        if compiler is None:
            raise OSError("no C++ compiler: set CXX")
        make_private(path.parent)
        # Others may be making the same; the first whole one is taken.
        self._path, self._folder = path, Path(tempfile.mkdtemp(dir=path.parent, prefix="making-"))
        self._partial, self._log = self._folder / path.name, self._folder / "log"
        root = Path(torch.__file__).parent
        try:
            with self._log.open("wb") as log:
                # A group of its own: Ctrl-C is for the search, and `stop` ends what g++ starts too.
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
        """Whether the compiler has ended, waiting so long for it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def finish(self, seconds: float) -> bool:
        """Waits for the compiler so long, ends it where it is not through, and keeps what it made.

        Returns:
            Whether it is there now. What a compiler that failed has said is kept beside it.
        """
        try:
            code = self._process.wait(seconds)
            if code == 0:
                with self._partial.open("rb") as made:
                    os.fsync(made.fileno())
                os.replace(self._partial, self._path)
                self._path.with_suffix(".log").unlink(missing_ok=True)
            elif code > 0:  # else a signal ended it
                os.replace(self._log, self._path.with_suffix(".log"))
        except (subprocess.TimeoutExpired, OSError):
            return False
        finally:
            self.stop()
        return code == 0

    def stop(self) -> None:
        """Ends the compiler, and leaves nothing of it behind."""
        atexit.unregister(self.stop)
        if self._process.returncode is None:  # else its number may be another's by now
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def is_missing() -> bool:
    """Whether it is not there, or of no use, and could be made."""
    with suppress(OSError):
        return _path() is not None and load()[0] is None and _compiler() is not None
    return False


def begin() -> Making | None:
    """Starts making it, where it is not there, or of no use, and can be made."""
    try:
        if load()[0] is not None:
            return None
        return Making()
    except OSError:  # without it everything works; `load` says why there is none
        return None


def _path() -> Path:
    """Where it lies: by its source, and all that it is compiled against.

    Raises:
        OSError: there is nowhere for it to lie, or no use in it.
    """
    folder = cache_folder("native")
    if folder is None:
        raise OSError("there is no folder for caches")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise OSError("it relies on the interpreter's lock, which this Python does without")
    made_for = (torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI"))
    said = "\0".join(map(str, (*made_for, *_OPTIONS)))
    digest = hashlib.sha256(SOURCE.read_bytes() + said.encode())
    return folder / f"{_NAME}-{digest.hexdigest()[:16]}.so"


def _compiler() -> list[str] | None:
    """The command, with what CXX may add to it."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quotation without an end
        return None
    known = [chosen] if chosen else [["g++"], ["clang++"]]
    return next((command for command in known if shutil.which(command[0])), None)
