"""AOTInductor packages: a model compiled ahead of time for one signature, weights included.

A package is machine code with the weights frozen in. PyTorch does not check a package's arguments.
`Package` checks the arguments, and passes calls with another signature to `torch.compile`.
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
from steadytorch.workload.signature import in_order

ALIGNED_BYTES = 16
"""Compiled code may use vector loads of this size if the example input was aligned to it."""

_log = logging.getLogger("steadytorch")
_PLAIN = (Tensor, nn.Parameter)
_ELF = b"\x7fELF"
_CPP_LIBRARY = re.compile(rb"\0lib(?:std)?c\+\+\.so\.\d+\0")
"""The dynamic C++ standard library, as named in an ELF file."""


def make(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    path: Path,
) -> None:
    """Compile a model ahead of time with AOTInductor, for inference on arguments like `args`.

    Args:
        model: a module or another callable.
        args: positional arguments of an example call.
        kwargs: keyword arguments of the example call.
        options: Inductor options.
        path: the file to write; PyTorch requires the suffix `.pt2`.

    Raises:
        UnsupportedError: the model cannot be exported or compiled, writes to its buffers or inputs,
            or this machine's compiler produces code that would crash.
    """
    import torch._inductor

    module = model if isinstance(model, nn.Module) else _Callable(model)
    with torch.inference_mode(False), torch.no_grad():
        with _reason("the model cannot be exported"):
            program = torch.export.export(module, args, in_order(kwargs), strict=False)
            written = program.run_decompositions({}).graph_signature
        if written.buffers_to_mutate or written.user_inputs_to_mutate:
            raise UnsupportedError("the model writes to its buffers or inputs")
        with _reason("the model cannot be compiled ahead of time"):
            torch._inductor.aoti_compile_and_package(
                program, package_path=os.fspath(path), inductor_configs=dict(options)
            )
    if brings_its_library(path):
        raise UnsupportedError(
            "the C++ compiler links its standard library statically, which crashes next to "
            "PyTorch's: set CXX to another compiler"
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


class _Layout(NamedTuple):
    """The layout of a tensor that a package accepts."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Package:
    """Runs an AOTInductor package for calls of its signature, and `torch.compile` for others.

    After the package has failed once, `torch.compile` serves every call.

    Args:
        path: the file.
        taken: the signature that the package was made for.
        device: the model's device.
        compiled: makes the fallback callable.

    Raises:
        Exception: the file is not a package, or its code cannot be loaded here.
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
            raise UnsupportedError(f"the package expects arguments nested as {given}")
        self._nesting, self._returned = given, returned
        self._leaves = [_expected(leaf, device) for leaf in taken.leaves]
        self._takes_one = given == pytree.tree_structure(((0,), {}))
        self._compiling, self._compiled = compiled, None
        self._lock = Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the package, or the callable from `torch.compile` if the package does not fit.

        Raises:
            Exception: any exception of the compiled callable.
        """
        run, tensors = self._run, self._fitting(args, kwargs)
        if run is None or tensors is None:
            return self._otherwise()(*args, **kwargs)
        try:
            found = run(tensors)
        except Exception as error:
            self._run = None
            _log.warning("a compiled package failed, recompiling: %s", one_line(error))
            return self._otherwise()(*args, **kwargs)
        return pytree.tree_unflatten(found, self._returned)

    def _fitting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """Return a call's tensors in the package's order; None if the signature differs."""
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
        # Compiled code reads raw memory.
        and not (value.is_conj() or value.is_neg())
    )


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if its address is not aligned to `ALIGNED_BYTES`."""
    if tensor.data_ptr() % ALIGNED_BYTES == 0:
        return tensor
    spans = [(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    flat = tensor.as_strided((1 + sum(spans),), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride())


class _Loader:
    """Runs a package by PyTorch's own loader, which supports operators registered in Python."""

    def __init__(self, path: str, device: torch.device) -> None:
        self._device, self._lock = device, Lock()
        if device.type == "cuda":
            torch.cuda.init()  # the loader assumes this was done
        index = -1 if device.index is None else device.index
        with self._there():
            # Single-threaded: ordering concurrent calls records events, which breaks CUDA graphs.
            self._loader = _aoti.AOTIModelPackageLoader(path, "model", True, 1, index)
        self.call_spec: list[str] = self._loader.get_call_spec()

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        with self._lock, self._there():
            return self._loader.boxed_run(inputs)

    def _there(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _loaded(path: str, device: torch.device) -> Library | _Loader:
    return _Loader(path, device) if device.type != "cpu" or _calls_out(path) else Library(path)


def brings_its_library(path: Path) -> bool:
    """Whether a package's code is linked statically with a C++ standard library."""
    with zipfile.ZipFile(path) as archive:
        codes = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    return any(code.startswith(_ELF) and not _CPP_LIBRARY.search(code) for code in codes)


def _calls_out(path: str) -> bool:
    """Whether a package calls operators outside PyTorch's C interface."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    return any(f"{name.removesuffix('.so')}.json" in names for name in names if ".so" in name)
