"""Builds a plan's AOTInductor package in a worker, in place of the candidate's `compile`.

The package is built at the compiled function's first call, while the other transforms of the
candidate are applied. Flags are set and inputs converted before packaging; CUDA graphs are recorded
after packaging. The package's outputs must match those of `torch.compile`. A package with matching
outputs runs the first and all later calls. Another worker loads the package as production would, so
that a package that crashes a fresh process is discarded.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch

from steadytorch.bench.bench_worker import WorkloadHandler, own_errors
from steadytorch.compiled.aot_inductor import Package, make
from steadytorch.compiled.bundle import MOST_BYTES
from steadytorch.compiled.model_digest import sources_of
from steadytorch.compiled.package import Made
from steadytorch.compiled.prebuilt import Call, Task, supplied
from steadytorch.errors import SteadyError, UnsupportedError, one_line
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.agreement import bound, disagreement, memory_of
from steadytorch.runtime.state import DRAWS, KEEPS_STATE, Draws, State
from steadytorch.transforms.precision import precision_of
from steadytorch.verification.verify import fresh_inputs
from steadytorch.workload.signature import in_order, signature
from steadytorch.workload.workload import Workload

NEVER_ASKED = "training steps and modes that record CUDA graphs at run time cannot be packaged"
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class PackagingResult(msgspec.Struct, frozen=True):
    """Result of building a package.

    Attributes:
        made: metadata of the package; None if there is none.
        reason: why there is no package.
    """

    made: Made | None
    reason: str = ""


class PackagingHandler(WorkloadHandler):
    """Worker handler that builds and checks packages. Methods take and return msgpack types."""

    @own_errors()
    def set_up_packaged(
        self, candidate: list[Any], file: str, tolerance: float | None
    ) -> dict[str, Any]:
        """Sets the candidate up like `set_up` and builds its package; returns a `PackagingResult`.

        Args:
            candidate: its transforms.
            file: where to write the package.
            tolerance: relative L2 error that the user allows; None for the class's default.
        """
        specs = tuple(msgspec.convert(candidate, list[TransformSpec]))
        packager = Packager(Path(file), precision_of(specs), tolerance)
        with supplied(packager):
            self.set_up(candidate)
        self._let_go()
        return msgspec.to_builtins(packager.outcome)

    @own_errors()
    def check_package(
        self, candidate: list[Any], file: str, made: dict[str, Any], tolerance: float | None
    ) -> str:
        """Sets the candidate up from its package, in a process that has not compiled it.

        Args:
            candidate: its transforms.
            file: the package.
            made: the package's metadata, a `Made`.
            tolerance: relative L2 error that the user allows; None for the class's default.

        Returns:
            How its outputs differ from the untouched model's; "" if they agree.
        """
        specs = tuple(msgspec.convert(candidate, list[TransformSpec]))
        taken, workload = msgspec.convert(made, Made).taken, self.workload
        with supplied(lambda task: Package(file, taken, workload.device, _unfit)):
            self.set_up(candidate)
        given = (workload.inputs, dict(workload.kwargs))
        limit = bound(precision_of(specs), workload.model, given, tolerance)
        with torch.no_grad():
            found, expected = (
                model(*given[0], **given[1]) for model in (self.model, workload.model)
            )
        self._let_go()
        return disagreement(found, expected, limit) or ""

    def _let_go(self) -> None:
        """Frees the package, since a worker's exit does not delete files that PyTorch unpacked."""
        self.close()
        self._context = None
        del self.model, self.step, self.applied
        gc.collect()


class Packager:
    """A `prebuilt` source that compiles the model, builds its package and then runs the package.

    Args:
        file: where to write the package.
        precision: class of the candidate.
        tolerance: relative L2 error that the user allows; None for the class's default.

    Attributes:
        outcome: the result; says that no package was requested until the first call.
    """

    def __init__(self, file: Path, precision: str, tolerance: float | None) -> None:
        self._file, self._precision, self._tolerance = file, precision, tolerance
        self.outcome = PackagingResult(None, NEVER_ASKED)

    def __call__(self, task: Task) -> Call:
        """Returns a callable that compiles the model and builds the package at its first call."""
        chosen: list[Call] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if not chosen:
                chosen.append(self._chosen(task, task.compiled(), args, in_order(kwargs)))
            return chosen[0](*args, **kwargs)

        return call

    def _chosen(
        self, task: Task, compiled: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        # Compile first, so that the compiler's cache is complete even if packaging fails.
        compiled(*args, **kwargs)
        try:
            package, made = self._package(task, args, kwargs)
            self._verify(package, compiled, task.workload, (args, kwargs))
        except SteadyError as error:
            self.outcome = PackagingResult(None, str(error))
        except Exception as error:
            self.outcome = PackagingResult(None, one_line(error))
        else:
            self.outcome = PackagingResult(made)
            return package
        return compiled

    def _package(
        self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Package, Made]:
        model, workload = task.workload.model, task.workload
        if (size := _weight_bytes(model)) > MOST_BYTES:
            raise UnsupportedError(f"its weights have {size} bytes, over the limit of {MOST_BYTES}")
        device = Workload(workload.untouched, workload.inputs, workload.kwargs).device
        taken = signature(args, kwargs)
        sources = _looked_at(workload, device, partial(model, *args, **kwargs))
        with _cache_beside(self._file):
            make(model, args, kwargs, task.options(), self._file)
        return Package(os.fspath(self._file), taken, device, _unfit), Made(taken, sources)

    def _verify(
        self,
        package: Package,
        compiled: Call,
        workload: Workload,
        given: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        limit = bound(self._precision, workload.untouched, given, self._tolerance)
        fresh = fresh_inputs(Workload(workload.model, *given), seed=0)
        first = package(*given[0], **given[1])
        for args, kwargs in (given, fresh):
            found, expected = package(*args, **kwargs), compiled(*args, **kwargs)
            if (fault := disagreement(found, expected, limit)) is not None:
                raise UnsupportedError(f"its outputs differ from torch.compile's: {fault}")
            if memory_of(found) & (memory_of((args, kwargs)) | memory_of(first)):
                raise UnsupportedError("its outputs share memory with inputs or earlier outputs")


def _weight_bytes(model: Any) -> int:
    held = (model.parameters(), model.buffers()) if isinstance(model, torch.nn.Module) else ()
    return sum(tensor.nbytes for tensor in chain(*held))


def _looked_at(workload: Workload, device: torch.device, call: Callable[[], Any]) -> dict[str, str]:
    """Digests of the source files of the code that a call runs, by module name.

    Raises:
        UnsupportedError: the call changes state or draws random numbers; a package would not.
    """
    models = (workload.untouched, workload.model)
    modules = [model for model in models if isinstance(model, torch.nn.Module)]
    state, draws = State(modules), Draws(device)
    sources = sources_of(call)
    if state.changed():
        raise UnsupportedError(KEEPS_STATE)
    if draws.happened():
        raise UnsupportedError(DRAWS)
    return sources


def _unfit() -> Call:
    raise UnsupportedError("it cannot be run here")


@contextmanager
def _cache_beside(file: Path) -> Iterator[None]:
    """Moves Inductor's cache beside the package, so that cache files do not enter the bundle."""
    before = os.environ.get(_CACHE)
    os.environ[_CACHE] = f"{file}.cache"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CACHE]
        else:
            os.environ[_CACHE] = before
