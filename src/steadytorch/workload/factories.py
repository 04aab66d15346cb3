"""Loads workloads from the user's code: imports the code, calls its factory and reports errors."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any, NoReturn

import cloudpickle

from steadytorch.errors import MissingWorkloadError, SteadyError, UsageError
from steadytorch.workload.serialization import find_anew
from steadytorch.workload.sources import PREFIXES, did_you_mean
from steadytorch.workload.workload import Workload

_RETURNS = "a factory returns a Workload, or a tuple (model, inputs)"
_SHOWN_FRAMES = 6
_IMPORTING = RLock()  # a factory may load another workload


def call_factory(spec: str, batch: int | None, train: bool) -> Workload:
    """Calls the factory named as `path/to/file.py:factory` or `package.module:factory`.

    The file's folder (for a module, the working directory) is on `sys.path` while the code is
    imported and the factory runs. Modules importable only from that folder are later pickled by
    value, so that worker processes can open the workload without importing them.

    Args:
        spec: the user's text, with a colon.
        batch: passed as the keyword `batch`, if given.
        train: whether a training workload is required.

    Raises:
        MissingWorkloadError: the file, module or factory does not exist.
        UsageError: a part of the spec is missing, or the code raises or returns something else. If
            the code raises, the message has several lines: the error and its traceback.
    """
    source, _, name = spec.rpartition(":")
    path = Path(source)
    is_file = source.endswith(".py") or "/" in source
    if not source or not name:
        raise UsageError(f"{spec!r} is incomplete: use file.py:factory or package.module:factory")
    if is_file and not path.is_file():
        raise MissingWorkloadError(
            f"file not found: {source} (of {spec!r}, looked up from {os.getcwd()})"
        )
    short = f"{path.name}:{name}" if is_file else spec
    directory = path.resolve().parent if is_file else Path.cwd()
    way_out = _as_module(path.resolve(), name) if is_file else ""
    with _importable(directory), _reported(short, way_out):
        module = _import_file(path.resolve()) if is_file else _import_module(source, spec)
        factory = _find(module, name)
        result = factory(**_arguments(factory, short, batch))
    return _workload(result, short, train)


def explain_missing_factory(source: str) -> NoReturn:
    """Raises an error for a path that is given without a factory name."""
    if not Path(source).is_file():
        raise MissingWorkloadError(f"file not found: {source} (looked up from {os.getcwd()})")
    raise UsageError(f"{source} needs a factory name: use {source}:factory; {_RETURNS}")


def _import_file(path: Path) -> ModuleType:
    """Runs a file as a module under a unique name, so that it shadows no other module."""
    stem = re.sub(r"\W", "_", path.stem)
    name = f"steady_{stem}_{zlib.crc32(os.fsencode(path)):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module
    try:
        # Always compile the current source: bytecode caches compare modification time in seconds
        # and size, and both may be equal after an edit.
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        if previous is not None:
            sys.modules[name] = previous
        raise
    return module


def _import_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != name and not name.startswith(f"{missing}."):
            raise  # the module exists, but one of its imports is missing
        hint = did_you_mean(name, PREFIXES)
        raise MissingWorkloadError(
            f"{spec!r}: {name!r}{hint} is neither a known prefix ({', '.join(PREFIXES)}) nor "
            f"a module that can be imported from {os.getcwd()}"
        ) from error


def _find(module: ModuleType, name: str) -> Callable[..., Any]:
    factory = getattr(module, name, None)
    if callable(factory):
        return factory
    file = Path(module.__file__ or module.__name__).name
    if factory is not None:
        raise UsageError(f"{name!r} in {file} is a {type(factory).__name__}, not a function")
    functions = [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    hint = did_you_mean(name, functions)
    found = ", ".join(functions[:8]) or "no functions"
    raise MissingWorkloadError(f"no factory {name!r} in {file}{hint or f'; it defines {found}'}")


def _arguments(factory: Callable[..., Any], spec: str, batch: int | None) -> dict[str, Any]:
    """Keyword arguments for a factory; raises if it cannot take `batch` or needs others."""
    arguments = {} if batch is None else {"batch": batch}
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # a builtin without a signature
        return arguments
    parameters = signature.parameters.values()
    takes_batch = any(
        p.kind is p.VAR_KEYWORD
        or (p.name == "batch" and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
        for p in parameters
    )
    if batch is not None and not takes_batch:
        raise UsageError(
            f"batch {batch} cannot be passed: {spec} has no argument named batch; add one, or omit "
            "the batch size"
        )
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in arguments
    ]
    if needed == ["batch"]:
        raise UsageError(f"{spec} needs a batch size: pass one, or give its argument a default")
    if needed:
        raise UsageError(
            f"{spec} needs arguments ({', '.join(needed)}): factories receive only batch, so give "
            "the others defaults"
        )
    return arguments


def _workload(result: Any, spec: str, train: bool) -> Workload:
    if isinstance(result, Workload):
        workload = result
    elif isinstance(result, tuple | list) and len(result) == 2 and callable(result[0]):
        workload = Workload(*result)
    else:
        kinds = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        raise UsageError(f"{spec} returned a {type(result).__name__}{kinds}: {_RETURNS}")
    if train and not workload.is_training:
        raise UsageError(
            f"{spec} returned a model without a loss, so it cannot be trained: return "
            "Workload.training(model, inputs, loss, optimizer)"
        )
    default = getattr(workload.model, "__name__", type(workload.model).__name__)
    return replace(workload, name=spec) if workload.name == default else workload


@contextlib.contextmanager
def _importable(directory: Path) -> Iterator[None]:
    """Puts a folder on `sys.path`; modules importable only from that folder are pickled by value.

    A lock serialises threads, because each block compares `sys.modules` before and after.
    """
    with _IMPORTING:
        before = set(sys.modules)
        sys.path.insert(0, str(directory))
        importlib.invalidate_caches()
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # the code may have removed it
                sys.path.remove(str(directory))
            for name in set(sys.modules) - before:
                module = sys.modules[name]
                if _only_from(directory, module):
                    cloudpickle.register_pickle_by_value(module)


def _only_from(directory: Path, module: ModuleType) -> bool:
    """Whether a module can be imported only from `directory`."""
    file = getattr(module, "__file__", None)
    if not file or not Path(file).resolve().is_relative_to(directory):
        return False
    root = module.__name__.partition(".")[0]
    return _places(find_anew(root)) != _places(getattr(sys.modules.get(root), "__spec__", None))


def _places(spec: ModuleSpec | None) -> tuple[str, ...]:
    """Paths of a module's files or package folders; empty if the module was not found."""
    if spec is None:
        return ()
    paths = spec.submodule_search_locations or ([spec.origin] if spec.origin else [])
    return tuple(os.path.abspath(path) for path in paths)


