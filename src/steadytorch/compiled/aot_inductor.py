"""AOTInductor packages: a model compiled ahead of time, for one signature and with its weights.

A package is machine code that has the weights in it as they were. PyTorch checks nothing of what
it is called with, so `Package` does, and hands whatever does not fit to `torch.compile`.
"""

from __future__ import annotations

import logging
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _aoti  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils import _pytree as pytree

from steadytorch.compiled.shared_library import Library
from steadytorch.errors import UnsupportedError, first_line, one_line
from steadytorch.results.signature import Leaf, Signature

ALIGNED_BYTES = 16
"""Compiled code may read tensors in vectors of this size, where the example began at a multiple."""

_log = logging.getLogger("steadytorch")
_PLAIN = (Tensor, nn.Parameter)
_ELF = b"\x7fELF"
_CPP_LIBRARY = re.compile(rb"\0lib(?:std)?c\+\+\.so\.\d+\0")
"""How code for Linux names the library that it is to be linked with when it is loaded."""


def make(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    path: Path,
) -> None:
    """Compiles a model ahead of time, for inference with arguments like these.

    Args:
        model: a module, or another callable.
        args: positional arguments of a call.
        kwargs: its keyword arguments.
        options: of Inductor.
        path: the file to write; PyTorch wants it to be called `*.pt2`.

    Raises:
        UnsupportedError: it cannot be exported or compiled, writes to what it is given, or would
            crash because of this machine's compiler.
    """
    import torch._inductor

    module = model if isinstance(model, nn.Module) else _Callable(model)
    with torch.inference_mode(False), torch.no_grad():
        with _reason("it cannot be exported"):
            program = torch.export.export(module, args, in_order(kwargs), strict=False)
            written = program.run_decompositions({}).graph_signature
        if written.buffers_to_mutate or written.user_inputs_to_mutate:
            raise UnsupportedError("it writes to its buffers or inputs")
        with _reason("it cannot be compiled ahead"):
            torch._inductor.aoti_compile_and_package(
                program, package_path=os.fspath(path), inductor_configs=dict(options)
            )
    if _brings_its_library(path):
        raise UnsupportedError(
            "the C++ compiler links its library into what it makes, and such code crashes beside "
            "PyTorch's: set CXX to another one"
        )


@contextmanager
def _reason(clause: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UnsupportedError(f"{clause}: {first_line(error)}") from error


class _Callable(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def in_order(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order in which signatures and packages have them."""
    return {name: kwargs[name] for name in sorted(kwargs)}


class _Layout(NamedTuple):
    """A tensor that a package takes."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Package:
    """Runs a package for arguments of its signature, and for all others what compiles.

    What compiles takes over, too, once a call has failed.

    Args:
        path: the file.
        taken: the signature that it was made for.
        device: where the model is.
        compiled: makes the callable for everything else.

    Raises:
        Exception: it is no package, or its code cannot be loaded here.
    """

    def __init__(
        self,
        path: str,
        taken: Signature,
        device: torch.device,
        compiled: Callable[[], Callable[..., Any]],
    ) -> None:
        run = _loaded(path, device)
        self._run: Callable[[list[Tensor]], list[Tensor]] | None = run
        given, returned = map(pytree.treespec_loads, run.call_spec)
        if str(given) != taken.structure:
            raise UnsupportedError(f"it takes arguments nested as {given}")
        self._nesting, self._returned = given, returned
        self._leaves = [_expected(leaf, device) for leaf in taken.leaves]
        self._takes_one = given == pytree.tree_structure(((0,), {}))
        self._compiling, self._compiled = compiled, None
        self._lock = Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the package, or what compiles.

        Raises:
            Exception: of what compiles.
        """
        run, tensors = self._run, self._fitting(args, kwargs)
        if run is None or tensors is None:
            return self._otherwise()(*args, **kwargs)
        try:
            found = run(tensors)
        except Exception as error:
            self._run = None
            _log.warning("a package failed, its model is compiled anew: %s", one_line(error))
            return self._otherwise()(*args, **kwargs)
        return pytree.tree_unflatten(found, self._returned)

    def _fitting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """The tensors of a call in the package's order; None where it was made for others."""
        if self._takes_one and len(args) == 1 and not kwargs:
            found = [args[0]]
        else:
            found, nesting = pytree.tree_flatten((args, in_order(kwargs)))
            if nesting != self._nesting:
                return None
        tensors = []
        for value, expected in zip(found, self._leaves, strict=True):
            if not isinstance(expected, _Layout):
                if repr(value) != expected:
                    return None
            elif not _fits(value, expected):
                return None
            else:
                tensors.append(_aligned(value))
        return tensors

    def _otherwise(self) -> Callable[..., Any]:
        with self._lock:
            if self._compiled is None:
                self._compiled = self._compiling()
            return self._compiled


def _expected(leaf: Leaf, device: torch.device) -> _Layout | str | None:
    if leaf.shape is None:
        return leaf.constant
    own = device if leaf.device == device.type else torch.device(leaf.device or "cpu")
    dtype = getattr(torch, leaf.dtype or "")
    return _Layout(torch.Size(leaf.shape), tuple(leaf.stride or ()), dtype, own)


def _fits(value: Any, expected: _Layout) -> bool:
    return (
        type(value) in _PLAIN
        and value.layout == torch.strided
        and (value.shape, value.stride(), value.dtype, value.device) == expected
        # Compiled code reads memory as it lies.
        and not (value.is_conj() or value.is_neg())
    )


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy at an address that compiled code may rely on."""
    if tensor.data_ptr() % ALIGNED_BYTES == 0:
        return tensor
    spans = [(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    flat = tensor.as_strided((1 + sum(spans),), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride())


class _Loader:
    """PyTorch's own way to run a package; it can call operators that are registered in Python."""

    def __init__(self, path: str, device: torch.device) -> None:
        self._device, self._lock = device, Lock()
        if device.type == "cuda":
            torch.cuda.init()  # which the loader takes for done
        index = -1 if device.index is None else device.index
        with self._there():
            # Its order of calls beside each other records events, which a CUDA graph cannot hold.
            self._loader = _aoti.AOTIModelPackageLoader(path, "model", True, 1, index)
        self.call_spec: list[str] = self._loader.get_call_spec()

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        with self._lock, self._there():
            return self._loader.boxed_run(inputs)

    def _there(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _loaded(path: str, device: torch.device) -> Library | _Loader:
    return _Loader(path, device) if device.type != "cpu" or _calls_out(path) else Library(path)


def _brings_its_library(path: Path) -> bool:
    """Whether a package's code would run with a C++ library of its own, not with the process's."""
    with zipfile.ZipFile(path) as archive:
        codes = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    return any(code.startswith(_ELF) and not _CPP_LIBRARY.search(code) for code in codes)


def _calls_out(path: str) -> bool:
    """Whether a package calls operators that are not in the C interface of PyTorch."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    return any(f"{name.removesuffix('.so')}.json" in names for name in names if ".so" in name)
