"""What a served call does on the host, compiled: made in the background, kept on disk."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
import sysconfig
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import torch

from steadytorch.caches import cache_folder, why_not_private

SOURCE = Path(__file__).with_suffix(".cpp")
_NAME = "host"
_OPTIONS = ("-O2", "-std=c++20", "-shared", "-fPIC")
_loaded: ModuleType | None = None


def load() -> tuple[ModuleType | None, str]:
    """The compiled functions, which the source describes.

    Returns:
        The module, or None and why there is none.
    """
    global _loaded
    if _loaded is None:
        path = _path()
        if path is None:
            return None, "there is no folder for caches"
        if not path.exists():
            log = path.with_suffix(".log")
            failed = f"its compiler failed, see {log}" if log.exists() else "a search on a GPU will"
            return None, f"not compiled for this PyTorch yet: {failed}"
        try:
            for each in (path, path.parent):
                if (reason := why_not_private(each.stat(), str(each))) is not None:
                    return None, reason
            loader = ExtensionFileLoader(_NAME, str(path))
            spec = spec_from_loader(_NAME, loader)
            if spec is None:
                return None, f"{path} is no module"
            module = module_from_spec(spec)
            loader.exec_module(module)
        except (ImportError, OSError) as error:
            return None, f"{path} cannot be loaded: {error}"
        _loaded = module
    return _loaded, ""


class Making:
    """A compiler at work; call `finish` or `stop` in the end.

    Raises:
        OSError: it could not be started, or there is no folder for what it makes.
    """

    def __init__(self) -> None:
        path, compiler = _path(), _compiler()
        if path is None or compiler is None:
            raise OSError("no folder for caches" if path is None else "no C++ compiler: set CXX")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Others may be making the same; the first whole one is taken.
        mine = secrets.token_hex(4)
        self._path, self._partial = path, path.with_suffix(f".{mine}.so")
        self._log = path.with_suffix(f".{mine}.log")
        root = Path(torch.__file__).parent
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(compiler, *_OPTIONS, str(SOURCE), "-o", str(self._partial)),
                    *("-isystem", str(root / "include"), f"-I{sysconfig.get_path('include')}"),
                    *(f"-L{root / 'lib'}", "-lc10", "-ltorch_python"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self, seconds: float) -> bool:
        """Waits for the compiler so long, ends it where it is not through, and keeps what it made.

        Returns:
            Whether it is there now. What a compiler that failed has said is kept beside it.
        """
        try:
            code = self._process.wait(seconds)
            if code == 0:
                os.replace(self._partial, self._path)
                self._path.with_suffix(".log").unlink(missing_ok=True)
            else:
                os.replace(self._log, self._path.with_suffix(".log"))
        except (subprocess.TimeoutExpired, OSError):
            return False
        finally:
            self.stop()
        return code == 0

    def stop(self) -> None:
        """Ends the compiler, and leaves nothing of it behind."""
        self._process.kill()
        self._process.wait()
        for path in (self._partial, self._log):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def begin() -> Making | None:
    """Starts making it, where it is not there and can be made."""
    path = _path()
    if path is None or path.exists():
        return None
    try:
        return Making()
    except OSError:  # without it everything works; `load` says why there is none
        return None


def _path() -> Path | None:
    """Where it lies: by its source, and all that it is compiled against."""
    folder = cache_folder("native")
    if folder is None:
        return None
    kept = (
        torch.__version__,
        str(torch.version.git_version),
        str(sysconfig.get_config_var("SOABI")),
    )
    digest = hashlib.sha256(SOURCE.read_bytes() + "\0".join((*kept, *_OPTIONS)).encode())
    return folder / f"{_NAME}-{digest.hexdigest()[:16]}.so"


def _compiler() -> str | None:
    chosen = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [chosen] if chosen else ["g++", "clang++"])), None)
