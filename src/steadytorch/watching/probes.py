"""Probes in PyTorch that report module calls, batches and optimizer steps to a `StepClock`.

The code objects of four PyTorch functions are replaced in place, and restored at the end. The
function objects stay the same, because torch.compile recognises the module call by identity.
The replacement code keeps PyTorch's file name, so that torch.compile still skips it.
"""

# ruff: noqa: F821 - replaced code finds the globals of PyTorch's modules
from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from operator import itemgetter
from statistics import median
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from steadytorch.watching.clock import (
    BACKWARD,
    COLLECTION,
    COPIES,
    EVALUATION,
    FORWARD,
    INPUT,
    ITERATION,
    LOADER,
    MODULE,
    OPTIMIZER,
    OPTIMIZING,
    REST,
    SYNCHRONISATION,
    StepClock,
)
from steadytorch.watching.flight import FlightRecorder

if TYPE_CHECKING:
    from steadytorch.findings.watched_steps import SteppedOptimizer

    # globals of the code that the probes replace
    torch: Any
    __steadytorch_begin__: Callable[[Any], bool]
    __steadytorch_call__: Callable[..., Any]
    __steadytorch_end__: Callable[[Any], None]

_BEGIN, _END = "__steadytorch_begin__", "__steadytorch_end__"
_REPEATS, _CALLS, _EVICTED_BYTES = 20, 300, 8 << 20
"""Repetitions of a measurement; back-to-back calls in each, for nested calls; and bytes written
before each timed call, to evict the probes' code from the caches, as a step's data does."""
_work = itemgetter(1)
_COPIES = ("to", "cuda", "copy_")
_WAITS = ("item", "cpu", "tolist", "numpy", "__float__", "__int__", "__bool__")


def _module_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or not __steadytorch_begin__(self):
        if self._compiled_call_impl is not None:
            return self._compiled_call_impl(*args, **kwargs)
        return self._call_impl(*args, **kwargs)
    try:
        if self._compiled_call_impl is not None:
            return self._compiled_call_impl(*args, **kwargs)
        return self._call_impl(*args, **kwargs)
    finally:
        __steadytorch_end__(self)


def _next_batch(self: Any) -> Any:
    if not __steadytorch_begin__(self):
        return __steadytorch_call__(self)
    try:
        return __steadytorch_call__(self)
    finally:
        __steadytorch_end__(self)


def _run_whole(*args: Any, **kwargs: Any) -> Any:
    if not __steadytorch_begin__(None):
        return __steadytorch_call__(*args, **kwargs)
    try:
        return __steadytorch_call__(*args, **kwargs)
    finally:
        __steadytorch_end__(None)


