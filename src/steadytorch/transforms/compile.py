"""Compiles the model with Inductor."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from steadytorch.compiled import compiler_choices, prebuilt
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
from steadytorch.workload.private_entry import private_entry
from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

# Without Inductor's own CUDA graphs, max-autotune composes with cuda_graph.
_MODES = {"max-autotune": "max-autotune-no-cudagraphs"}
_FOR_GPUS = ("coordinate-descent", "reduce-overhead")
_TUNING = ("coordinate-descent", "max-autotune")
_HOOKED = "the model has hooks, and the next call would overwrite the tensors they keep"


class Compile(Transform):
    """Runs `torch.compile` with static shapes; with `freezing`, the weights become constants.

    Freezing disables gradients and fixes the weights at the first call: later changes to them have
    no effect. In a model that compiles as one graph, later changes to attributes of PyTorch's own
    modules, such as a convolution's stride, also have no effect. Guards on module attributes would
    take 0.3 of the 4.4 ms of a MobileNetV3 call on a two-core CPU. With freezing, no parameter may
    be an input, since it would be frozen too.

    The first call compiles, which takes seconds to minutes.
    """

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """Inductor's mode, and whether to freeze weights, skip padding or combine kernels.

        `coordinate-descent` is the default mode plus a coordinate-descent search over Triton
        configurations, at about twice the set-up time. `max-autotune` includes the
        coordinate-descent search and also tunes matrix products.

        Inductor pads a matrix product to aligned sizes if that product alone gets faster. Copies
        for padding can still make the whole model slower: Swin-T took 3.01 ms padded and 2.87 ms
        unpadded on an H100.

        `combo_kernels` launches up to eight independent kernels as one, each with block sizes of
        its own. In training, conversions of weights to 16 bits and of gradients to float32 are
        independent. Recorded training steps on an H200 took 0.90 (BERT) to 1.00 (ViT) of the time,
        recorded frozen models 0.97 to 1.00. With common block sizes, GPT-2 took 1.3.
        """

        mode: Literal["default", "coordinate-descent", "reduce-overhead", "max-autotune"] = (
            "default"
        )
        freezing: bool = False
        unpadded: bool = False
        combo_kernels: bool = False

    name = "compile"
    risk = Risk.EXACT
    compiles = True

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Claims graph capture for `reduce-overhead`, float32 precision for `max-autotune`."""
        if self.parameters.mode == "reduce-overhead":
            return (Claim.CAPTURE,)
        # max-autotune reads it by PyTorch's older API, which raises once `tf32` used the newer one.
        return (Claim.FLOAT32_PRECISION,) if self.parameters.mode == "max-autotune" else ()

    @property
    def drops_nan(self) -> bool:
        """True with freezing: oneDNN's convolutions with a fused ReLU or clamp replace NaN."""
        return self.parameters.freezing

    @property
    def untuned(self) -> Any:
        """The default mode, if this one only tunes its kernels."""
        if self.parameters.mode not in _TUNING:
            return self.parameters
        return msgspec.structs.replace(self.parameters, mode="default")

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """Cheap variants first; modes for GPUs on CUDA only.

        The search itself adds variants without padded matrix products.
        """
        found = [cls.Parameters("default", True), cls.Parameters("default", False)]
        if facts.device == "cuda":
            found += [cls.Parameters(mode, True) for mode in _FOR_GPUS]
            found += [cls.Parameters(freezing=each, combo_kernels=True) for each in (True, False)]
        return (*found, cls.Parameters("max-autotune", True), cls.Parameters("max-autotune", False))

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs Inductor's compilers; freezing and reduce-overhead are inference only."""
        graphs = self.parameters.mode == "reduce-overhead"
        combines = self.parameters.combo_kernels
        extra = combines or self.parameters.mode == "max-autotune"
        no_weights = workload.module is None
        training_mode = workload.module is not None and workload.module.training
        freezing = self.parameters.freezing
        is_steered, why_steered = steered(workload)
        freezable = not (no_weights or training_mode or workload.is_training or is_steered)
        return decide(
            *missing_compiler(facts),
            (
                self.parameters.mode in _FOR_GPUS and facts.device != "cuda",
                f"{self.parameters.mode} needs a CUDA device",
            ),
            (combines and facts.device != "cuda", "combo kernels need a CUDA device"),
            (graphs and workload.is_training, "reduce-overhead supports inference only"),
            (graphs and hooked(workload)[0], _HOOKED),
            (freezing and no_weights, "a plain callable has no weights to freeze"),
            (freezing and training_mode, "freezing needs a model in evaluation mode"),
            (freezing and workload.is_training, "freezing supports inference only"),
            (freezing and is_steered, why_steered),
            (extra and freezable and not freezing, "skipped, the freezing variant covers it"),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield the workload with the compiled model; drop the compiled code on exit.

        Outputs have the model's strides, unless only a compiled loss takes them.

        Compiled code from the current `prebuilt` source, if any, replaces compilation.

        Raises:
            UnsupportedError: `freezing` is set and the model calls user functions.
        """
        if self.parameters.freezing:
            refuse_if(steered(workload))
        step = workload.training_step
        pads = step is not None and step.compiled_loss is not None
        with ExitStack() as stack:
            task = Task(
                workload,
                partial(inductor_options, self.parameters),
                lambda: stack.enter_context(_compiled(workload.model, self.parameters, pads)),
            )
            # reduce-overhead records CUDA graphs while it runs; training must keep its weights.
            runs_alone = self.parameters.mode != "reduce-overhead" and not workload.is_training
            found = prebuilt.find(task) if runs_alone else None
            yield workload.with_model(found or task.compiled())


@contextmanager
def _compiled(model: Any, parameters: Any, pads: bool) -> Iterator[Callable[..., Any]]:
    from torch._dynamo.eval_frame import remove_from_cache

    if isinstance(model, Converting):
        model.lend_uncompiled()
    entry = private_entry(model)
    unseen: Any = {"guard_filter_fn": guards_to_keep}
    compiled = torch.compile(
        entry,
        backend=_backend(parameters, pads),
        dynamic=False,
        options=unseen if parameters.freezing else None,
    )
    call: Any = _Frozen(compiled) if parameters.freezing else compiled
    try:
        yield _Recorded(call) if parameters.mode == "reduce-overhead" else call
    finally:
        remove_from_cache(entry)


def missing_compiler(facts: DeviceFacts) -> tuple[Objection, ...]:
    """Objections to Inductor on this device."""
    if facts.device == "cuda":
        return (
            (facts.triton is None, "needs Triton, which is not installed"),
            capability_below(facts, (7, 0), "Triton"),
        )
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return ((shutil.which(compiler) is None, f"no C++ compiler found: {compiler} is not on PATH"),)


_REGISTERED = re.compile(r"steadytorch_model(\._modules\['[^']*'\])*")
"""Dynamo's name for a module of the model's tree, as reached from `private_entry`."""


def guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Select the guards that frozen code keeps: drop those on PyTorch's modules in the model.

    All guards except those on PyTorch's own modules must stay. After a graph break, Dynamo compiles
    each submodule class once, and only the kept guards tell which instance's weights are the
    constants. Guards on PyTorch modules outside the module tree (global, or in a list) also stay,
    because nothing else guards those modules.
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
    """Raised if Dynamo is about to compile with the weights as inputs instead of constants."""


def inductor_options(parameters: Any) -> dict[str, Any]:
    """Return Inductor's options for the parameters of `Compile`."""
    from torch._inductor import list_mode_options

    if parameters.mode == "coordinate-descent":
        options: dict[str, Any] = {"coordinate_descent_tuning": True}
    else:
        options = list_mode_options(_MODES.get(parameters.mode, parameters.mode))
    if parameters.unpadded:
        options["shape_padding"] = False
    if parameters.combo_kernels:
        options |= {"combo_kernels": True, "combo_kernel_per_subkernel_blocks": True}
    return {**options, "freezing": parameters.freezing}


def _backend(parameters: Any, pads: bool) -> Callable[..., Any]:
    options, freezing = inductor_options(parameters), parameters.freezing
    choices = compiler_choices.current()
    choices.place()
    if choices.shared:  # a worker of a search, whose process ends with it
        compiler_choices.fill_queue_before_timing()

    def inductor(graph: Any, inputs: Any) -> Any:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        from steadytorch.compiled import output_strides
        from steadytorch.workload.compiler_faults import refuse_changed

        refuse_changed(graph)
        if freezing and not config.freezing:
            raise _NotFreezingError
        strides = {} if freezing else output_strides.options(pads)
        with compiler_choices.padding(choices):
            compiled: Any = compile_fx(graph, inputs, config_patches={**options, **strides})
        return _with_fresh_outputs(compiled, _folded(graph.graph)) if freezing else compiled

    return inductor


def _folded(graph: torch.fx.Graph) -> frozenset[int]:
    """Positions of outputs that are computed from weights alone, which freezing folds."""
    varies = set[torch.fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder" or varies.intersection(node.all_input_nodes):
            varies.add(node)
    outputs = graph.output_node().args[0]
    listed = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return frozenset(
        place
        for place, node in enumerate(listed)
        if isinstance(node, torch.fx.Node) and node.op != "get_attr" and node not in varies
    )


def _with_fresh_outputs(compiled: Callable[..., Any], places: frozenset[int]) -> Callable[..., Any]:
    """Clones folded outputs, which are the same memory at every call, unlike those of the model."""
    if not places:
        return compiled

    def call(*args: Any) -> Any:
        outputs = compiled(*args)
        return tuple(
            output.clone() if place in places and isinstance(output, torch.Tensor) else output
            for place, output in enumerate(outputs)
        )

    return call


@contextmanager
def weights_by_type() -> Iterator[None]:
    """Make Dynamo's guard labels show a frozen weight's type, not its values, as PyTorch 2.13 does.

    PyTorch versions before 2.13 print the values, which waits for the device hundreds of times.
    Compiling RegNetY-8GF on an H100 spent 5 of 20 s on printing values, and 43 of 58 s beside three
    other compilations (pytorch#176129).
    """
    from torch._dynamo import guards

    def label(value: Any) -> str:
        return f"<{type(value).__name__}>" if isinstance(value, torch.Tensor) else repr(value)

    if hasattr(guards, "_safe_type_repr"):
        yield
        return
    guards.__dict__["repr"] = label
    try:
        yield
    finally:
        guards.__dict__.pop("repr", None)


class _Frozen:
    """Turns freezing on for the duration of each compilation.

    Dynamo records weights as constants only if Inductor's process-wide `freezing` flag is set
    during tracing. The `freezing` option of a single compilation takes effect after tracing and
    folds nothing.
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

        with config.patch(freezing=True), weights_by_type():
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
    """Marks each call as a step for Inductor's CUDA graphs and clones the graphs' outputs."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return map_tensors(cloned, self.model(*args, **kwargs))
