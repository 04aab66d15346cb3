"""Making a plan's package, in a worker: where `compile` would run, and with what it would get.

The package is made at the first call of what the plan compiles, within the whole candidate: under
its flags, with its conversions before and its recording after. It must agree with what `compile`
itself gives there, and everything that follows in the call runs on it. Another worker then loads it
as production would: what crashes a fresh process must not be kept.
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

from steadytorch.bench.worker import WorkloadHandler, own_errors
from steadytorch.compiled.aot_inductor import Package, in_order, make
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
from steadytorch.workload.signature import signature
from steadytorch.workload.workload import Workload

NEVER_ASKED = "a training step, and a mode that records CUDA graphs while it runs, can have none"
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class Outcome(msgspec.Struct, frozen=True):
    """What became of making a package.

    Attributes:
        made: what is known of it; None if there is none.
        reason: why there is none.
    """

    made: Made | None
    reason: str = ""


class PackagingHandler(WorkloadHandler):
    """Answers who makes bundles. Methods take and return msgpack types."""

    @own_errors()
    def set_up_packaged(
        self, candidate: list[Any], file: str, tolerance: float | None
    ) -> dict[str, Any]:
        """Sets the candidate up as `set_up` does, and makes its package; returns an `Outcome`.

        Args:
            candidate: its transforms.
            file: where the package is to be.
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
        """Sets the candidate up on its package, in this process, which has not compiled it.

        Args:
            candidate: its transforms.
            file: the package.
            made: what is known of it, as a `Made`.
            tolerance: relative L2 error that the user allows; None for the class's default.

        Returns:
            How its answer differs from that of the untouched model; "" where they agree.
        """
        specs = tuple(msgspec.convert(candidate, list[TransformSpec]))
        taken, workload = msgspec.convert(made, Made).taken, self._workload
        with supplied(lambda task: Package(file, taken, workload.device, _unfit)):
            self.set_up(candidate)
        given = (workload.inputs, dict(workload.kwargs))
        limit = bound(precision_of(specs), workload.model, given, tolerance)
        with torch.no_grad():
            found, expected = (
                model(*given[0], **given[1]) for model in (self._model, workload.model)
            )
        self._let_go()
        return disagreement(found, expected, limit) or ""

    def _let_go(self) -> None:
        """Frees the package: PyTorch has unpacked it, and workers end without tidying up."""
        self.close()
        self._context = None
        del self._model, self._step
        gc.collect()


class Packager:
    """A source that compiles, makes a package of the same, and goes on with the package.

    Args:
        file: where it is to be.
        precision: class of the candidate.
        tolerance: relative L2 error that the user allows; None for the class's default.

    Attributes:
        outcome: what became of it.
    """

    def __init__(self, file: Path, precision: str, tolerance: float | None) -> None:
        self._file, self._precision, self._tolerance = file, precision, tolerance
        self.outcome = Outcome(None, NEVER_ASKED)

    def __call__(self, task: Task) -> Call:
        """What runs for a task: until it is called, neither."""
        chosen: list[Call] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if not chosen:
                chosen.append(self._chosen(task, task.compiled(), args, in_order(kwargs)))
            return chosen[0](*args, **kwargs)

        return call

    def _chosen(
        self, task: Task, compiled: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        # Compiled first: the compiler's cache is then complete, whatever comes of the package.
        compiled(*args, **kwargs)
        try:
            package, made = self._package(task, args, kwargs)
            self._verify(package, compiled, task.workload, (args, kwargs))
        except SteadyError as error:
            self.outcome = Outcome(None, str(error))
        except Exception as error:
            self.outcome = Outcome(None, one_line(error))
        else:
            self.outcome = Outcome(made)
            return package
        return compiled

    def _package(
        self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Package, Made]:
        model, workload = task.workload.model, task.workload
        if (size := _weight_bytes(model)) > MOST_BYTES:
            raise UnsupportedError(f"its weights take {size} bytes, and one holds {MOST_BYTES}")
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
                raise UnsupportedError(f"it does not agree with torch.compile: {fault}")
            if memory_of(found) & (memory_of((args, kwargs)) | memory_of(first)):
                raise UnsupportedError("its outputs lie in memory that others write to")


def _weight_bytes(model: Any) -> int:
    held = (model.parameters(), model.buffers()) if isinstance(model, torch.nn.Module) else ()
    return sum(tensor.nbytes for tensor in chain(*held))


def _looked_at(workload: Workload, device: torch.device, call: Callable[[], Any]) -> dict[str, str]:
    """The sources of what a call runs.

    Raises:
        UnsupportedError: it leaves something behind, which compiled code would not.
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
    """Has the compiler keep its files apart: those of a package would make the bundle larger."""
    before = os.environ.get(_CACHE)
    os.environ[_CACHE] = f"{file}.cache"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CACHE]
        else:
            os.environ[_CACHE] = before