class Probes:
    """Installs probes in PyTorch; `remove` restores PyTorch's original code.

    Args:
        clock: receives the events.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._undo: list[Callable[[], None]] = []
        self._stepping: object = None
        self._collecting = False
        self._seen: dict[int, tuple[Any, int]] = {}
        self._stepped: dict[str, tuple[bool, int, bool]] = {}

    def install(self) -> None:
        """Install the probes; PyTorch must be imported."""
        import torch
        from torch.autograd import graph
        from torch.optim.optimizer import (
            Optimizer,
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )
        from torch.utils.data import dataloader

        if self._undo:
            return
        call: Any = torch.nn.Module.__call__
        _hide_from_compiler(call.__code__.co_filename)
        self._swap(call, _module_call, *self._module(torch))
        following: Any = dataloader._BaseDataLoaderIter.__next__
        self._swap(following, _next_batch, *self._loader(), keep=True)
        backward = self._phase(BACKWARD)
        self._swap(graph._engine_run_backward, _run_whole, *backward, keep=True)
        zeroing: Any = Optimizer.zero_grad
        zeroing = getattr(zeroing, "__wrapped__", zeroing)
        self._swap(zeroing, _run_whole, *self._phase(OPTIMIZER), keep=True)
        before = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(self._after_step)
        self._undo += [before.remove, after.remove]
        gc.callbacks.append(self._collect)
        self._undo.append(partial(gc.callbacks.remove, self._collect))
        if torch.cuda.is_available():
            self.watch_tensors()

    def watch_tensors(self) -> None:
        """Also time tensor copies and synchronisations, which matter only with a GPU."""
        import torch

        for names, phase in ((_COPIES, COPIES), (_WAITS, SYNCHRONISATION)):
            for name in names:
                own = vars(torch.Tensor).get(name)
                setattr(torch.Tensor, name, self._timed(getattr(torch.Tensor, name), phase))
                undo = (delattr, name) if own is None else (setattr, name, own)
                self._undo.append(partial(undo[0], torch.Tensor, *undo[1:]))

    def remove(self) -> None:
        """Restore PyTorch's original code."""
        while self._undo:
            self._undo.pop()()

    def _swap(
        self,
        function: FunctionType,
        template: Any,
        begin: Callable[[Any], bool],
        end: Callable[[Any], None],
        *,
        keep: bool = False,
    ) -> None:
        """Replace a function's code by a template's; add helpers to the function's globals."""
        original = function.__code__
        names = {_BEGIN: begin, _END: end}
        if keep:
            names["__steadytorch_call__"] = FunctionType(
                original, function.__globals__, function.__name__, function.__defaults__
            )
        own = {name: f"{name}{function.__name__}" for name in names}
        space = function.__globals__
        space.update({own[name]: value for name, value in names.items()})
        function.__code__ = _as_if(template.__code__, original, own)

        def undo() -> None:
            function.__code__ = original
            for name in own.values():
                space.pop(name, None)

        self._undo.append(undo)

    def _module(self, torch: Any) -> tuple[Callable[[Any], bool], Callable[[Any], None]]:
        clock, enabled = self._clock, torch.is_grad_enabled

        def begin(module: Any) -> bool:
            clock.checks += 1
            if clock.phase != REST and clock.phase != OPTIMIZER:
                return False
            return clock.begin(FORWARD if enabled() else EVALUATION)

        def end(module: Any) -> None:
            clock.end()
            if clock.unit == MODULE:
                clock.boundary(MODULE, id(module))

        if clock.flight is None:
            return begin, end
        return _recorded(clock, clock.flight, begin, end)

    def _loader(self) -> tuple[Callable[[Any], bool], Callable[[Any], None]]:
        clock = self._clock

        def begin(iterator: Any) -> bool:
            if clock.phase == REST:
                clock.boundary(LOADER, "loader")
            return clock.begin(INPUT)

        def end(iterator: Any) -> None:
            clock.end()
            if clock.unit == LOADER and sys.exc_info()[0] is StopIteration:
                clock.pause()

        return begin, end

    def _phase(self, phase: int) -> tuple[Callable[[Any], bool], Callable[[Any], None]]:
        clock = self._clock
        return lambda _: clock.begin(phase), lambda _: clock.end()

    def _collect(self, stage: str, info: dict[str, int]) -> None:
        if stage == "start":
            self._collecting = self._clock.interrupt(COLLECTION)
        elif self._collecting:
            self._collecting = False
            self._clock.resume()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return
        if self._stepping == id(optimizer):  # its last step raised
            self._clock.reset()
        if self._clock.begin(OPTIMIZER):
            self._stepping = id(optimizer)
            seen, groups = self._seen.get(id(optimizer), (None, 0))
            if seen is None or seen() is not optimizer or groups != len(optimizer.param_groups):
                self._describe(optimizer)

    def _describe(self, optimizer: Any) -> None:
        """Record if an optimizer is fused; per class, keep the one with most unfused parameters."""
        groups, cls = optimizer.param_groups, type(optimizer)
        self._seen[id(optimizer)] = weakref.ref(optimizer), len(groups)
        unfused, single = 0, "fused" in optimizer.defaults
        for group in groups:
            if group.get("fused"):
                continue
            updated = [each for each in group["params"] if each.grad is not None]
            unfused += len(updated)
            # PyTorch's default is foreach on a GPU, and single tensors on a CPU.
            foreach = group.get("foreach")
            on_cpu = all(each.device.type == "cpu" for each in updated)
            single = single and not foreach and (on_cpu or foreach is False)
        found = unfused == 0, unfused, single and unfused > 0
        self._stepped[cls.__name__] = max(self._stepped.get(cls.__name__, found), found, key=_work)

    def stepped(self) -> list[SteppedOptimizer]:
        """The optimizers that took a step, one for each class."""
        from steadytorch.findings.watched_steps import SteppedOptimizer

        return [SteppedOptimizer(name, *found) for name, found in self._stepped.items()]

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        import torch

        if torch.compiler.is_compiling() or self._stepping != id(optimizer):
            return
        self._stepping = None
        self._clock.end()
        self._clock.boundary(OPTIMIZING, id(optimizer))

    def _timed(self, method: Any, phase: int) -> Any:
        clock = self._clock

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not clock.begin(phase):
                return method(*args, **kwargs)
            try:
                return method(*args, **kwargs)
            finally:
                clock.end()

        return timed