def _as_module(path: Path, name: str) -> str:
    """Advice for a file with relative imports: how to name its factory by module."""
    parts, folder = [path.stem], path.parent
    while not parts[1:] or (folder / "__init__.py").is_file():
        parts, folder = [folder.name, *parts], folder.parent
    start = "" if folder == Path.cwd() else f" and start in {folder}"
    return f"relative imports need a package: use {'.'.join(parts)}:{name}{start}"


@contextlib.contextmanager
def _reported(spec: str, way_out: str = "") -> Iterator[None]:
    """Converts exceptions of the user's code to a `UsageError` with a traceback.

    Args:
        spec: name of the code in the message.
        way_out: advice if a relative import fails.
    """
    try:
        yield
    except SteadyError:
        raise
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}" if error.lineno else error.filename or spec
        text = f": {error.text.strip()}" if error.text else ""
        raise UsageError(f"{place}: {error.msg}{text}") from error
    except (Exception, SystemExit) as error:
        lines = [f"{spec} raised {type(error).__name__}: {error}".strip(": ")[:2000]]
        if isinstance(error, ImportError) and "relative import" in str(error) and way_out:
            lines[0] = f"{lines[0]}: {way_out}"
        raise UsageError("\n".join(lines + _frames(error))) from error


def _frames(error: BaseException) -> list[str]:
    """Traceback of the user's code, one line per frame, with the middle of long tracebacks cut."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in (__file__, contextlib.__file__)
        and not frame.filename.startswith("<frozen importlib")
        and frame.filename != importlib.__file__
    ]
    lines = [f"  {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames]
    if len(lines) > _SHOWN_FRAMES:
        half = _SHOWN_FRAMES // 2
        left_out = f"  ... {len(lines) - 2 * half} more"
        lines = [*lines[:half], left_out, *lines[-half:]]
    return lines
