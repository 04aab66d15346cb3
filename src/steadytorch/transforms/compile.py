"""Compiles the model with Inductor."""

from __future__ import annotations

import builtins
import os
import re
import shutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from steadytorch.compiled import prebuilt
from steadytorch.compiled.prebuilt import Task
from steadytorch.device.facts import DeviceFacts
from steadytorch.rewrite.conversion import Converting, cloned
from steadytorch.transforms.base import Applicable, Claim, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import (
    Objection,
    capability_below,
    decide,
    hooked,
    refuse_if,
    steered,
)
from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

# Inductor's max-autotune captures CUDA graphs by itself; without them it composes with cuda_graph.
_MODES = {"max-autotune": "max-autotune-no-cudagraphs"}
_FOR_GPUS = ("coordinate-descent", "reduce-overhead")
_HOOKED = "the model has hooks, and what they keep would be overwritten by the next call"


class Compile(Transform):
    """`torch.compile` for the shapes at hand, with the weights as constants where `freezing`.

    Freezing runs without gradients and takes the weights as they are at the first call: later
    changes to them are not seen, nor are those to attributes of PyTorch's own modules, such as a
    convolution's stride, in a model that is compiled in one piece. To look at each of these takes a
    good part of a short call: 0.3 of 4.4 ms for MobileNetV3 on a CPU of two cores. The first call
    compiles, which takes seconds to minutes. No parameter may be an input: it would be frozen too.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """Inductor's mode, and whether weights become constants of the compiled code.

        `coordinate-descent` is the default with configurations of Triton kernels searched one
        coordinate at a time, at about twice the set-up; `max-autotune` does that too, and tries
        programs for matrix products besides.
        """

        mode: Literal["default", "coordinate-descent", "reduce-overhead", "max-autotune"] = (
            "default"
        )
        freezing: bool = False

    name = "compile"
    risk = Risk.EXACT
    compiles = True

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Graph capture for `reduce-overhead`, the float32 precision for `max-autotune`."""
        if self.parameters.mode == "reduce-overhead":
            return (Claim.CAPTURE,)
        # It reads the precision in a way that PyTorch refuses once it was set as tf32 sets it.
        return (Claim.FLOAT32_PRECISION,) if self.parameters.mode == "max-autotune" else ()

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """The cheap ones first; what is for GPUs on CUDA only."""
        found = [cls.Parameters("default", True), cls.Parameters("default", False)]
        if facts.device == "cuda":
            found += [cls.Parameters(mode, True) for mode in _FOR_GPUS]
        return (*found, cls.Parameters("max-autotune", True), cls.Parameters("max-autotune", False))

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs Inductor's compilers; freezing and reduce-overhead are for inference."""
        graphs = self.parameters.mode == "reduce-overhead"
        autotunes = self.parameters.mode == "max-autotune"
        no_weights = workload.module is None
        training_mode = workload.module is not None and workload.module.training
        freezing = self.parameters.freezing
        is_steered, why_steered = steered(workload)
        freezable = not (no_weights or training_mode or workload.is_training or is_steered)
        return decide(
            *_missing_compiler(facts),
            (
                self.parameters.mode in _FOR_GPUS and facts.device != "cuda",
                f"{self.parameters.mode} needs a CUDA device",
            ),
            (graphs and workload.is_training, "reduce-overhead is for inference"),
            (graphs and hooked(workload)[0], _HOOKED),
            (freezing and no_weights, "a plain callable has no weights to freeze"),
            (freezing and training_mode, "weights in training mode cannot be frozen"),
            (freezing and workload.is_training, "training changes frozen weights"),
            (freezing and is_steered, why_steered),
            (autotunes and freezable and not freezing, "skipped, the freezing variant covers it"),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields the workload on the compiled model; on leaving drops what was compiled.

        What was compiled before, and is supplied (`prebuilt`), is taken instead.

        Raises:
            UnsupportedError: it is to freeze, and the model calls functions of its user's.
        """
        if self.parameters.freezing:
            refuse_if(steered(workload))
        with ExitStack() as stack:
            task = Task(
                workload,
                partial(_options, self.parameters),
                lambda: stack.enter_context(_compiled(workload.model, self.parameters)),
            )
            # Inductor's own CUDA graphs are recorded while it runs; what trains keeps its weights.
            runs_alone = self.parameters.mode != "reduce-overhead" and not workload.is_training
            found = prebuilt.find(task) if runs_alone else None
            yield workload.with_model(found or task.compiled())


@contextmanager
def _compiled(model: Any, parameters: Any) -> Iterator[Callable[..., Any]]:
    from torch._dynamo.eval_frame import remove_from_cache

    if isinstance(model, Converting):
        model.lend_uncompiled()
    entry = _private_entry(model)
    unseen: Any = {"guard_filter_fn": _looked_at}
    compiled = torch.compile(
        entry,
        backend=_backend(parameters),
        dynamic=False,
        options=unseen if parameters.freezing else None,
    )
    call: Any = _Frozen(compiled) if parameters.freezing else compiled
    try:
        yield _Recorded(call) if parameters.mode == "reduce-overhead" else call
    finally:
        remove_from_cache(entry)


def _missing_compiler(facts: DeviceFacts) -> tuple[Objection, ...]:
    if facts.device == "cuda":
        return (
            (facts.triton is None, "needs Triton, which is not installed"),
            capability_below(facts, (7, 0), "Triton"),
        )
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return ((shutil.which(compiler) is None, f"no C++ compiler found: {compiler} is not on PATH"),)


def _private_entry(steadytorch_model: Any) -> Callable[..., Any]:
    """A function that calls the model, with a code object and globals of its own.

    Dynamo keeps what it compiles at the code object. A shared one would count the compilations of
    other callers against the same limit, and could not be dropped without dropping theirs. The
    name of the argument is that of the model in guards, and no other code's.
    """

    def entry(*args: Any, **kwargs: Any) -> Any:
        return steadytorch_model(*args, **kwargs)

    space = {"__builtins__": builtins, "__name__": __name__}
    return types.FunctionType(
        entry.__code__.replace(), space, entry.__name__, None, entry.__closure__
    )


_REGISTERED = re.compile(r"steadytorch_model(\._modules\['[^']*'\])*")
"""How Dynamo writes the way from `_private_entry` to a module of the model's tree."""


def _looked_at(guards: Sequence[Any]) -> list[bool]:
    """Which guards frozen code keeps: all but those of PyTorch's own modules in the model's tree.

    Nothing else may go. Where Dynamo does not trace the model in one piece, its code and that of
    its submodules is compiled by itself, once for all modules of a class: which one is at hand, and
    whose weights are the constants, shows in these guards alone. And modules that are not in the
    tree (global ones, those in a list) are watched by nothing else.
    """
    kept = torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe(guards)
    ways = [_REGISTERED.match(guard.name) for guard in guards]
    unseen = {
        guard.name
        for guard, way, keep in zip(guards, ways, kept, strict=True)
        if not (keep or way is None) and way.group() == guard.name and _is_pytorchs(guard.value)
    }
    return [
        keep or way is None or way.group() not in unseen
        for way, keep in zip(ways, kept, strict=True)
    ]


def _is_pytorchs(found: Any) -> bool:
    return isinstance(found, nn.Module) and type(found).__module__.startswith("torch.")


class _NotFreezingError(Exception):
    """Dynamo is about to compile with the weights as inputs."""


def _options(parameters: Any) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    if parameters.mode == "coordinate-descent":
        options: dict[str, Any] = {"coordinate_descent_tuning": True}
    else:
        options = list_mode_options(_MODES.get(parameters.mode, parameters.mode))
    return {**options, "freezing": parameters.freezing}


def _backend(parameters: Any) -> Callable[..., Any]:
    options, freezing = _options(parameters), parameters.freezing

    def inductor(graph: Any, inputs: Any) -> Any:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        if freezing and not config.freezing:
            raise _NotFreezingError
        return compile_fx(graph, inputs, config_patches=options)

    return inductor


class _Frozen:
    """Compiles with freezing switched on, and only while compiling.

    Freezing needs the process-wide switch already when Dynamo traces, so that it records the
    weights as constants; the option of the same name alone comes too late and folds nothing.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        from torch._dynamo.exc import BackendCompilerFailed

        self.compiled = compiled
        self.failure = BackendCompilerFailed
        self.call: Callable[..., Any] = self._compiling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.call(*args, **kwargs)

    def _compiling(self, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor import config

        with config.patch(freezing=True):
            output = self.compiled(*args, **kwargs)
        self.call = self._compiled
        return output

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.compiled(*args, **kwargs)
        except self.failure as failure:
            if not isinstance(failure.inner_exception, _NotFreezingError):
                raise
        return self._compiling(*args, **kwargs)


class _Recorded:
    """Announces each step to Inductor's CUDA graphs, and copies outputs out of their buffers."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return map_tensors(cloned, self.model(*args, **kwargs))