def _recorded(
    clock: StepClock,
    flight: FlightRecorder,
    begin: Callable[[Any], bool],
    end: Callable[[Any], None],
) -> tuple[Callable[[Any], bool], Callable[[Any], None]]:
    """Probes of module calls that also pass nested calls to the flight recorder."""

    def begin_recorded(module: Any) -> bool:
        if clock.phase != REST and clock.phase != OPTIMIZER:
            clock.checks += 1
            return flight.enter(module)
        return begin(module) and flight.enter(module, outermost=True)

    def end_recorded(module: Any) -> None:
        if flight.leave():
            end(module)

    return begin_recorded, end_recorded


def _as_if(code: CodeType, original: CodeType, names: dict[str, str]) -> CodeType:
    """A copy of `code` with the name and file of `original` and with renamed globals."""
    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names),
        co_filename=original.co_filename,
        co_name=original.co_name,
        co_qualname=original.co_qualname,
        co_firstlineno=original.co_firstlineno,
    )


def _hide_from_compiler(file: str) -> None:
    """Set the file name of the probes' code to the name of a file that torch.compile skips.

    Otherwise torch.compile would compile the probes at graph breaks.
    """
    inside = (StepClock, Probes, FlightRecorder)
    functions = [each for kind in inside for each in vars(kind).values()]
    for function in (*functions, _recorded):
        if isinstance(function, FunctionType):
            function.__code__ = _moved(function.__code__, file)


def _moved(code: CodeType, file: str) -> CodeType:
    inner = (_moved(c, file) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=file, co_consts=tuple(inner))


@dataclass(frozen=True)
class ProbeCost:
    """Time in ns that the probes add to a nested module call, and to a timed module call."""

    nested_ns: float
    timed_ns: float

    def of(self, clock: StepClock) -> float:
        """Total time that the probes of a clock took, in ns."""
        return clock.events / 2 * self.timed_ns + clock.checks * self.nested_ns


def probe_cost() -> ProbeCost:
    """Measure the cost of the probes on an empty module, while no other probes are installed."""
    import torch

    clock, module = StepClock(), torch.nn.Identity()
    clock.boundary(ITERATION, None)
    probes = Probes(clock)
    evict = partial(torch.zeros(_EVICTED_BYTES, dtype=torch.uint8).add_, 1)
    plain, plain_cold = _call_ns(module), _call_ns(module, 1, evict)
    probes.install()
    try:
        clock.begin(FORWARD)
        nested = _call_ns(module)
        clock.end()
        timed = _call_ns(module, 1, evict)
    finally:
        probes.remove()
    return ProbeCost(max(0.0, nested - plain), max(0.0, timed - plain_cold))


def _call_ns(
    call: Callable[[None], Any], calls: int = _CALLS, before: Callable[[], Any] = int
) -> float:
    """Median time of a call over several repetitions, in ns."""
    found = []
    for _ in range(_REPEATS):
        before()
        began = time.perf_counter_ns()
        for _ in range(calls):
            call(None)
        found.append(time.perf_counter_ns() - began)
    return median(found) / calls


class OnImport:
    """Calls a function once PyTorch has been imported, however the script imports it.

    Args:
        do: the function to call.
    """

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do

    def install(self) -> None:
        """Call the function when PyTorch is imported, or at once if PyTorch is imported already."""
        if "torch" in sys.modules:
            self._do()
        else:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def remove(self) -> None:
        """Stop waiting."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """PyTorch's import spec, with a loader that calls the function after the import."""
        if name != "torch":
            return None
        self.remove()
        import importlib.util

        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run, do = loader.exec_module, self._do

            def exec_module(module: Any) -> None:
                del loader.exec_module
                run(module)
                do()

            loader.exec_module = exec_module
        return spec
