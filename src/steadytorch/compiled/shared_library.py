"""Runs the shared library of an AOTInductor package on the CPU, through its C interface.

PyTorch's own loader holds the GIL while a package runs. On a GPU, the GIL is held only during
kernel launches. On the CPU, the GIL is held during the whole call and blocks all other Python
threads. Calls through `ctypes` release the GIL.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Callable
from typing import IO, Any

from torch import Tensor
from torch._C import _aoti  # pyright: ignore[reportAttributeAccessIssue]

_Handle = ctypes.c_void_p
_Handles = ctypes.POINTER(_Handle)
_Size = ctypes.c_size_t
_Text = ctypes.c_char_p
_CREATE = "CreateWithDevice", (ctypes.POINTER(_Handle), _Size, _Text, _Text)
_COUNT = "GetNumOutputs", (_Handle, ctypes.POINTER(_Size))
_NESTING = "GetCallSpec", (_Handle, ctypes.POINTER(_Text), ctypes.POINTER(_Text))
_RUN = "Run", (_Handle, _Handles, _Size, _Handles, _Size, _Handle, _Handle)
_DELETE = "Delete", (_Handle,)
_Entry = tuple[str, tuple[Any, ...]]
_MOST_RUNNERS = 8
"""Maximum concurrent calls; further calls wait. Runners share the weights."""

# C++ libraries are never really unloaded, so reuse the loaded one.
_OPEN: dict[tuple[int, ...], ctypes.CDLL] = {}
_OPENING = threading.Lock()


class Library:
    """A loaded AOTInductor package that uses PyTorch operators only.

    Args:
        package: path of the file, read once.

    Attributes:
        call_spec: the nesting of arguments and results, in the format of `torch.export`.

    Raises:
        Exception: the file is not a package, or its code cannot be loaded here.
    """

    def __init__(self, package: str) -> None:
        self._container = _Handle()
        self._library = _opened(package)
        runners = max(1, min(_MOST_RUNNERS, os.cpu_count() or 1))
        self._ask(_CREATE, ctypes.byref(self._container), runners, b"cpu", None)
        weakref.finalize(self, free_container, self._library, self._container).atexit = False
        self._run = _function(self._library, _RUN)
        count, given, returned = _Size(), _Text(), _Text()
        self._ask(_COUNT, self._container, ctypes.byref(count))
        self._ask(_NESTING, self._container, ctypes.byref(given), ctypes.byref(returned))
        self._outputs = count.value
        self.call_spec = [(text.value or b"").decode() for text in (given, returned)]

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run the package on the tensors of a call, in order.

        Raises:
            RuntimeError: the package reported an error.
        """
        # The library takes ownership of the input handles; we take ownership of the outputs.
        handles = _aoti.unsafe_alloc_void_ptrs_from_tensors(inputs)
        given = (_Handle * len(handles))(*[_address(handle, None) for handle in handles])
        returned = (_Handle * self._outputs)()
        counts = len(given), len(returned)
        if self._run(self._container, given, counts[0], returned, counts[1], None, None) != 0:
            raise RuntimeError("the compiled package failed to run")
        found = [_capsule(address, None, None) for address in returned]
        return _aoti.alloc_tensors_by_stealing_from_void_ptrs(found)

    def _ask(self, entry: _Entry, *arguments: object) -> None:
        if _function(self._library, entry)(*arguments) != 0:
            raise RuntimeError(f"cannot load the compiled package: {entry[0]} failed")


def _function(library: ctypes.CDLL, entry: _Entry) -> Callable[..., int]:
    name, types = entry
    found = library[f"AOTInductorModelContainer{name}"]
    found.argtypes = types
    return found


def _opened(package: str) -> ctypes.CDLL:
    with open(package, "rb") as file, _OPENING:
        seen = os.fstat(file.fileno())
        mark = (seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_size)
        if mark not in _OPEN:
            # The dynamic linker identifies libraries by path, so each needs its own.
            with tempfile.TemporaryDirectory(prefix="steadytorch-") as folder:
                path = os.path.join(folder, "package.so")
                _unpack(file, path)
                _OPEN[mark] = ctypes.CDLL(path)
        return _OPEN[mark]


def _unpack(package: IO[bytes], path: str) -> None:
    with zipfile.ZipFile(package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        with archive.open(name) as inside, open(path, "wb") as outside:
            shutil.copyfileobj(inside, outside, 1 << 20)


def free_container(library: ctypes.CDLL, container: _Handle) -> None:
    """Free the memory of a loaded package; its code stays loaded."""
    _function(library, _DELETE)(container)


# Item access returns private objects; types set on attributes of `pythonapi` affect every user.
_address = ctypes.pythonapi["PyCapsule_GetPointer"]
_address.restype, _address.argtypes = _Handle, [ctypes.py_object, _Text]
_capsule = ctypes.pythonapi["PyCapsule_New"]
_capsule.restype, _capsule.argtypes = ctypes.py_object, [_Handle, _Text, _Handle]
